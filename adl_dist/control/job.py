"""One job: the coordinator and the stages.

On rank 0 a watchdog supervises the job, and the run's socket answers; other ranks have a heartbeat monitor.
"""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from adl_dist.checkpoint.async_save import LAST_SAVE_SECONDS, PartReport
from adl_dist.control.coordinator import Coordinator
from adl_dist.control.group import CAUSE_SECONDS, RpcWorkerGroup, WorkerGroup, serve
from adl_dist.control.messages import Abort, Failure, Finish, Report, Summary
from adl_dist.control.requests import RequestKind
from adl_dist.control.rpc import ControlPlane, JobEndpoint, open_endpoint
from adl_dist.control.run_socket import LiveControl
from adl_dist.control.worker import LocalWorker
from adl_dist.distributed.rpc_errors import PeerLateError
from adl_dist.distributed.world import COORDINATOR_RANK, World, disconnect
from adl_dist.errors import StageFailed
from adl_dist.monitor.activity import ActivityLog
from adl_dist.monitor.status import RankStatus, StageStatus
from adl_dist.monitor.timeouts import WatchdogTimeouts
from adl_dist.monitor.watchdog import HeartbeatMonitor, Watchdog

logger = logging.getLogger("adl_dist")

ASK_SECONDS = 5.0  # limit for a process that is not busy to take a request


