"""Replays all stages on one thread: any interleaving, any deadlock, without a process or a tensor."""

import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Container, Hashable, Iterator, Mapping, Sequence

from adl_dist.errors import ScheduleError
from adl_dist.schedule.actions import LINKS, RECEIVES, Action, receiver

ActionLists = Sequence[Sequence[Action]]
Edge = tuple[str, int]  # what is carried, and the stage that receives it
Sending = tuple[str, int]  # what is carried, and the stage that sends it


def downstream_first(runnable: Sequence[int]) -> int:
    """Prefer the stage furthest downstream, so that messages are consumed as soon as they are there."""
    return runnable[-1]


def at_random(seed: int) -> Callable[[Sequence[int]], int]:
    """Return a choice among the stages that can continue, drawn by ``seed``."""
    return random.Random(seed).choice


def replay(
    lists: ActionLists, *, pick_next: Callable[[Sequence[int]], int] = downstream_first
) -> Iterator[tuple[int, Action]]:
    """Yield (stage, action) of all stages in one valid order: a receive comes after its send.

    The engine executes the order as it comes, so whatever ``pick_next`` picks is a run of the real thing.

    Args:
        lists: the actions of stages 0..K-1.
        pick_next: picks the next stage among those that can continue (ascending order).

    Raises:
        ScheduleError: every unfinished stage waits for another, or a message is not the one awaited.
    """
    num_stages = len(lists)
    cursor = [0] * num_stages
    mail: dict[Edge, deque[int]] = defaultdict(deque)

    def ready(stage: int) -> bool:
        if cursor[stage] >= len(lists[stage]):  # asked each time: a LOAD may shorten all lists
            return False
        action = lists[stage][cursor[stage]]
        if action.op not in RECEIVES:
            return True
        arrived = mail[RECEIVES[action.op].what, stage]
        if arrived and arrived[0] != action.number:
            raise ScheduleError(f"stage {stage} expects {action}, but micro-batch {arrived[0]} comes first")
        return bool(arrived)

    from_last = range(num_stages - 1, -1, -1)
    while True:
        if pick_next is downstream_first:  # which needs no more than the first that can
            for stage in from_last:
                if ready(stage):
                    break
            else:
                break
        elif runnable := [k for k in range(num_stages) if ready(k)]:
            stage = pick_next(runnable)
        else:
            break
        action = lists[stage][cursor[stage]]
        cursor[stage] += 1
        if action.op in LINKS:
            mail[LINKS[action.op].what, receiver(action.op, stage, num_stages=num_stages)].append(action.number)
        elif action.op in RECEIVES:
            mail[RECEIVES[action.op].what, stage].popleft()
        yield stage, action

    if unfinished := {k: s[cursor[k]] for k, s in enumerate(lists) if cursor[k] < len(s)}:
        raise ScheduleError(_stuck(unfinished))
    if lost := {edge: list(left) for edge, left in mail.items() if left}:
        raise ScheduleError(f"messages that no stage receives: {lost}")


def max_outstanding(lists: ActionLists, numbers: Container[int]) -> dict[Sending, int]:
    """Return, per edge, the most messages that may not have been received yet when one is sent, it included.

    However slow the receiver is, and however fast all others are: only that counts as received of which the sender has
    heard, through whatever messages came to it since.

    Args:
        lists: the actions of stages 0..K-1.
        numbers: the micro-batches at whose sending it is counted.
    """
    known: list[Counter[Sending]] = [Counter() for _ in lists]  # of each edge, received as far as a stage has heard
    letters: dict[Sending, deque[Counter[Sending]]] = defaultdict(deque)  # what the sender knew
    sent: Counter[Sending] = Counter()
    most: dict[Sending, int] = defaultdict(int)
    for k, action in replay(lists):
        if action.op in LINKS:
            edge = LINKS[action.op].what, k
            sent[edge] += 1
            if action.number in numbers:
                most[edge] = max(most[edge], sent[edge] - known[k][edge])
            letters[edge].append(known[k].copy())
        elif action.op in RECEIVES:
            what, _, hop = RECEIVES[action.op]
            edge = what, 0 if hop is None else k - hop
            known[k] |= letters[edge].popleft()  # of each edge the larger number
            known[k][edge] += 1
    return dict(most)


