"""What is not finite: its group is applied in no stage, or the run stops. Clipping, stage by stage."""

import random

import pytest
import torch
from torch import nn

import adl_dist
from adl_dist.errors import ConfigError, DivergedError
from adl_dist.schedule import Pipeline
from adl_dist.stage import GradientPolicy
from adl_dist.stage.nonfinite import NonFiniteCheck, keep_buffers_finite
from adl_dist.stage.stats import StepStats
from tests.support.equations import EQUATIONS, assert_close, by_the_equations, differ
from tests.support.kill import records
from tests.support.runs import EPOCHS, SPOILT, SPOILT_PAIRS, infinite_gradient, nan_inputs, pick, toy_trainer, train
from tests.support.tiers import covering
from tests.support.toys import FixedImages
from tests.support.user_code import InfiniteLoss
from tests.support.values import QUIET, SILENT

SKIP = {"non_finite": "skip"}
NAN, INF = float("nan"), float("inf")

# --- Skipped in all stages alike ---------------------------------------------------------------------------

CASES = [("adl", 1), *((name, 3) for name in EQUATIONS)]
BY_DEFAULT = [("adl", 1), *((name, 3) for name in ("adl", "gpipe", "fr", "2bw"))]


@pytest.mark.parametrize(("name", "K"), covering(CASES, BY_DEFAULT))
def test_a_skipped_group_moves_no_weight_of_any_stage(name, K):
    """NaN in an input: the weights, all later ones and the running statistics are those of the equations."""
    delays, weights = EQUATIONS[name]
    state, summary = train(K, 2, torch.float64, method=name, plant=nan_inputs, **SKIP)
    skipping = {"skipped": SPOILT_PAIRS, "unseen": SPOILT}
    assert_close(state, by_the_equations(K, 2, delays(K), weights, **skipping))
    assert summary["skipped_updates"] == len(SPOILT_PAIRS) * EPOCHS


def test_an_infinite_gradient_of_the_last_stage_skips_its_group():
    """Though the loss is finite."""
    state, summary = train(2, 2, torch.float64, plant=infinite_gradient, epochs=1, **SKIP)
    assert_close(state, by_the_equations(2, 2, [2, 0], "stash", epochs=1, skipped=[2]))
    assert summary["skipped_updates"] == 1


def test_skipped_updates_are_recorded_with_their_reason(tmp_path, capsys):
    """And no figure of theirs is."""
    data = FixedImages(32)
    data.images[9] = NAN
    summary = toy_trainer(2, 4, **SKIP).fit(data, epochs=2, batch_size=8, run_dir=tmp_path, shuffle=False)
    written = records(tmp_path)
    skipped = [r for r in written if r["name"] == "train/skipped_updates"]
    assert [(r["update"], r["value"], r["why"]) for r in skipped] == [(u, 1, "the loss is nan") for u in (1, 5)]
    for name in ("train/loss", "train/accuracy", "train/learning_rate"):
        assert [r["update"] for r in written if r["name"] == name] == [0, 2, 3, 4, 6, 7]
    assert all(r["value"] == r["value"] for r in written)
    assert summary["skipped_updates"] == 2
    shown = capsys.readouterr().out
    assert shown.count("skipped 1 ") == 2, "of each epoch"
    assert "loss nan" not in shown


def test_a_run_that_stopped_at_a_fault_goes_on_over_it_with_skip(tmp_path):
    def run(max_updates=None, **options):
        data = FixedImages(32)
        data.images[20] = NAN
        length = {"epochs": 1, "batch_size": 8, "max_updates": max_updates}
        trainer = toy_trainer(2, 4, **options)
        return trainer.fit(data, **length, shuffle=False, run_dir=tmp_path, monitoring=SILENT)

    run(max_updates=1)
    with pytest.raises(DivergedError, match="stage 1: the loss is nan at update 2 "):
        run()
    summary = run(**SKIP)
    assert (summary["updates"], summary["skipped_updates"], summary["num_samples"]) == (4, 1, 24)


def test_more_skipped_updates_in_a_row_than_allowed_stop_the_run():
    trainer = toy_trainer(3, 4, loss_fn=InfiniteLoss(), max_skipped=3, **SKIP)
    told = r"stage 2: the loss is inf, and .*max_skipped=3\) updates in a row have been skipped at update 3 "
    with pytest.raises(DivergedError, match=told):
        trainer.fit(FixedImages(24), epochs=9, batch_size=12, monitoring=QUIET)  # two updates in an epoch


# --- What cannot be skipped --------------------------------------------------------------------------------


def test_an_infinite_gradient_upstream_only_stops_the_run():
    """Because others have applied theirs."""
    with pytest.raises(DivergedError, match=r"stage 1: the norm of the gradient is nan, though .* at update 2 "):
        train(3, 2, torch.float32, plant=infinite_gradient, **SKIP)


