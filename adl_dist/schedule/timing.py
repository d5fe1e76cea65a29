"""The timing model: stages run actions in order, each as early as it can.

It runs the same lists of actions as the engine. A stage is busy in forward, recompute, backward or its parts, and
update. A send costs the sender nothing, occupies the link for a time, after the messages before it, and arrives after
the link's latency. If each process has one link to all others, a message occupies the links of its sender and receiver.
Times are in any one unit.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from adl_dist.errors import ConfigError
from adl_dist.schedule.actions import BACKWARDS, LINKS, Action, Op, message_of
from adl_dist.schedule.interleaving import ActionLists, Turns, downstream_first, interleave
from adl_dist.schedule.methods import Method
from adl_dist.schedule.pipeline import Pipeline
from adl_dist.schedule.run_plan import Segment
from adl_dist.schedule.work import training_work, turns_of

FORWARDS = (Op.FORWARD, Op.FORWARD_ONLY)
WORK = dict.fromkeys(FORWARDS, "forward") | {
    Op.RECOMPUTE: "recompute",
    Op.BACKWARD: "backward",
    Op.BACKWARD_INPUT: "backward_input",
    Op.BACKWARD_WEIGHT: "backward_weight",
    Op.UPDATE: "update",
}
Slowdown = Callable[[int, Action], float]


def at_full_speed(stage: int, action: Action) -> float:
    """Return 1: there is no straggler."""
    return 1.0


@dataclass(frozen=True, kw_only=True)
class Costs:
    """The costs of one micro-batch on each stage, in one unit of time.

    Raises:
        ConfigError: If lists do not fit each other, a number is below 0, or nothing takes any time.
    """

    forward: Sequence[float]
    backward: Sequence[float]
    recompute: Sequence[float] = ()  # a forward without its part in the messages; empty: as forward
    backward_weight: Sequence[float] = ()  # the part of the backward that a split can defer; empty: half of it
    update: Sequence[float] = ()  # empty: 0
    link: Sequence[float] = ()  # latency between stage k and k + 1, in either direction; empty: 0
    transfer: Sequence[float] = ()  # time for which an activation occupies that link; empty: 0
    transfer_back: Sequence[float] = ()  # time for which a gradient does; empty: as transfer
    shares_link: bool = False  # whether a process has one link for all of its messages

    def __post_init__(self) -> None:
        K = len(self.forward)
        usual = {"recompute": self.forward, "backward_weight": [time / 2 for time in self.backward]}
        usual |= {"update": [0.0] * K, "link": [0.0] * (K - 1), "transfer": [0.0] * (K - 1)}
        usual["transfer_back"] = self.transfer or usual["transfer"]
        for name, times in usual.items():
            object.__setattr__(self, name, getattr(self, name) or times)
        of_stages = self.forward, self.backward, self.recompute, self.backward_weight, self.update
        of_links = self.link, self.transfer, self.transfer_back
        lists = *of_stages, *of_links
        fits = list(map(len, lists)) == [K] * len(of_stages) + [K - 1] * len(of_links)
        if not fits or any(not time >= 0 for times in (*lists, self.backward_input) for time in times):
            raise ConfigError(
                "costs must be lists that fit each other, of numbers of at least 0: of K stages K numbers of forward, "
                "backward, recompute, backward_weight (at most backward), update, K - 1 of link, transfer and "
                f"transfer_back; got {self}; correct these, or omit all but forward and backward for the defaults"
            )
        if sum(self.forward) + sum(self.backward) == 0:
            raise ConfigError("costs must give each stage's forward and backward time, for example forward=[1,1]")

    @classmethod
    def balanced(cls, num_stages: int, *, link: float = 0.0) -> "Costs":
        """Return the costs of equal stages: 1 for a forward, 2 for a backward."""
        return cls(forward=[1.0] * num_stages, backward=[2.0] * num_stages, link=[link] * (num_stages - 1))

    @cached_property
    def backward_input(self) -> list[float]:
        """The time of the first part (I) of a split backward, on each stage."""
        return [whole - deferrable for whole, deferrable in zip(self.backward, self.backward_weight, strict=True)]

    @property
    def busiest_link(self) -> float:
        """The time that one micro-batch occupies the busiest link."""
        acts, grads = self.transfer, self.transfer_back
        if not self.shares_link:
            return max([*acts, *grads], default=0.0)
        out = map(sum, zip([*acts, 0.0], [0.0, *grads], strict=True))  # of each stage, to the next and the one before
        into = map(sum, zip([0.0, *acts], [*grads, 0.0], strict=True))
        return max(*out, *into)

    def of(self, stage: int, op: Op) -> float:
        """Return the time of one action of ``stage``."""
        return float(getattr(self, WORK[op])[stage]) if op in WORK else 0.0

    def between(self, sender: int, to: int) -> float:
        """Return the latency between two stages, summed over the hops."""
        return sum(self.link[min(sender, to) : max(sender, to)])


class Span(NamedTuple):
    """One action in time."""

    stage: int
    action: Action
    start: float
    end: float


def simulate(
    lists: ActionLists, costs: Costs, *, turns: Turns | None = None, slowdown: Slowdown = at_full_speed
) -> list[Span]:
    """Return when each action of each stage starts and ends.

    Args:
        lists: the actions of each stage.
        costs: their times.
        turns: the order within processes of several stages, see :func:`in_processes`.
        slowdown: factor on the time of an action, for stragglers.
    """
    K = len(lists)
    P = len(turns) if turns is not None else K
    free = [0.0] * P
    mail: dict[tuple[str, int], deque[float]] = defaultdict(deque)
    spans = []

    def first_in_time(runnable: Sequence[int]) -> int:
        return min(runnable, key=lambda stage: free[stage % P])

    # A shared link takes messages in the order of time.
    order = first_in_time if costs.shares_link else downstream_first
    links = _Links(costs)
    for stage, action in interleave(lists, turns=turns, pick_next=order):
        start = free[stage % P]
        message = message_of(action, stage, num_stages=K)
        if message is not None and action.op not in LINKS:
            start = max(start, mail[message.what, stage].popleft())
        end = start + costs.of(stage, action.op) * slowdown(stage, action)
        if message is not None and action.op in LINKS:
            leaves = end
            if message.what in ("act", "grad"):  # the others are small
                transfers = costs.transfer if message.what == "act" else costs.transfer_back
                transfer = transfers[min(stage, message.receiver)]
                leaves = links.departure(stage % P, message.receiver % P, end, transfer)
            mail[message.what, message.receiver].append(leaves + costs.between(stage, message.receiver))
        free[stage % P] = end
        spans.append(Span(stage, action, start, end))
    return spans


class _Links:
    """The links between processes, and the times until which they are busy."""

    def __init__(self, costs: Costs) -> None:
        self._shares = costs.shares_link
        self._over: dict[object, float] = defaultdict(float)

    def departure(self, sender: int, to: int, at: float, transfer: float) -> float:
        """Return when a message handed over at time ``at`` has passed its link."""
        over = self._over
        if not self._shares:
            over[sender, to] = max(at, over[sender, to]) + transfer
            return over[sender, to]
        # Both links carry a message at the same time, as a switch passes packets on. A queue keeps the order in which
        # messages were handed over, also if one still waits for its sender's link.
        begins = max(at, over["from", sender])
        over["from", sender] = begins + transfer
        over["to", to] = max(begins, over["to", to]) + transfer
        return over["to", to]


def makespan(spans: Iterable[Span]) -> float:
    """Return when the last of ``spans`` ends."""
    return max((span.end for span in spans), default=0.0)


def ticks(lists: ActionLists, *, turns: Turns | None = None) -> list[dict[int, list[Action]]]:
    """Return the actions of each stage in each tick.

    A tick has at most one forward, then one backward, and an update. A message takes one tick. The go message of the
    forward lock (DDG, FR) takes none, because the papers do not count it. Stages of one process share its ticks, see
    :func:`in_processes`.
    """
    K = len(lists)
    P = len(turns) if turns is not None else K
    now, used = [0] * P, [0] * P  # of a process; used: 1 after the forward of a tick, 2 after its backward
    ready = [0] * K
    mail: dict[tuple[str, int], deque[int]] = defaultdict(deque)
    table: list[dict[int, list[Action]]] = [defaultdict(list) for _ in range(K)]
    for stage, action in interleave(lists, turns=turns):
        process = stage % P
        if (message := message_of(action, stage, num_stages=K)) is not None:
            if action.op in LINKS:
                arrives = max(now[process], ready[stage]) + (action.op is not Op.SEND_GO)
                mail[message.what, message.receiver].append(arrives)
            else:
                ready[stage] = max(ready[stage], mail[message.what, stage].popleft())
        elif action.op in FORWARDS or action.op in (Op.RECOMPUTE, *BACKWARDS):
            rank = 1 if action.op in FORWARDS else 2
            tick = max(now[process] + (used[process] >= rank), ready[stage])
            if action.op is Op.RECOMPUTE:  # its backward follows in the same tick
                rank = 1
            now[process], used[process] = tick, rank
            table[stage][tick].append(action)
        elif action.op in (Op.LEARN, Op.UPDATE_TIED):
            # A stage without further forwards does it as soon as the message is there.
            now[process] = max(now[process], ready[stage])
            table[stage][now[process]].append(action)
        elif action.op in (Op.BACKWARD_WEIGHT, Op.UPDATE, Op.UPDATE_HEAD):
            table[stage][now[process]].append(action)
    return table


@dataclass(frozen=True, kw_only=True)
class Speed:
    """The speed of a method in steady state."""

    time_per_update: float  # in the unit of the costs
    bubble: float  # share of that time in which a process waits, averaged over them
    speed_up: float  # over backpropagation with the same costs and the same M
    busy: list[float]  # share of that time in which each stage works


def speed(method: Method, costs: Costs) -> Speed:
    """Predict the speed of ``method`` in a full pipeline."""
    K, M = len(costs.forward), method.micro_batches_per_update
    pipeline, serial = Pipeline(method, K), Pipeline(Method(name="bp", accumulation_steps=M), K)
    period, worked = _per_update(pipeline, costs)
    serial_period = time_per_update(serial, costs)
    busy = [time / period for time in worked]
    return Speed(
        time_per_update=period,
        bubble=1 - sum(busy) / pipeline.num_processes,
        speed_up=serial_period / period,
        busy=busy,
    )


def time_per_update(pipeline: Pipeline, costs: Costs) -> float:
    """Return the time of an update in a full pipeline."""
    return _per_update(pipeline, costs)[0]


def actions_of_all(pipeline: Pipeline, *, num_micro_batches: int) -> list[list[Action]]:
    """Return the actions of all stages in a segment of equal micro-batches."""
    segment = _segment(pipeline, num_micro_batches)
    work = training_work(pipeline, segment, stages=range(pipeline.num_stages))
    return [work[k].actions for k in range(pipeline.num_stages)]


def in_processes(pipeline: Pipeline, *, num_micro_batches: int) -> tuple[list[list[Action]], Turns | None]:
    """Return (actions of each stage, turns of each process).

    The turns are None if each process has one stage.
    """
    lists, turns = actions_of_all(pipeline, num_micro_batches=num_micro_batches), None
    if pipeline.stages_per_process > 1:
        segment = _segment(pipeline, num_micro_batches)
        turns = [turns_of(pipeline, segment, process, training=True) for process in range(pipeline.num_processes)]
    return lists, turns


def _segment(pipeline: Pipeline, num_micro_batches: int) -> Segment:
    """Return a segment of the first epoch after ``flush_epochs``."""
    M, after = pipeline.micro_batches_per_update, pipeline.method.flush_epochs
    return Segment(epoch=after, first_update=0, num_samples=num_micro_batches, micro_batch_size=1, accumulation_steps=M)


def _per_update(pipeline: Pipeline, costs: Costs) -> tuple[float, list[float]]:
    """Return (time of an update, busy time of each stage in it).

    Both are means over groups, after as many groups have filled the pipeline.
    """
    K, M = pipeline.num_stages, pipeline.micro_batches_per_update
    num_groups = max(min(24, -(-96 // M)), 2 * (pipeline.delays[0] // M + 2))  # enough for the steady state's period
    if pipeline.spec.flush:
        num_groups = 4  # groups do not overlap, so all are equal from the second one on

    def run(groups: int) -> tuple[float, list[float]]:
        lists, turns = in_processes(pipeline, num_micro_batches=groups * M)
        spans = simulate(lists, costs, turns=turns)
        worked = [0.0] * K
        for span in spans:
            worked[span.stage] += span.end - span.start
        return makespan(spans), worked

    (short, less), (long, more) = run(num_groups), run(2 * num_groups)
    return (long - short) / num_groups, [(b - a) / num_groups for a, b in zip(less, more, strict=True)]
