"""K gloo processes against K stages in one process: the same bits."""

import functools
import os
from functools import partial

import pytest
import torch
from torch import nn

from adl_dist.optimizers import Muon
from adl_dist.schedule import METHODS
from tests.support.commands import assert_same
from tests.support.ranks import RanksFailed, run_ranks
from tests.support.runs import nan_inputs, toy_trainer, train
from tests.support.tiers import slow
from tests.support.toys import UNET_BALANCE, FixedImages, batch_norm_net, tuple_net, unet
from tests.support.user_code import At, fail
from tests.support.values import QUIET, SILENT

pytestmark = pytest.mark.ranks

# The float64 runs are those of which test_equality.py shows that they follow the equations.
CASES = [
    *((M, {}) for M in (1, 2, 3, 4)),
    (2, {"dtype": torch.float64}),
    *((3, {"method": name, "dropout": 0.3}) for name in METHODS if name not in ("adl", "interleaved")),
    (2, {"options": {"weights": "recompute"}, "dropout": 0.3}),
    (2, {"options": {"order": "backward_first", "reduction": "sum", "lr_clock": "global"}}),
    (3, {"method": "gpipe", "options": {"recompute": "except_last"}, "dropout": 0.3}),
    (1, {"method": "dsp", "options": {"activation_queue": 2}}),
    (1, {"method": "dgl", "options": {"head": "linear"}}),
    (2, {"method": "dni", "options": {"head_sees_target": True, "head_delay": 1}, "clip_norm": 0.3}),
    (2, {"dropout": 0.3, "shuffle": True}),
    (2, {"channels_last": True}),
    (2, {"optimizer": partial(Muon, lr=0.02), "clip_norm": 0.3, "non_finite": "skip", "plant": nan_inputs}),
    (3, {"method": "paci", "non_finite": "skip", "plant": nan_inputs}),
    (1, {"options": {"mitigation": ["discount", "spike", "predict", "delay_compensation"]}, "dropout": 0.3}),
    (3, {"method": "2bw", "options": {"mitigation": ["error_feedback"]}}),
    (2, {"options": {"mitigation": ["predict"], "flush_epochs": 1}}),
    (3, {"options": {"split_backward": True, "delay": "third"}, "dropout": 0.3}),
    (2, {"options": {"split_backward": True, "delay": "third", "mitigation": ["predict", "spike"]}}),
    *((3, {"method": name, "options": {"split_backward": True}}) for name in ("gpipe", "fr", "2bw")),
    (2, {"options": {"split_backward": True}, "clip_norm": 0.3, "non_finite": "skip", "plant": nan_inputs}),
]
ADL = CASES[:4]  # M = 1 .. 4

LOWERED, NARROW = {"autocast": torch.bfloat16}, {"codec": "bf16"}
LOWER_PRECISION = [
    (2, {**NARROW, "dropout": 0.3}),
    (1, {**NARROW, "method": "fr", "channels_last": True}),
    (2, {**LOWERED, **NARROW}),
    (3, {**LOWERED, "method": "2bw"}),
    (2, {**LOWERED, "method": "gpipe", "options": {"recompute": "except_last"}, "dropout": 0.3}),
    (2, {**LOWERED, **NARROW, "method": "dni", "channels_last": True}),
    (2, {"codec": "int8", "channels_last": True, "non_finite": "skip", "plant": nan_inputs}),
    (3, {"codec": "int4", "gradient_codec": "int8", "options": {"split_backward": True, "delay": "third"}}),
    (2, {**LOWERED, "codec": "int8", "gradient_codec": "int4", "method": "dgl", "options": {"head": "linear"}}),
]

# Over the cuts of this network go the input itself, a tensor for three stages, booleans, and shapes without a byte.
UNET = {"model": unet, "balance": UNET_BALANCE, "num_samples": 11}
RELAYED = [
    (2, {**UNET, "dtype": torch.float64}),
    (2, {**UNET, "codec": "int8"}),
    *((M, {**UNET, "method": name}) for name, M in (("adl", 1), ("bp", 2), ("dsp", 1))),
]


def train_all(K, cases):
    return [train(K, M, **{"dtype": torch.float32, "epochs": 2, **options}) for M, options in cases]


RUNS = {
    "2": (2, ADL),
    "3 all": (3, CASES),
    "3 in lower precision": (3, LOWER_PRECISION),
    "4": (4, ADL),
    "4 with tensors for several stages": (4, RELAYED),
}
SLOW_RUNS = [slow(2, CASES, id="2 all"), slow(4, CASES, id="4 all")]


@pytest.mark.parametrize(("K", "cases"), [*(pytest.param(*run, id=name) for name, run in RUNS.items()), *SLOW_RUNS])
def test_k_processes_equal_one_process_bit_for_bit(K, cases):
    by_rank, in_one_process = run_ranks(K, train_all, K, cases, timeout_seconds=110), train_all(K, cases)
    for rank in range(K):
        for case, (state, summary), (expected, in_one) in zip(cases, by_rank[rank], in_one_process, strict=True):
            assert state.keys() == expected.keys()
            assert [n for n in expected if not torch.equal(state[n], expected[n])] == [], f"{case} rank {rank}"
            for figure in ("validation_loss", "validation_accuracy", "updates", "skipped_updates"):
                assert summary[figure] == in_one[figure], f"{case} rank {rank}"
            staleness, expected_staleness = (
                [(s["staleness_mean"], s["staleness_max"]) for s in run["stages"]] for run in (summary, in_one)
            )
            assert staleness == expected_staleness


