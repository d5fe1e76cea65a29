"""The table and the figure of a comparison, on run folders whose numbers are made up."""

import csv
import json
import math
from dataclasses import asdict

import pytest
import yaml

from adl_dist.report import curves
from adl_dist.report.comparison import compare, write_comparison
from adl_dist.report.page import write_page
from adl_dist.report.runs import KEYS, measure_of, read_runs
from adl_dist.stage import Precision
from adl_dist.stage_options import GradientPolicy
from tests.support.commands import in_process, shows

EPOCHS = 3


class Runs:
    """Makes run folders as a trainer leaves them."""

    def __init__(self, folder):
        self.folder, self.made = folder, []

    def add(self, method, *values, K=2, M=1, seed=0, name="accuracy", ended=None, diverged=None, **more):
        """``values``: of validation, after each epoch; ``diverged``: update and epoch."""
        path = self.folder / f"run{len(self.made)}"
        path.mkdir()
        lines = [{"name": f"validation/{name}", "value": v, "update": 9 * e, "epoch": e} for e, v in enumerate(values)]
        (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        if diverged:
            (path / "diverged.json").write_text(json.dumps(dict(zip(("update", "epoch"), diverged, strict=True))))
        elif ended is not False:
            summary = {f"validation_{name}": values[-1], "epochs": EPOCHS, "updates": 9 * EPOCHS}
            (path / "summary.json").write_text(json.dumps({**summary, "stages": []}))
        partition = {"num_stages": K, **more.pop("partition", {})}
        settings = {"name": method, "accumulation_steps": M, **more.pop("settings", {})}
        train = {"epochs": EPOCHS, "max_updates": None}
        config = {"method": settings, "partition": partition, "train": train, "seed": seed, "run_dir": str(path)}
        (path / "config.yaml").write_text(yaml.safe_dump({**config, **more}))
        self.made.append(path)

    def table(self, *, draws=False):
        with pytest.MonkeyPatch.context() as patch:
            if not draws:
                patch.setattr(curves, "draw_curves", lambda *_: None)
                patch.setattr(curves, "save_figure", lambda _, path: path.touch())
            write_comparison(self.folder, read_runs(self.made), command="adl-dist train experiment=toy")
        lines = (self.folder / "comparison.md").read_text().splitlines()
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
        return rows[0], {row[0]: row[1:] for row in rows[2:]}


@pytest.fixture
def runs(tmp_path):
    return Runs(tmp_path)


def test_a_row_has_median_range_seeds_and_difference_to_bp(runs):
    for seed, value in enumerate((0.95, 0.91, 0.92)):
        runs.add("adl", 0.1, value, seed=seed)
        runs.add("bp", 0.1, value + 0.01, seed=seed)
    head, rows = runs.table()
    assert head == ["method", "K = 2", "to bp"]
    assert rows["adl"] == ["92.00 % (91.00 to 95.00, 3)", "\u22121.00"]


def test_equal_runs_count_once_and_without_bp_no_column_is_its(runs):
    """Equal settings of a script do not make equal runs."""
    for value, seed in ((0.9, 0), (0.9, 0), (0.9, 1), (0.7, 1)):
        runs.add("adl", value, seed=seed)
    text = compare(runs.made)
    labels = [f"| adl ({run}) | {value}.00 % " for run, value in (("run0", 90), ("run2", 90), ("run3", 70))]
    shows(text, ["3 runs, seeds 0, 1", *labels, "| K = 2  "])
    shows(text, [f"{runs.made[1]} has the settings and results of {runs.made[0]}; counted once"])


def test_runs_of_equal_settings_are_told_apart_by_their_folders(runs):
    """Also in the rows, and with their other seeds: a median over the seeds would be one of two models."""
    for loss, seed in ((0.5, 0), (0.4, 1), (0.3, 1)):
        runs.add("adl", 2.0, 1.0, loss, seed=seed, name="loss")
    shows(compare(runs.made), ["| adl (run0), K = 2, seed 0 ", "| adl (run1), K = 2, seed 1 |", "| adl (run2) "])


def test_bp_comes_first_and_others_are_compared_with_their_m(runs):
    for method, value, M in (("fdg", 0.9, 1), ("bp", 0.9, 4), ("adl", 0.9, 4), ("bp", 0.7, 1), ("adl", 0.8, 2)):
        runs.add(method, value, M=M)
    _, rows = runs.table()
    differences = {"bp M=4": ".", "bp": ".", "fdg": "+20.00", "adl M=4": "+0.00", "adl M=2": "\u221210.00"}
    assert [(label, row[1]) for label, row in rows.items()] == list(differences.items())


def test_a_row_is_named_by_all_that_tells_the_runs_apart(runs):
    """But not by what follows from a class."""
    sgd, adam = {"name": "SGD", "lr": 0.1, "momentum": 0.9}, {"name": "Adam", "lr": 0.003, "eps": 1e-8}
    for optimizer, every in ((sgd, None), (sgd | {"lr": 0.2}, None), (adam, None), (adam, 40)):
        runs.add("adl", 0.9, optimizer=optimizer, checkpoint_every_updates=every)
    _, rows = runs.table()
    of_sgd, of_adam = "optimizer.lr={} optimizer.name=SGD", "optimizer.lr=0.003 optimizer.name=Adam"
    every = "runtime.checkpoint_every_updates=40"
    labels = [of_sgd.format(0.1), of_sgd.format(0.2), of_adam, f"{every} {of_adam}"]
    assert [*rows] == [f"adl {label}" for label in labels]


def test_settings_of_a_script_have_the_names_of_a_commands():
    of_script = {*Precision().settings, *asdict(GradientPolicy())} - {"dtype"}
    assert of_script <= KEYS.keys()


def test_a_row_has_no_setting_that_a_script_does_not_record(runs):
    """Settings of both kinds have the names of the command line, and each kind of run has a row of its own."""
    for seed, more in enumerate(({"runtime": {"trace": True, "codec": "none"}, "data": {"_target_": "mine"}}, {})):
        runs.add("adl", 0.9, seed=seed, **more)
    script = yaml.safe_load((runs.made[1] / "config.yaml").read_text())
    script["num_stages"] = script.pop("partition")["num_stages"]
    for codec, of_setting in (("int8", " runtime.codec={}"), ("none", "")):
        (runs.made[1] / "config.yaml").write_text(yaml.safe_dump(script | {"codec": codec}))
        labels = [f"adl{of_setting.format('none')}", f"adl (script){of_setting.format(codec)}"]
        assert [*runs.table()[1]] == labels
        write_page(runs.made, page := runs.folder / "page.html")
        assert (">runtime.codec</td>" in page.read_text()) == (codec == "int8")
        assert ">runtime.trace</td>" not in page.read_text()


def test_runs_are_compared_by_the_metric_that_tells_the_best(runs):
    for method, value in (("bp", 0.5), ("adl", 0.25)):
        runs.add(method, 0.1, value, name="miou", runtime={"best_metric": "validation_miou"})
    _, rows = runs.table()
    assert rows["adl"] == ["0.2500 (0.2500 to 0.2500, 1)", "\u22120.2500"]
    assert "Validation miou" in (runs.folder / "comparison.md").read_text()
    for path in runs.made:  # which have an accuracy, too
        config = yaml.safe_load((path / "config.yaml").read_text())
        config["runtime"]["best_metric"] = "validation_loss"
        (path / "config.yaml").write_text(yaml.safe_dump(config))
        line = {"name": "validation/accuracy", "value": 0.5, "update": 9, "epoch": 1}
        (path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    assert measure_of(read_runs(runs.made)).name == "validation/loss"
    written = csv.DictReader((runs.folder / "comparison.csv").read_text().splitlines())
    assert [row["validation_miou"] for row in written] == ["0.5", "0.25"]


def test_options_of_the_method_are_in_a_label_unless_usual(runs):
    for weights in ("stash", "latest"):
        runs.add("adl", 0.5, M=4, settings={"weights": weights})
    assert list(runs.table()[1]) == ["adl M=4", "adl M=4 weights=latest"]


def test_runs_that_diverged_are_counted_but_not_in_the_median(runs):
    runs.add("bp", 0.9)
    runs.add("fdg", 0.5, math.nan, seed=0, diverged=(11, 1))
    runs.add("fdg", 0.5, 0.8, seed=1)
    runs.add("ddg", seed=0, diverged=(3, 0))
    runs.add("ddg", seed=1, ended=False)
    _, rows = runs.table()
    assert rows["fdg"][0] == "80.00 % (80.00 to 80.00, 1), **1 of 2 diverged**"
    assert rows["ddg"][0] == "**1 of 2 diverged**, **1 of 2 unfinished**"
    written = (runs.folder / "comparison.csv").read_text().splitlines()
    assert len(written) == 1 + 5
    assert sum(",diverged,11,1,,0.5," in line for line in written) == 1


def test_without_classes_runs_are_compared_by_their_loss(runs):
    runs.add("bp", 2.0, 1.5, name="loss")
    runs.add("adl", 2.0, 1.25, name="loss")
    _, rows = runs.table()
    assert rows["adl"] == ["1.2500 (1.2500 to 1.2500, 1)", "\u22120.2500"]
    assert "Validation loss" in (runs.folder / "comparison.md").read_text()


def test_the_figure_names_the_methods_and_what_diverged(runs):
    """That the same runs give the same bytes is shown by tests/cli/test_sweep.py."""
    for label in ("bp", "adl", "fdg"):
        runs.add(label, 0.1, 0.6, 0.9)
    runs.add("ddg", 0.1, diverged=(12, 1))
    runs.table(draws=True)
    svg = (runs.folder / "curves.svg").read_text()
    shows(svg, [f"<!-- {text} -->" for text in ("K = 2", "bp", "adl", "fdg", "ddg", "diverged", "epoch")])


def test_the_table_for_programs_has_best_loss_and_most_memory(runs):
    runs.add("adl", 2.0, 1.25, 1.5, name="loss")
    stages = [{"peak_memory_bytes": n, "peak_tensor_bytes": n - 1, "staleness_mean": 0.0} for n in (7, 9)]
    summary = {"validation_loss": 1.5, "epochs": EPOCHS, "updates": 9, "stages": stages}
    (runs.made[0] / "summary.json").write_text(json.dumps(summary))
    runs.table()
    with (runs.folder / "comparison.csv").open() as file:
        (row,) = csv.DictReader(file)
    assert (row["best_validation_loss"], row["best_validation_accuracy"]) == ("1.25", "")
    assert (row["peak_memory_bytes"], row["peak_tensor_bytes"]) == ("9", "8")


def test_a_run_is_compared_with_bp_of_its_own_model(runs):
    for depth, bp, adl in ((20, 0.91, 0.9), (110, 0.94, 0.938)):
        runs.add("bp", bp, model={"depth": depth})
        runs.add("adl", adl, model={"depth": depth})
    runs.add("adl", 0.5, model={"depth": 56})
    rows = runs.table()[1]
    shown = [rows[f"adl model.depth={depth}"][1] for depth in (20, 110, 56)]
    assert shown == ["\u22121.00", "\u22120.20", "."]


def test_compare_takes_the_runs_below_a_folder_and_writes_there(runs):
    runs.add("bp", 0.9)
    runs.add("adl", 0.8)
    done = in_process("compare", str(runs.folder))
    assert (done.code, done.err) == (0, "")
    shows(done.out, ["| bp ", "| adl ", "\u221210.00", f"adl-dist compare {runs.folder}"])
    assert done.out.startswith((runs.folder / "comparison.md").read_text())