def one_group_per_direction(what: str, low: int, high: int) -> Hashable:
    """Return the communicator as transport/ has it: acts, grads and targets never share one."""
    return what, low, high


def one_group_per_pair(what: str, low: int, high: int) -> Hashable:
    """One communicator for both directions of a neighbour pair. It deadlocks; a test shows it."""
    return low, high


def check_rendezvous(
    lists: ActionLists,
    *,
    group: Callable[[str, int, int], Hashable] = one_group_per_direction,
    max_pending: Mapping[Sending, int] | None = None,
) -> None:
    """Prove that the stages finish even if no message is ever buffered.

    The model is that of NCCL: on one communicator a rank's operations run in the order in which they
    were issued, and each finishes only together with its partner at the head of the peer's queue. A
    receive blocks the host, a send only if too many of its edge are under way. gloo buffers, and so hides
    such deadlocks.

    Args:
        lists: the actions of stages 0..K-1.
        group: names the communicator that carries ``what`` between two stages.
        max_pending: for each edge, sends under way that do not block the host; None: any number.

    Raises:
        ScheduleError: the stages wait for each other; the text says for what.
    """
    wire = _Wire(len(lists), group)
    cursor = [0] * len(lists)
    received: set[tuple[int, Action]] = set()

    def is_blocked(stage: int, action: Action) -> bool:
        if action.op in RECEIVES:
            return (stage, action) not in received
        if max_pending is None or action.op not in LINKS:
            return False
        what = LINKS[action.op].what
        return wire.num_pending(stage, what) > max_pending[what, stage]

    moved = True
    while moved:
        moved = False
        for k, actions in enumerate(lists):
            while cursor[k] < len(actions):
                action = actions[cursor[k]]
                wire.issue(k, action)
                if is_blocked(k, action):
                    break
                cursor[k] += 1
                moved = True
        for arrival in wire.transfer():
            received.add(arrival)
            moved = True

    if unfinished := {k: s[cursor[k]] for k, s in enumerate(lists) if cursor[k] < len(s)}:
        raise ScheduleError(_stuck(unfinished))


class _Wire:
    """Communicators that hold what was issued until both ends have come to it."""

    def __init__(self, num_stages: int, group: Callable[[str, int, int], Hashable]) -> None:
        self._num_stages, self._group = num_stages, group
        self._queues: dict[tuple[Hashable, int], deque[tuple[str, bool, int]]] = defaultdict(deque)
        self._peers: dict[Hashable, tuple[int, int]] = {}
        self._issued: set[tuple[int, Action]] = set()

    def issue(self, stage: int, action: Action) -> None:
        """Queue a send or a receive of ``stage``, once; any other action does nothing."""
        link = LINKS.get(action.op) or RECEIVES.get(action.op)
        if link is None or (stage, action) in self._issued:
            return
        hop = self._num_stages - 1 if link.hop is None else link.hop
        peer = stage + hop if action.op in LINKS else stage - hop
        low, high = min(stage, peer), max(stage, peer)
        key = self._group(link.what, low, high)
        self._peers[key] = low, high
        self._queues[key, stage].append((link.what, action.op in LINKS, action.number))
        self._issued.add((stage, action))

    def num_pending(self, stage: int, what: str) -> int:
        """Return how many sends of ``what`` by ``stage`` are under way."""
        return sum(m[:2] == (what, True) for (_, k), queue in self._queues.items() if k == stage for m in queue)

    def transfer(self) -> Iterator[tuple[int, Action]]:
        """Finish whatever both ends have at the head of their queues; yield each receive with its stage."""
        for key, (low, high) in self._peers.items():
            mine, theirs = self._queues[key, low], self._queues[key, high]
            while mine and theirs and _partners(mine[0], theirs[0]):
                what, low_sends, number = mine.popleft()
                theirs.popleft()
                op = next(link.recv for link in LINKS.values() if link.what == what)
                yield (high if low_sends else low), Action(op, number)


def _partners(mine: tuple[str, bool, int], theirs: tuple[str, bool, int]) -> bool:
    return mine[0] == theirs[0] and mine[1] != theirs[1] and mine[2] == theirs[2]


def _stuck(waiting: dict[int, Action]) -> str:
    places = ", ".join(f"stage {k} at {action} ({action.op.name})" for k, action in waiting.items())
    return f"deadlock: every unfinished stage waits for another: {places}"
