"""The control plane: one endpoint per job in each process, called over torch.distributed.rpc, by this file alone.

RPC puts commands and reports into queues; the main thread of each process takes its commands from there and is the only
one that issues data-plane communication. What cannot wait for a main thread is answered in RPC's own threads: the
watchdog's questions, and that a segment ends early.
"""

import queue
import threading
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch.distributed.rpc as rpc
import torch.futures

from adl_dist.checkpoint.async_save import PartReport
from adl_dist.control.messages import Abort, Command, Finish, Report, Stop
from adl_dist.control.requests import Ask, Requests
from adl_dist.control.stop import EarlyStop
from adl_dist.distributed.rpc_errors import Call, PeerError
from adl_dist.distributed.world import World, name_of
from adl_dist.monitor.heartbeat import ANSWER_SECONDS, Heartbeat, end_because
from adl_dist.monitor.status import ProcessStatus

T = TypeVar("T")
Message = Command | Finish | Abort | Stop | Report | PartReport


class JobEndpoint:
    """What the processes of one job may call in one of them. The methods run in threads of RPC and never block."""

    def __init__(self) -> None:
        self.commands: queue.SimpleQueue[Command | Finish | Abort] = queue.SimpleQueue()
        self.heartbeat = Heartbeat()
        self.stop = EarlyStop()
        # Used on rank 0 alone:
        self.reports: queue.SimpleQueue[Report] = queue.SimpleQueue()
        self.requests = Requests()
        self.on_part: Callable[[PartReport], None] = lambda part: None  # takes what the processes report of a save
        self.on_abort: Callable[[], None] = lambda: None  # ends messages that would never arrive; may take a while

    def take(self, message: Message) -> None:
        """Take a message to where it is waited for."""
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

    def tell_status(self, asker: ProcessStatus, *, closely: bool) -> ProcessStatus:
        """Answer the watchdog of ``asker``, rank 0, what this process does now."""
        return self.heartbeat.answer(asker, closely=closely)

    def abort(self, why: str) -> None:
        """End this process, after the answer to this."""
        end_because(why)

    def ask(self, what: Ask, why: str) -> None:
        """Take a request from outside, which may have reached any process."""
        self.requests.ask(what, why)

    def ping(self) -> None:
        """Answer, which shows that this process is there."""


# RPC calls functions by their names, so each process needs one place where a message finds the object that it is for.
# This is it, and the only module-level state of this package: the endpoint of the job, by the job's number in its
# world. A message may arrive before its job begins here, and finds the endpoint that the job will take.
_endpoints: dict[int, JobEndpoint] = {}
_lock = threading.Lock()


def open_endpoint(job: int) -> JobEndpoint:
    """Return the endpoint of job number ``job`` in this process; those of the jobs before it are dropped."""
    with _lock:
        if job not in _endpoints:
            for earlier in [number for number in _endpoints if number < job]:
                del _endpoints[earlier]
            _endpoints[job] = JobEndpoint()
        return _endpoints[job]


def _deliver(job: int, method: Callable[..., T], arguments: tuple[object, ...], options: dict[str, object]) -> T:
    """Call ``method`` of this process's endpoint; runs in a thread of RPC."""
    return method(open_endpoint(job), *arguments, **options)


class ControlPlane:
    """The endpoints of a world's present job, as one of its processes reaches them."""

    def __init__(self, world: World, endpoint: JobEndpoint) -> None:
        self.world, self.endpoint = world, endpoint
        self.others = [rank for rank in range(world.size) if rank != world.rank]
        self._job, self._seconds = world.num_jobs, world.timeout.total_seconds()

    def call(
        self, rank: int, method: Callable[..., T], *arguments: object, seconds: float | None = None, **options: object
    ) -> Call[T]:
        """Call ``method`` of the endpoint in process ``rank``; by default it may take as long as a message."""

        def start(limit: float) -> torch.futures.Future[T]:
            future: torch.futures.Future[T] = torch.futures.Future()
            if rank == self.world.rank:  # also when RPC has ended
                future.set_result(method(self.endpoint, *arguments, **options))
            else:
                message = self._job, method, arguments, options
                future = rpc.rpc_async(name_of(rank), _deliver, args=message, timeout=limit)
            return future

        return Call(f"rank {rank}", start, self._seconds if seconds is None else seconds)

    def send(self, rank: int, message: Message, *, seconds: float | None = None) -> Call[None]:
        """Send ``message`` to process ``rank``."""
        return self.call(rank, JobEndpoint.take, message, seconds=seconds)

    def announce(self, stop: Stop) -> None:
        """Hand the decision to all other processes; return when they have it; PeerError if one is late or gone."""
        for call in [self.send(rank, stop) for rank in self.others]:
            call.wait()

    def statuses(
        self, limits: Mapping[int, float], asker: ProcessStatus, *, closely: bool
    ) -> dict[int, ProcessStatus | PeerError]:
        """Ask processes what they do now; ``limits``: seconds that each may take to answer."""
        calls = {
            rank: self.call(rank, JobEndpoint.tell_status, asker, closely=closely, seconds=seconds)
            for rank, seconds in limits.items()
        }
        return {rank: call.answer_or_error() for rank, call in calls.items()}

    def abort(self, why: str) -> Callable[[], None]:
        """Have all other processes end; the function returned waits until they have heard or are late."""
        calls = [self.call(rank, JobEndpoint.abort, why, seconds=ANSWER_SECONDS) for rank in self.others]

        def wait_until_heard() -> None:
            for call in calls:
                call.answer_or_error()

        return wait_until_heard
