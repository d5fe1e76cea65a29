"""Runs that are asked to stop or to save, in one process or several: where they end, what that does to values."""

import functools
import json
import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc

from adl_dist.checkpoint import layout
from adl_dist.control import job
from adl_dist.control.job import Job
from adl_dist.control.requests import RequestKind
from adl_dist.control.rpc import JobEndpoint
from adl_dist.distributed.world import connect
from adl_dist.errors import ConfigError, DivergedError
from adl_dist.monitor.timeouts import WatchdogTimeouts
from tests.support.kill import records
from tests.support.ranks import run_ranks
from tests.support.runs import toy_trainer
from tests.support.tiers import slow
from tests.support.toys import TRIED, FixedImages, batch_norm_net
from tests.support.values import values

NUM_SAMPLES, MICRO_BATCH, EPOCHS = 60, 2, 2
PER_EPOCH = NUM_SAMPLES // (3 * MICRO_BATCH)  # updates
OPTIONS = {"dgl": {"head": "linear"}, "dni": {"head_layers": 0, "head_delay": 0}, "paci": {"flush_epochs": EPOCHS}}
RANKS = 3
STOPS = {8: 3, 22: 8}  # while which of the samples ranks are asked to stop, and the update that it comes after


class Asking(FixedImages):
    """Asks for something while a sample is loaded, the ``at``-th of all; never if that is 0."""

    def __init__(self, at=0, what=RequestKind.STOP, num_samples=NUM_SAMPLES):
        super().__init__(num_samples)
        self.at, self.what, self.num_served, self.answer = at, what, -TRIED, None
        self.trainer = None

    def __getitem__(self, index):
        self.num_served += 1
        if self.at and self.num_served == self.at:
            self.answer = self.trainer.requests.ask(self.what, "a test")
        return super().__getitem__(index)


def fitted(K, *, data=None, name="adl", M=3, run_dir=None, options=(), epochs=EPOCHS, handle_signals=False, **of_fit):
    """Train; return the dataset, the state and the summary."""
    data = data or Asking()
    model, optimizer = batch_norm_net(dropout=0.2), functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)
    of_trainer = {"model": model, "optimizer": optimizer, "timeout_seconds": 20, "handle_signals": handle_signals}
    data.trainer = trainer = toy_trainer(
        K, M, name, {**OPTIONS.get(name, {}), **dict(options)}, **{"verify": False, **of_trainer}
    )
    settings = {"epochs": epochs, "batch_size": MICRO_BATCH * M, "run_dir": run_dir}
    settings |= values(tensorboard=False, quiet=True, **of_fit)
    summary = trainer.fit(data, **settings, val_dataset=FixedImages(6, seed=1))
    return data, trainer.full_state_dict(), summary


@functools.cache
def undisturbed(K, name="adl", options=(), epochs=EPOCHS, **of_fit):
    return fitted(K, name=name, options=options, epochs=epochs, **of_fit)[1]


def different(state, expected):
    return [name for name in expected if not torch.equal(state[name], expected[name])]


EXACT = [(3, "gpipe"), slow(2, "1f1b"), slow(3, "dni"), slow(3, "paci")]


@pytest.mark.parametrize(("K", "name"), EXACT, ids=str)
def test_where_nothing_is_stale_a_stopped_run_resumes_exactly(K, name, tmp_path):
    data, _, summary = fitted(K, data=Asking(at=68), name=name, run_dir=tmp_path)
    assert summary["stopped"] == {
        "why": "a test",
        "update": 12,  # the sample is one of the 4th micro-batch of the second epoch, whose group of 3 ends there
        "epoch": 1,
        "checkpoint": str(tmp_path / "checkpoints" / "update-00000012"),
        "drain_changed_result": False,
    }
    assert data.answer.result(0) == summary["stopped"]["checkpoint"]
    written = (tmp_path / "summary.json").read_text()
    assert json.loads(written)["stopped"] == summary["stopped"]
    _, state, summary = fitted(K, name=name, run_dir=tmp_path)
    assert "stopped" not in summary
    assert different(state, undisturbed(K, name)) == []
    # As a kill before the last summary would have left it: the same command brings it.
    (tmp_path / "summary.json").write_text(written)
    fitted(K, name=name, run_dir=tmp_path)
    known = json.loads((tmp_path / "summary.json").read_text())
    assert (known["updates"], "stopped" in known) == (2 * PER_EPOCH, False)
    assert known["validation_loss"] == summary["validation_loss"]


