"""Runs that are asked to stop or to save, all stages in one process: where they end, and what that does to values."""

import json

import pytest
import torch
from torch import nn

import adl_dist
from adl_dist.checkpoint import layout
from adl_dist.control.requests import Ask
from adl_dist.errors import ConfigError, DivergedError
from tests.support.toys import FixedImages, batch_norm_net
from tests.support.values import values

NUM_SAMPLES, MICRO_BATCH, EPOCHS = 60, 2, 3


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


def fitted(K, *, data=None, name="adl", M=3, run_dir=None, options=None, **of_fit):
    """Train up to three epochs; return the dataset, the state and the summary."""
    data = data or Asking()
    trainer = adl_dist.Trainer(
        batch_norm_net(dropout=0.2),
        loss_fn=nn.CrossEntropyLoss(),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
        method=adl_dist.method(name, accumulation_steps=M, **(options or {})),
        num_stages=K,
        processes=adl_dist.ProcessOptions(threads=1),
    )
    data.trainer = trainer
    settings = {"epochs": EPOCHS, "batch_size": MICRO_BATCH * M, "run_dir": run_dir}
    summary = trainer.fit(
        data,
        **settings,
        val_dataset=FixedImages(6, seed=1),
        **values(tensorboard=False, quiet=True, **of_fit),
    )
    return data, trainer.full_state_dict(), summary


def assert_same(state, expected):
    assert [name for name in expected if not torch.equal(state[name], expected[name])] == []


STALE = [(2, "adl", {}), (3, "adl", {}), (3, "dsp", {}), (3, "ddg", {}), (2, "2bw", {}), (3, "fr", {})]
FRESH = [(1, "adl", {}), (3, "gpipe", {}), (2, "1f1b", {}), (3, "dgl", {"head": "linear"})]


@pytest.mark.parametrize(("K", "name", "options"), FRESH, ids=lambda v: str(v))
def test_where_nothing_is_stale_a_stopped_run_resumes_exactly(K, name, options, tmp_path):
    """Where nothing is stale a run stopped in mid epoch continues to the bits of an uninterrupted one."""
    _, expected, _ = fitted(K, name=name, options=options)
    data, _, summary = fitted(K, data=Asking(at=70), name=name, options=options, run_dir=tmp_path)
    assert summary["stopped"] == {
        "why": "a test",
        "update": 12,  # the sample is one of the 5th micro-batch of the second epoch, whose group of 3 ends there
        "epoch": 1,
        "checkpoint": str(tmp_path / "checkpoints" / "update-00000012"),
        "drain_changed_result": False,
    }
    assert data.answer.result(0) == summary["stopped"]["checkpoint"]
    assert json.loads((tmp_path / "summary.json").read_text())["stopped"] == summary["stopped"]
    _, state, summary = fitted(K, name=name, options=options, run_dir=tmp_path)
    assert "stopped" not in summary
    assert_same(state, expected)


@pytest.mark.parametrize(("K", "name", "options"), STALE, ids=lambda v: str(v))
def test_a_stop_equals_max_updates_there_and_leaves_a_trace(K, name, options, tmp_path):
    """Where gradients are stale a stop is the same as max updates there and says that it leaves a trace."""
    stopped, planned = tmp_path / "stopped", tmp_path / "planned"
    _, _, summary = fitted(K, data=Asking(at=70), name=name, options=options, run_dir=stopped)
    assert (summary["stopped"]["drain_changed_result"], summary["updates"]) == (True, 12)
    fitted(K, name=name, options=options, run_dir=planned, max_updates=12)
    _, state, _ = fitted(K, name=name, options=options, run_dir=stopped)
    _, expected, _ = fitted(K, name=name, options=options, run_dir=planned)
    assert_same(state, expected)


@pytest.mark.parametrize("at", [70, 90])
def test_with_planned_checkpoints_a_stop_leaves_no_trace(at, tmp_path):
    every = {"every_updates": 4}
    _, expected, _ = fitted(3, **every)
    _, otherwise, _ = fitted(3)
    _, _, summary = fitted(3, data=Asking(at=at), run_dir=tmp_path, **every)
    assert summary["stopped"]["update"] == {70: 14, 90: 18}[at]  # 10 updates an epoch
    assert not summary["stopped"]["drain_changed_result"]
    _, state, _ = fitted(3, run_dir=tmp_path, **every)
    assert_same(state, expected)
    assert not all(torch.equal(otherwise[name], expected[name]) for name in expected), (
        "the key changes what is computed"
    )


def test_checkpoints_come_where_they_are_planned(tmp_path):
    """Checkpoints come where they are planned and evaluations only between epochs."""
    fitted(2, run_dir=tmp_path, every_updates=4, keep=99)
    saved = [layout.read_manifest(path)["update"] for path in layout.complete(tmp_path / "checkpoints")]
    assert saved == [4, 8, 10, 14, 18, 20, 24, 28, 30]
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [r["update"] for r in records if r["name"] == "validation/loss"] == [9, 19, 29]
    assert sorted(r["update"] for r in records if r["name"] == "train/loss") == list(range(30))


def test_checkpoints_of_another_distance_belong_to_another_run(tmp_path):
    fitted(2, run_dir=tmp_path, every_updates=4, max_updates=4)
    with pytest.raises(ConfigError, match="every_updates is 4 there and 5 here"):
        fitted(2, run_dir=tmp_path, every_updates=5)


