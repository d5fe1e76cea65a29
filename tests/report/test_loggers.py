"""Records go to every logger; one that fails is given up, and the run continues."""

import contextlib
import json
import sys
from types import SimpleNamespace

import pytest

import adl_dist
from adl_dist.report import MetricsWriter
from tests.support.runs import toy_trainer
from tests.support.toys import FixedImages

RECORDS = [
    {"name": "train/loss", "value": 0.5, "update": 0, "epoch": 0, "stage": 1},
    {"name": "stage/staleness", "value": 1.5, "update": 1, "epoch": 0, "stage": 0},
    {"name": "train/loss", "value": 0.25, "update": 1, "epoch": 0, "stage": 1},
]
SETTINGS = {"optimizer.lr": 0.1, "seed": 3}


class Notes:
    """A logger of a user's own."""

    def __init__(self, *, fails_at=None):
        self.records, self.calls, self.fails_at = [], [], fails_at

    def start(self, folder, settings, from_update):
        self.calls.append((folder, settings, from_update))

    def write(self, record):
        if record["update"] == self.fails_at:
            raise RuntimeError("the line is dead")
        self.records.append(record)

    def flush(self):
        self.calls.append("flush")

    def close(self):
        self.calls.append("close")


def recorded(folder, loggers, *, from_update=0):
    with contextlib.closing(MetricsWriter(folder, loggers=loggers, settings=SETTINGS)) as recorder:
        recorder.start(from_update=from_update)
        for record in RECORDS:
            if record["update"] >= from_update:
                recorder.write(record)
        recorder.flush()


def test_a_logger_gets_what_metrics_jsonl_gets(tmp_path):
    notes = Notes()
    monitoring = adl_dist.Monitoring(quiet=True, tensorboard=False, report=False, loggers=[notes])
    trainer = toy_trainer(2, 2)
    trainer.fit(FixedImages(8), epochs=1, batch_size=4, run_dir=tmp_path, monitoring=monitoring)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert notes.records == [json.loads(line) for line in lines]
    (folder, settings, from_update), *later = notes.calls
    assert (folder, from_update, later) == (tmp_path, 0, ["flush", "close"])
    assert settings["method.name"] == "adl"


def test_a_logger_that_fails_is_given_up_with_one_warning(tmp_path, capfd):
    notes, other = Notes(fails_at=1), Notes()
    recorded(tmp_path, [notes, other])
    assert notes.records == RECORDS[:1]
    assert other.records == RECORDS
    said = capfd.readouterr().err
    assert said.count("\n") == 1
    assert "logger Notes fails (RuntimeError: the line is dead); the run continues without it" in said


@pytest.mark.parametrize("left", ['{"name": "train/l', '{"name": "train/loss", "value": 1.0, "update": 0}'])
def test_a_line_that_a_killed_process_did_not_end_is_dropped(tmp_path, left):
    (tmp_path / "metrics.jsonl").write_text(left)
    recorded(tmp_path, [], from_update=1)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [record for record in RECORDS if record["update"] >= 1]


def test_an_evaluation_that_is_made_again_drops_its_records(tmp_path):
    lines = [json.dumps({"name": f"{kind}/loss", "update": n}) for n in range(3) for kind in ("train", "validation")]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    for is_evaluated, expected in ((True, lines[:4]), (False, lines[:3])):
        with contextlib.closing(MetricsWriter(tmp_path)) as recorder:
            recorder.start(from_update=2, is_evaluated=is_evaluated)
        assert (tmp_path / "metrics.jsonl").read_text().splitlines() == expected


def test_mlflow_keeps_one_run_over_a_resume(tmp_path, monkeypatch):
    """In its store of local files, which it has to be told to allow."""
    pytest.importorskip("mlflow")
    for key, value in {
        "TRACKING_URI": f"file://{tmp_path / 'store'}", "ALLOW_FILE_STORE": "true", "DISABLE_TELEMETRY": "true",
        "EXPERIMENT_NAME": "mine",
    }.items():  # fmt: skip
        monkeypatch.setenv(f"MLFLOW_{key}", value)
    from mlflow.tracking import MlflowClient

    folder = tmp_path / "run"
    folder.mkdir()
    recorded(folder, ["mlflow"])
    recorded(folder, ["mlflow"], from_update=1)
    client = MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
    assert run.data.params == {"optimizer.lr": "0.1", "seed": "3"}
    curve = [(one.step, one.value) for one in client.get_metric_history(run.info.run_id, "train/loss")]
    assert sorted({*curve}) == [(0, 0.5), (1, 0.25)]
    assert run.data.metrics["stage/staleness/0"] == 1.5


def test_wandb_is_called_as_it_documents(tmp_path, monkeypatch):
    """By a module that stands in for it: wandb itself is not tried here."""
    calls = []

    def init(**options):
        calls.append(("init", options))
        return SimpleNamespace(
            id="abc",
            define_metric=lambda name, step_metric: calls.append((name, step_metric)),
            log=lambda values: calls.append(("log", values)),
            finish=lambda: calls.append(("finish",)),
        )

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    recorded(tmp_path, ["wandb"])
    (_, options), *later = calls
    assert options == {"project": "adl_dist", "name": tmp_path.name, "dir": str(tmp_path), "config": SETTINGS}
    logged = [
        {"train/loss": 0.5, "update": 0},
        {"stage/staleness/0": 1.5, "update": 1},
        {"train/loss": 0.25, "update": 1},
    ]
    assert later == [("*", "update"), *(("log", values) for values in logged), ("finish",)]
    calls.clear()
    recorded(tmp_path, ["wandb"], from_update=1)
    assert (calls[0][1]["id"], calls[0][1]["resume"]) == ("abc", "allow")
