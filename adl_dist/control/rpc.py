"""The control plane: one endpoint per job in each process, over RPC.

RPC puts commands and reports into queues; the main thread of each process takes its commands from there and is the only
one that issues data-plane communication. RPC's own threads answer whatever cannot wait for a main thread: the
watchdog's questions, and the early end of a segment.
"""

import queue
import threading
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch.distributed.rpc as rpc
import torch.futures

from adl_dist.checkpoint.async_save import PartReport
from adl_dist.control.messages import Abort, Command, Finish, Report, Stop
from adl_dist.control.requests import RequestKind, RequestQueue
from adl_dist.control.stop import EarlyStop
from adl_dist.distributed.rpc_errors import Call, PeerError
from adl_dist.distributed.world import World, name_of
from adl_dist.monitor.status import ProcessStatus
from adl_dist.monitor.watchdog import ANSWER_SECONDS, Heartbeat, end_because

T = TypeVar("T")
Message = Command | Finish | Abort | Stop | Report | PartReport


class JobEndpoint:
    """The methods that other processes may call; they never block."""

    def __init__(self) -> None:
        self.commands: queue.SimpleQueue[Command | Finish | Abort] = queue.SimpleQueue()
        self.heartbeat = Heartbeat()
        self.stop = EarlyStop()
        # Used only on rank 0:
        self.reports: queue.SimpleQueue[Report] = queue.SimpleQueue()
        self.requests = RequestQueue()
        self.on_part: Callable[[PartReport], None] = lambda part: None  # takes the reports on a save
        self.on_abort: Callable[[], None] = lambda: None  # ends messages that would never arrive; may take a while

    def take(self, message: Message) -> None:
        """Hand a message to its queue or object."""
        match message:
            case Stop():
                self.stop.take(message)
            case Report():
                self.reports.put(message)
            case PartReport():
                self.on_part(message)
            case Abort():
                self.stop.take(message)
                self.commands.put(message)
                threading.Thread(target=self.on_abort, name="abort", daemon=True).start()
            case _:
                self.commands.put(message)

    def status(self, asker: ProcessStatus) -> ProcessStatus:
        """Return the status of this process to rank 0, the ``asker``."""
        return self.heartbeat.answer(asker)

    def abort(self, why: str) -> None:
        """End this process, after the answer to this call."""
        end_because(why)

    def ask(self, what: RequestKind, why: str) -> None:
        """Take a request; rank 0 carries it out, others only show to be alive."""
        self.requests.ask(what, why)


# RPC calls functions by their names, so each process needs one place where a message finds its object: the endpoint of
# the job, by the job's number in its world. A message may arrive before its job begins here, and finds the endpoint
# that the job will use.
_endpoints: dict[int, JobEndpoint] = {}
_lock = threading.Lock()


def open_endpoint(job: int) -> JobEndpoint:
    """Return this process's endpoint of a job, and drop earlier ones."""
    with _lock:
        if job not in _endpoints:
            for earlier in [number for number in _endpoints if number < job]:
                del _endpoints[earlier]
            _endpoints[job] = JobEndpoint()
        return _endpoints[job]


def _deliver(job: int, method: Callable[..., T], *arguments: object) -> T:
    """Call ``method`` of this process's endpoint, in a thread of RPC."""
    return method(open_endpoint(job), *arguments)


class ControlPlane:
    """One process's access to the endpoints of the present job."""

    def __init__(self, world: World, endpoint: JobEndpoint) -> None:
        self.world, self.endpoint = world, endpoint
        self.others = [rank for rank in range(world.size) if rank != world.rank]
        self._job, self._seconds = world.num_jobs, world.timeout.total_seconds()

    def call(self, rank: int, method: Callable[..., T], *arguments: object, seconds: float | None = None) -> Call[T]:
        """Call ``method`` of ``rank``'s endpoint; the default timeout is World's."""

        def start(limit: float) -> torch.futures.Future[T]:
            future: torch.futures.Future[T] = torch.futures.Future()
            if rank == self.world.rank:  # also when RPC has ended
                future.set_result(method(self.endpoint, *arguments))
            else:
                future = rpc.rpc_async(name_of(rank), _deliver, args=(self._job, method, *arguments), timeout=limit)
            return future

        return Call(f"rank {rank}", start, self._seconds if seconds is None else seconds)

    def send(self, rank: int, message: Message, *, seconds: float | None = None) -> Call[None]:
        """Send ``message`` to process ``rank``."""
        return self.call(rank, JobEndpoint.take, message, seconds=seconds)

    def announce(self, stop: Stop) -> None:
        """Send ``stop`` to all others; raise PeerError if one is late or gone."""
        for call in [self.send(rank, stop) for rank in self.others]:
            call.wait()

    def statuses(self, limits: Mapping[int, float], asker: ProcessStatus) -> dict[int, ProcessStatus | PeerError]:
        """Return each rank's status or error; ``limits``: seconds to answer."""
        calls = {r: self.call(r, JobEndpoint.status, asker, seconds=seconds) for r, seconds in limits.items()}
        return {rank: call.answer_or_error() for rank, call in calls.items()}

    def abort(self, why: str) -> None:
        """Tell all others to exit, and wait for them."""
        for call in [self.call(rank, JobEndpoint.abort, why, seconds=ANSWER_SECONDS) for rank in self.others]:
            call.answer_or_error()
