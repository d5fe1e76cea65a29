"""Which schedules stand still on GPUs, in a model of NCCL's kernels: edges, receives posted ahead, order of launches.

Each directed edge is a stream on either side: its kernels begin one after the other, each when the one before is done
and the compute stream has come as far as its launch. A message is done when both of its kernels have begun. With
``NCCL_LAUNCH_ORDER_IMPLICIT=1`` a kernel also begins only after the kernel of NCCL launched before it in its process
has begun, whatever its edge. The host only launches; it waits for tokens and targets, which go from host to host,
before an update for the numbers of the one before, and before it receives an act until the one before has arrived.
"""

from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field

from adl_dist.schedule import Op
from adl_dist.schedule.actions import LINKS, RECEIVES, is_of_groups, message_of, what_of

ON_CPU = ("target", "label", "go")


@dataclass
class Kernel:
    """One end of a message."""

    place: int  # in its process's list of actions: the compute stream must have come there
    before: "Kernel | None"  # the one before it in its stream
    has_begun: bool = False
    is_done: bool = False


@dataclass
class Process:
    """A stage's list of actions, how far its host and its compute stream have come, and what it has launched."""

    actions: list
    host: int = 0
    compute: int = 0
    kernels: list[Kernel] = field(default_factory=list)  # in the order of their launches
    ends: dict = field(default_factory=lambda: defaultdict(list))  # (is it a send, edge) -> kernels of that stream
    waited_for: dict = field(default_factory=lambda: defaultdict(list))  # by place
    posted: dict = field(default_factory=lambda: defaultdict(deque))
    to_post: dict = field(default_factory=dict)
    awaited: Kernel | None = None  # of the last act

    def launch(self, *stream):
        """Launch the next kernel of a stream."""
        earlier = self.ends[stream]
        earlier.append(Kernel(self.host, earlier[-1] if earlier else None))
        self.kernels.append(earlier[-1])
        return earlier[-1]


def standing_still(lists, **model):
    """Return, by stage, the action at which it waits for ever; {} if all stages come to their ends; see :func:`run`."""
    processes = run(lists, **model)
    return {k: str(p.actions[p.compute]) for k, p in enumerate(processes) if p.compute < len(p.actions)}


def run(lists, *, max_pending, ahead, in_order_of_launches, ahead_of_tied=None):
    """Return the processes when they have come as far as they can.

    ``ahead``: receives posted beyond the one awaited; ``ahead_of_tied``: likewise, by what is sent once a group.
    ``max_pending``: as :func:`check_rendezvous` has it.
    """
    processes = [Process(actions) for actions in lists]
    arrived = Counter()  # (what, sending stage) -> messages from host to host that no one has taken
    for process in processes:
        for action in process.actions:
            if action.op in RECEIVES:
                process.to_post.setdefault(what_of(action), deque()).append(action.number)

    def launches(k, process):
        """Whether the host of stage k gets past its next action."""
        action = process.actions[process.host]
        if action.op in RECEIVES:
            what, source, _ = message_of(action, k, num_stages=len(lists))
            edge = what, source
            if what in ON_CPU:
                is_there = arrived[edge] > 0
                arrived[edge] -= is_there
                return is_there
            if what == "act" and process.awaited is not None and not process.awaited.is_done:
                return False
            posted, waiting = process.posted[what], process.to_post[what]
            while len(posted) < 1 + (ahead_of_tied[what] if is_of_groups(what) else ahead) and waiting:
                waiting.popleft()
                posted.append(process.launch(False, edge))
            process.waited_for[process.host].append(posted.popleft())
            if what == "act":
                process.awaited = process.waited_for[process.host][-1]
        elif action.op in LINKS:
            edge = what_of(action), k
            if edge[0] in ON_CPU:
                if action.op is Op.SEND_GO and k == len(lists) - 1 and process.compute < process.host:
                    return False  # it is sent when the forward is done
                arrived[edge] += 1
                return True
            process.launch(True, edge)
            sent = process.ends[True, edge]
            if len(sent) > max_pending[edge]:
                process.waited_for[process.host].append(sent[-1 - max_pending[edge]])
        elif action.op is Op.UPDATE:
            earlier = [n for n in range(process.host) if process.actions[n].op is Op.UPDATE]
            return not earlier or process.compute >= earlier[-1]
        return True

    moved = True
    while moved:
        moved = False
        for k, process in enumerate(processes):
            while process.host < len(process.actions) and launches(k, process):
                process.host += 1
                moved = True
            last = None
            for kernel in process.kernels:
                is_next = kernel.before is None or kernel.before.is_done
                may = last is None or last.has_begun or not in_order_of_launches
                if not kernel.has_begun and is_next and may and process.compute >= kernel.place:
                    kernel.has_begun = moved = True
                last = kernel
            process.kernels = [kernel for kernel in process.kernels if not kernel.has_begun]
        for process in processes:
            for (is_send, edge), kernels in process.ends.items():
                if is_send:
                    other = next((p.ends[False, edge] for p in processes if (False, edge) in p.ends), [])
                    for mine, theirs in zip(kernels, other, strict=False):
                        if mine.has_begun and theirs.has_begun and not mine.is_done:
                            mine.is_done = theirs.is_done = moved = True
            while process.compute < process.host and all(x.is_done for x in process.waited_for[process.compute]):
                process.compute += 1
                moved = True
    return processes
