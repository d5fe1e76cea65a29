"""The control plane: one endpoint per job in each process, called over torch.distributed.rpc. Only this file uses it.

RPC puts commands and reports into queues; the main thread of each process takes its commands from there and is the only
one that issues data-plane communication. What cannot wait for a main thread is answered in RPC's own threads: the
watchdog's questions, and that a segment ends early.
"""

import queue
import threading
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch.distributed.rpc as rpc

from adl_dist.checkpoint.async_save import PartReport
from adl_dist.control.messages import Abort, Command, Finish, Report, Stop
from adl_dist.control.requests import Ask, Requests
from adl_dist.control.stop import EarlyStop
from adl_dist.distributed.rpc_errors import Call, PeerError, PeerLateError
from adl_dist.distributed.world import COORDINATOR_RANK, World, name_of
from adl_dist.monitor.heartbeat import ANSWER_SECONDS, Heartbeat, end_because
from adl_dist.monitor.status import ProcessStatus

T = TypeVar("T")


class JobEndpoint:
    """What the processes of one job may call in one of them. The methods run in threads of RPC and never block.

    Attributes:
        commands: what the coordinator wants of this process.
        reports: on rank 0, what the processes report.
        requests: on rank 0, what is asked from outside.
        heartbeat: answers the watchdog.
        stop: where the running segment ends early.
        on_part: on rank 0, takes what the processes report of a save.
    """

    def __init__(self) -> None:
        self.commands: queue.SimpleQueue[Command | Finish | Abort] = queue.SimpleQueue()
        self.reports: queue.SimpleQueue[Report] = queue.SimpleQueue()
        self.requests = Requests()
        self.heartbeat = Heartbeat()
        self.stop = EarlyStop()
        self.on_part: Callable[[PartReport], None] = lambda part: None

    def take_command(self, command: Command | Finish | Abort) -> None:
        """Take a command of the coordinator."""
        self.commands.put(command)

    def take_report(self, report: Report) -> None:
        """Take a report of a process."""
        self.reports.put(report)

    def take_part(self, part: PartReport) -> None:
        """Take the report of a process on its part of a save."""
        self.on_part(part)

    def take_request(self, what: Ask, why: str) -> None:
        """Take a request from outside, which has reached another process."""
        self.requests.ask(what, why)

    def take_stop(self, stop: Stop) -> None:
        """Take the decision where the running segment ends."""
        self.stop.take(stop)

    def tell_status(self, asker: ProcessStatus, *, closely: bool) -> ProcessStatus:
        """Answer the watchdog of ``asker``, rank 0, what this process does now."""
        return self.heartbeat.answer(asker, closely=closely)

    def abort(self, why: str) -> None:
        """End this process, after the answer to this."""
        end_because(why)

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
        for earlier in [number for number in _endpoints if number < job]:
            del _endpoints[earlier]
        return _endpoints.setdefault(job, JobEndpoint())


def _deliver(job: int, method: Callable[..., T], arguments: tuple[object, ...], options: dict[str, object]) -> T:
    """Call ``method`` of this process's endpoint; runs in a thread of RPC."""
    return method(open_endpoint(job), *arguments, **options)


class ControlPlane:
    """One job's endpoints, as one of its processes reaches them."""

    def __init__(self, world: World, endpoint: JobEndpoint) -> None:
        self.world, self.endpoint = world, endpoint
        self._job, self._seconds = world.num_jobs, world.timeout.total_seconds()

    def call(
        self, rank: int, method: Callable[..., T], *arguments: object, seconds: float | None = None, **options: object
    ) -> Call[T]:
        """Call ``method`` of the endpoint in process ``rank``; by default it may take as long as a message."""
        return Call(
            f"rank {rank}",
            lambda limit: rpc.rpc_async(
                name_of(rank), _deliver, args=(self._job, method, arguments, options), timeout=limit
            ),
            self._seconds if seconds is None else seconds,
        )

    @property
    def others(self) -> list[int]:
        """The ranks of all other processes."""
        return [rank for rank in range(self.world.size) if rank != self.world.rank]

    def announce(self, stop: Stop) -> None:
        """Hand the decision to all other processes; return when they have it.

        Raises:
            PeerError: one of them is late or gone.
        """
        for call in [self.call(rank, JobEndpoint.take_stop, stop) for rank in self.others]:
            call.wait()

    def ask(self, what: Ask, why: str, *, seconds: float) -> list[PeerError]:
        """Ask something of the job, on any rank and in any thread.

        Rank 0 looks whether the others are there. These look for rank 0 alone: between two of them there is no way.

        Returns:
            The errors of the processes that did not answer within ``seconds``.
        """
        if self.world.rank == COORDINATOR_RANK:
            self.endpoint.requests.ask(what, why)
            calls = [self.call(rank, JobEndpoint.ping, seconds=seconds) for rank in self.others]
        else:
            calls = [self.call(COORDINATOR_RANK, JobEndpoint.take_request, what, why, seconds=seconds)]
        return [error for call in calls if (error := _error_of(call)) is not None]

    def statuses(
        self, limits: Mapping[int, float], asker: ProcessStatus, *, closely: bool
    ) -> dict[int, ProcessStatus | PeerError]:
        """Ask processes what they do now; ``limits``: seconds that each may take to answer."""
        calls = {
            rank: self.call(rank, JobEndpoint.tell_status, asker, closely=closely, seconds=seconds)
            for rank, seconds in limits.items()
        }
        answers: dict[int, ProcessStatus | PeerError] = {}
        for rank, call in calls.items():
            try:
                answers[rank] = call.wait()
            except PeerError as error:
                answers[rank] = error
        return answers

    def abort(self, why: str) -> Callable[[], None]:
        """Have all other processes end; the function returned waits until they have heard or are late."""
        calls = [self.call(rank, JobEndpoint.abort, why, seconds=ANSWER_SECONDS) for rank in self.others]

        def wait_until_heard() -> None:
            for call in calls:
                _error_of(call)

        return wait_until_heard


def is_there(errors: list[PeerError]) -> bool:
    """Whether the processes behind ``errors`` are all there: late, which a busy one is, but not gone."""
    return all(isinstance(error, PeerLateError) for error in errors)


def _error_of(call: Call[None]) -> PeerError | None:
    try:
        call.wait()
    except PeerError as error:
        return error
    return None
