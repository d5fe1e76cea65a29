"""A backward in two parts gives the values of a backward in one: for every method, weight policy and list of delays."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from adl_dist.errors import DivergedError
from adl_dist.schedule import METHODS, Pipeline, method
from adl_dist.stage import Stage
from adl_dist.stage.deferred import DeferredGradients
from tests.support.commands import assert_same
from tests.support.equations import assert_close, by_the_equations, run
from tests.support.kill import records
from tests.support.runs import BALANCE, InfiniteGradient, nan_inputs, toy_trainer, train
from tests.support.tiers import grid
from tests.support.toys import FixedImages, batch_norm_net
from tests.support.values import QUIET, SILENT

SPLIT = {"split_backward": True}
GOING_BACK = [name for name, spec in METHODS.items() if "split_backward" in spec.options]
DEFAULT = [("adl", 4, 4), ("2bw", 3, 2), ("dsp", 3, 1), ("gpipe", 3, 3)]


@pytest.fixture
def deferrable(monkeypatch):
    """The number of layers' gradients in each part that was done later."""
    compute, counts = DeferredGradients.compute, []
    counted = lambda self, later: (counts.append(len(later)), compute(self, later))  # noqa: E731
    monkeypatch.setattr(DeferredGradients, "compute", counted)
    return counts


@pytest.mark.parametrize(
    ("name", "K", "M"),
    grid(GOING_BACK, range(1, 5), range(1, 5), default=DEFAULT),
)
def test_every_method_ends_in_the_bits_of_the_whole_backward(name, K, M, deferrable):
    """Uneven last micro-batch and group, BatchNorm, dropout, momentum and weight decay, with two epochs."""
    if name == "2bw" and M < K - 1:
        pytest.skip("2bw needs M of at least the delay of stage 0")
    options = {"method": name, "dropout": 0.3, "epochs": 2}
    whole, summary = train(K, M, torch.float32, **options)
    assert deferrable == []
    split, of_split = train(K, M, torch.float32, options=SPLIT, **options)
    assert_same(split, whole)
    splits = Pipeline(method(name, accumulation_steps=M, **SPLIT), K).splits_backward
    assert len(deferrable) == 2 * 11 * sum(map(splits, range(K)))
    assert min(deferrable, default=1) > 0, "each stage has a layer"
    assert [s["staleness_mean"] for s in of_split["stages"]] == [s["staleness_mean"] for s in summary["stages"]]
    assert of_split["validation_loss"] == summary["validation_loss"]


@settings(max_examples=6, deadline=None, derandomize=True)
@given(
    delays=st.lists(st.integers(0, 5), min_size=3, max_size=3).map(lambda d: sorted(d, reverse=True)),
    weights=st.sampled_from(["stash", "latest", "recompute"]),
    M=st.integers(1, 4),
    most=st.integers(1, 4),
)
def test_any_delays_follow_the_equations_to_1e_12(delays, weights, M, most):
    got = run(3, M, "adl", delay=delays, weights=weights, max_deferred=most, **SPLIT)
    assert_close(got, by_the_equations(3, M, delays, weights))


PREDICT = {"mitigation": ["predict", "delay_compensation"]}
OTHERS = {
    "clip, predict": {"clip_norm": 0.3, "options": PREDICT},
    "channels last, bfloat16": {"channels_last": True, "autocast": torch.bfloat16},
    "skip, gpipe": {"non_finite": "skip", "plant": nan_inputs, "method": "gpipe"},
    "shrink, backward first": {"options": {"gradient_shrink": 0.5, "reduction": "sum", "order": "backward_first"}},
    "gpipe, replayed": {"method": "gpipe", "options": {"recompute": "except_last"}, "dropout": 0.3},
    "spike, latest, flush": {"options": {"mitigation": ["spike"], "weights": "latest", "flush_epochs": 1}},
}


@pytest.mark.parametrize("more", OTHERS.values(), ids=OTHERS)
def test_with_other_settings_it_ends_in_the_same_bits_too(more):
    M, options = 3, more.get("options", {})
    whole, summary = train(3, M, torch.float32, **{**more, "options": options})
    split, of_split = train(3, M, torch.float32, **{**more, "options": options | SPLIT})
    assert_same(split, whole)
    assert of_split["skipped_updates"] == summary["skipped_updates"]


def partly_frozen():
    """Weights without a gradient: of a convolution, of a norm, and of a layer that nothing uses."""
    net = batch_norm_net()
    net[1].conv.weight.requires_grad_(False)
    net[2].norm.bias.requires_grad_(False)
    net[4].unused = nn.Linear(3, 3)
    return net


def test_what_has_no_gradient_gets_none_and_no_weight_decay():
    """Momentum and weight decay would move a weight whose gradient were zero."""
    nets = []
    for options in ({}, SPLIT):
        nets.append(toy_trainer(2, 2, "adl", options, model=partly_frozen(), balance=BALANCE[2]))
        nets[-1].fit(FixedImages(20), epochs=1, batch_size=6, monitoring=QUIET)
    assert_same(nets[1].full_state_dict(), nets[0].full_state_dict())
    assert torch.equal(nets[1].full_state_dict()["4.unused.weight"], partly_frozen()[4].unused.weight)


def with_an_infinite_gradient():
    net = batch_norm_net()
    net[5] = InfiniteGradient(5)  # in the middle of stage 1
    return net


def test_stop_names_the_update_that_was_not_finite_one_later(tmp_path, monkeypatch):
    """As on a GPU: it is applied, nothing is saved after it, and the stage nearest the loss tells."""
    M, update, updated = 2, Stage.update, []
    monkeypatch.setattr(Stage, "update", lambda self: (updated.append((self.index, self.version)), update(self)))
    trainer = toy_trainer(2, M, "adl", SPLIT, model=with_an_infinite_gradient(), balance=BALANCE[2])
    with pytest.raises(DivergedError, match=f"the norm of the gradient is .* at update {5 // M} ") as failure:
        trainer.fit(FixedImages(32), epochs=1, batch_size=3 * M, run_dir=tmp_path, monitoring=SILENT)
    assert failure.value.stage == 1
    assert (1, 5 // M) in updated
    assert (1, 5 // M + 1) not in updated
    assert not list((tmp_path / "checkpoints").glob("update-*"))
    reported = [r["update"] for r in records(tmp_path) if r["name"] == "train/loss"]
    assert max(reported) < 5 // M, "no figure of an update that is not applied in the end"


class Checkpointed(nn.Module):
    """Residual blocks whose forward runs again in the backward."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(72, 72), nn.ReLU(), nn.Linear(72, 72)) for _ in range(4))
        self.last = nn.Linear(72, 5)

    def forward(self, x):
        x = x.flatten(1)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return self.last(x)


def test_a_forward_that_runs_again_in_the_backward_may_be_split():
    states = []
    for options in ({}, SPLIT):
        trainer = toy_trainer(3, 2, "adl", options, model=Checkpointed(), balance="even")
        trainer.fit(FixedImages(20), epochs=1, batch_size=6, monitoring=QUIET)
        states.append(trainer.full_state_dict())
    assert_same(*states)
