"""Training to the reference's losses: values worked out by hand on made-up curves."""

import json

import pytest
import yaml

import adl_dist
from adl_dist.report.overhead import goals, overhead_rows
from adl_dist.report.runs import Run, read_runs
from tests.support.commands import in_process, shows


def made(folder, losses, *, updates, every=10, samples=64, name="validation", method="adl", seed=0, first=0, **config):
    """A run of ``updates`` of half a second, with a validation after each tenth."""
    folder.mkdir(parents=True)
    lines = []
    for update in range(updates):
        loss = losses[update] if name == "train" else 9.0
        where = {"update": first + update, "epoch": 0}
        lines.append({"name": "train/loss", "value": loss, "num_samples": samples, **where})
        lines[-1]["elapsed_seconds"] = (update + 1) / 2
        if name == "validation" and (update + 1) % every == 0:
            lines.append({"name": "validation/loss", "value": losses[update // every], **where})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = {"method": {"name": method, "accumulation_steps": 1}, "num_stages": 2, "seed": seed}
    (folder / "config.yaml").write_text(yaml.safe_dump({**settings, **config}))
    (folder / "summary.json").write_text(json.dumps({"epochs": 1, "updates": updates, "stages": []}))
    return folder


def reached(run, reference):
    """Of each goal the loss, and updates, samples and seconds of the run."""
    return [(goal.loss, goal.run and tuple(goal.run)) for goal in goals(Run(run), Run(reference))]


def test_a_slower_run_needs_more_and_may_never_get_there(tmp_path):
    reference = made(tmp_path / "a", [4.0, 3.0, 2.0, 1.0], updates=40)
    run = made(tmp_path / "b", [4.0, 3.5, 3.0, 2.5, 2.0, 1.5], updates=60)
    expected = [(4.0, (10, 640, 5.0)), (3.0, (30, 1920, 15.0)), (2.0, (50, 3200, 25.0)), (1.0, None)]
    assert reached(run, reference) == expected
    ratios = [goal.ratio for goal in goals(Run(run), Run(reference))]
    assert ratios == [1.0, 1.5, pytest.approx(5 / 3), None]


def test_between_two_validations_a_loss_is_reached_in_proportion(tmp_path):
    reference = made(tmp_path / "a", [4.0, 3.0, 2.0, 1.0], updates=40)
    run = made(tmp_path / "b", [5.0, 1.0], updates=20, samples=32)
    # From 5 at update 10 to 1 at 20: 4, 3 and 2 after a fourth, half and three fourths of the way.
    expected = [(4.0, (12.5, 400, 6.25)), (3.0, (15, 480, 7.5)), (2.0, (17.5, 560, 8.75)), (1.0, (20, 640, 10.0))]
    assert reached(run, reference) == expected
    assert [goal.ratio for goal in goals(Run(run), Run(reference))] == [0.625, 0.375, 560 / 1920, 0.25]


def test_a_run_that_continues_another_has_the_samples_before(tmp_path):
    """By ``resume=`` in a folder of its own, which does not know the seconds before."""
    reference = made(tmp_path / "a", [4.0, 3.0, 2.0, 1.0], updates=40)
    run = made(tmp_path / "b", [2.0, 1.0], updates=20, first=20)
    assert reached(run, reference)[2:] == [(2.0, (30, 1920, 5.0)), (1.0, (40, 2560, 10.0))]
    shows(adl_dist.compare([reference, run]), ["seed 0, continued at update 20 |"])


def test_a_reference_whose_loss_rises_again_sets_its_lowest(tmp_path):
    reference = made(tmp_path / "a", [4.0, 2.0, 3.0, 2.5], updates=40)
    assert [goal.loss for goal in goals(*[Run(reference)] * 2)] == [4.0, 2.0, 2.0, 2.0]
    assert [goal.ratio for goal in goals(*[Run(reference)] * 2)] == [1.0] * 4
    assert goals(*[Run(reference)] * 2)[3].reference == (20, 1280, 10.0)


def test_without_validations_the_mean_of_a_window_counts(tmp_path):
    """100 updates, so a window of 2: a loss of 100 - n at update n is a mean of 100.5 - n."""
    reference = made(tmp_path / "a", [100.0 - n for n in range(1, 101)], updates=100, name="train")
    run = made(tmp_path / "b", [100.0 - n / 2 for n in range(1, 101)], updates=100, name="train")
    # The run's mean at update n is 100.25 - n / 2, which is 100.5 - 25 at n = 49.5, and 100.5 - 50 at 99.5.
    found = reached(run, reference)
    assert [loss for loss, _ in found] == [75.5, 50.5, 25.5, 0.5]
    assert [training and training[0] for _, training in found] == [49.5, 99.5, None, None]


def test_a_run_without_losses_has_no_row(tmp_path):
    runs = [made(tmp_path / "a", [4.0, 3.0, 2.0, 1.0], updates=40), made(tmp_path / "b", [2.0] * 4, updates=40)]
    (runs[1] / "metrics.jsonl").write_text("")
    assert [row[0] for row in overhead_rows(read_runs(runs), {str(run): run.name for run in runs})] == ["run", "a"]


def test_the_reference_is_bp_of_the_seed_or_the_chosen_run(tmp_path):
    """``compare`` prints the table, also for runs of scripts; the reference comes first."""
    for seed in (0, 1):
        made(tmp_path / "runs" / f"bp{seed}", [4.0, 3.0, 2.0, 1.0 + seed], updates=40, method="bp", seed=seed)
    made(tmp_path / "runs" / "adl", [4.0, 4.0, 3.0, 3.0, 2.0, 2.0, 2.0, 2.0], updates=80, seed=1)
    text = adl_dist.compare([tmp_path / "runs"])
    row = next(line for line in text.splitlines() if line.startswith("| adl, K = 2, seed 1"))
    assert [cell.strip() for cell in row.split("|")[2:6]] == [
        "10 / 640 / 5.0 s = 1.00x", "30 / 1,920 / 15.0 s = 1.50x", "50 / 3,200 / 25.0 s = 1.67x",
        "50 / 3,200 / 25.0 s = 1.67x"]  # fmt: skip
    done = in_process("compare", str(tmp_path / "runs"), f"reference={tmp_path / 'runs' / 'bp0'}")
    assert done.code == 0
    shows(done.out, ["Reference: bp, K = 2, seed 0.", "| not reached  "])
    two = [f"reference={tmp_path}"] * 2
    shows(in_process("compare", str(tmp_path), *two).refusal(), ["takes one reference=, got "])
