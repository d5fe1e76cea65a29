"""A measured cut across processes: one rank measures, all cut alike, and a failed measurement ends all of them."""

import json
import shutil

import pytest

from tests.support.commands import assert_same, in_process, weights_of, words
from tests.support.ranks import command_on_ranks

pytestmark = pytest.mark.ranks


def train(run_dir, *overrides, processes):
    command = words(run_dir, "partition.balance=auto", *overrides, processes=processes)
    return command_on_ranks(2, *command) if processes else in_process(*command)


def test_all_ranks_cut_where_one_has_measured(tmp_path):
    outcome = train(tmp_path / "ranks", "partition.links=auto", processes=True)
    assert outcome.code == 0, outcome.err
    assert "measured cut: stage 0 stem" in outcome.out
    assert "links between stages: " in outcome.out
    kept = json.loads((tmp_path / "ranks" / "links.json").read_text())
    ((bandwidth, latency),) = kept["2 stages in 2 processes"]
    assert bandwidth > 1e5
    assert 0 < latency < 1
    units = json.loads((tmp_path / "ranks" / "profile.json").read_text())["units"]
    assert {"stem.conv", "layer1_0.conv1", "layer3_0.conv2", "head.fc"} <= {unit["name"] for unit in units}
    (tmp_path / "alone").mkdir()
    shutil.copy(tmp_path / "ranks" / "profile.json", tmp_path / "alone")
    assert train(tmp_path / "alone", processes=False).code == 0
    assert_same(weights_of(tmp_path, "ranks"), weights_of(tmp_path, "alone"))
