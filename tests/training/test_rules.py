"""Groups of an optimizer by rule: plain torch with these groups, frozen stages by the equations."""

from functools import partial

import pytest
import torch

from adl_dist.optimizers import with_rules
from tests.support.commands import assert_same
from tests.support.equations import assert_close, by_the_equations, plain_loop
from tests.support.runs import BALANCE, sgd, train
from tests.support.toys import batch_norm_net

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
