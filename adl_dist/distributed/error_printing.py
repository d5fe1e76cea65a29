"""The print-out of a job's error by rank 0, to which all ranks report."""

import time

from adl_dist.distributed.world import launched_rank, launched_world_size

RANK_0_SECONDS = 5.0  # limit for rank 0 to print; torchrun, and our own launcher, then end the other ranks


def wait_for_rank_0() -> None:
    """Give rank 0 time to print, and the launcher to end this rank."""
    if launched_world_size() is not None and launched_rank() != 0:
        time.sleep(RANK_0_SECONDS)
