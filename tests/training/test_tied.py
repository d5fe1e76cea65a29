"""Tied weights of several stages: the equations, equal copies, resume, and what is refused."""

import math
from collections import OrderedDict
from functools import partial

import pytest
import torch
from torch import nn

import adl_dist
from adl_dist.errors import ConfigError, DivergedError, PartitionError
from adl_dist.optimizers import Muon
from adl_dist.stage.tied import TiedWeights
from tests.support.equations import EQUATIONS, assert_close
from tests.support.runs import SPOILT, SPOILT_PAIRS, nan_inputs, toy_trainer
from tests.support.tied import LR, SHARED, TIED_BALANCE, tied_by_the_equations, tied_net, train_tied
from tests.support.tiers import grid
from tests.support.toys import FixedImages, batch_norm_net
from tests.support.values import QUIET, SILENT

FLUSHING = ("bp", "gpipe", "1f1b", "zbh1", "zbh2", "interleaved")
SOME = [("adl", 2, 1), ("adl", 3, 2), ("adl", 4, 4), ("2bw", 4, 3), ("paci", 4, 2), ("dsp", 4, 1), ("fr", 3, 2),
        ("ddg", 3, 2), ("gpipe", 4, 3), ("1f1b", 3, 2), ("zbh2", 2, 4), ("interleaved", 4, 2)]  # fmt: skip
LATE = {"split_backward": True}


def assert_copies_are_equal(state):
    for first, *others in SHARED:
        for name in others:
            assert torch.equal(state[first], state[name]), name


@pytest.mark.parametrize(("name", "K", "M"), grid(list(EQUATIONS), range(2, 5), range(1, 5), default=SOME))
def test_every_method_follows_the_equations_to_1e_12(name, K, M):
    """Two epochs, an uneven last micro-batch and group, momentum and weight decay."""
    if (name == "2bw" and M < K - 1) or (name == "paci" and K < 4):
        pytest.skip("2bw needs M of at least the delay of stage 0; the equations of latest know each weight once")
    delays, weights = EQUATIONS[name]
    got, _ = train_tied(K, M, method=name)
    assert_close(got, tied_by_the_equations(K, M, delays(K), weights, epochs=2, flushes=name in FLUSHING))
    assert_copies_are_equal(got)


@pytest.mark.parametrize(("K", "other"), [(2, 0.2), (3, 0.2), (2, None)])
def test_groups_by_objects_are_refused_as_copies_would_differ(K, other, capfd):
    model = tied_net()
    known = {id(parameter) for parameter in model.parameters()}

    def by_object(parameters):
        rates = [(p, 0.1 if id(p) in known else other) for p in parameters]
        groups = [{"params": [p], "lr": rate, "note": lambda: None} for p, rate in rates if rate]
        return torch.optim.SGD(groups or [{"params": []}])

    trainer = toy_trainer(K, model=model, optimizer=by_object, balance=TIED_BALANCE[K])
    found = r"\{'lr': 0.2\}" if other else "no group"
    message = rf"^the copies of '.*' on stages 0 and \d would train differently: \{{'lr': 0.1.*\}} and {found}; prob"
    with pytest.raises(ConfigError, match=message):
        trainer.fit(FixedImages(12), epochs=1, batch_size=4, monitoring=QUIET)
    known.update(id(p) for module in trainer._partitioned.modules.values() for p in module.parameters())
    trainer.fit(FixedImages(12), epochs=1, batch_size=4, monitoring=QUIET)


@pytest.mark.parametrize(("delay", "M", "weights"), [((6, 4, 2, 0), 1, "stash"), ((2, 2, 1, 0), 2, "recompute"),
                                                     ((5, 5, 2, 1), 1, "stash")])  # fmt: skip
def test_with_a_split_backward_any_delays_do_too(delay, M, weights):
    options = {**LATE, "delay": delay, "weights": weights}
    expected = tied_by_the_equations(4, M, delay, weights, epochs=2)
    assert_close(train_tied(4, M, options=options)[0], expected)


