"""Ticks of all stages: what they can do side by side, read off their own lists of actions.

In a tick each stage does at most one forward, then one backward, then an update, and needs for it only what others have
sent in earlier ticks. With delays that fall by 2 from stage to stage (ADL, FDG) all stages are at work in every tick of
the steady state, and none waits for another one.
"""

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from adl_dist.schedule.actions import BACKWARDS, LINKS, RECEIVES, Action, Message, Op, message_of
from adl_dist.schedule.build_actions import training_actions
from adl_dist.schedule.pipeline import Pipeline

# In which order the parts of a tick are done, each by all stages: what is sent is complete by then.
PARTS = (
    frozenset({Op.LOAD, Op.RECV_ACT, Op.RECV_TARGET, Op.FORWARD}),
    frozenset({Op.SEND_ACT, Op.SEND_TARGET}),
    frozenset({Op.RECV_GRAD, Op.BACKWARD}),
    frozenset({Op.SEND_GRAD}),
    frozenset({Op.UPDATE}),
)
PART_OF = {op: number for number, ops in enumerate(PARTS) for op in ops}


@dataclass(frozen=True)
class Tick:
    """What the stages do in one tick.

    Attributes:
        actions: (stage, action) in an order in which they can be done.
        forwards: the micro-batch that each stage forwards, of those that do.
        backwards: likewise those that go backward.
    """

    actions: list[tuple[int, Action]] = field(default_factory=list)
    forwards: dict[int, int] = field(default_factory=dict)
    backwards: dict[int, int] = field(default_factory=dict)


def ticks_of(lists: Mapping[int, Sequence[Action]]) -> Iterator[Tick]:
    """Yield the ticks of a segment, from the actions of all its stages, which may be shortened meanwhile.

    Raises:
        ValueError: an action has no place in a tick.
    """
    K, done = len(lists), dict.fromkeys(lists, 0)
    sent: set[tuple[Message, int]] = set()
    while any(done[k] < len(actions) for k, actions in lists.items()):
        turns = {k: _possible(k, _turn(actions, done[k]), K, sent) for k, actions in lists.items()}
        ready = {k: turn for k, turn in turns.items() if turn}
        if not ready:
            raise ValueError("stages wait for each other in a tick")
        tick = Tick()
        for k, turn in ready.items():
            done[k] += len(turn)
            for action in turn:
                if action.op is Op.FORWARD:
                    tick.forwards[k] = action.number
                elif action.op in BACKWARDS:
                    tick.backwards[k] = action.number
        for ops in PARTS:
            tick.actions.extend((k, action) for k, turn in ready.items() for action in turn if action.op in ops)
        sent |= {message for k, turn in ready.items() for message in _messages(k, turn, K, LINKS)}
        yield tick


def steady_ticks(pipeline: Pipeline, num_slots: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return the slots of the micro-batches that all stages forward, and back-propagate, in each tick of a period.

    Micro-batch b has slot b mod ``num_slots``, which is also how many ticks a period has.

    Raises:
        ValueError: not all stages are at work in each tick of the steady state.
    """
    K, M = pipeline.num_stages, pipeline.micro_batches_per_update
    groups = [M] * (2 * pipeline.updates_to_fill + 2 * K + 2 * -(-num_slots // M) + 2)
    lists = {k: list(training_actions(pipeline, k, group_sizes=groups)) for k in range(K)}
    full = [
        (tuple(t.forwards[k] % num_slots for k in range(K)), tuple(t.backwards[k] % num_slots for k in range(K)))
        for t in ticks_of(lists)
        if len(t.forwards) == len(t.backwards) == K
    ]
    period = full[-num_slots:]
    if len({forwards for forwards, _ in period}) < num_slots or len({slots for _, slots in period}) < num_slots:
        raise ValueError(f"only {len(set(full))} of {num_slots} ticks of a period have all stages at work")
    if len(full) < sum(groups) - pipeline.delays[0] - 2 * K:
        raise ValueError("in some ticks of the steady state stages wait for each other")
    return period


def _turn(actions: Sequence[Action], start: int) -> list[Action]:
    """Return the actions from ``start`` on that a stage does in one tick."""
    turn: list[Action] = []
    part, done = 0, set[int]()
    for at in range(start, len(actions)):
        action = actions[at]
        if action.op not in PART_OF:
            raise ValueError(f"{action} has no place in a tick")
        own = PART_OF[action.op]
        if own < part or own in done:  # what comes in belongs to the forward, or the backward, behind it
            break
        part = own
        turn.append(action)
        if action.op in (Op.FORWARD, Op.BACKWARD):
            done.add(own)
    return turn


def _possible(k: int, turn: list[Action], num_stages: int, sent: Container[tuple[Message, int]]) -> list[Action]:
    """Return the first actions of ``turn``, up to one that awaits what no earlier tick has sent."""
    for at, action in enumerate(turn):
        if not all(message in sent for message in _messages(k, [action], num_stages, RECEIVES)):
            return turn[:at]
    return turn


def _messages(k: int, turn: Sequence[Action], num_stages: int, ops: Container[Op]) -> set[tuple[Message, int]]:
    """Return what stage ``k`` exchanges by those of ``ops`` in its ``turn``, each with its micro-batch."""
    found = ((message_of(action, k, num_stages=num_stages), action.number) for action in turn if action.op in ops)
    return {(message, number) for message, number in found if message is not None}
