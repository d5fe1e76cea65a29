"""How many copies of its memory a stage needs if none of them may ever move, as a CUDA graph demands.

Each weight version lies in a slot, and so does all that a micro-batch leaves between its forward and its backward.
Version u of a segment is in slot u mod V, micro-batch b in slot b mod A. V is so large that no update writes to a
version that is still of use, A so large that no forward writes to what a backward is still to read. Where V > 1, A is a
multiple of M V, so that in steady state the slot of a micro-batch also says in which slot its weights are.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from adl_dist.schedule.actions import BACKWARDS, Action, Op
from adl_dist.schedule.build_actions import training_actions
from adl_dist.schedule.pipeline import Pipeline


@dataclass(frozen=True)
class Slots:
    """The slots of one stage.

    Attributes:
        num_versions: V.
        num_micro_batches: A.
        versions: for each of the A slots that of the weights in steady state.
    """

    num_versions: int
    num_micro_batches: int
    versions: tuple[int, ...]


@lru_cache(maxsize=64)
def slots_of(pipeline: Pipeline, stage: int, *, least_versions: int = 1) -> Slots:
    """Return the fewest slots that do for ``stage``, with ``least_versions`` so many of weights, from its own actions.

    Raises:
        ValueError: its weights are not those of a version that stays until the backward, or it replays forwards.
    """
    M, fill = pipeline.micro_batches_per_update, pipeline.updates_to_fill
    used = _used(list(training_actions(pipeline, stage, group_sizes=[M] * (2 * fill + 4))))
    V = 1 if pipeline.method.weights == "latest" else max((n - oldest + 1 for n, oldest in used.oldest), default=1)
    V = max(V, least_versions)
    period = M * V if V > 1 else 1
    A = -(-used.span // period) * period
    steady = fill * M
    last = steady + A
    if last > len(used.versions):  # a segment long enough to see each of the slots in steady state
        groups = [M] * (2 * fill + 4 + -(-A // M))
        used = _used(list(training_actions(pipeline, stage, group_sizes=groups)))
    versions = {b % A: used.versions[b] % V for b in range(steady, last)}
    return Slots(V, A, tuple(versions[slot] for slot in range(A)))


@dataclass(frozen=True)
class _Used:
    """What one stage uses at the same time in a segment."""

    versions: Sequence[int]  # of the weights, by micro-batch
    oldest: Sequence[tuple[int, int]]  # for each update, the version that it makes, and the oldest of use from then on
    span: int  # the most micro-batches from the first to the last of those in flight


def _used(actions: Sequence[Action]) -> _Used:
    versions: dict[int, int] = {}
    newest, chosen = 0, None
    until: dict[int, int] = {}  # by version, where in the list it is used last
    updates: list[tuple[int, int]] = []
    flying: set[int] = set()
    span = 1
    for at, (op, number) in enumerate(actions):
        if op is Op.FORWARD:
            versions[number] = newest if chosen is None else chosen
            flying.add(number)
            span = max(span, max(flying) - min(flying) + 1)
        elif op in BACKWARDS:
            flying.remove(number)
            until[versions[number]] = at
        elif op is Op.WEIGHTS:
            chosen = number
        elif op is Op.UPDATE:
            newest += 1
            updates.append((at, newest))
        elif op in (Op.FORWARD_ONLY, Op.RECOMPUTE):
            raise ValueError("a forward that is replayed leaves nothing for a slot")
    oldest = [
        (made, min((version for version, last in until.items() if last > at and version < made), default=made))
        for at, made in updates
    ]
    return _Used([versions[b] for b in range(len(versions))], oldest, span)