# K, P, v and further options; K = 3 leaves the second process one stage, and both ends of the pipeline the first.
SHARED = [
    (4, 2, 2, {"method": "interleaved"}),
    (3, 2, 2, {"method": "interleaved", "shuffle": True}),
    (7, 3, 3, {"method": "interleaved", "balance": [1] * 7}),
]


def train_shared(K, v, options):
    options = {"options": {"stages_per_process": v}, "dropout": 0.3, "epochs": 2, **options}
    return [train(K, M, dtype, **options) for M, dtype in ((1, torch.float32), (4, torch.float64), (5, torch.float32))]


@pytest.mark.parametrize(("K", "P", "v", "options"), SHARED)
def test_processes_of_several_stages_equal_one_bit_for_bit(K, P, v, options):
    by_rank, in_one_process = (
        run_ranks(P, train_shared, K, v, options, timeout_seconds=110),
        train_shared(K, v, options),
    )
    for of_rank in by_rank:
        for (state, summary), (expected, in_one) in zip(of_rank, in_one_process, strict=True):
            assert_same(state, expected)
            assert [stage["stage"] for stage in summary["stages"]] == list(range(K))
            assert summary["validation_loss"] == in_one["validation_loss"]


def a_bug_on_stage_1():
    model = batch_norm_net()
    model[4] = At(5, fail)
    toy_trainer(M=4, model=model, timeout_seconds=20).fit(FixedImages(32), epochs=1, batch_size=8, monitoring=QUIET)


def a_head_where_none_can_be():
    trainer = toy_trainer(M=4, method="dgl", model=tuple_net(), timeout_seconds=20)
    trainer.fit(FixedImages(16), epochs=1, batch_size=8, monitoring=QUIET)


def different_jobs():
    return train(2, 1 + int(os.environ["RANK"]), torch.float32)


@pytest.mark.parametrize(
    ("body", "cause", "victim", "message"),
    [
        (a_bug_on_stage_1, "cause-rank1", "victim-rank0", "a bug of the user's"),
        (a_head_where_none_can_be, "cause-rank0", "cause-rank1", "expected one tensor [B, C, H, W] or [B, C]"),
    ],
)
def test_every_rank_knows_the_cause_of_a_failure_first(body, cause, victim, message):
    with pytest.raises(RanksFailed) as failure:
        run_ranks(2, body)
    text = str(failure.value)
    assert "still ran" not in text
    assert text.index(cause) < text.index(victim)
    assert message in text[: text.index(victim)]
    assert message in text[text.index(victim) :], "through the control plane, or because it finds the same"


def different_models():
    model = batch_norm_net()
    model[-1][-1] = torch.nn.Linear(4, 5 + int(os.environ["RANK"]))
    return train(2, 1, torch.float32, model=lambda: model)


def unseeded_models():
    return train(2, 1, torch.float32, model=lambda: batch_norm_net(seed=int(os.environ["RANK"])))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (different_jobs, r"were not given the same job: method.accumulation_steps is . here and . there"),
        (different_models, r"were not given the same job: model 6.2.weight is \[., 4\] here and \[., 4\] there"),
        (
            unseeded_models,
            r"do not begin with the same weights: the initial 0.0.weight differs; call",
        ),
    ],
)
def test_ranks_that_differ_refuse_to_start_and_say_in_what(body, message):
    with pytest.raises(RanksFailed, match=message):
        run_ranks(2, body)


def weights_of_a_checkpoint(checkpoint, run_dir):
    """Load, then continue there: the ranks' own initial weights, of other seeds, mean nothing."""
    trainer = toy_trainer(2, 2, model=batch_norm_net(seed=int(os.environ["RANK"])))
    trainer.load_checkpoint(checkpoint)
    loss = trainer.evaluate(FixedImages(8), batch_size=4)["validation_loss"]
    again = toy_trainer(2, 2, model=batch_norm_net(seed=2 + int(os.environ["RANK"])))
    summary = again.fit(FixedImages(16), epochs=2, batch_size=8, run_dir=run_dir, monitoring=SILENT)
    return loss, summary["updates"]


def test_ranks_with_weights_of_a_checkpoint_need_no_common_seed(tmp_path):
    trainer = toy_trainer(2, 2)
    trainer.fit(FixedImages(16), epochs=1, batch_size=8, run_dir=tmp_path, monitoring=SILENT)
    expected = trainer.evaluate(FixedImages(8), batch_size=4)["validation_loss"]
    (checkpoint,) = (tmp_path / "checkpoints").iterdir()
    found = run_ranks(2, weights_of_a_checkpoint, str(checkpoint), str(tmp_path))
    assert found == [(expected, 4)] * 2


def evaluated_first(num_samples, last=nn.Identity):
    """Evaluate, when no stage knows what micro-batches training will have, and train then."""
    trainer = toy_trainer(2, 1, model=nn.Sequential(*batch_norm_net(), last()), balance="even")
    trainer.evaluate(FixedImages(8), batch_size=4)
    return trainer.fit(FixedImages(num_samples), epochs=1, batch_size=4, monitoring=SILENT)["updates"]


@pytest.mark.parametrize("num_samples", [9, 11])
def test_a_small_last_micro_batch_may_come_after_an_evaluation(num_samples):
    assert run_ranks(2, evaluated_first, num_samples) == [3, 3]


def test_one_sample_that_cannot_be_normalised_is_told_then():
    told = r"holds 1 sample, and the model .*Expected more than 1 value per channel.*another train.batch_size"
    with pytest.raises(RanksFailed, match=told):
        run_ranks(2, evaluated_first, 9, functools.partial(nn.BatchNorm1d, 5))