@pytest.mark.parametrize(("K", "M", "weights"), [(2, 1, "stash"), (3, 2, "stash"), (4, 2, "recompute")])
def test_copies_predict_as_far_as_their_own_gradients_are_late(K, M, weights):
    options = {"mitigation": ["predict"], "weights": weights}
    delays = [2 * (K - k) for k in range(1, K + 1)]
    expected = tied_by_the_equations(K, M, delays, weights, epochs=2, predict=True, lr=[LR] * 100)
    got, _ = train_tied(K, M, options=options, lr_schedule=None)
    assert_close(got, expected)
    assert_copies_are_equal(got)


@pytest.mark.parametrize(("name", "K", "clip_norm"), [("1f1b", 2, 0.1), ("zbh2", 4, None)])
def test_synchronous_methods_train_as_plain_torch(name, K, clip_norm):
    how = {"optimizer": partial(torch.optim.AdamW, lr=0.05), "clip_norm": clip_norm}
    expected, _ = train_tied(1, 3, method="bp", **how)
    assert_close(train_tied(K, 3, method=name, **how)[0], expected)


@pytest.mark.parametrize("name", ["adl", "1f1b"])
def test_each_stage_clips_the_sum_alike(name):
    """By itself: the norm of a stage does not count its part, which no other stage knows."""
    delays, flushes = ([4, 2, 0], False) if name == "adl" else ([0, 0, 0], True)
    expected = tied_by_the_equations(3, 2, delays, epochs=2, flushes=flushes, clip_norm=0.05)
    got, _ = train_tied(3, 2, method=name, clip_norm=0.05, clip_scope="stage")
    assert_close(got, expected)
    assert_copies_are_equal(got)


def test_all_copies_skip_the_same_groups():
    """Micro-batches that are not finite show in the loss; the group is skipped in all stages, and by all copies."""
    got, summary = train_tied(3, 2, non_finite="skip", plant=nan_inputs, clip_norm=0.05)
    assert summary["skipped_updates"] == 2 * len(SPOILT_PAIRS)
    how = {"skipped": SPOILT_PAIRS, "unseen": SPOILT, "clip_norm": 0.05}
    assert_close(got, tied_by_the_equations(3, 2, [4, 2, 0], epochs=2, **how))
    assert_copies_are_equal(got)


OTHERS = {
    "Muon": {"optimizer": partial(Muon, lr=0.02), "codec": "bf16"},
    "error feedback": {"options": {"mitigation": ["discount", "error_feedback"]}},
    "spike": {"options": {"mitigation": ["spike"], "flush_epochs": 1}},
    "latest": {"options": {"weights": "latest", "gradient_shrink": 0.5, "reduction": "sum"}},
    "2bw, skip": {"method": "2bw", "clip_norm": 0.1, "non_finite": "skip", "plant": nan_inputs},
}


@pytest.mark.parametrize("more", OTHERS.values(), ids=OTHERS)
def test_copies_stay_equal_whatever_trains_them(more):
    got, _ = train_tied(4, 3, torch.float32, **more)
    assert_copies_are_equal(got)
    moved = {name: (got[name] - weight).abs().max() for name, weight in tied_net().state_dict().items()}
    assert min(moved.values()) > 0


def fit(K, run_dir=None, tied="share"):
    of = {"model": tied_net(), "balance": TIED_BALANCE[K], "tied": tied}
    trainer = toy_trainer(K, 2, "1f1b", optimizer=partial(torch.optim.AdamW, lr=0.01), **of)
    trainer.fit(FixedImages(20), epochs=1, batch_size=6, run_dir=run_dir, monitoring=SILENT)
    return trainer.full_state_dict()


def test_untied_each_name_has_weights_of_its_own_for_any_cut():
    expected = fit(1, tied="untie")
    got = fit(4, tied="untie")
    for name in expected:
        torch.testing.assert_close(got[name], expected[name], rtol=1e-4, atol=1e-5)
    names = [name for group in SHARED for name in group]
    assert all(not torch.equal(expected[SHARED[0][0]], expected[name]) for name in names[1:])
    trainer = toy_trainer(2, model=tied_net(), tied="untie")
    assert trainer._partitioned.notes == [
        "partition.tied=untie: mid.1.weight, more.1.weight, head.1.weight had the weights of another layer, now its own"
    ]


