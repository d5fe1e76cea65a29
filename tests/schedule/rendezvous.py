"""The proof that stages finish even if no message is ever buffered, in the model of NCCL.

On one communicator a rank's operations run in the order in which they were issued, and each finishes only together with
its partner at the head of the peer's queue. A receive blocks the host, a send only if too many of its edge are under
way. gloo buffers, and so hides such deadlocks.
"""

from collections import Counter, defaultdict, deque

from adl_dist.schedule.actions import LINKS, RECEIVES, message_of
from adl_dist.schedule.interleaving import refuse_unfinished


def check_rendezvous(lists, *, one_per_pair=False, max_pending=None, turns=None):
    """Raise a ScheduleError that says for what stages wait, if the ``lists`` of stages 0..K-1 deadlock.

    ``one_per_pair``: one communicator for both directions of a neighbour pair, which transport/ never has.
    ``turns``: the stages of each process's actions, in order; None: each stage has its own.
    ``max_pending``: for each (what, sending stage), sends under way that do not block the host; None: any number.
    """
    cursor, num_issued = [0] * len(lists), [0] * len(lists)
    queues = defaultdict(deque)  # (communicator, stage) -> messages that it sends or receives
    ends = {}  # of a communicator: its two stages
    under_way, done = Counter(), set()

    def is_blocked(stage, action):
        """Issue ``action``, once; return whether it keeps its stage waiting."""
        if action.op not in LINKS and action.op not in RECEIVES:
            return False
        what, source, to = message_of(action, stage, num_stages=len(lists))
        carried = what, source, to, action.number  # the same for both partners
        if num_issued[stage] <= cursor[stage]:
            num_issued[stage] = cursor[stage] + 1
            pair = min(source, to), max(source, to)
            communicator = pair if one_per_pair else (what, *pair)
            ends[communicator] = pair
            queues[communicator, stage].append(carried)
            under_way[what, source] += action.op in LINKS
        if action.op in RECEIVES:
            return carried not in done
        return max_pending is not None and under_way[what, source] > max_pending[what, source]

    def has_turn(stage):
        process = stage % len(turns) if turns is not None else stage
        return turns is None or turns[process][sum(cursor[process :: len(turns)])] == stage

    progress = -1
    while progress < sum(cursor) + len(done):
        progress = sum(cursor) + len(done)
        for k, actions in enumerate(lists):
            while cursor[k] < len(actions) and has_turn(k) and not is_blocked(k, actions[cursor[k]]):
                cursor[k] += 1
        for name, pair in ends.items():
            mine, theirs = (queues[name, stage] for stage in pair)
            while mine and theirs and mine[0] == theirs[0]:
                what, source, *_ = mine.popleft()
                under_way[what, source] -= 1
                done.add(theirs.popleft())
    refuse_unfinished(lists, cursor)