@pytest.mark.parametrize("name", ["dgl", "dni"])
def test_stages_with_heads_cannot_skip_in_all_stages(name):
    with pytest.raises(ConfigError, match=rf"GradientPolicy\(non_finite='skip'\) cannot skip .* method={name}"):
        GradientPolicy(**SKIP).check(Pipeline(adl_dist.method(name), 2))
    GradientPolicy(**SKIP).check(Pipeline(adl_dist.method(name), 1))


def test_an_update_without_a_target_that_counts_says_so():
    data = FixedImages(24)
    data.labels[8:16] = [-1] * 8
    trainer = toy_trainer(2, 4, loss_fn=nn.CrossEntropyLoss(ignore_index=-1))
    with pytest.raises(DivergedError, match=r"no target of this update counts, so the loss is nan at update 1 .*skip"):
        trainer.fit(data, epochs=1, batch_size=8, shuffle=False, monitoring=QUIET)


def test_a_loss_of_ones_own_may_be_nan_for_another_reason():
    """Targets that are no class may be numbers to it."""
    data = FixedImages(8)
    data.labels[:] = [-1] * 8
    trainer = toy_trainer(2, 4, loss_fn=lambda out, target: out.mean() * NAN, verify=False)
    with pytest.raises(DivergedError, match="stage 1: the loss is nan at update 0 "):
        trainer.fit(data, epochs=1, batch_size=8, monitoring=QUIET)


def test_the_stage_nearest_the_loss_reports_a_shared_fault():
    for seed in range(2):
        with (
            pick(random.Random(seed).choice),
            pytest.raises(DivergedError, match=r"stage 2: the loss is nan at update 0 \(epoch 1\)"),
        ):
            train(3, 2, torch.float32, plant=nan_inputs)


def test_a_gradient_that_is_not_finite_stops_before_it_is_used():
    with pytest.raises(DivergedError, match=r"stage 1: the norm of the gradient is nan at update 2 \(epoch 1\)"):
        train(3, 2, torch.float32, plant=infinite_gradient)


def test_a_mask_of_infinities_is_no_fault_and_does_not_hide_one():
    norm = nn.BatchNorm2d(2)
    norm.register_buffer("mask", torch.tensor([0.0, -INF]))
    before = {name: buffer.clone() for name, buffer in norm.named_buffers()}
    with keep_buffers_finite(norm):
        norm(torch.full((2, 2, 2, 2), NAN))
    assert all(torch.equal(buffer, before[name]) for name, buffer in norm.named_buffers())
    with keep_buffers_finite(norm):
        norm(torch.ones(2, 2, 2, 2))
    assert norm.num_batches_tracked == 1
    assert norm.running_mean.isfinite().all()


# --- Clipping ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["adl", "2bw"])
def test_each_stage_clips_its_own_gradient_as_the_equations_say(name):
    delays, weights = EQUATIONS[name]
    state, _ = train(3, 2, torch.float64, method=name, clip_norm=0.3)
    assert_close(state, by_the_equations(3, 2, delays(3), weights, clip_norm=0.3))
    assert differ(state, by_the_equations(3, 2, delays(3), weights)) > 1e-3, "the norm is above 0.3"


# --- Figures of a GPU: looked at one update late, but all of them, by the number of their update -----------


@pytest.fixture
def underway(monkeypatch):
    """As on a GPU: figures are on their way when they are first asked for."""
    monkeypatch.setattr(StepStats, "fetch", lambda self, arrived=(): True)


def tally_of(loss=1.0, norm=1.0):
    tally = StepStats(gradient_norm=torch.tensor(norm))
    tally.score(None, torch.zeros(1), torch.tensor(loss))
    return tally


@pytest.mark.usefixtures("underway")
def test_what_is_underway_is_told_with_the_next_or_at_the_end():
    faults = NonFiniteCheck(GradientPolicy(), stage=3, is_last=True)
    faults.judge(tally_of(), (), update=0, epoch=0)
    faults.judge(tally_of(norm=INF), (), update=1, epoch=0)
    with pytest.raises(DivergedError, match="the norm of the gradient is inf at update 1 "):
        faults.judge(tally_of(NAN), (), update=2, epoch=0)
    faults.forget()  # the segment was interrupted there
    faults.judge(tally_of(NAN), (), update=5, epoch=2)
    with pytest.raises(DivergedError, match=r"the loss is nan at update 5 \(epoch 3\)"):
        faults.check()


def test_what_a_broken_off_group_has_sent_judges_no_other():
    faults = NonFiniteCheck(GradientPolicy(**SKIP), stage=0, is_last=False)
    faults.sent((torch.tensor([INF]),))
    faults.forget()
    assert faults.judge(tally_of(), (), update=0, epoch=0) is None


@pytest.mark.usefixtures("underway")
def test_no_segment_ends_before_its_last_loss_was_looked_at():
    trainer = toy_trainer(2, 2, loss_fn=InfiniteLoss())
    with pytest.raises(DivergedError, match="stage 1: the loss is inf at update 0 "):
        trainer.fit(FixedImages(8), epochs=1, batch_size=8, monitoring=QUIET)