@pytest.mark.parametrize(("K", "name"), [(3, "adl"), (2, "2bw"), slow(3, "dsp"), slow(3, "fr")], ids=str)
def test_a_stop_equals_max_updates_there_and_leaves_a_trace(K, name, tmp_path):
    stopped, planned = tmp_path / "stopped", tmp_path / "planned"
    _, _, summary = fitted(K, data=Asking(at=70), name=name, run_dir=stopped)
    assert (summary["stopped"]["drain_changed_result"], summary["updates"]) == (True, 12)
    fitted(K, name=name, run_dir=planned, max_updates=12)
    assert different(fitted(K, name=name, run_dir=stopped)[1], fitted(K, name=name, run_dir=planned)[1]) == []


def test_with_planned_checkpoints_a_stop_leaves_no_trace(tmp_path):
    """Nor does a checkpoint of mid epoch, where nothing is evaluated, cost the best one."""
    _, expected, _ = fitted(3, run_dir=tmp_path, every_updates=4, keep=99)
    saved = [layout.read_manifest(path)["update"] for path in layout.complete(tmp_path / "checkpoints")]
    assert saved == [4, 8, 10, 14, 18, 20]
    written = records(tmp_path)
    assert [r["update"] for r in written if r["name"] == "validation/loss"] == [9, 19]
    assert sorted(r["update"] for r in written if r["name"] == "train/loss") == list(range(20))
    with pytest.raises(ConfigError, match="every_updates is 4 there and 5 here"):
        fitted(3, run_dir=tmp_path, every_updates=5)
    every = {"every_updates": 4, "keep": 1, "keep_best": True}
    for at, update in ((70, 14), (90, 18)):  # 10 updates an epoch
        _, _, summary = fitted(3, data=Asking(at=at), run_dir=tmp_path / str(at), **every)
        stopped, folder = summary["stopped"], tmp_path / str(at) / "checkpoints"
        assert (stopped["update"], stopped["drain_changed_result"]) == (update, False)
        assert "validation_loss" not in summary
        assert "validation_loss" not in json.loads((tmp_path / str(at) / "summary.json").read_text())
        metrics = {path.name: layout.read_manifest(path)["metrics"] for path in layout.complete(folder)}
        assert [(name, metrics[name] == {}) for name in sorted(metrics)] == [
            ("update-00000010", False),
            (f"update-{update:08}", True),
        ]
        assert different(fitted(3, run_dir=tmp_path / str(at), **every)[1], expected) == []
    assert different(undisturbed(3), expected), "the key changes what is computed"


@pytest.mark.parametrize(("K", "drain_changed_result"), [(1, False), (3, True)])
def test_asked_for_a_checkpoint_a_run_saves_and_continues(K, drain_changed_result, tmp_path):
    """It says if that changes values, which it then does."""
    data, state, summary = fitted(K, data=Asking(at=70, what=RequestKind.CHECKPOINT), run_dir=tmp_path, keep=99)
    said, path = data.answer.result(0), tmp_path / "checkpoints" / "update-00000012"
    assert layout.read_manifest(path)["update"] == 12
    assert ("stopped" in summary, summary["updates"]) == (False, 2 * PER_EPOCH)
    assert bool(different(state, undisturbed(K))) is drain_changed_result
    trace = "those of a run that ended with train.max_updates=12 and was continued"
    assert said.startswith(str(path))
    assert (said == str(path)) is (trace not in said) is (not drain_changed_result)
    assert (trace in (tmp_path / "logs" / "rank0.log").read_text()) is drain_changed_result
    changed = [r["update"] for r in records(tmp_path) if r["name"] == "checkpoint/drain_changed_result"]
    assert changed == [11] * drain_changed_result


def test_asked_to_stop_in_its_last_group_a_run_is_complete(tmp_path):
    data, _, summary = fitted(2, data=Asking(at=EPOCHS * NUM_SAMPLES), run_dir=tmp_path)
    assert "stopped" not in summary
    assert data.answer.result(0) == str(tmp_path / "checkpoints" / "update-00000020")


def test_what_is_asked_of_a_run_that_fails_is_answered():
    data = Asking(at=1)
    data.images[3] = float("nan")
    with pytest.raises(DivergedError):
        fitted(1, data=data, M=30)
    assert str(data.answer.exception(0)) == "the run has ended, at update 0"
    assert not data.trainer.requests.any_open


def stop_twice_and_continue(names, folder):
    fit = functools.partial(fitted, RANKS, epochs=1)
    return [
        ([fit(data=Asking(at), **run)[2]["stopped"] for at in STOPS], fit(**run)[1])
        for run in ({"name": name, "run_dir": folder / name} for name in names)
    ]