def test_asked_for_a_checkpoint_a_run_saves_and_continues(tmp_path):
    _, expected, _ = fitted(1)
    data, state, summary = fitted(1, data=Asking(at=70, what=Ask.CHECKPOINT), run_dir=tmp_path, keep=99)
    assert data.answer.result(0) == str(tmp_path / "checkpoints" / "update-00000012")
    assert layout.read_manifest(tmp_path / "checkpoints" / "update-00000012")["update"] == 12
    assert "stopped" not in summary
    assert summary["updates"] == 30
    assert_same(state, expected)


def test_stages_with_buffers_stop_at_the_end_of_the_epoch(tmp_path):
    options = {"head": "linear", "buffer_size": 4}
    _, expected, _ = fitted(2, name="dgl", options=options)
    _, _, summary = fitted(2, data=Asking(at=70), name="dgl", options=options, run_dir=tmp_path)
    assert (summary["stopped"]["update"], summary["stopped"]["drain_changed_result"]) == (20, False)
    _, state, _ = fitted(2, name="dgl", options=options, run_dir=tmp_path)
    assert_same(state, expected)


def test_a_missing_last_summary_comes_by_the_same_command(tmp_path):
    """A run that was killed before its last summary has it after the same command again."""
    _, _, earlier = fitted(2, data=Asking(at=70), run_dir=tmp_path)
    told = (tmp_path / "summary.json").read_text()
    fitted(2, run_dir=tmp_path)
    (tmp_path / "summary.json").write_text(told)  # as the kill would have left it
    _, _, summary = fitted(2, run_dir=tmp_path)
    known = json.loads((tmp_path / "summary.json").read_text())
    assert (known["updates"], "stopped" in known, "stopped" in earlier) == (30, False, True)
    assert known["validation_loss"] == summary["validation_loss"]


def test_a_run_without_a_folder_stops_and_says_nothing_is_saved():
    data, _, summary = fitted(2, data=Asking(at=70))
    assert summary["stopped"]["checkpoint"] is None
    assert data.answer.result(0) == "nothing is saved: the run has no run_dir"
    data, _, _ = fitted(2, data=Asking(at=70, what=Ask.CHECKPOINT))
    assert str(data.answer.exception(0)) == "nothing is saved: the run has no run_dir"


def test_asked_to_stop_in_its_last_group_a_run_is_complete(tmp_path):
    data, _, summary = fitted(2, data=Asking(at=EPOCHS * NUM_SAMPLES), run_dir=tmp_path)
    assert "stopped" not in summary
    assert data.answer.result(0) == str(tmp_path / "checkpoints" / "update-00000030")


def test_what_is_asked_of_a_run_that_fails_is_answered():
    """What is asked of a run that fails is answered and not left for the next one."""
    data = Asking(at=1)
    data.images[3] = float("nan")
    with pytest.raises(DivergedError):
        fitted(1, data=data, M=30)
    assert str(data.answer.exception(0)) == "the run has ended, at update 0"
    assert not data.trainer.requests.any_open


def test_a_run_without_a_folder_logs_into_no_other_run(tmp_path):
    fitted(1, run_dir=tmp_path, max_updates=1)
    log = (tmp_path / "logs" / "rank0.log").read_text()
    fitted(2, data=Asking(at=10, what=Ask.CHECKPOINT))  # which a run notes
    assert (tmp_path / "logs" / "rank0.log").read_text() == log != ""


def test_what_is_asked_after_the_end_does_not_stop_the_next_run():
    """What is asked after a run has ended is answered and does not stop the next one."""
    data, _, _ = fitted(1, max_updates=2)
    late = data.trainer.requests.ask(Ask.STOP, "a test")
    assert str(late.exception(0)) == "the run has ended, at update 2"
    _, _, summary = fitted(1)
    assert (summary["updates"], "stopped" in summary) == (30, False)


def test_a_mid_epoch_checkpoint_does_not_cost_the_best_one(tmp_path):
    """A checkpoint of mid epoch claims no evaluation and does not cost the best one."""
    options = {"every_updates": 4, "keep": 1, "keep_best": True}
    _, _, summary = fitted(2, data=Asking(at=90), run_dir=tmp_path, **options)
    metrics = {path.name: layout.read_manifest(path)["metrics"] for path in layout.complete(tmp_path / "checkpoints")}
    assert summary["stopped"]["update"] == 18
    assert "validation_loss" not in summary
    assert "validation_loss" not in json.loads((tmp_path / "summary.json").read_text())
    assert [(name, metrics[name] == {}) for name in sorted(metrics)] == [
        ("update-00000010", False),
        ("update-00000018", True),
    ]


@pytest.mark.parametrize(("K", "drain_changed_result"), [(1, False), (3, True)])
def test_a_checkpoint_in_mid_epoch_says_if_it_changes_values(K, drain_changed_result, tmp_path):
    _, expected, _ = fitted(K)
    data, state, _ = fitted(K, data=Asking(at=70, what=Ask.CHECKPOINT), run_dir=tmp_path)
    said = "those of a run that ended with train.max_updates=12 and was continued"
    log = (tmp_path / "logs" / "rank0.log").read_text()
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert any(not torch.equal(state[name], expected[name]) for name in expected) is drain_changed_result
    assert (said in data.answer.result(0)) is drain_changed_result
    assert (said in log) is drain_changed_result
    assert [r["update"] for r in records if r["name"] == "checkpoint/drain_changed_result"] == [
        11
    ] * drain_changed_result
