"""Runs that are asked to stop or to save, all stages in one process: where they end, and what that does to values."""

import functools
import json

import pytest
import torch
from torch import nn

import adl_dist
from adl_dist.checkpoint import layout
from adl_dist.control.requests import Ask, NotDoneError, Requests
from adl_dist.errors import ConfigError, DivergedError
from tests.support.tiers import slow
from tests.support.toys import FixedImages, batch_norm_net
from tests.support.values import values

NUM_SAMPLES, MICRO_BATCH, EPOCHS = 60, 2, 2
PER_EPOCH = NUM_SAMPLES // (3 * MICRO_BATCH)  # updates
DGL = (("head", "linear"),)


class Asking(FixedImages):
    """Asks for something while a sample is loaded, the ``at``-th of all; never if that is 0."""

    def __init__(self, at=0, what=Ask.STOP):
        super().__init__(NUM_SAMPLES)
        self.at, self.what, self.num_served, self.answer = at, what, 0, None
        self.trainer = None

    def __getitem__(self, index):
        self.num_served += 1
        if self.num_served == self.at:
            self.answer = self.trainer.requests.ask(self.what, "a test")
        return super().__getitem__(index)


def fitted(K, *, data=None, name="adl", M=3, run_dir=None, options=(), epochs=EPOCHS, **of_fit):
    """Train; return the dataset, the state and the summary."""
    data = data or Asking()
    trainer = adl_dist.Trainer(
        batch_norm_net(dropout=0.2),
        loss_fn=nn.CrossEntropyLoss(),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
        method=adl_dist.method(name, accumulation_steps=M, **dict(options)),
        num_stages=K,
        processes=adl_dist.ProcessOptions(threads=1),
    )
    data.trainer = trainer
    settings = {"epochs": epochs, "batch_size": MICRO_BATCH * M, "run_dir": run_dir}
    summary = trainer.fit(
        data, **settings, val_dataset=FixedImages(6, seed=1), **values(tensorboard=False, quiet=True, **of_fit)
    )
    return data, trainer.full_state_dict(), summary


@functools.cache
def undisturbed(K, name="adl", options=(), epochs=EPOCHS, **of_fit):
    return fitted(K, name=name, options=options, epochs=epochs, **of_fit)[1]


def different(state, expected):
    return [name for name in expected if not torch.equal(state[name], expected[name])]


def records_of(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("K", "name", "options"), [(1, "adl", ()), (3, "gpipe", ()), slow(2, "1f1b", ()), (3, "dgl", DGL)], ids=str
)
def test_where_nothing_is_stale_a_stopped_run_resumes_exactly(K, name, options, tmp_path):
    """Where nothing is stale a run stopped in mid epoch continues to the bits of an uninterrupted one."""
    data, _, summary = fitted(K, data=Asking(at=70), name=name, options=options, run_dir=tmp_path)
    assert summary["stopped"] == {
        "why": "a test",
        "update": 12,  # the sample is one of the 5th micro-batch of the second epoch, whose group of 3 ends there
        "epoch": 1,
        "checkpoint": str(tmp_path / "checkpoints" / "update-00000012"),
        "drain_changed_result": False,
    }
    assert data.answer.result(0) == summary["stopped"]["checkpoint"]
    told = (tmp_path / "summary.json").read_text()
    assert json.loads(told)["stopped"] == summary["stopped"]
    _, state, summary = fitted(K, name=name, options=options, run_dir=tmp_path)
    assert "stopped" not in summary
    assert different(state, undisturbed(K, name, options)) == []
    # As a kill before the last summary would have left it: the same command brings it.
    (tmp_path / "summary.json").write_text(told)
    fitted(K, name=name, options=options, run_dir=tmp_path)
    known = json.loads((tmp_path / "summary.json").read_text())
    assert (known["updates"], "stopped" in known) == (2 * PER_EPOCH, False)
    assert known["validation_loss"] == summary["validation_loss"]


@pytest.mark.parametrize(
    ("K", "name"), [(3, "adl"), (2, "2bw"), (3, "ddg"), slow(2, "adl"), slow(3, "dsp"), slow(3, "fr")], ids=str
)
def test_a_stop_equals_max_updates_there_and_leaves_a_trace(K, name, tmp_path):
    """Where gradients are stale a stop is the same as max updates there and says that it leaves a trace."""
    stopped, planned = tmp_path / "stopped", tmp_path / "planned"
    _, _, summary = fitted(K, data=Asking(at=70), name=name, run_dir=stopped)
    assert (summary["stopped"]["drain_changed_result"], summary["updates"]) == (True, 12)
    fitted(K, name=name, run_dir=planned, max_updates=12)
    assert different(fitted(K, name=name, run_dir=stopped)[1], fitted(K, name=name, run_dir=planned)[1]) == []


def test_with_planned_checkpoints_a_stop_leaves_no_trace(tmp_path):
    """Nor does a checkpoint of mid epoch, which claims no evaluation, cost the best one."""
    every = {"every_updates": 4, "keep": 1, "keep_best": True}
    expected = undisturbed(3, every_updates=4)
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


