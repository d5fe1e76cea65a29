"""Runs of several processes that are asked to stop: the same bits as where one process had been told to end there."""

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc
from torch import Tensor, nn

import adl_dist
from adl_dist.control import job
from adl_dist.control.job import Job
from adl_dist.control.requests import Ask
from adl_dist.control.rpc import JobEndpoint
from adl_dist.distributed.world import connect
from adl_dist.monitor.timeouts import WatchdogTimeouts
from tests.support.kill import records
from tests.support.ranks import run_ranks
from tests.support.tiers import slow
from tests.support.toys import FixedImages, batch_norm_net
from tests.support.values import SILENT

pytestmark = pytest.mark.ranks

K, M, MICRO_BATCH = 3, 3, 2
OPTIONS: dict[str, dict[str, Any]] = {"dgl": {"head": "linear"}}
STOPS = {8: 3, 22: 8}  # while which of the samples it is asked for, and the update that it comes after


class Asking(FixedImages):
    """Asks the run to stop while the ``at``-th of all its samples is loaded; never if that is 0."""

    def __init__(self, at: int, num_samples: int = 60) -> None:
        super().__init__(num_samples)
        self._at, self._num_served = at, 0
        self.trainer: adl_dist.Trainer | None = None

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self._num_served += 1
        if self._num_served == self._at:
            assert self.trainer is not None
            self.trainer.requests.ask(Ask.STOP, "a test")
        return super().__getitem__(index)


def fit(
    name: str, folder: Path, *, data: Asking | None = None, handle_signals: bool = False, **of_fit: Any
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    trainer = adl_dist.Trainer(
        batch_norm_net(dropout=0.2),
        loss_fn=nn.CrossEntropyLoss(),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
        method=adl_dist.method(name, accumulation_steps=M, **OPTIONS.get(name, {})),
        num_stages=K,
        processes=adl_dist.ProcessOptions(threads=1, timeout_seconds=20, handle_signals=handle_signals),
    )
    settings = {"epochs": 1, "batch_size": MICRO_BATCH * M, "run_dir": folder / name, **of_fit}
    data = data or Asking(at=0)
    data.trainer = trainer
    summary = trainer.fit(data, **settings, monitoring=SILENT)
    return trainer.full_state_dict(), summary


def stop_twice_and_continue(names: list[str], folder: Path) -> list[tuple[list[Any], dict[str, Tensor]]]:
    return [([fit(n, folder, data=Asking(at))[1]["stopped"] for at in STOPS], fit(n, folder)[0]) for n in names]


@pytest.mark.parametrize("names", [["adl", "gpipe"], slow(["ddg", "dgl"])], ids="-".join)  # DDG has a forward lock
def test_processes_stop_after_the_same_update_and_resume(names: list[str], tmp_path: Path) -> None:
    """Processes asked to stop do so after the same update and continue as one process does."""
    by_rank = run_ranks(K, stop_twice_and_continue, names, tmp_path / "asked", timeout_seconds=100)
    for case, name in enumerate(names):
        stops, _ = by_rank[0][case]
        # One sample has been looked at before. The 7th of the epoch belongs to micro-batch 3; before 4 is loaded,
        # receives are posted up to 6, and so the segment ends with the group of 6, 7, 8.
        assert [stop["update"] for stop in stops] == list(STOPS.values()), name
        assert [stop["drain_changed_result"] for stop in stops] == [name not in ("gpipe", "dgl")] * 2
        for stop in stops:
            fit(name, tmp_path / "planned", max_updates=stop["update"])
        expected, _ = fit(name, tmp_path / "planned")
        for rank in range(K):
            assert by_rank[rank][case][0] == stops
            assert [n for n, t in by_rank[rank][case][1].items() if not torch.equal(t, expected[n])] == [], name


def stop_by_signal(folder: Path, rank: int) -> dict[str, Any]:
    """Rank ``rank`` sends itself SIGINT when it has made three updates of an epoch that takes a while."""
    # As from a terminal, also where the tests themselves run in the background with SIGINT ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)

    class Slow(Asking):
        def __getitem__(self, index: int) -> tuple[Tensor, int]:
            time.sleep(0.01)
            return super().__getitem__(index)

    def send() -> None:
        while not any(record["update"] >= 3 for record in records(folder / "adl")):
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    if os.environ["RANK"] == str(rank):
        threading.Thread(target=send, daemon=True).start()
    return fit("adl", folder, data=Slow(0, num_samples=400), handle_signals=True)[1]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_to_any_rank_stops_all(rank: int, tmp_path: Path) -> None:
    summaries = run_ranks(K, stop_by_signal, tmp_path, rank, timeout_seconds=60)
    assert summaries[0] == summaries[1] == summaries[2]
    assert summaries[0]["stopped"]["why"] == "SIGINT"
    assert 3 < summaries[0]["updates"] < 50, "of 67"


def ask_past_one_that_is_late_and_one_that_is_gone() -> list[bool]:
    world, answers = connect(K, device_type="cpu", timeout_seconds=20), []
    world.fresh_store()
    one = Job(world, WatchdogTimeouts(stall_seconds=60, abort_seconds=None))

    def ask_from(rank: int) -> None:
        if world.rank == rank:
            answers.append(one.ask(Ask.STOP, f"rank {rank}"))
        dist.barrier()

    for rank in range(K):
        ask_from(rank)
    job.ASK_SECONDS = 0.3
    ping = JobEndpoint.ping
    if world.rank == 2:
        JobEndpoint.ping = lambda self: time.sleep(1)  # type: ignore[method-assign]
    dist.barrier()
    ask_from(0)
    job.ASK_SECONDS = 5.0
    JobEndpoint.ping = ping  # type: ignore[method-assign]
    if world.rank == 2:
        rpc.shutdown(graceful=False)
    dist.barrier()
    ask_from(0)
    ask_from(1)
    if world.rank == 0:
        assert [request.why[-1] for request in one.requests.take()] == list("012001")
    return answers


def test_every_rank_is_heard_also_past_one_that_is_late() -> None:
    """Every rank is heard also past one that is late and rank 0 sees one that is gone."""
    answers = run_ranks(K, ask_past_one_that_is_late_and_one_that_is_gone)
    assert answers == [[True, True, False], [True, True], [True]]
