"""Which rank prints the error that ends a job: one of those that know it first-hand, the rank where it arose or rank 0.

torchrun, and our own launcher, end all ranks as soon as one has ended. So a rank that leaves an error to another waits,
for a limited time, until a store says that it is printed.
"""

import contextlib
import datetime
import os
from pathlib import Path

import torch.distributed as dist

from adl_dist.distributed.parent_process import RENDEZVOUS_FOLDER
from adl_dist.distributed.world import launched_rank, launched_world_size, world_of_process

KEY, TURNS = "adl_dist/error", "adl_dist/turns"  # what was announced; how many ranks have asked for the turn
LIMIT = datetime.timedelta(seconds=10)  # that another rank may take to print what it knows


def announce(*, printed: bool) -> None:
    """Let the other ranks know that an error is printed or, on rank 0, that the set-up, which all share, has none."""
    if launched_world_size() is None or (launched_rank() != 0 and not printed) or (store := _store()) is None:
        return
    with contextlib.suppress(RuntimeError):  # the store has ended; the other ranks find that out, too
        store.set(KEY, "printed" if printed else "none")
        store.get(KEY)  # an answer: the store has it, though this process may end now


def arose_here() -> bool:
    """Return whether the error that ends this process arose in it while a job ran."""
    world = world_of_process()
    return world is not None and world.has_failed_itself


def is_mine() -> bool:
    """Return whether this rank has to print the error that ends it, once that is known."""
    if launched_world_size() is None:
        return True
    world, knows_first_hand = world_of_process(), arose_here() or launched_rank() == 0
    if world is not None and not world.is_rank_0_informed:
        return True
    is_others = world is not None and (world.is_ended_by_rank_0 or not knows_first_hand)
    try:
        if (store := _store()) is None or (knows_first_hand and store.add(TURNS, 1) == 1):
            return True
        is_others = world is not None
        store.wait([KEY], LIMIT)
        return store.get(KEY) == b"none"
    except dist.DistNetworkError:  # the store has ended with rank 0
        return not is_others
    except RuntimeError:  # too late
        return True


def _store() -> dist.Store | None:
    """Return the store of the ranks; before they have met, that of their launcher; None: there is none."""
    if (world := world_of_process()) is not None:
        return world.store
    rank, size, attempt = launched_rank(), launched_world_size(), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    assert size is not None
    if folder := os.environ.get(RENDEZVOUS_FOLDER):
        return dist.FileStore(str(Path(folder) / f"set-up{attempt}"), size)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True):
        store, _, _ = next(dist.rendezvous("env://", rank, size, timeout=LIMIT))
        return dist.PrefixStore(f"set-up{attempt}", store)
    return None
