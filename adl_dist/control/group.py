"""The group of stages that rank 0 calls, and each process's command loop."""

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import zip_longest
from typing import Any, TypeVar

from adl_dist.checkpoint.async_save import LAST_SAVE_SECONDS, PartReport
from adl_dist.control.messages import (
    Abort,
    Command,
    Failure,
    Finish,
    Record,
    Report,
    Result,
    Summary,
    command_name,
)
from adl_dist.control.rpc import ControlPlane
from adl_dist.control.worker import LocalWorker
from adl_dist.distributed.rpc_errors import Call
from adl_dist.distributed.world import COORDINATOR_RANK
from adl_dist.errors import AdlError, ChannelError
from adl_dist.monitor.status import CoordinatorStatus, user_frame

logger = logging.getLogger("adl_dist")

CAUSE_SECONDS = 1.0  # how long a failure that follows from another one waits for the report of that one
REPORT_SECONDS = 0.2  # records travel in batches this far apart
HEARD_SECONDS = 4 * CAUSE_SECONDS  # limit for rank 0 to find the cause and report it

R = TypeVar("R", bound=Result)


class WorkerGroup:
    """All stages, with the last command for status and watchdog."""

    def __init__(self, carry_out: Callable[[Command], list[Result]]) -> None:
        """Create a group that carries out a command by ``carry_out``."""
        self._carry_out = carry_out
        self.thread = threading.get_ident()  # the coordinator's
        self._now = ("", False, time.monotonic())

    def call(self, command: Command, result: type[R]) -> list[R]:
        """Carry out ``command`` on all stages; return results in stage order.

        Raises:
            StageFailed: If another process failed.
        """
        name = command_name(command)
        self._now = (name, True, time.monotonic())
        try:
            results: list[Any] = self._carry_out(command)
        finally:
            self._now = (name, False, time.monotonic())
        assert all(isinstance(one, result) for one in results), f"expected results of {result.__name__}, got {results}"
        return results

    def status(self) -> CoordinatorStatus:
        """Return the coordinator's status."""
        command, is_waiting, since = self._now
        return CoordinatorStatus(command, is_waiting, time.monotonic() - since, user_frame(self.thread))


class RpcWorkerGroup(WorkerGroup):
    """Stages in several processes, called by the coordinator on rank 0."""

    def __init__(self, plane: ControlPlane, record: Callable[[Record], None]) -> None:
        """Create a group that passes the records of all processes to ``record``."""
        super().__init__(self._carry_out_by_rpc)
        self._plane, self._record = plane, record
        self.held_up_by: Callable[[], str | None] = lambda: None  # names the process that others wait for, if any

    def end(self, command: Finish | Abort, *, seconds: float | None = None) -> None:
        """Tell all processes that the job is over, and wait for each."""
        for call in self._send(command, seconds=seconds):
            if (error := call.answer_or_error()) is not None:
                logger.info("a process has not heard the end of the job: %s", error)

    def _carry_out_by_rpc(self, command: Command) -> list[Result]:
        self._send(command)
        results: dict[int, list[Result]] = {}
        while len(results) < self._plane.world.size:
            report = self._take_report()
            if report.failure is not None:
                raise self._cause(report.failure).error()
            if report.results is not None:
                results[report.rank] = report.results
        # Of several stages in each of P processes, the first P come first: stage s is in rank s mod P.
        rows = zip_longest(*(results[rank] for rank in sorted(results)))
        return [one for row in rows for one in row if one is not None]

    def _send(self, command: Command | Finish | Abort, *, seconds: float | None = None) -> list[Call[None]]:
        return [self._plane.send(rank, command, seconds=seconds) for rank in range(self._plane.world.size)]

    def _take_report(self, seconds: float | None = None) -> Report:
        report = self._plane.endpoint.reports.get(timeout=seconds)
        for record in report.records:
            self._record(record)
        return report

    def _cause(self, failure: Failure) -> Failure:
        """Return the failure that caused ``failure``, if reported soon."""
        deadline = time.monotonic() + CAUSE_SECONDS
        failures = [failure]
        while failures[-1].is_victim and (left := deadline - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):  # and no time is left
                report = self._take_report(left)
                if report.failure is not None:
                    failures.append(report.failure)
        for one in failures:
            logger.error("rank %s failed:\n%s", one.rank, one.traceback)
        cause = min(failures, key=lambda one: one.is_victim)
        if cause.is_victim and (name := self.held_up_by()):
            return replace(cause, text=f"{name}; {cause.text}", is_victim=False, is_gone=True)
        return cause


