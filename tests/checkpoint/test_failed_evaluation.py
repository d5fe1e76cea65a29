"""An evaluation that fails costs no epoch: what was trained is in a checkpoint, and continues to the same bits."""

import json

import pytest

import adl_dist
from adl_dist import EpochMetric
from adl_dist.checkpoint import layout
from adl_dist.errors import AdlError
from tests.support.commands import assert_same
from tests.support.ranks import run_ranks
from tests.support.runs import toy_trainer
from tests.support.toys import FixedImages
from tests.support.values import SILENT

UPDATES = 3  # of an epoch


class Raises(adl_dist.Callback):
    def on_epoch(self, now):
        now.metrics["validation_f1"]


@EpochMetric
def broken(outputs, targets):
    raise ValueError("no such average")


def wrong_target():
    data = FixedImages(12, seed=1)
    data.labels[-1] = 99  # the trial at the start looks at others
    return data


FAULTS = {
    "metric": ({"metrics": [broken]}, {}),
    "target": ({}, {"val_dataset": wrong_target}),
    "callback": ({}, {"callbacks": lambda: [Raises()]}),
}


def fit(run_dir, of_trainer=(), of_fit=(), *, epochs):
    trainer = toy_trainer(2, 2, timeout_seconds=30, verify=False, **dict(of_trainer))
    given = {"val_dataset": lambda: FixedImages(12, seed=1), **dict(of_fit)}
    options = {name: make() for name, make in given.items()}
    length = {"epochs": epochs, "batch_size": 4, "monitoring": SILENT}
    return trainer, trainer.fit(FixedImages(4 * UPDATES), run_dir=run_dir, **length, **options)


def failed(run_dir, fault, epochs):
    with pytest.raises(AdlError):
        fit(run_dir, *FAULTS[fault], epochs=epochs)


def evaluations(run_dir):
    """The records of evaluations, and those in the manifests, which tell the best checkpoint."""
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    saved = [layout.read_manifest(path)["metrics"] for path in layout.complete(run_dir / "checkpoints")]
    return [record for record in records if record["name"].startswith("validation/")], saved


def check(run_dir, epochs):
    """The first of ``epochs`` is saved, and continues as if nothing had been: its evaluation comes first."""
    assert [file.parent.name for file in run_dir.glob("checkpoints/*/manifest.json")] == [f"update-{UPDATES:08d}"]
    (trainer, summary), (whole, expected) = fit(run_dir, epochs=epochs), fit(run_dir / "whole", epochs=epochs)
    assert evaluations(run_dir) == evaluations(run_dir / "whole")
    assert_same(trainer.full_state_dict(), whole.full_state_dict())
    assert summary["validation_loss"] == expected["validation_loss"]


@pytest.mark.parametrize(("fault", "epochs"), [("metric", 1), ("target", 2)])
def test_what_was_trained_is_saved(fault, epochs, tmp_path):
    failed(tmp_path, fault, epochs)
    check(tmp_path, epochs)


@pytest.mark.ranks
@pytest.mark.parametrize("fault", ["metric", "callback"])  # of the last stage, and of rank 0
def test_what_several_processes_trained_is_saved(fault, tmp_path):
    run_ranks(2, failed, tmp_path, fault, 2)
    check(tmp_path, 2)
