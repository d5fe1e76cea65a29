"""All stages as one group that carries out commands."""

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import zip_longest
from typing import Any, TypeVar

from adl_dist.control.messages import Abort, Command, Failure, Finish, Record, Report, Result, command_name
from adl_dist.control.rpc import ControlPlane
from adl_dist.distributed.rpc_errors import Call
from adl_dist.monitor.status import CoordinatorStatus, user_frame

logger = logging.getLogger("adl_dist")

R = TypeVar("R", bound=Result)

CAUSE_SECONDS = 1.0  # how long a failure that follows from another one waits for the report of that one


class WorkerGroup:
    """All stages, with the last command for status and watchdog."""

    def __init__(self, carry_out: Callable[[Command], list[Result]]) -> None:
        """Create a group that carries out a command by ``carry_out``."""
        self._carry_out = carry_out
        self.thread = threading.get_ident()  # the coordinator's
        self._now = ("", False, time.monotonic())

    def call(self, command: Command, result: type[R]) -> list[R]:
        """Carry out ``command`` on all stages; return results in their order.

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
        """Return the failure that other failures follow from."""
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
