"""Of the ranks that know an error first-hand, the one where it arose and rank 0, one prints it."""

import threading
import time
from dataclasses import replace

import pytest
import torch

from adl_dist.distributed import print_turn, world
from adl_dist.distributed.world import single_process


@pytest.mark.parametrize("ranks", [(0, 1), (1, 0)], ids=["rank 0 first", "rank 1 first"])
def test_the_rank_that_failed_and_rank_0_print_one_line(ranks, monkeypatch):
    """Both ask at the same time, before either has printed; the second waits until the first has."""
    here = single_process(torch.device("cpu"))
    turns = []
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in ranks:
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setattr(world, "_world", replace(here, rank=rank, size=2, has_failed_itself=rank == 1))
        if turns:
            threading.Timer(0.3, here.store.set, [print_turn.KEY, "printed"]).start()
        began = time.monotonic()
        turns.append(print_turn.is_mine())
    assert turns == [True, False]
    assert 0.2 < time.monotonic() - began < 5
