"""Brings the coordinator and the stages together: in one thread, or as rank 0's second thread over RPC."""

import contextlib
import threading
from collections.abc import Callable, Iterator

from adl_dist.checkpoint.async_save import LAST_SAVE_SECONDS
from adl_dist.control.rpc import (
    LocalWorkerGroup,
    Record,
    Result,
    RpcWorkerGroup,
    Worker,
    WorkerGroup,
    serve,
)
from adl_dist.control.supervision import Supervisor
from adl_dist.distributed.world import COORDINATOR_RANK, World, disconnect
from adl_dist.errors import StageFailed


def run_job(
    world: World,
    worker: Worker,
    policy: Callable[[WorkerGroup], Result],
    on_record: Callable[[Record], None],
    watch: Supervisor,
) -> Result:
    """Run ``policy`` against all stages; every process calls it, and rank 0's policy is the one that runs.

    Args:
        world: of this process.
        worker: this process's stages.
        policy: tells the crew what to do, from the first command to the result.
        on_record: takes what the stages report meanwhile; on rank 0 only.
        watch: over this process, and on rank 0 over all.

    Returns:
        What ``policy`` returned, on every rank.

    Raises:
        StageFailed: another process failed, and told why.
        AdlError: this one did, or the policy.
    """
    if not world.is_distributed:
        with watch.kept():
            return policy(watch.followed(LocalWorkerGroup(worker, on_record)))
    with _disconnected_on_error(), watch.kept():
        if world.rank != COORDINATOR_RANK:
            return serve(worker, world)
        return _conduct_from_rank_0(world, worker, policy, on_record, watch)


def _conduct_from_rank_0(
    world: World,
    worker: Worker,
    policy: Callable[[WorkerGroup], Result],
    on_record: Callable[[Record], None],
    watch: Supervisor,
) -> Result:
    workers = RpcWorkerGroup(world, on_record, watch.cause)
    errors: list[BaseException] = []

    def coordinate() -> None:
        try:
            result = policy(watch.followed(workers))
            watch.rest()
            told = workers.tell("stop", result=result)
            # This process may end at once, and the last word must have arrived before it does.
            for arrival in told:
                with contextlib.suppress(RuntimeError):  # a process that is gone needs no telling
                    arrival.wait()
        except BaseException as error:
            errors.append(error)
            watch.rest()
            workers.stop_all(error)

    # The main thread issues all data-plane communication, so the coordinator is the one to move out.
    thread = threading.Thread(target=coordinate, name="coordinator", daemon=True)
    thread.start()
    try:
        result = serve(worker, world)
    except StageFailed:
        # The coordinator stopped everything: for an error of its own, or for that of another rank.
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
