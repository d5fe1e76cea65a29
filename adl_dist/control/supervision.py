"""Supervision of a running job: on rank 0 the watchdog and the run's socket, elsewhere the heartbeat monitor."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from adl_dist.checkpoint.async_save import PartReport
from adl_dist.control.group import Policy, TrackedGroup
from adl_dist.control.messages import Failure, Report
from adl_dist.control.rpc import ControlPlane
from adl_dist.control.run_socket import LiveControl
from adl_dist.distributed.world import COORDINATOR_RANK
from adl_dist.monitor.activity import ActivityLog
from adl_dist.monitor.heartbeat import HeartbeatMonitor
from adl_dist.monitor.status import CoordinatorStatus, RankStatus
from adl_dist.monitor.timeouts import WatchdogTimeouts
from adl_dist.monitor.watchdog import Watchdog


class Supervisor:
    """The supervision of one job in one of its processes.

    Attributes:
        group: the stages as the coordinator commands them; None: it has not begun.
    """

    def __init__(
        self,
        plane: ControlPlane,
        activity: ActivityLog,
        timeouts: WatchdogTimeouts,
        *,
        run_dir: Path | None,
        policy: Policy,
    ) -> None:
        """Prepare; see :meth:`running`.

        Args:
            plane: this process's way to the others.
            activity: what this process does.
            timeouts: how long nothing may move.
            run_dir: where the run's socket is; None: nowhere.
            policy: the coordinator.
        """
        self._plane, self._policy, self._activity, self._timeouts = plane, policy, activity, timeouts
        self.group: TrackedGroup | None = None
        self._watchdog = Watchdog(
            plane.world.size,
            plane,
            activity,
            self._coordination,
            timeouts,
            on_gone=self._report_gone,
            on_end=self._close,
        )
        self._live: LiveControl | None = None
        if run_dir is not None and plane.world.rank == COORDINATOR_RANK:
            self._live = LiveControl(run_dir, self._status, plane.endpoint.requests)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Supervise while inside."""
        heartbeat, world = self._plane.endpoint.heartbeat, self._plane.world
        heartbeat.activate(self._activity)
        if world.rank != COORDINATOR_RANK:
            monitor = HeartbeatMonitor(heartbeat, world.rank, self._timeouts)
            monitor.start()
            try:
                yield
            finally:
                monitor.stop()
                monitor.join()
            heartbeat.deactivate()
            return
        self._watchdog.start()
        try:
            if self._live is not None:
                self._live.start()
            yield
        finally:
            self._watchdog.stop()  # before anything that may fail: there is nothing left to look after
            self._watchdog.join()
            self._close()
            if not world.is_distributed:  # else other processes may yet ask what it failed at
                heartbeat.deactivate()
        heartbeat.deactivate()

    def stop(self) -> None:
        """From now on take no notice of what happens to the other processes."""
        self._watchdog.stop()

    @property
    def held_up_by(self) -> Callable[[], str | None]:
        """On rank 0: names the process that holds up the others; None: no process in particular."""
        return self._watchdog.cause

    def _coordination(self, *, closely: bool = False) -> CoordinatorStatus:
        return self.group.status(closely=closely) if self.group is not None else CoordinatorStatus()

    def _status(self) -> dict[str, Any]:
        coordination = self._coordination()
        return {
            "coordinator": f"{coordination.doing} since {coordination.seconds:.1f} s",
            "stages": stage_rows(self._watchdog.statuses(closely=False)),
        }

    def _report_gone(self, rank: int, text: str) -> None:
        """Report, in place of ``rank``, that it is gone: to the coordinator, and to a save that waits for its part."""
        failure = Failure(rank=rank, text=text, traceback=text, is_gone=True)
        self._plane.endpoint.take_report(Report(rank=rank, failure=failure))
        self._policy.take_part(PartReport(rank=rank, failure=text, is_gone=True))

    def _close(self) -> None:
        if self._live is not None:
            self._live.close()


def stage_rows(statuses: Sequence[RankStatus]) -> list[dict[str, Any]]:
    """Return what ``adl-dist status`` shows of each stage."""
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
            "silent_seconds": known.silent_seconds,
            "saving": seen.saving,
        }
        for known in statuses
        if (seen := known.seen) is not None
        for stage in seen.stages
    ]