def test_checkpoints_come_where_they_are_planned(tmp_path):
    """And evaluations only between epochs; checkpoints of another distance belong to another run."""
    fitted(2, run_dir=tmp_path, every_updates=4, keep=99)
    saved = [layout.read_manifest(path)["update"] for path in layout.complete(tmp_path / "checkpoints")]
    assert saved == [4, 8, 10, 14, 18, 20]
    records = records_of(tmp_path)
    assert [r["update"] for r in records if r["name"] == "validation/loss"] == [9, 19]
    assert sorted(r["update"] for r in records if r["name"] == "train/loss") == list(range(20))
    with pytest.raises(ConfigError, match="every_updates is 4 there and 5 here"):
        fitted(2, run_dir=tmp_path, every_updates=5)


@pytest.mark.parametrize(("K", "drain_changed_result"), [(1, False), (3, True)])
def test_asked_for_a_checkpoint_a_run_saves_and_continues(K, drain_changed_result, tmp_path):
    """It says if that changes values, which it then does."""
    data, state, summary = fitted(K, data=Asking(at=70, what=Ask.CHECKPOINT), run_dir=tmp_path, keep=99)
    said, path = data.answer.result(0), tmp_path / "checkpoints" / "update-00000012"
    assert layout.read_manifest(path)["update"] == 12
    assert ("stopped" in summary, summary["updates"]) == (False, 2 * PER_EPOCH)
    assert bool(different(state, undisturbed(K))) is drain_changed_result
    trace = "those of a run that ended with train.max_updates=12 and was continued"
    assert said.startswith(str(path))
    assert (said == str(path)) is (trace not in said) is (not drain_changed_result)
    assert (trace in (tmp_path / "logs" / "rank0.log").read_text()) is drain_changed_result
    changed = [r["update"] for r in records_of(tmp_path) if r["name"] == "checkpoint/drain_changed_result"]
    assert changed == [11] * drain_changed_result


def test_stages_with_buffers_stop_at_the_end_of_the_epoch(tmp_path):
    buffered = {"name": "dgl", "options": (*DGL, ("buffer_size", 4)), "epochs": 3}
    _, _, summary = fitted(2, data=Asking(at=70), run_dir=tmp_path, **buffered)
    assert (summary["stopped"]["update"], summary["stopped"]["drain_changed_result"]) == (20, False)
    assert different(fitted(2, run_dir=tmp_path, **buffered)[1], undisturbed(2, **buffered)) == []


def test_asked_to_stop_in_its_last_group_a_run_is_complete(tmp_path):
    data, _, summary = fitted(2, data=Asking(at=EPOCHS * NUM_SAMPLES), run_dir=tmp_path)
    assert "stopped" not in summary
    assert data.answer.result(0) == str(tmp_path / "checkpoints" / "update-00000020")


def test_a_run_without_a_folder_stops_and_says_nothing_is_saved(tmp_path):
    """Nor does it log into the folder of the run before, or end by what is asked after its end."""
    fitted(1, run_dir=tmp_path, max_updates=1)
    log = (tmp_path / "logs" / "rank0.log").read_text()
    data, _, summary = fitted(2, data=Asking(at=10))
    assert summary["stopped"]["checkpoint"] is None
    assert data.answer.result(0) == "nothing is saved: the run has no run_dir"
    data, _, summary = fitted(2, data=Asking(at=10, what=Ask.CHECKPOINT), epochs=1)  # which a run notes
    assert str(data.answer.exception(0)) == "nothing is saved: the run has no run_dir"
    assert (tmp_path / "logs" / "rank0.log").read_text() == log != ""
    late = data.trainer.requests.ask(Ask.STOP, "a test")
    assert str(late.exception(0)) == "the run has ended, at update 10"
    assert ("stopped" in summary, "stopped" in fitted(1, max_updates=2)[2]) == (False, False)


def test_what_is_asked_of_a_run_that_fails_is_answered():
    """What is asked of a run that fails is answered and not left for the next one."""
    data = Asking(at=1)
    data.images[3] = float("nan")
    with pytest.raises(DivergedError):
        fitted(1, data=data, M=30)
    assert str(data.answer.exception(0)) == "the run has ended, at update 0"
    assert not data.trainer.requests.any_open


def test_each_request_is_answered_once_however_the_run_ends():
    """Also one that was taken when the run failed, that comes as it ends, or whose asker would cancel it."""
    requests = Requests()
    taken, cancelled = requests.ask(Ask.CHECKPOINT, "a test"), requests.ask(Ask.STOP, "a test")
    assert not cancelled.cancel()
    requests.take()[1].answer("saved")

    class EndsTheRun:
        """Closes the requests right after the next one is put among them."""

        def __enter__(self):
            lock.acquire()

        def __exit__(self, *_):
            lock.release()
            requests._lock = lock
            requests.close("it has ended")

    lock, requests._lock = requests._lock, EndsTheRun()
    late = requests.ask(Ask.STOP, "a test")
    assert [str(one.exception(0)) for one in (taken, late)] == ["it has ended"] * 2
    assert (type(late.exception(0)), cancelled.result(0)) == (NotDoneError, "saved")
