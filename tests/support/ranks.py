"""Runs a function on real gloo ranks; reports the rank that caused a failure before its victims."""

import multiprocessing
import os
import pathlib
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch

from adl_dist.distributed.parent_process import RENDEZVOUS_FOLDER
from adl_dist.errors import ChannelError, StageFailed


class RanksFailed(AssertionError):
    """One or more ranks raised, crashed or hung."""


# One server process imports torch once and forks clean ranks from then on: milliseconds instead of seconds.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch._dynamo", "adl_dist.training.trainer", "tests.support.toys"])


def _rank_main(rank: int, world_size: int, folder: str, body: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(world_size),
        # A folder, not a port: two test runs cannot collide, so nothing has to be retried.
        **{RENDEZVOUS_FOLDER: folder},
    )
    torch.set_num_threads(1)
    try:
        torch.save(body(*args), f"{folder}/result-rank{rank}.pt")
    except BaseException as error:
        kind = "victim" if isinstance(error, (ChannelError, StageFailed)) else "cause"
        pathlib.Path(folder, f"{kind}-rank{rank}.txt").write_text(traceback.format_exc())
        os._exit(1)


def run_ranks(world_size: int, body: Callable[..., Any], *args: Any, timeout_seconds: float = 60.0) -> list[Any]:
    """Run ``body(*args)`` on ``world_size`` processes, as torchrun would; leave none behind.

    Returns:
        What each rank's ``body`` returned.

    Raises:
        RanksFailed: with every rank's traceback, causes first, and the ranks that hung.
    """
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            _context.Process(target=_rank_main, args=(rank, world_size, folder, body, args))
            for rank in range(world_size)
        ]
        deadline = time.monotonic() + timeout_seconds
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(max(0.0, deadline - time.monotonic()))
        hung = [rank for rank, process in enumerate(ranks) if process.is_alive()]
        for process in ranks:
            process.kill()
            process.join()
        reports = [f"{f.stem}:\n{f.read_text()}" for f in sorted(pathlib.Path(folder).glob("*-rank*.txt"))]
        crashed = [f"rank {rank}: exit code {p.exitcode}" for rank, p in enumerate(ranks) if p.exitcode]
        if crashed:
            late = [f"ranks {hung} still ran after {timeout_seconds} s"] if hung else []
            raise RanksFailed("\n".join([*crashed, *reports, *late]))
        return [torch.load(f"{folder}/result-rank{rank}.pt", weights_only=False) for rank in range(world_size)]
