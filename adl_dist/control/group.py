"""The stages as the coordinator sees them: a group that carries out one command after the other, wherever they are."""

import logging
import queue
import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from adl_dist.checkpoint.async_save import PartReport
from adl_dist.control.messages import Abort, Command, Failure, Finish, Record, Report, Result
from adl_dist.control.rpc import ControlPlane, JobEndpoint
from adl_dist.distributed.rpc_errors import Call, PeerError
from adl_dist.errors import StageFailed
from adl_dist.monitor.status import CoordinatorStatus, user_frame

logger = logging.getLogger("adl_dist")

R = TypeVar("R", bound=Result)

CAUSE_SECONDS = 1.0  # seconds that the report of a failure that follows from another waits for the other's


class Reporter(Protocol):
    """Takes what a worker has to report while it carries out a command."""

    def record(self, record: Record) -> None:
        """Take one record."""
        ...

    def part(self, part: PartReport) -> None:
        """Take the report on a part of a save; called by any thread, and never raises."""
        ...


class Worker(Protocol):
    """Carries out commands on the stages of one process."""

    def execute(self, command: Command, reporter: Reporter) -> list[Result]:
        """Carry out ``command``; return one result per stage."""
        ...


class Policy(Protocol):
    """The coordinator, as the stages' reports reach it."""

    def take_record(self, record: Record) -> None:
        """Take one record of a stage."""
        ...

    def take_part(self, part: PartReport) -> None:
        """Take the report of a process on its part of a save; called by any thread."""
        ...


class WorkerGroup(Protocol):
    """All stages."""

    def call(self, command: Command, result: type[R]) -> list[R]:
        """Have every stage carry out ``command``; return their results, of that type, in the order of stages.

        Raises:
            StageFailed: another process failed.
        """
        ...


class LocalWorkerGroup:
    """All stages in this process."""

    def __init__(self, worker: Worker, policy: Policy) -> None:
        """Hand what ``worker`` reports to ``policy``."""
        self._worker, self.record, self.part = worker, policy.take_record, policy.take_part

    def call(self, command: Command, result: type[R]) -> list[R]:
        """See :class:`WorkerGroup`."""
        return _checked(self._worker.execute(command, self), result)


class RpcWorkerGroup:
    """One stage in each process; used by the coordinator's thread on rank 0."""

    def __init__(self, plane: ControlPlane, policy: Policy, held_up_by: Callable[[], str | None]) -> None:
        """Hand reports to ``policy``; ``held_up_by`` names the process that others wait for in vain."""
        self._plane, self._policy, self._held_up_by = plane, policy, held_up_by

    def call(self, command: Command, result: type[R]) -> list[R]:
        """See :class:`WorkerGroup`."""
        self._send(command)
        results: dict[int, list[Result]] = {}
        while len(results) < self._plane.world.size:
            report = self._take_report()
            if report.failure is not None:
                raise self._cause(report.failure).error()
            if report.results is not None:
                results[report.rank] = report.results
        return _checked([one for rank in sorted(results) for one in results[rank]], result)

    def end(self, command: Finish | Abort, *, seconds: float | None = None) -> None:
        """Tell all processes that the job is over; return when they have heard, are late or are gone."""
        for call in self._send(command, seconds=seconds):
            try:
                call.wait()
            except PeerError as error:
                logger.info("a process has not heard the end of the job: %s", error)

    def _send(self, command: Command | Finish | Abort, *, seconds: float | None = None) -> list[Call[None]]:
        plane = self._plane
        plane.endpoint.take_command(command)
        return [plane.call(rank, JobEndpoint.take_command, command, seconds=seconds) for rank in plane.others]

    def _take_report(self, seconds: float | None = None) -> Report:
        report = self._plane.endpoint.reports.get(timeout=seconds)
        for record in report.records:
            self._policy.take_record(record)
        return report

    def _cause(self, failure: Failure) -> Failure:
        """Return, of the failures that arrive together, the one that the others follow from."""
        deadline = time.monotonic() + CAUSE_SECONDS
        failures = [failure]
        while failures[-1].is_victim and (left := deadline - time.monotonic()) > 0:
            try:
                report = self._take_report(left)
            except queue.Empty:
                break
            if report.failure is not None:
                failures.append(report.failure)
        for one in failures:
            logger.error("rank %s failed:\n%s", one.rank, one.traceback)
        cause = min(failures, key=lambda one: one.is_victim)
        if cause.is_victim and (name := self._held_up_by()):
            return Failure(
                rank=cause.rank, text=f"{name}; {cause.text}", exit_code=cause.exit_code, is_victim=False, is_gone=True
            )
        return cause


class TrackedGroup:
    """A group that remembers what the coordinator's thread commanded last, for status queries and the watchdog."""

    def __init__(self, group: WorkerGroup, thread: int) -> None:
        """Wrap ``group``; ``thread``: the identity of the coordinator's thread."""
        self._group, self._thread = group, thread
        self._now = ("", False, time.monotonic())

    def call(self, command: Command, result: type[R]) -> list[R]:
        """See :class:`WorkerGroup`."""
        self._now = (command_name(command), True, time.monotonic())
        try:
            return self._group.call(command, result)
        finally:
            self._now = (command_name(command), False, time.monotonic())

    def status(self, *, closely: bool) -> CoordinatorStatus:
        """Return what the coordinator does now; ``closely``: also where in its program."""
        command, is_waiting, since = self._now
        at = user_frame(self._thread) if closely else ""
        return CoordinatorStatus(command, is_waiting, time.monotonic() - since, at)


def command_name(command: Command) -> str:
    """Return the name of a command, for messages."""
    return type(command).__name__.lower()


def failure_of(error: StageFailed | BaseException, rank: int) -> Failure:
    """Return what the other processes get to know of the error that ends the job on ``rank``."""
    return Failure(
        rank=rank,
        text=str(error),
        exit_code=getattr(error, "exit_code", 1),
        is_victim=getattr(error, "is_victim", False),
        is_gone=getattr(error, "is_gone", False),
    )


def _checked(results: list[Any], result: type[R]) -> list[R]:
    assert all(isinstance(one, result) for one in results), f"expected results of {result.__name__}, got {results}"
    return results
