"""Callbacks are called in order with the figures of the run, may end it, and fail in one line."""

import json
import random
import re

import pytest
import torch

import adl_dist
from adl_dist.errors import CallbackError, ConfigError, StageFailed
from tests.support.commands import assert_same, in_process, shows, words
from tests.support.ranks import run_ranks
from tests.support.runs import toy_trainer
from tests.support.toys import FixedImages, batch_norm_net
from tests.support.values import SILENT

TRAIN, VALIDATION = FixedImages(16), FixedImages(8, seed=1)


class Diary(adl_dist.Callback):
    """Records every call."""

    def __init__(self):
        self.lines = []

    def on_start(self, now):
        self.lines.append(("start", now.update, now.epoch))

    def on_update(self, now):
        self.lines.append(("update", now.update, now.epoch, now.metrics))

    def on_epoch(self, now):
        self.lines.append(("epoch", now.update, now.epoch, now.metrics))

    def on_checkpoint(self, now):
        assert (now.checkpoint / "manifest.json").is_file()
        self.lines.append(("checkpoint", now.update, now.epoch, now.checkpoint.name))

    def on_end(self, now):
        self.lines.append(("end", now.update, now.epoch, now.summary["updates"]))


class Raises(adl_dist.Callback):
    """Fails in update 3."""

    def on_update(self, now):
        assert now.update < 3, f"update {now.update}"


class StopsAt(adl_dist.Callback):
    """Ends the run behind an update."""

    def __init__(self, update):
        self.at = update

    def on_update(self, now):
        if now.update == self.at:
            now.stop("enough")


def fit(callbacks, *, K=2, epochs=2, **options):
    trainer = toy_trainer(K, 2, verify=False)
    options = {"monitoring": SILENT, "val_dataset": VALIDATION, **options}
    return trainer, trainer.fit(TRAIN, epochs=epochs, batch_size=4, callbacks=callbacks, **options)


def diary_of(folder):
    diary = Diary()
    fit([diary], run_dir=folder)
    return diary.lines


def test_callbacks_hear_all_in_order(tmp_path):
    lines = diary_of(tmp_path)
    called = [line[:3] for line in lines if line[0] != "checkpoint"]
    epochs = [
        [*(("update", 4 * epoch + update, epoch) for update in (1, 2, 3, 4)), ("epoch", 4 * epoch + 4, epoch + 1)]
        for epoch in (0, 1)
    ]
    assert called == [("start", 0, 0), *epochs[0], *epochs[1], ("end", 8, 2)]
    saved = [line for line in lines if line[0] == "checkpoint"]
    assert saved == [("checkpoint", 4, 1, "update-00000004"), ("checkpoint", 8, 2, "update-00000008")]
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    losses = [one["value"] for one in records if one["name"] == "train/loss"]
    assert [line[3]["train_loss"] for line in lines if line[0] == "update"] == losses
    of_epoch = next(line[3] for line in lines if line[0] == "epoch")
    assert of_epoch["train_loss"] == pytest.approx(sum(losses[:4]) / 4)
    assert of_epoch["validation_loss"] == next(one["value"] for one in records if one["name"] == "validation/loss")


def test_a_checkpoint_is_told_of_before_the_next_one(tmp_path):
    diary, policy = Diary(), adl_dist.CheckpointPolicy(every_updates=2, background=False)
    fit([diary], epochs=1, run_dir=tmp_path, checkpoints=policy)
    told = [line[:2] for line in diary.lines]
    assert told.index(("checkpoint", 2)) < told.index(("update", 4))


def diary_and_drawing(folder):
    return diary_of(folder), drawing_and_plain()


@pytest.mark.ranks
def test_two_processes_call_callbacks_as_one_does(tmp_path):
    """And what they draw changes no dropout of rank 0."""
    (on_0, drawn_on_0), (on_1, drawn_on_1) = run_ranks(2, diary_and_drawing, tmp_path / "ranks")
    here = diary_of(tmp_path / "here")
    for is_checkpoint in (False, True):  # which come when they are written
        mine, theirs = (
            [line for line in lines if (line[0] == "checkpoint") is is_checkpoint] for lines in (on_0, here)
        )
        assert mine == theirs
    assert on_1 == []
    for drawing, plain in (drawn_on_0, drawn_on_1):
        assert_same(drawing, plain)


SAID = r"callback Raises.on_update fails at update 3: AssertionError: update 3.*test_callbacks.py:\d+; the last checkp"


def failing(folder):
    with pytest.raises((CallbackError, StageFailed)) as failed:
        fit([Raises()], run_dir=folder)
    return str(failed.value)


@pytest.mark.ranks
def test_an_exception_ends_all_processes_in_a_line(tmp_path):
    for said in run_ranks(2, failing, tmp_path):
        assert re.search(SAID, said), said
        assert "\n" not in said
    assert "Traceback" in (tmp_path / "logs" / "rank0.log").read_text()


