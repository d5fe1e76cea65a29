"""Decides which rank prints the error that ends a job: rank 0, to which every rank reports; if it cannot, another."""

import time

from adl_dist.distributed.world import launched_rank, launched_world_size

RANK_0_SECONDS = 5.0  # limit for rank 0 to print; torchrun, and our own launcher, then end the other ranks


def wait_for_rank_0() -> None:
    """Return at once on rank 0; on another rank only if it still runs after ``RANK_0_SECONDS``, so that it prints."""
    if launched_world_size() is not None and launched_rank() != 0:
        time.sleep(RANK_0_SECONDS)