@pytest.mark.ranks
@pytest.mark.parametrize("names", [["adl"], slow(["gpipe", "ddg", "dgl"])], ids="-".join)  # DDG has a forward lock
def test_processes_stop_after_the_same_update_and_resume(names, tmp_path):
    by_rank = run_ranks(RANKS, stop_twice_and_continue, names, tmp_path / "asked", timeout_seconds=100)
    for case, name in enumerate(names):
        stops, _ = by_rank[0][case]
        # One sample has been looked at before. The 7th of the epoch belongs to micro-batch 3; before 4 is loaded,
        # receives are posted up to 6, and so the segment ends with the group of 6, 7, 8.
        assert [stop["update"] for stop in stops] == list(STOPS.values()), name
        assert [stop["drain_changed_result"] for stop in stops] == [name not in ("gpipe", "dgl")] * 2
        planned = {"name": name, "run_dir": tmp_path / "planned" / name, "epochs": 1}
        for stop in stops:
            fitted(RANKS, **planned, max_updates=stop["update"])
        expected = fitted(RANKS, **planned)[1]
        for rank in range(RANKS):
            assert by_rank[rank][case][0] == stops
            assert different(by_rank[rank][case][1], expected) == [], name


def stop_twice_in_shared_processes(folder):
    fit = functools.partial(fitted, 4, name="interleaved", run_dir=folder, epochs=1)
    return [fit(data=Asking(at))[2]["stopped"]["update"] for at in STOPS], fit()[1]


@pytest.mark.ranks
def test_processes_of_several_stages_stop_and_go_on_in_others(tmp_path):
    """No gradient is stale, so that nothing changes; then all stages continue in one process."""
    plain = [fitted(4, name="interleaved", epochs=epochs)[1] for epochs in (1, 2)]
    for stops, state in run_ranks(2, stop_twice_in_shared_processes, tmp_path, timeout_seconds=100):
        assert stops == [*STOPS.values()]
        assert different(state, plain[0]) == []
    in_one = {"name": "interleaved", "options": (("stages_per_process", 4),)}
    assert different(fitted(4, run_dir=tmp_path, epochs=2, **in_one)[1], plain[1]) == []


def stop_by_signal(folder):
    """Rank 1 sends itself SIGINT when it has made three updates of an epoch that takes a while."""
    # As from a terminal, also where the tests themselves run in the background with SIGINT ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)

    class Slow(Asking):
        def __getitem__(self, index):
            time.sleep(0.01)
            return super().__getitem__(index)

    def send():
        while not any(record["update"] >= 3 for record in records(folder)):
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    if os.environ["RANK"] == "1":
        threading.Thread(target=send, daemon=True).start()
    return fitted(RANKS, data=Slow(num_samples=400), run_dir=folder, epochs=1, handle_signals=True)[2]


@pytest.mark.ranks
def test_a_signal_to_any_rank_stops_all(tmp_path):
    summaries = run_ranks(RANKS, stop_by_signal, tmp_path)
    assert summaries[0] == summaries[1] == summaries[2]
    assert summaries[0]["stopped"]["why"] == "SIGINT"
    assert 3 < summaries[0]["updates"] < 50, "of 67"


def ask_past_one_that_is_late_and_one_that_is_gone():
    world, answers = connect(RANKS, device_type="cpu", timeout_seconds=20), []
    world.fresh_store()
    one = Job(world, WatchdogTimeouts(stall_seconds=60, abort_seconds=None))

    def ask_from(*ranks):
        for rank in ranks:
            if world.rank == rank:
                answers.append(one.ask(RequestKind.STOP, f"rank {rank}"))
            dist.barrier()

    ask_from(*range(RANKS))
    job.ASK_SECONDS, ask = 0.3, JobEndpoint.ask
    if world.rank == 2:
        JobEndpoint.ask = lambda self, what, why: time.sleep(1)
    dist.barrier()
    ask_from(0)
    job.ASK_SECONDS, JobEndpoint.ask = 5.0, ask
    if world.rank == 2:
        rpc.shutdown(graceful=False)
    dist.barrier()
    ask_from(0, 1)
    if world.rank == 0:
        assert [request.why[-1] for request in one.requests.take()] == list("012001")
    return answers


@pytest.mark.ranks
def test_every_rank_is_heard_also_past_one_that_is_late():
    answers = run_ranks(RANKS, ask_past_one_that_is_late_and_one_that_is_gone)
    assert answers == [[True, True, False], [True, True], [True]]