def test_a_callback_ends_the_run_evaluated_and_saved(tmp_path):
    diary = Diary()
    _, summary = fit([StopsAt(3), diary], run_dir=tmp_path, epochs=5, K=1)
    assert summary["ended_by"] == "StopsAt: enough"
    assert summary["updates"] < 20
    assert "stopped" not in summary
    assert "validation_loss" in summary
    assert diary.lines[-1][0] == "end"
    again, _ = fit([], run_dir=tmp_path, epochs=5, K=1)
    whole, _ = fit([], epochs=5, K=1)
    assert_same(again.full_state_dict(), whole.full_state_dict())


def test_early_stopping_waits_patiently_also_across_resumes(tmp_path):
    _, whole = fit([adl_dist.EarlyStopping(2)], epochs=30)
    assert 8 < whole["updates"] < 120
    for epochs in (1, 3, 30, 31):
        _, summary = fit([adl_dist.EarlyStopping(2)], epochs=epochs, run_dir=tmp_path)
    assert (summary["updates"], summary["ended_by"]) == (whole["updates"], whole["ended_by"])
    assert summary["num_samples"] == 0, "the last calls find it ended"
    _, more = fit([adl_dist.EarlyStopping(3)], epochs=30, run_dir=tmp_path)
    assert more["updates"] > whole["updates"]


def test_early_stopping_follows_its_metric_and_direction():
    ended, stopping = [], adl_dist.EarlyStopping(2, metric="validation_loss", best_mode="max")
    for epoch, loss in enumerate((1.0, 2.0, 1.5, 3.0, 2.0, 2.5), start=1):
        stopping.on_epoch(adl_dist.TrainerState(epoch, epoch, {"validation_loss": loss}, stop=ended.append))
        assert len(ended) == (epoch == 6)


def test_a_loss_must_fall_by_min_change():
    """And what a version before 0.3.7 kept of it, with a 0 in the place of an accuracy, is no reason never to stop."""
    ended, stopping = [], adl_dist.EarlyStopping(2, min_change=0.5)
    stopping.load_state_dict({"goal": {}, "best_score": [0.0, -9.0], "best_value": "", "waited": 0})
    for epoch, loss in enumerate((3.0, 2.9, 2.6, 1.0), start=1):
        stopping.on_epoch(adl_dist.TrainerState(epoch, epoch, {"validation_loss": loss}, stop=ended.append))
        assert len(ended) == (epoch == 3)
        ended.clear()


class Draws(adl_dist.Callback):
    """Draws from the global streams, and seeds torch's."""

    def on_update(self, now):
        random.random()
        torch.manual_seed(now.update)
        for _ in range(1000):
            torch.rand(1)


def trained_with(callbacks):
    """The weights of a net with dropout; epochs long enough for figures of most updates to come before their end."""
    trainer = toy_trainer(2, 2, model=batch_norm_net(dropout=0.5), balance=[3, 4], verify=False)
    trainer.fit(FixedImages(160), epochs=2, batch_size=4, callbacks=callbacks, monitoring=SILENT)
    return trainer.full_state_dict()


def drawing_and_plain():
    return trained_with([Draws()]), trained_with([])


class Interrupts(adl_dist.Callback):
    """Raises what Ctrl-C raises."""

    def on_update(self, now):
        if now.update == 2:
            raise KeyboardInterrupt


def interrupted(folder):
    trainer = toy_trainer(2, 2, handle_signals=True, verify=False)
    given = {"epochs": 50, "batch_size": 4, "callbacks": [Interrupts()], "monitoring": SILENT}
    return trainer.fit(TRAIN, run_dir=folder, **given)["stopped"]


@pytest.mark.ranks
def test_an_interrupt_in_a_callback_stops_all_processes(tmp_path):
    for stopped in run_ranks(2, interrupted, tmp_path):
        assert stopped["why"] == "KeyboardInterrupt in Interrupts.on_update"
        assert stopped["checkpoint"] == str(next((tmp_path / "checkpoints").glob(f"*{stopped['update']:08}")))


class Misnamed:
    """As other frameworks call it."""

    def on_epoch_end(self, now): ...


REFUSED = {
    "another name": ([Misnamed()], r"Misnamed has on_epoch_end; did you mean on_epoch\?"),
    "no callback": ([3], r"callbacks: there are on_start, .* and int has none of them"),
    "a class": ([Diary], r"Diary is a class; give one that is made: Diary\(\)"),
    "no list": (Diary(), r"expected a list of callbacks"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_callback_is_refused(case):
    callbacks, said = REFUSED[case]
    with pytest.raises(ConfigError, match=said):
        fit(callbacks)


def test_the_command_line_makes_callbacks(tmp_path):
    stopping = "callbacks=[{_target_:adl_dist.EarlyStopping,patience:1,metric:validation_loss,best_mode:max}]"
    few = ["train.epochs=9", "partition.num_stages=1", "method=bp", "optimizer.lr=0.01"]
    done = in_process(*words(tmp_path / "run", stopping, *few))
    assert done.code == 0
    shows(done.out, ["ended by EarlyStopping: validation_loss", "was not bettered in 1 evaluations"])
    again = in_process(*words(tmp_path / "run", stopping, *few))
    assert again.code == 0
    shows(again.out, ["nothing is trained: ended by EarlyStopping"])