class Job:
    """One job in one of its processes; on rank 0 it takes ``requests``."""

    def __init__(self, world: World, timeouts: WatchdogTimeouts, run_dir: Path | None = None) -> None:
        """Create a job in each process, after :meth:`World.fresh_store`."""
        endpoint = open_endpoint(world.num_jobs) if world.is_distributed else JobEndpoint()
        self._world, self._plane = world, ControlPlane(world, endpoint)
        self._timeouts, self._run_dir, self.requests = timeouts, run_dir, endpoint.requests

    def ask(self, what: RequestKind, why: str) -> bool:
        """Send a request to the job; return whether all processes are alive.

        A process that times out counts as alive, since it may be busy. Rank 0 checks all ranks; the others can only
        check rank 0, because they have no connection to each other.
        """
        ranks = range(self._world.size) if self._world.rank == COORDINATOR_RANK else [COORDINATOR_RANK]
        calls = [self._plane.call(rank, JobEndpoint.ask, what, why, seconds=ASK_SECONDS) for rank in ranks]
        errors = [error for call in calls if (error := call.answer_or_error()) is not None]
        for error in errors:
            logger.warning("asked by %s: %s", why, error)
        return all(isinstance(error, PeerLateError) for error in errors)

    def run(
        self, worker: LocalWorker, coordinator: Coordinator, act: Callable[[WorkerGroup], Summary], *, stops_early: bool
    ) -> Summary:
        """Carry out one job in every process; return the summary on each.

        ``act`` is a method of the coordinator, called on rank 0 with the group of all stages. With ``stops_early`` a
        request ends the running segment early.

        Raises:
            StageFailed: If another process failed, with its report.
            AdlError: If this process or the coordinator failed.
        """
        plane, endpoint = self._plane, self._plane.endpoint
        worker.stop, endpoint.on_part = endpoint.stop, coordinator.part
        endpoint.on_abort = self._world.abort_edges
        if stops_early and self._world.rank == COORDINATOR_RANK:
            endpoint.stop.is_wanted = lambda: self.requests.any_open or coordinator.ends_segment
            endpoint.stop.announce = plane.announce
        if not self._world.is_distributed:
            local = WorkerGroup(lambda command: worker.execute(command, coordinator.record, coordinator.part))
            with self._supervised(local, worker.activity, coordinator):
                return act(local)
        try:
            if self._world.rank != COORDINATOR_RANK:
                return self._run_on_other_rank(worker)
            group = RpcWorkerGroup(plane, coordinator.record)
            with self._supervised(group, worker.activity, coordinator) as watchdog:
                group.held_up_by = watchdog.cause
                return self._run_on_rank_0(worker, group, act, watchdog)
        except BaseException:
            disconnect(in_order=False)
            raise

    def _run_on_rank_0(
        self, worker: LocalWorker, group: RpcWorkerGroup, act: Callable[[WorkerGroup], Summary], watchdog: Watchdog
    ) -> Summary:
        errors: list[BaseException] = []

        def coordinate() -> None:
            group.thread = threading.get_ident()
            try:
                result = act(group)
                watchdog.stop()
                # This process may end at once, and its last message must have arrived by then.
                group.end(Finish(result))
            except BaseException as error:
                errors.append(error)
                watchdog.stop()
                group.end(Abort(Failure.of(error, COORDINATOR_RANK)), seconds=CAUSE_SECONDS)

        # The main thread issues all data-plane communication, so the coordinator gets another thread.
        thread = threading.Thread(target=coordinate, name="coordinator", daemon=True)
        thread.start()
        try:
            result = serve(worker, self._plane)
        except BaseException as error:
            thread.join(timeout=5 + LAST_SAVE_SECONDS)  # it tells the others; only then may this process end
            if isinstance(error, StageFailed):  # for a failure elsewhere, or an error of the coordinator
                raise errors[0] from None
            raise
        thread.join()
        return result

    @contextlib.contextmanager
    def _supervised(self, group: WorkerGroup, activity: ActivityLog, coordinator: Coordinator) -> Iterator[Watchdog]:
        """Supervise the job on rank 0 and serve its socket; yield the watchdog."""
        heartbeat = self._plane.endpoint.heartbeat

        def report_gone(rank: int, text: str) -> None:
            """Report that ``rank`` is gone to the coordinator and a save."""
            failure = Failure(rank=rank, text=text, traceback=text, is_gone=True)
            self._plane.endpoint.take(Report(rank=rank, failure=failure))
            coordinator.part(PartReport(rank=rank, failure=text, is_gone=True))

        def status() -> dict[str, Any]:
            now, known = group.status(), watchdog.statuses()
            stages = [_stage_row(one, stage) for one in known if one.seen is not None for stage in one.seen.stages]
            return {"coordinator": f"{now.doing} since {now.seconds:.1f} s", "stages": stages}

        live = None if self._run_dir is None else LiveControl(self._run_dir, status, self.requests)
        watchdog = Watchdog(
            self._world.size,
            activity,
            group.status,
            self._timeouts,
            ask_peers=self._plane.statuses,
            abort_peers=self._plane.abort,
            on_gone=report_gone,
            on_end=lambda: None if live is None else live.close(),
        )
        heartbeat.activate(activity)
        watchdog.start()
        try:
            if live is not None:
                coordinator.on_open = live.start
            yield watchdog
        finally:
            watchdog.stop()  # before anything that may fail
            watchdog.join()
            if live is not None:
                live.close()
        heartbeat.activate(None)  # not after an error: others may still ask for the place of the failure

    def _run_on_other_rank(self, worker: LocalWorker) -> Summary:
        """Serve rank 0; end this process if rank 0's watchdog stops asking."""
        heartbeat = self._plane.endpoint.heartbeat
        heartbeat.activate(worker.activity)
        monitor = HeartbeatMonitor(heartbeat, self._world.rank, self._timeouts, self._end_without_rank_0)
        monitor.start()
        try:
            result = serve(worker, self._plane)
        finally:
            monitor.stop()
            monitor.join()
        heartbeat.activate(None)
        return result

    def _end_without_rank_0(self, why: str) -> None:
        """End the job over NCCL, since its waits do not notice a dead rank 0."""
        stop = self._plane.endpoint.stop
        if self._world.backend != "nccl" or stop.failure is not None:  # rank 0 has reported the cause before
            return
        abort = Abort(Failure(rank=COORDINATOR_RANK, text=why, is_gone=True))
        stop.take(abort)
        self._plane.endpoint.commands.put(abort)  # for a main thread that waits for the next command
        self._world.abort_edges()


def _stage_row(known: RankStatus, stage: StageStatus) -> dict[str, Any]:
    """Return the row of ``stage`` for ``adl-dist status``."""
    of_stage = ("stage", "epoch", "update", "micro_batch", "images_per_second", "busy_share", "staleness_mean")
    row = {name: getattr(stage, name) for name in (*of_stage, "doing", "seconds")}
    row |= {name: getattr(known.seen, name) for name in ("host", "pid", "memory_bytes", "saving")}
    return {**row, "silent_seconds": known.silent_seconds}