def test_a_sum_that_is_not_finite_stops_the_run(monkeypatch):
    """Each part is finite; both stages find the same."""
    add = TiedWeights.add

    def overflow(self, part):
        add(self, part)
        if self.name == "first.2.weight" and self.version + len(self._sums) == 2:
            self._own[0][0] = math.inf

    monkeypatch.setattr(TiedWeights, "add", overflow)
    for non_finite in ("stop", "skip"):
        with pytest.raises(DivergedError, match=r"summed gradient of tied 'first.2.weight'.* is inf.* at update 2 "):
            train_tied(3, 2, non_finite=non_finite)


def test_a_copy_without_a_gradient_is_refused_by_name():
    class Sometimes(nn.Linear):
        calls = 0

        def forward(self, x):
            self.calls += len(x) == 3  # a micro-batch of training
            return super().forward(x) if self.calls < 4 else x

    def model():
        net = tied_net()
        net.more[1] = Sometimes(10, 10)
        net.more[1].weight = net.up[1].weight
        return net

    with pytest.raises(PartitionError, match=r"'up.1.weight': 'up.1.weight' got no gradient .* update 3, but"):
        train_tied(4, 1, model=model)


def test_muon_knows_the_role_of_a_frozen_copy():
    def frozen():
        net = tied_net()
        for name in SHARED[0][0], SHARED[1][0]:
            net.get_parameter(name).requires_grad_(False)
        return net

    got = [train_tied(K, 2, method="1f1b", model=frozen, optimizer=Muon)[0] for K in (1, 2)]
    assert_close(*got)
    assert torch.equal(got[1][SHARED[1][2]], tied_net().state_dict()[SHARED[1][0]].double())


@pytest.mark.parametrize("name", ["1f1b", "adl"])
def test_a_stage_may_have_nothing_but_tied_weights(name):
    """And the trainer may be used again: copies remain copies."""
    trainers = {K: toy_trainer(K, 2, name, model=tied_net(), balance=[5, 1][:K] if K > 1 else [6]) for K in (1, 2)}
    for trainer in trainers.values():
        for _ in range(2):
            trainer.fit(FixedImages(20), epochs=1, batch_size=6, monitoring=QUIET)
    got = trainers[2].full_state_dict()
    assert_copies_are_equal(got)
    if name == "1f1b":
        for tensor, expected in zip(got.values(), trainers[1].full_state_dict().values(), strict=True):
            torch.testing.assert_close(tensor, expected, rtol=1e-4, atol=1e-5)


def test_the_rate_is_recorded_where_all_weights_are_tied():
    rates, callback = [], adl_dist.Callback()
    callback.on_update = lambda now: rates.append(now.metrics["train_learning_rate"])
    trainer = toy_trainer(2, 2, "1f1b", model=tied_net(), balance=[5, 1])
    trainer.fit(FixedImages(12), epochs=1, batch_size=6, callbacks=[callback], monitoring=SILENT)
    assert rates == [LR, LR]


@pytest.mark.parametrize(("net", "weights"), [(tied_net, "stash"), (batch_norm_net, "recompute")])
def test_modules_may_be_named_like_attributes_of_a_stage(net, weights):
    def trained(names):
        named = nn.Sequential(OrderedDict(zip([*names, *"5678"], net(), strict=False)))
        options = {"balance": "even", "granularity": "layer", "dtype": torch.float64}
        trainer = toy_trainer(3, 2, "adl", {"weights": weights}, model=named, **options)
        trainer.fit(FixedImages(20, dtype=torch.float64), epochs=1, batch_size=6, monitoring=SILENT)
        return [*trainer.full_state_dict().values()]

    pairs = zip(trained(["model", "plan", "results", "seeds"]), trained("abcd"), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
