"""What stands beside a job while it runs: beacons in all processes, on rank 0 the doctor and live control."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from adl_dist.control import reports
from adl_dist.control.requests import Requests
from adl_dist.control.rpc import Record, Result, Worker, WorkerGroup
from adl_dist.control.run_socket import LiveControl
from adl_dist.distributed.world import COORDINATOR_RANK, World
from adl_dist.monitor.activity import ActivityRecorder, user_frame
from adl_dist.monitor.heartbeat import HeartbeatMonitor, activate, deactivate
from adl_dist.monitor.status import CoordinatorStatus, RankStatus
from adl_dist.monitor.timeouts import WatchdogTimeouts
from adl_dist.monitor.watchdog import Watchdog


class Supervisor:
    """Over one job, in one of its processes."""

    def __init__(
        self,
        world: World,
        beacon: ActivityRecorder,
        limits: WatchdogTimeouts,
        *,
        run_dir: Path | None,
        requests: Requests,
    ) -> None:
        """Prepare; see :meth:`kept`.

        Args:
            world: of all processes.
            beacon: of this one.
            limits: of a standstill.
            run_dir: where live control listens; None: nowhere.
            requests: where it puts what it is asked.
        """
        self._world, self._beacon, self._limits = world, beacon, limits
        self._crew: _TrackedGroup | None = None
        self._live = LiveControl(run_dir, self._status, requests) if run_dir is not None else None
        self._doctor: Watchdog | None = None

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Watch while inside."""
        activate(self._beacon)
        limits = vars(self._limits)
        if self._world.rank != COORDINATOR_RANK:
            deputy = HeartbeatMonitor(self._world.rank, **limits)
            deputy.start()
            try:
                yield
            finally:
                deputy.stop()
            deactivate()
            return
        self._doctor = Watchdog(
            self._world, self._beacon, self._coordination, on_gone=reports.report_gone, on_end=self._close, **limits
        )
        self._doctor.start()
        try:
            if self._live is not None:
                self._live.start()
            yield
        finally:
            self._doctor.stop()  # before anything that may fail: nobody is left whom it could look after
            self._doctor.join()
            self._close()
            if not self._world.is_distributed:  # or others may yet ask what it failed at
                deactivate()
        deactivate()

    def followed(self, workers: WorkerGroup) -> WorkerGroup:
        """``workers``, watched; to be called in the thread that will command it."""
        self._crew = _TrackedGroup(workers)
        return self._crew

    def rest(self) -> None:
        """What happens to the other processes from now on is no news."""
        if self._doctor is not None:
            self._doctor.stop()

    def cause(self) -> str | None:
        """On rank 0: who holds up the others, by name; None: no process in particular."""
        return self._doctor.cause() if self._doctor is not None else None

    def _coordination(self, *, closely: bool = False) -> CoordinatorStatus:
        return self._crew.tell(closely=closely) if self._crew is not None else CoordinatorStatus()

    def _status(self) -> dict[str, Any]:
        assert self._doctor is not None, "live control starts after it"
        coordination = self._coordination()
        return {
            "coordinator": f"{coordination.doing} since {coordination.seconds:.1f} s",
            "stages": stage_rows(self._doctor.statuses(closely=False)),
        }

    def _close(self) -> None:
        if self._live is not None:
            self._live.close()


class TrackedWorker:
    """Tells the beacon which command it carries out."""

    def __init__(self, worker: Worker, beacon: ActivityRecorder) -> None:
        self._worker, self._beacon = worker, beacon

    def execute(self, do: str, arguments: dict[str, Any], emit: Callable[[Record], None]) -> list[Result]:
        """See :class:`adl_dist.control.rpc.Worker`."""
        with self._beacon.during(do):
            return self._worker.execute(do, arguments, emit)


class _TrackedGroup:
    """Remembers what the coordinator has told it last."""

    def __init__(self, workers: WorkerGroup) -> None:
        self._crew = workers
        self._thread = threading.get_ident()
        self._now = ("", False, time.monotonic())

    def call(self, do: str, **arguments: Any) -> list[Result]:
        """See :class:`adl_dist.control.rpc.WorkerGroup`."""
        self._now = (do, True, time.monotonic())
        try:
            return self._crew.call(do, **arguments)
        finally:
            self._now = (do, False, time.monotonic())

    def tell(self, *, closely: bool) -> CoordinatorStatus:
        """What the coordinator is at."""
        command, is_waiting, since = self._now
        at = user_frame(self._thread) if closely else ""
        return CoordinatorStatus(command, is_waiting, time.monotonic() - since, at)


def stage_rows(statuses: Sequence[RankStatus]) -> list[dict[str, Any]]:
    """What ``adl-dist status`` tells of each stage."""
    return [
        {
            "stage": stage.stage,
            "host": seen.host,
            "pid": seen.pid,
            "epoch": stage.epoch,
            "update": stage.update,
            "micro_batch": stage.micro_batch,
            "images_per_second": stage.images_per_second,
            "busy_share": stage.busy_share,
            "staleness_mean": stage.staleness_mean,
            "memory_bytes": seen.memory_bytes,
            "doing": stage.doing,
            "seconds": stage.seconds,
            "silent_seconds": member.silent_seconds,
            "saving": seen.saving,
        }
        for member in statuses
        if (seen := member.seen) is not None
        for stage in seen.stages
    ]
