"""Several runs in one command: interrupted, continued, compared; what cannot be run is refused before any starts."""

import csv
import json
import signal
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from adl_dist.checkpoint import layout
from adl_dist.checkpoint.run_dir import make_folder
from adl_dist.cli import sweep
from adl_dist.cli.config.compose import compose_run
from adl_dist.cli.sweep import requested
from adl_dist.errors import ConfigError
from tests.support.commands import in_process, left_behind, shows, snapshot
from tests.support.kill import HOLD, Command

BP, WILD = 'sweep.variants.bp=["method=bp"]', 'sweep.variants.wild=["method=fdg","optimizer.lr=1e6"]'
SETTINGS = [
    *("model._target_=tests.support.kill.net_with_dropout", "data._target_=tests.support.kill.held_images"),
    *("train.batch_size=16", "train.epochs=3"),
    *("runtime.processes=false", "runtime.threads=1", "runtime.tensorboard=false", "runtime.report=false"),
]
WORDS = ["--multirun", BP, WILD, "seed=0,1", "sweep.jobs=1", *SETTINGS]
FIRST, SECOND = "bp/k2-seed0", "bp/k2-seed1"
pytestmark = pytest.mark.timeout(300)  # three runs start, each in seconds of its own


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """A sweep two of whose runs were there, interrupted in the third, and the same command again."""
    folder = tmp_path_factory.mktemp("sweep")
    run_dir = folder / "run"
    done = {FIRST: (["method=bp"], 0), "wild/k2-seed0": (["method=fdg", "optimizer.lr=1e6"], 2)}
    for name, (method, code) in done.items():
        assert in_process("train", *SETTINGS, *method, "seed=0", f"run_dir={run_dir / name}").code == code
    (folder / HOLD).touch()  # the other bp run comes as far as its third epoch
    with Command(WORDS, folder=folder) as command:
        assert command.run_dir == run_dir
        saved = run_dir / SECOND / "checkpoints"
        command.wait_for("a checkpoint", lambda: len(layout.complete(saved)) == 2)
        command.interrupt()
        code, message = command.finish(seconds=20), command.err
    (folder / HOLD).unlink()
    left = left_behind(folder, seconds=1)
    before = {name: snapshot(run_dir / name) for name in done}
    words = ["train", *WORDS, "sweep.jobs=2", f"run_dir={run_dir}"]
    told = {"code": code, "message": message, "left": left, "again": in_process(*words)}
    return SimpleNamespace(run_dir=run_dir, words=words, before=before, **told)


def test_an_interrupted_sweep_is_continued_by_the_same_command(swept):
    assert (swept.code, swept.left) == (128 + signal.SIGINT, [])
    shows(swept.message, ["interrupted", "the same command resumes"])
    assert swept.again.code == 0, swept.again
    parts = ["4 runs", "2 of them to do", "  bp/k2-seed1: accuracy ", "  wild/k2-seed1: diverged at update", "2/2"]
    shows(swept.again.out, parts)
    assert {name: snapshot(swept.run_dir / name) for name in swept.before} == swept.before
    shows((swept.run_dir / SECOND / sweep.LOG).read_text(), ["resumed from", "update-00000016"])


def test_a_complete_sweep_writes_the_comparison_and_runs_nothing(swept):
    before = snapshot(swept.run_dir)
    for name in ("comparison.md", "comparison.csv", "curves.svg", "curves.png"):
        (swept.run_dir / name).unlink()
    again = in_process(*swept.words)
    assert again.code == 0, again
    shows(again.out, ["0 of them to do"])
    assert snapshot(swept.run_dir) == before


