"""One segment of training as the stages carry it out: the actions, and how much each works on."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from adl_dist.schedule.actions import LINKS, Action, Op
from adl_dist.schedule.actions_of import evaluation_actions, steady_staleness, training_actions
from adl_dist.schedule.greedy import greedy_streams
from adl_dist.schedule.methods import Method
from adl_dist.schedule.replay import Sending, max_outstanding
from adl_dist.schedule.segment import Segment


@dataclass(frozen=True)
class StageWork:
    """What one stage does in one segment.

    Attributes:
        stream: its actions.
        sizes: samples of each of its micro-batches.
        sizes_upstream: samples of each micro-batch of the stage before it, which is what arrives.
        loss_weights: of the loss of each of its micro-batches.
    """

    stream: list[Action]
    sizes: list[int]
    sizes_upstream: list[int]
    loss_weights: list[float]

    def last_of_groups(self) -> frozenset[int]:
        """The micro-batches whose backward completes the gradients of a group."""
        last, found = -1, set()
        for action in self.stream:
            if action.op is Op.BACKWARD:
                last = action.number
            elif action.op is Op.UPDATE:
                found.add(last)
        return frozenset(found)


def training_work(
    method: Method, segment: Segment, *, num_stages: int, stages: Iterable[int], seed: int
) -> dict[int, StageWork]:
    """What each of ``stages`` does to train on ``segment``; every process derives the same."""
    sizes, groups = segment.sizes, segment.group_sizes
    if not method.is_asynchronous_greedy:
        weights = segment.loss_weights(method.reduction, sizes)
        return {
            k: StageWork(list(_stream(method, k, num_stages, tuple(groups))), sizes, sizes, weights) for k in stages
        }
    streams, origins = greedy_streams(method, num_stages=num_stages, group_sizes=groups, seed=seed)
    of_stage = [[sizes[b] for b in origin] for origin in origins]
    return {
        k: StageWork(
            streams[k], of_stage[k], of_stage[max(k - 1, 0)], segment.loss_weights(method.reduction, of_stage[k])
        )
        for k in stages
    }


@lru_cache(maxsize=32)
def _stream(method: Method, stage: int, num_stages: int, group_sizes: tuple[int, ...]) -> tuple[Action, ...]:
    # Kept, for the epochs of a run are alike, and so many new objects have Python's garbage collector look at all.
    return tuple(training_actions(method, stage, num_stages=num_stages, group_sizes=group_sizes))


def forget_actions() -> None:
    """Give back what is kept for the epochs to come: of every stage 0.7 MB for 1,000 micro-batches."""
    _stream.cache_clear()


@lru_cache(maxsize=32)
def max_pending_of(method: Method, *, num_stages: int) -> Mapping[Sending, int]:
    """Messages under way on each edge in training, by (what, sending stage), beyond which a send waits for the oldest.

    So few that a buffer is given back as soon as its sender can know that it has left, and enough that in steady state
    no send waits for what has yet to happen; while the pipeline fills or empties one may. No such wait closes a cycle
    of stages that wait for each other (tests/schedule/test_schedule.py).
    """
    K, M = num_stages, method.micro_batches_per_update
    if method.spec.local_losses:  # nothing comes back that would tell
        return {(link.what, k): method.max_pending(K) for link in LINKS.values() for k in range(K)}
    fill = method.updates_to_fill(K)
    groups = [M] * (fill + 1 + fill)
    made = [list(training_actions(method, k, num_stages=K, group_sizes=groups)) for k in range(K)]
    steady = range(fill * M, (fill + 1) * M)
    return max_outstanding(made, steady)


def drain_is_exact(method: Method, *, num_stages: int) -> bool:
    """Whether a pipeline of ``method`` can be emptied after any update without changing a value."""
    return not any(any(steady_staleness(method, delay=delay)) for delay in method.delays(num_stages))


def updates_that_load(group_sizes: Sequence[int], num_micro_batches: int) -> int:
    """The fewest updates that take in at least so many micro-batches, or all there are."""
    return sum(end < num_micro_batches for end in accumulate(group_sizes[:-1])) + 1


def shorten(stream: list[Action], method: Method, stage: int, *, num_stages: int, group_sizes: Sequence[int]) -> None:
    """Turn a stream, in place, into that of a segment of fewer groups, while a stage carries it out.

    Up to the first action that the longer stream has for a micro-batch beyond these groups (2BW chooses weights right
    before it) both are the same, so a stage that has not come that far does not notice. What follows is the drain.

    Args:
        stream: of the whole segment, from :func:`training_actions`.
        method: that the stream is of; not one whose stages draw from replay buffers.
        stage: k.
        num_stages: K.
        group_sizes: those of the shorter segment, the first of the whole one.
    """
    shorter = list(training_actions(method, stage, num_stages=num_stages, group_sizes=group_sizes))
    same = next((i for i, (a, b) in enumerate(zip(stream, shorter, strict=False)) if a != b), len(shorter))
    stream[same:] = shorter[same:]


def evaluation_work(segment: Segment, *, num_stages: int, stages: Iterable[int]) -> dict[int, StageWork]:
    """What each of ``stages`` does to evaluate on ``segment``."""
    sizes = segment.sizes
    return {
        k: StageWork(list(evaluation_actions(k, num_stages=num_stages, num_micro_batches=len(sizes))), sizes, sizes, [])
        for k in stages
    }
