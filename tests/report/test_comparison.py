"""The table and the figure of a comparison, on runs whose numbers are made up."""

import json
import math

import pytest

from adl_dist.report.comparison import write_comparison
from adl_dist.report.runs import Run


class Runs:
    """Makes run folders as a trainer leaves them."""

    def __init__(self, folder):
        self.folder, self.made = folder, []

    def add(self, label, *values, K=2, M=1, seed=0, method=None, status="complete", name="accuracy", **more):
        """``values``: of validation, after each epoch."""
        path = self.folder / f"{label}-{K}-{seed}"
        path.mkdir()
        lines = [{"name": f"validation/{name}", "value": v, "update": 9 * e, "epoch": e} for e, v in enumerate(values)]
        (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        if status == "complete":
            summary = {f"validation_{name}": values[-1], "epochs": len(values), "updates": 9 * len(values)}
            (path / "summary.json").write_text(json.dumps({**summary, "stages": []}))
        method = {"name": method or label.split()[0]}
        self.made.append(
            Run(
                label=label,
                num_stages=K,
                accumulation_steps=M,
                method=method,
                seed=seed,
                folder=path,
                status=status,
                **more,
            )
        )

    def table(self):
        write_comparison(self.folder, self.made, command="adl-dist train experiment=toy")
        lines = (self.folder / "comparison.md").read_text().splitlines()
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
        return rows[0], {row[0]: row[1:] for row in rows[2:]}


@pytest.fixture
def runs(tmp_path):
    return Runs(tmp_path)


def test_a_row_has_median_range_and_number_of_seeds_and_the_difference_to_bp(runs):
    for seed, value in enumerate((0.95, 0.91, 0.92)):
        runs.add("adl", 0.1, value, seed=seed)
        runs.add("bp", 0.1, value + 0.01, seed=seed)
    head, rows = runs.table()
    assert head == ["method", "K = 2", "to bp"]
    assert rows["adl"] == ["92.00 % (91.00 to 95.00, 3)", "\u22121.00"]


def test_the_rows_of_bp_come_first_and_the_others_as_given(runs):
    for label in ("fdg", "bp M=4", "adl", "bp M=1"):
        runs.add(label, 0.5)
    assert list(runs.table()[1]) == ["bp M=4", "bp M=1", "fdg", "adl"]


def test_a_method_is_compared_with_bp_of_the_same_accumulation(runs):
    runs.add("bp M=4", 0.9, M=4)
    runs.add("bp M=1", 0.7, M=1)
    runs.add("adl M=4", 0.9, M=4)
    runs.add("fdg", 0.9, M=1)
    runs.add("adl M=2", 0.8, M=2)
    _, rows = runs.table()
    assert [rows[label][1] for label in ("adl M=4", "fdg", "adl M=2")] == ["+0.00", "+20.00", "\u221210.00"]


def test_runs_that_diverged_are_counted_in_the_table_and_are_no_part_of_the_median(runs):
    runs.add("bp", 0.9)
    runs.add("fdg", 0.5, math.nan, seed=0, status="diverged", ended_at_update=11, ended_in_epoch=1)
    runs.add("fdg", 0.5, 0.8, seed=1)
    runs.add("ddg", seed=0, status="diverged", ended_at_update=3, ended_in_epoch=0)
    runs.add("ddg", seed=1, status="failed")
    _, rows = runs.table()
    assert rows["fdg"][0] == "80.00 % (80.00 to 80.00, 1), **1 of 2 diverged**"
    assert rows["ddg"][0] == "**1 of 2 diverged**, **1 of 2 failed**"
    written = (runs.folder / "comparison.csv").read_text().splitlines()
    assert len(written) == 1 + 5
    assert sum(",diverged,11,1,,0.5," in line for line in written) == 1


def test_a_variant_that_was_not_run_with_some_k_is_compared_with_bp_of_any_k(runs):
    runs.add("bp", 0.9)
    runs.add("adl", 0.9, K=4)
    assert runs.table()[1]["adl"] == ["not run", ".", "90.00 % (90.00 to 90.00, 1)", "+0.00"]


def test_without_classes_runs_are_compared_by_their_loss(runs):
    runs.add("bp", 2.0, 1.5, name="loss")
    runs.add("adl", 2.0, 1.25, name="loss")
    _, rows = runs.table()
    assert rows["adl"] == ["1.2500 (1.2500 to 1.2500, 1)", "\u22120.2500"]
    assert "Validation loss" in (runs.folder / "comparison.md").read_text()


def test_the_same_runs_give_the_same_files_to_the_byte(runs):
    names = ("comparison.md", "comparison.csv", "curves.svg", "curves.png")
    for label in ("bp", "adl", "fdg"):
        runs.add(label, 0.1, 0.6, 0.9)
    runs.add("ddg", 0.1, status="diverged", ended_at_update=12, ended_in_epoch=1)
    runs.table()
    before = [(runs.folder / name).read_bytes() for name in names]
    runs.table()
    assert [(runs.folder / name).read_bytes() for name in names] == before
    svg = before[2].decode()
    assert all(f"<!-- {text} -->" in svg for text in ("K = 2", "bp", "adl", "fdg", "ddg", "diverged", "epoch"))


def test_runs_that_all_diverged_still_give_a_table_and_a_figure(runs):
    runs.add("fdg", status="diverged", ended_at_update=0, ended_in_epoch=0)
    assert runs.table()[1]["fdg"][0] == "**1 of 1 diverged**"
    assert (runs.folder / "curves.png").stat().st_size > 1000


def test_what_each_stage_held_is_a_table_of_its_own_if_it_was_measured(runs):
    runs.add("bp", 0.5)
    runs.add("adl", 0.5)
    summary = {"validation_accuracy": 0.5, "epochs": 1, "updates": 9}
    stages = [{"peak_tensor_bytes": n * 2**20, "peak_memory_bytes": 0, "staleness_mean": 0.0} for n in (3, 1.5)]
    (runs.made[1].folder / "summary.json").write_text(json.dumps({**summary, "stages": stages}))
    _, rows = runs.table()
    assert rows["MiB of tensors"] == ["stage 0", "stage 1", "mean", "largest"]
    assert rows["adl, K = 2, seed 0"] == ["3.0", "1.5", "2.2", "3.0"]
    assert "bp, K = 2, seed 0" not in rows