def test_the_comparison_says_what_the_summaries_say(swept, tmp_path):
    """And ``adl-dist compare`` the same again; a run that diverges is a result."""
    with (swept.run_dir / "comparison.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["status"] for row in rows] == ["complete", "complete", "diverged", "diverged"]
    names = [(row["label"], row["num_stages"], row["seed"]) for row in rows[:2]]
    assert names == [("bp M=4 optimizer.lr=0.1", "2", seed) for seed in ("0", "1")]
    for row in rows[:2]:
        summary = json.loads((Path(row["folder"]) / "summary.json").read_text())
        for name in ("validation_accuracy", "validation_loss", "epochs", "updates", "seconds", "samples_per_second"):
            assert float(row[name]) == summary[name], name
        assert float(row["stage0_staleness_mean"]) == summary["stages"][0]["staleness_mean"]
    where = json.loads((swept.run_dir / "wild/k2-seed1/diverged.json").read_text())
    assert rows[-1]["ended_at_update"] == str(where["update"])
    text = (swept.run_dir / "comparison.md").read_text()
    shows(text, ["**2 of 2 diverged**", "adl-dist train --multirun", "seeds 0, 1", "torch"])
    done = in_process("compare", str(swept.run_dir / "bp"), str(swept.run_dir / "wild"), f"out={tmp_path / 'new'}")
    assert (done.code, done.err) == (0, "")
    for name in ("comparison.csv", "curves.svg", "curves.png"):
        assert (tmp_path / "new" / name).read_bytes() == (swept.run_dir / name).read_bytes(), name
    old, new = ([line for line in text.splitlines() if line.startswith("|")] for text in (swept.again.out, done.out))
    assert new == old


def test_runs_that_fail_are_named_and_the_others_run(tmp_path, monkeypatch):
    words, run_dir = [*SETTINGS, "train.max_updates=1"], tmp_path / "run"
    assert in_process("train", "seed=2", *words, f"run_dir={run_dir / 'adl-M4/k2-seed2'}").code == 0
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\ncase "$*" in *seed=0*) kill -9 $$;; esac\necho adl-dist: error: no luck; exit 3\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    outcome = in_process("train", "-m", "seed=0,1,2", *words, f"run_dir={run_dir}")
    assert outcome.code == 1, outcome
    log = run_dir / "adl-M4/k2-seed1" / sweep.LOG
    assert log.read_text() == "adl-dist: error: no luck\n"
    shows(outcome.out, ["adl-M4/k2-seed0: failed (killed by SIGKILL; see", f"failed (exit code 3; see {log})"])
    assert f"failed: adl-M4/k2-seed1, no luck; see {log}" in (run_dir / "comparison.md").read_text().splitlines()
    again = in_process("train", "-m", "seed=0,1,2", *words, f"run_dir={run_dir}")
    shows(again.out, ["2 of them to do"])  # the cause may have been fixed


def row_of(job):
    return job.folder.parent.name, job.config.partition.num_stages, job.config.seed


def test_two_sweeps_in_one_folder_are_refused(tmp_path):
    refused = pytest.raises(ConfigError, match=r"pid \d+ on .* runs a sweep here")
    with sweep.locked(tmp_path), refused, sweep.locked(tmp_path):
        pass
    with pytest.raises(BlockingIOError), sweep.locked(tmp_path):  # what blocks inside is not another sweep
        raise BlockingIOError
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file/run cannot be made: Not a directory; choose another run_dir"):
        make_folder(tmp_path / "file/run")


def test_a_variant_that_fixes_k_meets_the_seeds_not_other_ks():
    words = ["--multirun", "partition.num_stages=2,3", "seed=0,1", "runtime.processes=false"]
    words += ["sweep.variants={bp: ['method=bp','partition.num_stages=1'], fdg: ['method=fdg']}"]
    ran = [row_of(job) for job in requested(words).jobs]
    assert sorted(ran) == sorted([("bp", 1, 0), ("bp", 1, 1), *(("fdg", K, seed) for K in (2, 3) for seed in (0, 1))])


@pytest.mark.parametrize(
    ("processes", "at_once", "words", "most"),
    [
        ([2, 1, 1, 4, 1, 1, 1, 1, 1], None, [], [2, 3, 4, 4, 1, 2, 3, 4, 1]),  # cores in use when each one starts
        ([2, 1, 1, 4, 1], 2, [], [2, 3, 1, 5, 1]),
        ([8, 1, 1], None, [], [8, 1, 2]),  # more than there are, and so alone
        ([1, 1], None, ["runtime.device=cuda"], [1, 1]),
    ],
)
def test_as_many_runs_as_there_are_cores_for(processes, at_once, words, most, monkeypatch, tmp_path):
    """Whatever the widest of all needs: the others do not wait for it. All that run end at the same time."""
    running, in_use = [], []

    class Process:
        def __init__(self, child):
            self.cores, self.returncode = int(child.command[-1]), 0
            running.append(self)
            in_use.append(sum(process.cores for process in running))

        def poll(self):
            if running[:1] != [self]:
                return None
            running.remove(self)
            return 0

    monkeypatch.setattr(sweep, "num_cores", lambda: 4)
    monkeypatch.setattr(sweep, "start", Process)
    monkeypatch.setattr(sweep, "end_all", lambda _: None)
    config = {K: compose_run([f"partition.num_stages={K}", "runtime.threads=1", *words])[0] for K in set(processes)}
    jobs = [SimpleNamespace(config=config[K], program=[], overrides=[str(K)], folder=tmp_path) for K in processes]
    assert [code for _, code in sweep._run_here(jobs, at_once=at_once)] == [0] * len(processes)
    assert in_use == most


def test_a_launcher_that_ends_no_run_is_told(tmp_path, monkeypatch):
    swept = replace(requested(["-m", "seed=0,1", f"run_dir={tmp_path}"]), launcher=["hydra/launcher=basic"])
    monkeypatch.setattr(sweep.Plugins, "instance", Mock(side_effect=LookupError("no cluster")))
    with pytest.raises(ConfigError, match="basic has brought none of the runs to an end: no cluster"):
        sweep._submit(swept.jobs, swept)
