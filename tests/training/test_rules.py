"""Groups of an optimizer by rule: plain torch with these groups, frozen stages by the equations, any K, any process."""

from functools import partial

import pytest
import torch
from torch import nn

from adl_dist.optimizers import Muon, mark_roles, with_rules
from tests.support.commands import assert_same
from tests.support.equations import assert_close, by_the_equations, plain_loop
from tests.support.runs import BALANCE, sgd, toy_trainer, train
from tests.support.toys import NUM_CLASSES, FixedImages, batch_norm_net
from tests.support.values import SILENT

RULES = [
    {"layers": "*Norm*", "weight_decay": 0.0},
    {"ndim": 1, "weight_decay": 0.0},
    {"names": "6.*", "lr_factor": 0.25},
    {"names": ["1.conv.*", "6.2.bias"], "frozen": True},
    {"names": "6.2.bias", "frozen": False},
]
ADAMW = partial(torch.optim.AdamW, lr=0.01, weight_decay=0.3)


def groups_by_hand(model, lr, **options):
    """What RULES say, written with torch's own groups; the head's rate is a quarter, and vectors do not decay."""
    model[1].conv.weight.requires_grad_(False)
    groups = {}
    for name, p in model.named_parameters():
        groups.setdefault((p.ndim == 1, name.startswith("6.")), []).append(p)
    return [
        {"params": some, "lr": lr * (0.25 if is_head else 1), "weight_decay": 0.0 if is_vector else 0.3, **options}
        for (is_vector, is_head), some in groups.items()
    ]


def by_a_plain_loop(make):
    model = batch_norm_net().double()
    return plain_loop(model, make(model), M=2)


TORCHS = {
    "adamw": (ADAMW, lambda m: torch.optim.AdamW(groups_by_hand(m, 0.01))),
    "sgd": (
        partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.3),
        lambda m: torch.optim.SGD(groups_by_hand(m, 0.05), momentum=0.9),
    ),
}


@pytest.mark.parametrize(("name", "K"), [("adamw", 4), ("sgd", 1)])
def test_rules_are_torchs_own_groups_bit_for_bit(name, K):
    make, by_hand = TORCHS[name]
    state, _ = train(K, 2, torch.float64, method="bp" if K == 1 else "1f1b", optimizer=with_rules(make, RULES))
    assert_same(state, by_a_plain_loop(by_hand))


def muon_by_hand(model):
    """Muon's two groups, each divided by hand."""
    mark_roles(model)
    optimizer = Muon(model.parameters(), lr=0.02, rest_lr=0.01, rest_options={"weight_decay": 0.2})
    slow, still = {model[1].conv.weight, model[6][2].weight}, {model[6][2].bias}
    groups = []
    for group in optimizer.param_groups:
        parts = [[p for p in group["params"] if p not in slow | still]]
        parts += [[p for p in group["params"] if p in some] for some in (slow, still)]
        groups += [{**group, "params": parts[0]}, {**group, "params": parts[1], "lr": group["lr"] * 0.5}]
        groups.append({**group, "params": parts[2], "weight_decay": 0.0})
    optimizer.param_groups[:] = groups
    return optimizer


def test_rules_divide_both_groups_of_muon():
    rules = [{"names": ["1.conv.weight", "6.2.weight"], "lr_factor": 0.5}, {"names": "6.2.bias", "weight_decay": 0}]
    make = with_rules(partial(Muon, lr=0.02, rest_lr=0.01, rest_options={"weight_decay": 0.2}), rules)
    state, _ = train(3, 2, torch.float64, method="1f1b", optimizer=make)
    # Newton-Schulz in bfloat16 turns what differs in the last bit into another step, so bits it must be.
    assert_same(state, by_a_plain_loop(muon_by_hand))


@pytest.mark.parametrize(("frozen", "weights"), [({1, 2}, "latest"), ({2}, "recompute"), ({1, 3}, "stash")])
def test_frozen_stages_follow_the_equations_with_a_rate_of_0(frozen, weights):
    """Modules are counted from 1; behind the last frozen one gradients travel on."""
    firsts = [0, *(sum(BALANCE[4][:k]) for k in range(1, 5))]
    names = [f"{unit}.*" for k in frozen for unit in range(firsts[k - 1], firsts[k]) if unit != 3]  # 3 is Dropout
    make = with_rules(sgd, [{"names": names, "frozen": True}])
    state, summary = train(4, 2, torch.float64, optimizer=make, options={"weights": weights})
    rate = lambda k, s: 0.0 if k in frozen else 0.1 * (0.2 + 0.05 * s)  # noqa: E731
    assert_close(state, by_the_equations(4, 2, None, weights, lr_of=rate))
    assert [stage["staleness_max"] for stage in summary["stages"]] == [3, 2, 1, 0]


class Position(nn.Module):
    """Adds a table, and has a layer that is never used."""

    def __init__(self):
        super().__init__()
        self.pos_embed = nn.Parameter(torch.randn(4, 36))
        self.spare = nn.Linear(4, 4)

    def forward(self, x):
        return (x.flatten(2) + self.pos_embed).view(x.shape)


def frozen_net():
    torch.manual_seed(0)
    flat = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 16))
    layers = [nn.Conv2d(2, 4, 3, padding=1), Position(), nn.Conv2d(4, 4, 3, padding=1), flat, nn.LayerNorm(16)]
    model = nn.Sequential(*layers, nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, NUM_CLASSES))
    model[2].weight.requires_grad_(False)
    return model


MIXED = {
    "muon": partial(Muon, rest_options={"weight_decay": 0.3}),
    "muon and sgd": partial(Muon, weight_decay=0.7, rest="sgd", rest_options={"weight_decay": 0.1}),
}


@pytest.mark.parametrize(("name", "method", "balance"), [
    ("muon", "bp", [8]), ("muon", "1f1b", [3, 5]), ("muon and sgd", "bp", [2, 3, 3]),
])  # fmt: skip
def test_any_k_is_a_plain_loop_of_the_uncut_model(name, method, balance):
    """With frozen and unused parameters, weight decay, and a group that is skipped: the same bits."""
    M, size, num, spoilt = 4, 3, 36, slice(12, 24)
    data, model = FixedImages(num), frozen_net()
    data.images[14, 0, 1, 1] = float("nan")
    options = {"model": frozen_net(), "optimizer": MIXED[name], "non_finite": "skip", "balance": balance}
    trainer = toy_trainer(len(balance), M, method, **options)
    summary = trainer.fit(data, epochs=1, batch_size=size * M, shuffle=False, monitoring=SILENT)
    assert (summary["updates"], summary["skipped_updates"]) == (3, 1)
    mark_roles(model)
    optimizer, labels = MIXED[name](model.parameters()), torch.tensor(data.labels)
    for group in (slice(0, 12), slice(24, 36)):
        assert group != spoilt
        for x, target in zip(data.images[group].split(size), labels[group].split(size), strict=True):
            nn.functional.cross_entropy(model(x), target).backward(torch.tensor(1 / M))
        optimizer.step()
        optimizer.zero_grad()
    found, start = trainer.full_state_dict(), frozen_net().state_dict()
    assert_same(found, model.state_dict())
    still = ["1.spare.weight", "1.spare.bias", "2.weight"]
    assert [key for key in found if torch.equal(found[key], start[key])] == still
