"""One job: brings the coordinator and the stages together, in one thread, or as rank 0's second thread over RPC."""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from adl_dist.checkpoint.async_save import LAST_SAVE_SECONDS
from adl_dist.control.group import (
    CAUSE_SECONDS,
    LocalWorkerGroup,
    Policy,
    RpcWorkerGroup,
    TrackedGroup,
    WorkerGroup,
    failure_of,
)
from adl_dist.control.messages import Abort, Finish, Summary
from adl_dist.control.requests import Ask, Requests
from adl_dist.control.rpc import ControlPlane, JobEndpoint, is_there, open_endpoint
from adl_dist.control.serve import serve
from adl_dist.control.supervision import Supervisor
from adl_dist.control.worker import LocalWorker
from adl_dist.distributed.world import COORDINATOR_RANK, World, disconnect
from adl_dist.errors import StageFailed
from adl_dist.monitor.timeouts import WatchdogTimeouts

logger = logging.getLogger("adl_dist")

ASK_SECONDS = 5.0  # within which a process that is not busy takes a request


class Job:
    """One job in one of its processes, from the moment that they have met."""

    def __init__(self, world: World, timeouts: WatchdogTimeouts, run_dir: Path | None = None) -> None:
        """Prepare; every process does so, after :meth:`World.fresh_store`.

        Args:
            world: this process among the others.
            timeouts: how long nothing may move.
            run_dir: where the run's socket is; None: nowhere.
        """
        endpoint = open_endpoint(world.num_jobs) if world.is_distributed else JobEndpoint()
        self._plane, self._timeouts, self._run_dir = ControlPlane(world, endpoint), timeouts, run_dir

    @property
    def requests(self) -> Requests:
        """On rank 0: what is asked of the job."""
        return self._plane.endpoint.requests

    def ask(self, what: Ask, why: str) -> bool:
        """Ask something of the job, on any rank and in any thread.

        Returns:
            False: a process is gone, so nothing will come of it. One that does not answer in time is there: it may be
            busy, and what it is sent waits for it.
        """
        errors = self._plane.ask(what, why, seconds=ASK_SECONDS)
        for error in errors:
            logger.warning("asked by %s: %s", why, error)
        return is_there(errors)

    def run(
        self, worker: LocalWorker, policy: Policy, act: Callable[[WorkerGroup], Summary], *, stops_early: bool
    ) -> Summary:
        """Run ``act`` against all stages; every process calls it, and that of rank 0 is the one that runs.

        Args:
            worker: this process's stages.
            policy: the coordinator.
            act: what it does, from the first command to the result.
            stops_early: whether a request ends the running segment early.

        Returns:
            What ``act`` returned, on every rank.

        Raises:
            StageFailed: another process failed, and reported why.
            AdlError: this one did, or the coordinator.
        """
        endpoint, world = self._plane.endpoint, self._plane.world
        supervisor = Supervisor(self._plane, worker.activity, self._timeouts, run_dir=self._run_dir, policy=policy)
        worker.stop, endpoint.on_part = endpoint.stop, policy.take_part
        if stops_early and world.rank == COORDINATOR_RANK:
            endpoint.stop.is_wanted = lambda: self.requests.any_open
            endpoint.stop.announce = self._plane.announce
        if not world.is_distributed:
            with supervisor.running():
                supervisor.group = TrackedGroup(LocalWorkerGroup(worker, policy), threading.get_ident())
                return act(supervisor.group)
        with _disconnected_on_error(), supervisor.running():
            if world.rank != COORDINATOR_RANK:
                return serve(worker, self._plane)
            return self._run_on_rank_0(worker, policy, act, supervisor)

    def _run_on_rank_0(
        self, worker: LocalWorker, policy: Policy, act: Callable[[WorkerGroup], Summary], supervisor: Supervisor
    ) -> Summary:
        group = RpcWorkerGroup(self._plane, policy, supervisor.held_up_by)
        errors: list[BaseException] = []

        def coordinate() -> None:
            supervisor.group = TrackedGroup(group, threading.get_ident())
            try:
                result = act(supervisor.group)
                supervisor.stop()
                # This process may end at once, and its last message must have arrived before it does.
                group.end(Finish(result))
            except BaseException as error:
                errors.append(error)
                supervisor.stop()
                group.end(Abort(failure_of(error, COORDINATOR_RANK)), seconds=CAUSE_SECONDS)

        # The main thread issues all data-plane communication, so the coordinator is the one to move out.
        thread = threading.Thread(target=coordinate, name="coordinator", daemon=True)
        thread.start()
        try:
            result = serve(worker, self._plane)
        except StageFailed:
            # The coordinator ended the job: for an error of its own, or for that of another rank.
            thread.join(timeout=5 + LAST_SAVE_SECONDS)
            raise errors[0] from None
        except BaseException:
            thread.join(timeout=5 + LAST_SAVE_SECONDS)  # it tells the others; only then may this process hang up
            raise
        thread.join()
        return result


@contextlib.contextmanager
def _disconnected_on_error() -> Iterator[None]:
    try:
        yield
    except BaseException:
        disconnect(in_order=False)
        raise
