"""Runs that are killed, fail to save, and are started again: a few of the 10,000 seeds of ``make test-faults``."""

import re
from unittest.mock import patch

import pytest

from adl_dist.checkpoint import layout, optimizer_state, storage
from adl_dist.control import worker
from adl_dist.optim import fast_forward
from adl_dist.report import recorder
from tools.faults.simulation import SEEDS_PER_JOB, simulate, undisturbed

SEEDS = 20


@pytest.mark.parametrize("first", range(0, SEEDS, SEEDS_PER_JOB))
def test_a_disturbed_run_ends_undisturbed_or_says_why(first):
    for seed in range(first, first + SEEDS_PER_JOB):
        story = simulate(seed)
        assert not story.wrong, "\n".join(story.lines)


def test_a_seed_tells_the_same_story_twice():
    first, second = ("\n".join(simulate(3).lines) for _ in range(2))
    temporary = r"\S*adl-dist-faults-\S*"
    assert re.sub(temporary, "", first) == re.sub(temporary, "", second)
    assert first.count("\n") > 2


# --- bugs that it must find ------------------------------------------------------------------------------------------


def from_the_first(schedule, updates):
    fast_forward(schedule, 0)


def one_update_ahead(self, path, update, load=worker.LocalWorker._load):
    load(self, path, update + 1)


def has_files(path):
    return bool(storage.names(path))


RATE, TWICE = "'train/learning_rate'", r"^metrics: .*'train/loss', \d, \d, 1\)"
# Where which name is replaced by what, a seed that finds it, and what it says.
BUGS = {
    "optimizer state is lost": (optimizer_state, "restore", lambda *_: None, 2, "^weights: (?!.*learning_rate)"),
    "the learning rate starts again": (worker, "fast_forward", from_the_first, 2, RATE),
    "updates are counted from one too many": (worker.LocalWorker, "_load", one_update_ahead, 2, RATE),
    "records of updates that are made again are kept": (recorder, "_place_of", lambda line: (-1, False), 5, TWICE),
    "checksums are not compared": (layout, "verify", layout.read_manifest, 1, "newest checkpoint: another"),
    "a checkpoint counts without its manifest": (
        layout,
        "is_complete",
        has_files,
        89,
        "manifest.json cannot be read",
    ),
}


@pytest.mark.parametrize("bug", BUGS)
def test_it_finds(bug):
    place, name, planted, seed, said = BUGS[bug]
    undisturbed.cache_clear()
    with patch.object(place, name, planted):
        assert re.search(said, simulate(seed).wrong)
    undisturbed.cache_clear()
