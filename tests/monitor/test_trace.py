"""The trace of a run: every action once; of several processes one clock, one file, written by one rank."""

import json
import time

import pytest

import adl_dist
from adl_dist.schedule import Segment
from tests.support import traces
from tests.support.commands import assert_same
from tests.support.ranks import run_ranks
from tests.support.runs import toy_trainer
from tests.support.toys import FixedImages
from tests.support.values import values

K, M, MICRO_BATCH, NUM_SAMPLES, NUM_VALIDATION = 3, 2, 2, 11, 5


TRAINING, VALIDATION = FixedImages(NUM_SAMPLES), FixedImages(NUM_VALIDATION, seed=1)


def run(run_dir, trainer=None, *, epochs=2, data=TRAINING, validation=VALIDATION, trace=True, **options):
    options = values(quiet=True, tensorboard=False, trace=trace, **options)
    length = {"epochs": epochs, "batch_size": MICRO_BATCH * M}
    return (trainer or toy_trainer(K, M)).fit(data, **length, val_dataset=validation, run_dir=run_dir, **options)


def segment(epoch, *, num_samples=NUM_SAMPLES, steps=M):
    sizes = {"num_samples": num_samples, "micro_batch_size": MICRO_BATCH, "accumulation_steps": steps}
    return Segment(epoch=epoch, first_update=epoch * 3, **sizes)


METHODS = {"adl recompute": {"weights": "recompute"}, "ddg": {}, "dni": {"head_layers": 0}}


@pytest.mark.parametrize(("name", "options"), [(n.partition(" ")[0], o) for n, o in METHODS.items()], ids=METHODS)
def test_every_action_is_one_event_of_its_stage_and_none_overlap(name, options, tmp_path):
    summary = run(tmp_path, toy_trainer(K, M, name, options))
    method = adl_dist.method(name, accumulation_steps=M, **options)
    validation = segment(0, num_samples=NUM_VALIDATION, steps=1)
    traces.assert_is_whole(tmp_path, summary, method, training=[segment(0), segment(1)], validation=validation)


def test_events_have_the_version_and_tracing_changes_no_bit(tmp_path):
    """Events tell the version of the weights; without a trace the weights are the same, and nothing is written."""
    trainer, untraced = toy_trainer(K, M), toy_trainer(K, M)
    run(tmp_path / "traced", trainer)
    summary = run(tmp_path / "untraced", untraced, trace=False)
    assert not list((tmp_path / "untraced").glob("trace*"))
    assert all("shares" not in stage for stage in summary["stages"])
    assert_same(trainer.full_state_dict(), untraced.full_state_dict())
    for k, of_stage in traces.read_trace(tmp_path / "traced").items():
        training = [e["args"] for e in of_stage if "epoch" in e["args"]]
        forwards = {(a["epoch"], a["micro_batch"]): a for a in training if a["action"].startswith("F")}
        backwards = {(a["epoch"], a["micro_batch"]): a for a in training if a["action"].startswith("B")}
        updates = [a for a in training if a["action"].startswith("U")]
        assert [a["update"] for a in updates] == [a["version"] for a in updates] == list(range(6))
        delay = 2 * (K - 1 - k)
        for (epoch, b), forward in forwards.items():
            assert forward["forward_version"] == forward["version"] == epoch * 3 + max(0, (b - delay) // M)
            backward = backwards[epoch, b]
            assert backward["forward_version"] == forward["version"]
            assert backward["version"] == epoch * 3 + b // M


def test_only_the_first_events_are_kept_but_all_count(tmp_path, monkeypatch):
    monkeypatch.setattr("adl_dist.training.trainer.MOST_EVENTS", 20)
    summary = run(tmp_path)
    assert all(len(events) == 20 for events in traces.read_trace(tmp_path).values())
    traces.assert_shares_are_all_of_the_time(summary, K)
    assert summary["stages"][2]["shares"]["update"] > 0
    stages = json.loads((tmp_path / "trace.json").read_text())["otherData"]["stages"]
    assert all(stage["events"] == 20 and stage["events_left_out"] > 0 for stage in stages)
    assert "left out by stage" in (tmp_path / "logs" / "rank0.log").read_text()


def test_a_trace_that_cannot_be_written_fails_no_complete_run(tmp_path, capfd):
    (tmp_path / "trace.json").mkdir()
    summary = run(tmp_path)
    assert json.loads((tmp_path / "summary.json").read_text())["updates"] == summary["updates"] == 6
    err = capfd.readouterr().err
    assert err.count(f"adl-dist: warning: {tmp_path / 'trace.json'} could not be written: ") == 1
    assert err.count("the run itself is complete and saved") == 1
    assert [path.name for path in tmp_path.iterdir() if "trace" in path.name] == ["trace.json"]


def train_traced(run_dir):
    """Train as on two machines: the clock of rank 1 is ahead of the clock of rank 0."""
    trainer = toy_trainer(2, M, timeout_seconds=30)
    if not trainer.needs_data:
        true = time.perf_counter
        time.perf_counter = lambda: true() + 1000.0
    return run(run_dir, trainer, epochs=1, data=FixedImages(24), validation=None)


@pytest.mark.ranks
def test_two_processes_make_one_trace_on_one_clock(tmp_path):
    summary, same = run_ranks(2, train_traced, tmp_path)
    assert summary == same
    training, method = [segment(0, num_samples=24)], adl_dist.method("adl", accumulation_steps=M)
    traces.assert_is_whole(tmp_path, summary, method, training=training)
