"""All stages on one thread, in any interleaving of their actions."""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from adl_dist.errors import ScheduleError
from adl_dist.schedule.actions import LINKS, RECEIVES, Action, message_of

ActionLists = Sequence[Sequence[Action]]
Turns = Sequence[Sequence[int]]  # the stages of the actions of each of P processes, in order; stage s is in s mod P
Edge = tuple[str, int]  # name of the message, and its receiver


def downstream_first(runnable: Sequence[int]) -> int:
    """Choose the stage furthest downstream, which consumes messages early."""
    return runnable[-1]


def in_turns(lists: Mapping[int, Sequence[Action]], turns: Iterable[int]) -> Iterator[tuple[int, Action]]:
    """Yield (stage, action) of one process in the order of its ``turns``.

    The lists may be shortened meanwhile.
    """
    cursor = dict.fromkeys(lists, 0)
    for k in turns:
        if cursor[k] < len(lists[k]):
            yield k, lists[k][cursor[k]]
            cursor[k] += 1


def interleave(
    lists: ActionLists,
    *,
    pick_next: Callable[[Sequence[int]], int] = downstream_first,
    turns: Turns | None = None,
) -> Iterator[tuple[int, Action]]:
    """Yield (stage, action) of all stages; a receive comes after its send.

    ``pick_next`` gets the stages that can continue, in ascending order, and chooses one. The engine runs actions in the
    order yielded, and any choice is a valid run. With ``turns``, the stages of a process keep its order.

    Raises:
        ScheduleError: If all unfinished stages wait for each other, or a message is not the awaited one.
    """
    num_stages = len(lists)
    cursor = [0] * num_stages
    mail: dict[Edge, deque[int]] = defaultdict(deque)

    def ready(stage: int) -> bool:
        if cursor[stage] >= len(lists[stage]):  # a LOAD may have shortened the list
            return False
        if turns is not None:
            process = stage % len(turns)
            if turns[process][sum(cursor[process :: len(turns)])] != stage:
                return False
        action = lists[stage][cursor[stage]]
        if action.op not in RECEIVES or (awaited := message_of(action, stage, num_stages=num_stages)) is None:
            return True
        arrived = mail[awaited.what, stage]
        if arrived and arrived[0] != action.number:
            raise ScheduleError(f"stage {stage} expects {action}, but micro-batch {arrived[0]} comes first")
        return bool(arrived)

    from_last = range(num_stages - 1, -1, -1)
    while True:
        if pick_next is downstream_first:  # it needs only the first stage that can continue
            stage = next(filter(ready, from_last), None)
        else:
            runnable = [*filter(ready, range(num_stages))]
            stage = pick_next(runnable) if runnable else None
        if stage is None:
            break
        action = lists[stage][cursor[stage]]
        cursor[stage] += 1
        if (message := message_of(action, stage, num_stages=num_stages)) is not None:
            what, _, to = message
            if action.op in LINKS:
                mail[what, to].append(action.number)
            else:
                mail[what, to].popleft()
        yield stage, action

    refuse_unfinished(lists, cursor)
    if lost := {edge: list(left) for edge, left in mail.items() if left}:
        raise ScheduleError(f"messages that no stage receives: {lost}")


def refuse_unfinished(lists: ActionLists, cursor: Sequence[int]) -> None:
    """Raise a ScheduleError that names the waiting stages, if there are any."""
    waiting = [(k, actions[i]) for k, (actions, i) in enumerate(zip(lists, cursor, strict=True)) if i < len(actions)]
    if waiting:
        places = ", ".join(f"stage {k} at {action} ({action.op.name})" for k, action in waiting)
        raise ScheduleError(f"deadlock: every unfinished stage waits for another: {places}")
