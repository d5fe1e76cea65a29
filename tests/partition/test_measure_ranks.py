"""A measured cut across processes: one rank measures, all cut alike, and a failed measurement ends all of them."""

import json
import re
import shutil

import pytest
import torch

from tests.support.commands import in_process, words
from tests.support.ranks import command_on_ranks

pytestmark = pytest.mark.ranks


def train(run_dir, *overrides, processes):
    command = words(run_dir, "partition.balance=auto", *overrides, processes=processes)
    return command_on_ranks(2, *command) if processes else in_process(*command)


def weights(run_dir, out):
    assert in_process("export", f"run_dir={run_dir}", f"out={out}").code == 0
    return torch.load(out, weights_only=True)


def test_all_ranks_cut_where_one_has_measured(tmp_path):
    outcome = train(tmp_path / "ranks", processes=True)
    assert outcome.code == 0, outcome.err
    assert "measured cut: [" in outcome.out
    assert len(json.loads((tmp_path / "ranks" / "profile.json").read_text())["units"]) == 30

    (tmp_path / "alone").mkdir()
    shutil.copy(tmp_path / "ranks" / "profile.json", tmp_path / "alone")
    assert train(tmp_path / "alone", processes=False).code == 0
    apart, together = weights(tmp_path / "ranks", tmp_path / "a.pt"), weights(tmp_path / "alone", tmp_path / "b.pt")
    assert all(torch.equal(apart[name], together[name]) for name in together)


def test_a_measurement_that_fails_ends_every_rank_with_one_line(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "profile.json").write_text("{}")
    line = train(tmp_path / "run", processes=True).refusal()
    assert re.search(r"profile\.json is not a profile .* remove it", line)
