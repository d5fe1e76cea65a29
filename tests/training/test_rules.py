"""Groups of an optimizer by rule: plain torch with these groups, frozen stages by the equations, any K, any process."""

from functools import partial

import pytest
import torch
from torch import nn

from adl_dist.errors import ConfigError
from adl_dist.optimizers import Muon, mark_roles, with_rules
from tests.support.commands import assert_same
from tests.support.equations import assert_close, by_the_equations, micro_batches
from tests.support.ranks import run_ranks
from tests.support.runs import BALANCE, EPOCHS, NUM_SAMPLES, sgd, toy_trainer, train, warm_up_schedule
from tests.support.toys import FixedImages, batch_norm_net
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
    optimizer = make(model)
    schedule, batches = warm_up_schedule(optimizer), micro_batches()
    for _ in range(EPOCHS):
        for start in range(0, len(batches), 2):
            group = batches[start : start + 2]
            for x, target in group:
                share = len(target) / sum(len(t) for _, t in group)
                nn.functional.cross_entropy(model(x), target).backward(torch.tensor(share, dtype=torch.float64))
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    return model.state_dict()


TORCHS = {
    "adamw": (ADAMW, lambda m: torch.optim.AdamW(groups_by_hand(m, 0.01))),
    "sgd": (
        partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.3),
        lambda m: torch.optim.SGD(groups_by_hand(m, 0.05), momentum=0.9),
    ),
}


@pytest.mark.parametrize("K", [1, 4])
@pytest.mark.parametrize("name", TORCHS)
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


@pytest.mark.parametrize("K", [1, 3])
def test_rules_divide_both_groups_of_muon(K):
    rules = [{"names": ["1.conv.weight", "6.2.weight"], "lr_factor": 0.5}, {"names": "6.2.bias", "weight_decay": 0}]
    make = with_rules(partial(Muon, lr=0.02, rest_lr=0.01, rest_options={"weight_decay": 0.2}), rules)
    state, _ = train(K, 2, torch.float64, method="bp" if K == 1 else "1f1b", optimizer=make)
    # Newton-Schulz in bfloat16 turns what differs in the last bit into another step, so bits it must be.
    assert_same(state, by_a_plain_loop(muon_by_hand))


@pytest.mark.parametrize(
    ("frozen", "weights"), [({1}, "stash"), ({1, 2}, "latest"), ({2}, "recompute"), ({3}, "latest"), ({1, 3}, "stash")]
)
def test_frozen_stages_follow_the_equations_with_a_rate_of_0(frozen, weights):
    """Modules are counted from 1; behind the last frozen one gradients travel on."""
    firsts = [0, *(sum(BALANCE[4][:k]) for k in range(1, 5))]
    names = [f"{unit}.*" for k in frozen for unit in range(firsts[k - 1], firsts[k]) if unit != 3]  # 3 is Dropout
    make = with_rules(sgd, [{"names": names, "frozen": True}])
    state, summary = train(4, 2, torch.float64, optimizer=make, options={"weights": weights})
    rate = lambda k, s: 0.0 if k in frozen else 0.1 * (0.2 + 0.05 * s)  # noqa: E731
    assert_close(state, by_the_equations(4, 2, None, weights, lr_of=rate))
    assert [stage["staleness_max"] for stage in summary["stages"]] == [3, 2, 1, 0]


class CountsBackward(torch.autograd.Function):
    """The identity; counts how often a gradient passes."""

    times = 0

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        CountsBackward.times += 1
        return grad


class Counting(nn.Linear):
    """A layer through which gradients are counted."""

    def forward(self, x):
        return torch.relu(CountsBackward.apply(super().forward(x)))


@pytest.mark.parametrize(("names", "passes"), [("0.*", False), ("[01].*", False), ("1.*", True)])
def test_no_gradient_goes_back_to_where_nothing_trains(names, passes):
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Flatten(), nn.Linear(72, 6)), Counting(6, 6), nn.Linear(6, 5)]
    if names == "0.*":
        layers = [nn.Sequential(nn.Flatten(), Counting(72, 6)), nn.Linear(6, 6), nn.Linear(6, 5)]
    make = with_rules(sgd, [{"names": names, "frozen": True}])
    trainer = toy_trainer(3, 2, model=nn.Sequential(*layers), optimizer=make, balance=[1, 1, 1], verify=False)
    CountsBackward.times = 0
    trainer.fit(FixedImages(12), epochs=1, batch_size=4, monitoring=SILENT)
    assert (CountsBackward.times > 0) == passes