class RpcReporter:
    """The sender of a process's records, results and errors to rank 0."""

    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane
        self._records: list[Record] = []
        self._sent_at = 0.0
        self._under_way: list[Call[None]] = []

    def record(self, record: Record) -> None:
        """Take one record; it leaves with the next batch."""
        self._records.append(record)
        if time.monotonic() - self._sent_at > REPORT_SECONDS:
            self._under_way = [call for call in self._under_way if not call.is_done]
            self._under_way.append(self._send())

    def part(self, part: PartReport) -> None:
        """Report the end of this process's part of a save."""
        if (error := self._plane.send(COORDINATOR_RANK, part).answer_or_error()) is not None:
            logger.warning("could not report the end of this process's part of a save: %s", error)

    def results(self, results: list[Result]) -> None:
        """Send ``results`` and remaining records, and wait for their arrival.

        Raises:
            ChannelError: If rank 0 is gone or late, unless its last command is here.
        """
        try:
            # RPC keeps no order between messages: the records sent before must be there before the result is.
            for call in self._under_way:
                call.wait()
            self._under_way = []
            self._send(results=results).wait()
        except ChannelError:
            # After the last result rank 0 may end before its answer has left; then its last command is here.
            if self._plane.endpoint.commands.empty():
                raise

    def failure(self, error: BaseException) -> bool:
        """Report ``error`` at once; return whether rank 0 has acknowledged."""
        lost = self._send(failure=Failure.of(error, self._plane.world.rank)).answer_or_error()
        if lost is not None:
            logger.warning("could not report the failure to the coordinator: %s", lost)
        return lost is None

    def _send(self, *, results: list[Result] | None = None, failure: Failure | None = None) -> Call[None]:
        records, self._records, self._sent_at = self._records, [], time.monotonic()
        report = Report(rank=self._plane.world.rank, records=records, results=results, failure=failure)
        return self._plane.send(COORDINATOR_RANK, report)


def serve(worker: LocalWorker, plane: ControlPlane) -> Summary:
    """Carry out commands until the job is over; return the summary.

    Raises:
        StageFailed: If the coordinator ended the job because of another process.
        AdlError: If this process failed, or rank 0 is gone; the text says which.
    """
    reporter = RpcReporter(plane)
    while True:
        try:
            command = plane.endpoint.commands.get()  # a Ctrl-C here must reach the others, too
            if not isinstance(command, Finish | Abort):
                reporter.results(worker.execute(command, reporter.record, reporter.part))
                continue
        except BaseException as error:
            ended = plane.endpoint.stop.failure
            if ended is not None and not isinstance(error, ChannelError):  # results since then are worth nothing
                raise ended.error() from None
            is_reported = reporter.failure(error)
            if isinstance(error, ChannelError):
                if (cause := _find_cause(error, is_reported, plane)) is not error:
                    raise cause from None
            elif is_reported and plane.world.rank != COORDINATOR_RANK:
                # The coordinator first lets a save end that is under way, and this process may be writing its part.
                with contextlib.suppress(queue.Empty):
                    plane.endpoint.commands.get(timeout=LAST_SAVE_SECONDS)
            raise
        if isinstance(command, Abort):
            raise command.failure.error()
        return command.result


def _find_cause(error: ChannelError, is_reported: bool, plane: ControlPlane) -> AdlError:
    """Return the cause of ``error``: rank 0's report, or rank 0's death."""
    heartbeat = plane.endpoint.heartbeat
    deadline = time.monotonic() + HEARD_SECONDS + (LAST_SAVE_SECONDS if is_reported else 0.0)
    is_last = False
    while not is_last:
        # Messages that rank 0 sent before it ended may still be under way.
        is_last = time.monotonic() >= deadline or heartbeat.rank0_status() is not None
        with contextlib.suppress(queue.Empty):
            command = plane.endpoint.commands.get(timeout=CAUSE_SECONDS)
            return command.failure.error() if isinstance(command, Abort) and not command.failure.is_victim else error
    # A rank 0 that took the report was there when the channel broke; it ends, too, when it has told the others.
    name = None if is_reported else heartbeat.rank0_status()
    return ChannelError(f"{name}; {error}") if name else error
