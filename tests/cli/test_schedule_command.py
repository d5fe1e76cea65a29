"""``adl-dist schedule`` as a user calls it."""

import gc
import json
import sys

import pytest

from adl_dist.cli.schedule import read_costs
from adl_dist.schedule import Costs
from tests.support.commands import as_command, in_process, shows

SMALL = ("method=adl", "partition.num_stages=3", "method.accumulation_steps=2")


def done(*words):
    outcome = in_process("schedule", *words)
    assert (outcome.code, outcome.err) == (0, "")
    return outcome.out


def test_the_table_of_ticks_is_printed_and_costs_add_times(tmp_path):
    lines = done(*SMALL).splitlines()
    assert "10 micro-batches" in lines[0]
    assert " ".join(next(line for line in lines if line.startswith("stage 2 ")).split()[2:7]) == "F0 B0 F1 B1 U0"
    file = tmp_path / "costs.yaml"
    file.write_text("forward: 1\nbackward: [2, 2, 1]\nlink: 0.5\n")
    assert read_costs(str(file), num_stages=3) == Costs(forward=[1, 1, 1], backward=[2, 2, 1], link=[0.5, 0.5])
    told = done(*SMALL, "--costs", str(file))
    shows(told, ["time per update  6\n", "bubble           11.1%", "speed-up         3.33", "stage 2 66.7%"])


def test_json_is_one_object_and_a_picture_a_file(tmp_path):
    out = ("--out", str(tmp_path / "a.svg"))
    facts = json.loads(done(*SMALL, "--json", *out, "--micro-batches", "4", "--costs", "{forward: 1, backward: 2}"))
    assert (facts["num_stages"], facts["accumulation_steps"], facts["num_micro_batches"]) == (3, 2, 4)
    assert (facts["method"]["name"], facts["method"]["weights"]) == ("adl", "stash")
    assert [stage["staleness_by_offset"] for stage in facts["stages"]] == [[2, 2], [1, 1], [0, 0]]
    assert [stage["graphs"] for stage in facts["stages"]] == [5, 3, 1]
    assert facts["ticks"][2]["3"] == ["F1", "B1", "U0"]
    assert facts["speed"]["speed_up"] == pytest.approx(3)
    assert "speed" not in json.loads(done(*SMALL, "--json"))
    assert (tmp_path / "a.svg").read_text().startswith("<svg")


def test_a_schedule_is_printed_without_torch():
    code = "import sys; sys.modules['torch'] = None; from adl_dist.cli import main; main(['schedule'])"
    outcome = as_command(sys.executable, "-c", code)
    assert (outcome.code, outcome.err) == (0, "")


def test_a_caller_of_main_keeps_its_garbage_collector():
    before = gc.get_freeze_count()
    gc.disable()
    try:
        done(*SMALL)
        assert (gc.isenabled(), gc.get_freeze_count()) == (False, before)
    finally:
        gc.enable()
