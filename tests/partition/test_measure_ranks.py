"""A measured cut across processes: one rank measures, all cut alike, and a failed measurement ends all of them."""

import json
import re
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


def test_all_ranks_have_the_delays_that_one_has_found(tmp_path):
    delays = ("method.delay=auto", "method.split_backward=true", "method.accumulation_steps=2")
    outcome = train(tmp_path / "ranks", *delays, processes=True)
    assert outcome.code == 0, outcome.err
    assert "measured delays: [" in outcome.out
    (tmp_path / "alone").mkdir()
    shutil.copy(tmp_path / "ranks" / "profile.json", tmp_path / "alone")
    assert train(tmp_path / "alone", *delays, processes=False).code == 0
    found = [json.loads((tmp_path / run / "delays.json").read_text()) for run in ("ranks", "alone")]
    assert found[0] == found[1]
    assert_same(weights_of(tmp_path, "ranks"), weights_of(tmp_path, "alone"))


def test_a_measurement_that_fails_ends_every_rank_with_one_line(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "profile.json").write_text("{}")
    line = train(tmp_path / "run", processes=True).refusal()
    assert re.search(r"profile\.json is not a profile .* remove it", line)
