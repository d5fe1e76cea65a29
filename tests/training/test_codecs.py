"""Coded messages in training: they follow the equations with the same rounding, runs resume, figures are reported."""

import functools

import pytest
import torch

import adl_dist
from adl_dist.report import final_table
from tests.support.coded import crossing
from tests.support.commands import assert_same
from tests.support.equations import EQUATIONS, modules_by_the_equations
from tests.support.kill import records
from tests.support.oracle import Versions
from tests.support.runs import BALANCE, MOMENTUM, WEIGHT_DECAY, toy_trainer, train
from tests.support.slices import cut
from tests.support.toys import FixedImages, batch_norm_net
from tests.support.values import QUIET


class ByVersion(Versions):
    """Adds up first what has met one version, as a run does that keeps versions apart: float32 shows the order."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.sums = {}

    def accumulate(self, gradient, version):
        before = self.sums.get(version)
        self.sums[version] = gradient if before is None else {n: g + gradient[n] for n, g in before.items()}

    def update(self, lr):
        for version in sorted(self.sums, key=lambda v: (v != self.updates, v)):  # the present one first
            super().accumulate(self.sums[version])
        self.sums = {}
        super().update(lr)


def by_the_equations(K, M, name, codec, gradient_codec):
    delays, weights = EQUATIONS[name]
    modules = cut(batch_norm_net(), num_stages=K, balance=BALANCE[K])
    how = {"dtype": torch.float32, "crossing": functools.partial(crossing, codec, gradient_codec)}
    if weights == "stash":
        how["versions"] = lambda k, module: ByVersion(module, MOMENTUM, WEIGHT_DECAY)
    return modules_by_the_equations(modules, M, delays(K), weights, **how)


CASES = [
    (3, 1, "adl", "int8", "bf16", False),
    (3, 2, "adl", "none", "int4", False),
    (3, 3, "adl", "int4", "int8", True),
    (3, 2, "fr", "int8", None, False),
]


@pytest.mark.parametrize(("K", "M", "name", "codec", "gradient_codec", "split"), CASES)
def test_coded_training_equals_the_coded_equations_bit_for_bit(K, M, name, codec, gradient_codec, split):
    """No tolerance would do: what rounds to another level is off by a level."""
    expected = by_the_equations(K, M, name, codec, gradient_codec or codec)
    options = {"split_backward": True} if split else {}
    state, _ = train(K, M, torch.float32, method=name, options=options, codec=codec, gradient_codec=gradient_codec)
    assert_same(state, expected)


def test_a_codec_tolerates_stages_to_which_no_gradient_goes():
    """Two frozen stages: messages upstream hold nothing, on an edge that is there."""

    def model():
        net = batch_norm_net()
        net[:2].requires_grad_(False)
        return net

    _, summary = train(3, 2, torch.float32, model=model, balance=[1, 1, 5], codec="int8", epochs=1)
    sent = {(k, edge["what"]): edge["bytes"] > 0 for k, s in enumerate(summary["stages"]) for edge in s["coded"]}
    assert sent == {(0, "act"): True, (1, "act"): True, (1, "grad"): False, (2, "grad"): False}


def test_error_and_bytes_of_each_edge_are_recorded_and_shown(tmp_path):
    checkpoints = adl_dist.CheckpointPolicy(every_updates=2)
    of_fit = {"epochs": 2, "batch_size": 4, "run_dir": tmp_path, "monitoring": QUIET, "checkpoints": checkpoints}
    summary = toy_trainer(2, 2, codec="int8").fit(FixedImages(16), val_dataset=FixedImages(6, seed=1), **of_fit)
    by_stage = [{edge["what"]: edge for edge in stage.get("coded", ())} for stage in summary["stages"]]
    assert [list(edges) for edges in by_stage] == [["act"], ["grad"]]
    for edges, (what, most) in zip(by_stage, (("act", 0.01), ("grad", 0.02)), strict=True):
        edge = edges[what]
        assert 0 < edge["error"] < most
        assert edge["bytes"] < 0.28 * edge["plain_bytes"]
    for name, stage in (("act", 0), ("grad", 1)):
        of_edge = [r for r in records(tmp_path) if r["name"] == f"stage/{name}_coding_error"]
        assert {r["stage"] for r in of_edge} == {stage}
        assert [r["update"] for r in of_edge] == [1, 3, 5, 7], "one for each segment"
    shown = final_table(summary)
    assert "0 -> 1" in shown
    assert "1 -> 0" in shown
    assert "relative error" in shown
    by_stage[0]["act"].update(bytes=250, plain_bytes=1000)
    (line,) = [line for line in final_table(summary).splitlines() if line.startswith("0 -> 1")]
    assert line.endswith(" 25.0%")