OF_RANKS = {
    "adl": {"optimizer": with_rules(ADAMW, RULES), "dropout": 0.3},
    "ahead": {"optimizer": with_rules(sgd, RULES), "options": {"mitigation": ["predict"]}},
    "frozen front": {"optimizer": with_rules(sgd, [{"names": ["0.*", "1.*", "2.*"], "frozen": True}])},
    "muon": {"optimizer": with_rules(Muon, [{"names": "2.*", "lr_factor": 0.5, "weight_decay": 0.2}])},
    "heads": {"optimizer": with_rules(sgd, [{"ndim": 1, "weight_decay": 0.0}]), "method": "dgl"},
}


@pytest.mark.ranks
@pytest.mark.parametrize("case", OF_RANKS)
def test_three_processes_with_rules_end_with_the_bits_of_one(case):
    here, _ = train(3, 2, torch.float32, **OF_RANKS[case])
    there = run_ranks(3, partial(train, **OF_RANKS[case]), 3, 2, torch.float32)
    for state, _ in there:
        assert_same(state, here)


@pytest.mark.parametrize("make", [ADAMW, partial(Muon, lr=0.02)], ids=["adamw", "muon"])
def test_a_run_with_rules_goes_on_with_another_cut(make, tmp_path):
    """Without delay any K has the same bits, if each parameter finds its own state and group."""
    of = {"dtype": torch.float64, "optimizer": with_rules(make, RULES), "lr_schedule": warm_up_schedule}
    of_fit = {"batch_size": 6, "monitoring": SILENT}
    whole, data = toy_trainer(1, 2, "bp", **of), FixedImages(NUM_SAMPLES, dtype=torch.float64)
    whole.fit(data, epochs=2, **of_fit)
    for K, epochs in ((3, 1), (2, 2)):
        trainer = toy_trainer(K, 2, "1f1b", **of)
        trainer.fit(data, epochs=epochs, run_dir=tmp_path, **of_fit)
    assert_same(trainer.full_state_dict(), whole.full_state_dict())


def test_a_run_is_recognised_by_its_rules(tmp_path):
    def fit(rules):
        trainer = toy_trainer(2, 2, optimizer=with_rules(ADAMW, rules))
        trainer.fit(FixedImages(8), epochs=1, batch_size=4, run_dir=tmp_path, monitoring=SILENT)

    fit([{"names": "0.*", "weight_decay": 0.0}])
    with pytest.raises(ConfigError, match=r"rules"):
        fit([{"names": "1.*", "weight_decay": 0.0}])


class SetsOneRate(torch.optim.lr_scheduler.LRScheduler):
    """Gives all groups the same rate."""

    def get_lr(self):
        return [0.3 for _ in self.optimizer.param_groups]


def test_a_schedule_that_would_lose_a_factor_is_refused():
    def one_cycle(optimizer, total_updates, max_lr=0.1):
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=max_lr, total_steps=total_updates + 1)

    def fit(schedule):
        make = with_rules(sgd, [{"names": "6.*", "lr_factor": 0.5}])
        trainer = toy_trainer(2, 2, optimizer=make, lr_schedule=schedule)
        trainer.fit(FixedImages(8), epochs=1, batch_size=4, monitoring=SILENT)

    fit(partial(one_cycle, max_lr=[0.1, 0.05]))  # on each stage both groups, one of them empty
    for schedule in (one_cycle, SetsOneRate):
        with pytest.raises(ConfigError, match=r"lr_factor of optimizer.rules would be lost; give it a list of 2 rates"):
            fit(schedule)


def test_rules_that_a_function_hides_do_not_go_unnoticed():
    make = with_rules(sgd, [{"names": "0.*", "frozen": True}])
    trainer = toy_trainer(2, 2, optimizer=lambda parameters: make(parameters))
    with pytest.raises(ConfigError, match=r"freeze 0.0.weight, but it takes a gradient: give with_rules\(...\) itself"):
        trainer.fit(FixedImages(8), epochs=1, batch_size=4, monitoring=SILENT)
