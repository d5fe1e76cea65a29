"""Clipping by the norm of the whole model: to the bit as plain torch does it, in a loop that shares no code."""

from functools import partial

import pytest
import torch
import yaml
from torch import nn

import adl_dist
from adl_dist.errors import ConfigError
from adl_dist.optimizers import Muon, mark_roles
from tests.support.commands import assert_same
from tests.support.equations import plain_loop
from tests.support.kill import records
from tests.support.runs import nan_inputs, sgd, toy_trainer, train, warm_up_schedule
from tests.support.toys import FixedImages, batch_norm_net
from tests.support.values import SILENT

CLIP = 1.9  # of 8 norms from 1.3 to 2.7
METHODS = ["bp", "gpipe", "1f1b", "interleaved", "zbh1"]


class HeadFirst(nn.Module):
    """The toy net, registered from its end: ``parameters()`` are in another order than the stages."""

    def __init__(self):
        super().__init__()
        units = [*batch_norm_net()]
        for place in reversed(range(len(units))):
            self.add_module(f"unit{place}", units[place])

    def forward(self, x):
        for place in range(7):
            x = getattr(self, f"unit{place}")(x)
        return x


def oracle(model, *, optimizer=sgd, in_reverse=False, norms=None):
    mark_roles(model)  # for Muon
    how = {"M": 3, "dtype": torch.float32, "clip_norm": CLIP}
    return plain_loop(model, optimizer(model.parameters()), in_reverse=in_reverse, norms=norms, **how)


@pytest.mark.parametrize(("name", "K"), [("adl", 1), ("1f1b", 2), *((name, 3) for name in METHODS)])
def test_weights_are_those_of_plain_torch_to_the_bit(name, K):
    expected = oracle(batch_norm_net(), in_reverse=name == "gpipe")
    assert_same(train(K, 3, torch.float32, method=name, clip_norm=CLIP)[0], expected)


@pytest.mark.parametrize(("K", "optimizer"), [(1, partial(Muon, lr=0.02)), (3, partial(torch.optim.AdamW, lr=0.01))])
def test_norms_are_in_the_order_of_the_models_parameters(K, optimizer):
    how = {"method": "1f1b", "model": HeadFirst, "optimizer": optimizer, "clip_norm": CLIP}
    balance = ["unit2", "unit6"] if K == 3 else "even"
    assert_same(train(K, 3, torch.float32, balance=balance, **how)[0], oracle(HeadFirst(), optimizer=optimizer))


def test_a_tensor_without_a_gradient_has_no_norm():
    """A zero in its place would move the others, and the rounding with them."""

    def net():
        model = batch_norm_net()
        model[0].unused, model[4].conv.frozen = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
        return model

    assert_same(train(2, 3, torch.float32, method="1f1b", model=net, clip_norm=CLIP)[0], oracle(net()))


SKIPPING = {"non_finite": "skip", "plant": nan_inputs, "optimizer": partial(torch.optim.NAdam, lr=0.01)}
OTHERS = [
    ("1f1b", {"autocast": torch.bfloat16, "options": {"reduction": "sum"}}),
    ("zbh1", {**SKIPPING, "ema": 0.9}),
]


@pytest.mark.parametrize(("name", "how"), OTHERS)
def test_with_other_options_the_cut_does_not_matter(name, how):
    (expected, in_one), (state, summary) = (
        train(K, 2, torch.float32, epochs=1, clip_norm=CLIP, method=method, **how)
        for K, method in ((1, "bp"), (3, name))
    )
    assert_same(state, expected)
    assert summary["skipped_updates"] == in_one["skipped_updates"] == (3 if "plant" in how else 0)


def test_the_recorded_norm_is_that_of_torch(tmp_path):
    norms = []
    oracle(batch_norm_net(), norms=norms)
    assert 2 < sum(norm > CLIP for norm in norms) < len(norms) - 2, "some groups are clipped, others are not"
    fit(tmp_path, 2)
    told = [(r["update"], r["value"]) for r in records(tmp_path) if r["name"] == "train/gradient_norm"]
    assert told == list(enumerate(norms))


def test_a_method_that_cannot_wait_names_those_that_can():
    told = r"clip_norm=.* method=zbh2 .*; use one of bp, gpipe, 1f1b, zbh1, interleaved, or .*clip_scope='stage'"
    with pytest.raises(ConfigError, match=told):
        toy_trainer(3, method="zbh2", clip_norm=1.0)
    toy_trainer(3, method="zbh2", clip_norm=1.0, clip_scope="stage")
    toy_trainer(1, method="zbh2", clip_norm=1.0)


def test_without_a_flush_one_line_says_that_stages_clip_alone():
    line = "train.clip_norm: with method=adl each stage clips its own gradient"
    notes = [toy_trainer(K, clip_norm=1.0, **more)._partitioned.notes for K, more in
             ((3, {}), (1, {}), (3, {"clip_scope": "stage"}), (3, {"method": "1f1b"}))]  # fmt: skip
    assert [[note.startswith(line) for note in of_one] for of_one in notes] == [[True], [], [], []]


def fit(run_dir, epochs, **options):
    trainer = toy_trainer(3, 3, "1f1b", lr_schedule=warm_up_schedule, clip_norm=CLIP, verify=False, **options)
    if epochs == 2:  # stages are settled before the run is known
        trainer.evaluate(FixedImages(8), batch_size=4)
    trainer.fit(FixedImages(32), epochs=epochs, batch_size=9, run_dir=run_dir, shuffle=False, monitoring=SILENT)
    return trainer.full_state_dict()


def make_old(run_dir):
    """Make the folder one of before the key."""
    settings = yaml.safe_load((run_dir / "config.yaml").read_text())
    assert settings.pop("clip_scope") == "stage"
    (run_dir / "config.yaml").write_text(yaml.safe_dump(settings))


@pytest.mark.parametrize(("began", "other"), [("stage", "model"), ("model", "stage")])
def test_a_resumed_run_clips_as_it_began(tmp_path, began, other):
    """With ``stage`` it is of before the key."""
    expected = fit(None, 2, clip_scope=began)
    fit(tmp_path, 1, clip_scope=began)
    if began == "stage":
        make_old(tmp_path)
    assert_same(fit(tmp_path, 2, clip_scope=other), expected)
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["clip_scope"] == began


def test_the_choice_is_checked():
    assert adl_dist.GradientPolicy().clip_scope == "model"
    with pytest.raises(ConfigError, match=r"clip_scope=.*: there is no 'all'; choose one of model, stage"):
        toy_trainer(3, clip_scope="all")
