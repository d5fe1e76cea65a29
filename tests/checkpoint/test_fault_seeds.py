"""Runs that are killed, fail to save, and are started again: a few of the 10,000 seeds of ``make test-faults``."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from adl_dist.checkpoint import layout, state
from adl_dist.control import worker
from adl_dist.optim import fast_forward
from adl_dist.report import recorder
from tests.support.kill import Command
from tools.faults.simulation import SEEDS_PER_JOB, simulate, undisturbed
from tools.kill import run
from tools.kill.deck import UPDATES_PER_EPOCH, draw

SEEDS = 40


@pytest.mark.parametrize("first", range(0, SEEDS, SEEDS_PER_JOB))
def test_a_disturbed_run_ends_undisturbed_or_says_why(first: int) -> None:
    """A run that was disturbed ends as the undisturbed one or with an error that says why."""
    for seed in range(first, first + SEEDS_PER_JOB):
        story = simulate(seed)
        assert not story.wrong, "\n".join(story.lines)


def test_a_seed_tells_the_same_story_twice() -> None:
    first, second = simulate(3), simulate(3)
    assert [anonymous(line) for line in first.lines] == [anonymous(line) for line in second.lines]
    assert len(first.lines) > 3


def anonymous(line: str) -> str:
    """Without the name of the temporary folder."""
    return " ".join(word for word in line.split() if "adl-dist-faults-" not in word)


# --- bugs that it must find ------------------------------------------------------------------------------------------


def no_learning_rates(schedule: Any, updates: int) -> None:
    fast_forward(schedule, 0)


def one_update_ahead(self: Any, path: str, update: int, load: Any = worker.LocalWorker._load) -> None:
    load(self, path, update + 1)


# What is planted instead of what, a job whose seeds find it, and what they say.
BUGS: dict[str, tuple[tuple[Any, str, Any], int, str]] = {
    "optimizer state is not read back": (
        (state, "restore_optimizer", lambda stage, tensors, values: None),
        0,
        r"^weights: (?!.*learning_rate)",
    ),
    "the learning rate starts again": ((worker, "fast_forward", no_learning_rates), 0, r"'train/learning_rate'"),
    "a resumed run counts its updates from one too many": (
        (worker.LocalWorker, "_load", one_update_ahead),
        0,
        r"'train/learning_rate'",
    ),
    "records of updates that are made again are kept": (
        (recorder, "_update_of", lambda line: -1),
        0,
        r"^metrics: .*'train/loss', \d, \d, 1\)",  # for the second time
    ),
    "checksums are not compared": ((layout, "verify", layout.read_manifest), 5, r"newest checkpoint: another"),
    "a checkpoint is copied to where it belongs instead of renamed": (
        (Path, "rename", lambda source, target: copied(source, target)),
        1,
        r"update-\d+ is damaged: .* nothing of what was planted explains",
    ),
}


def copied(source: Path, target: Path) -> Path:
    if not source.is_dir():
        return source.replace(target)
    shutil.copytree(source, target)
    shutil.rmtree(source)
    return target


@pytest.mark.parametrize("bug", BUGS)
def test_it_finds(bug: str) -> None:
    planted, job, said = BUGS[bug]
    first = job * SEEDS_PER_JOB
    undisturbed.cache_clear()
    with patch.object(*planted):
        assert any(re.search(said, simulate(seed).wrong) for seed in range(first, first + SEEDS_PER_JOB))
    undisturbed.cache_clear()


# --- tools.kill ------------------------------------------------------------------------------------------------------


def test_every_kill_that_comes_too_late_can_come_earlier() -> None:
    killings = draw(100, seed=0, start_seconds=8.0)
    assert {killing.update is None for killing in killings} == {True, False}
    for killing in killings:
        sooner = killing.earlier()
        if killing.update is None:
            assert (sooner.update, sooner.seconds) == (None, killing.seconds / 2)
        else:
            assert sooner.update in (killing.update - UPDATES_PER_EPOCH, killing.update % UPDATES_PER_EPOCH)


@pytest.mark.parametrize("code", [0, 1])
def test_a_run_that_fails_before_its_kill_is_not_too_late(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Ended(Command):
        def __init__(self, words: Any, *, folder: Path, start: Any) -> None:
            self.run_dir, self._output = folder / "run", [folder / "stdout", folder / "stderr"]
            for file in self._output:
                file.write_text("the reason")
            self._process = subprocess.Popen([sys.executable, "-c", f"exit({code})"])
            self._process.wait()

    monkeypatch.setattr(run, "Command", Ended)
    outcome = run.kill(draw(1, seed=0, start_seconds=8.0)[0], tmp_path / "run", None)  # type: ignore[arg-type]
    assert outcome is None if code == 0 else "it failed before" in outcome.wrong and "the reason" in outcome.wrong
