"""What rules are about, in which order they count, and which are refused."""

from functools import partial

import pytest
import torch
from torch import nn

from adl_dist.errors import ConfigError
from adl_dist.models import cifar_resnet
from adl_dist.optimizers import Muon, mark_roles, prepare, with_rules
from tests.support.toys import batch_norm_net

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.5)


def groups_of(rules, model=None, make=SGD):
    """The names and options of each group that has parameters."""
    model = batch_norm_net() if model is None else model
    ruled = with_rules(make, rules)
    prepare(model, ruled)
    names = {p: name for name, p in model.named_parameters()}
    return [({names[p] for p in g["params"]}, g) for g in ruled(model.parameters()).param_groups if g["params"]]


def names_with(rules, key, value, **more):
    return {name for names, group in groups_of(rules, **more) if group[key] == value for name in names}


def test_a_layer_is_meant_by_what_it_derives_from_too():
    class OwnNorm(nn.LayerNorm):
        pass

    model = nn.Sequential(
        nn.Linear(3, 3), OwnNorm(3), nn.BatchNorm1d(3), nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))
    )
    found = {
        pattern: names_with([{"layers": pattern, "weight_decay": 0}], "weight_decay", 0, model=model)
        for pattern in ("LayerNorm", "OwnNorm", "*Norm*", "Linear")
    }
    norms = {"1.weight", "1.bias"}
    assert found["LayerNorm"] == found["OwnNorm"] == norms
    assert found["*Norm*"] == norms | {"2.weight", "2.bias"}
    assert found["Linear"] == {name for name, _ in model.named_parameters() if name[0] in "03"}


def test_all_criteria_of_a_rule_must_be_met_each_by_one_value():
    rule = {"names": ["1.*", "2.*"], "ndim": [1, 2], "layers": "BatchNorm2d", "weight_decay": 0}
    expected = {f"{unit}.norm.{name}" for unit in (1, 2) for name in ("weight", "bias")}
    assert names_with([rule], "weight_decay", 0) == expected


def test_muon_steps_all_groups_of_matrices_and_of_the_rest():
    model = batch_norm_net()
    make = partial(Muon, weight_decay=0.0, rest="sgd", rest_lr=0.5, rest_options={"momentum": 0.0})
    rules = [{"names": ["*.bias", "4.conv.*"], "lr_factor": 0.5}, {"names": "1.norm.*", "weight_decay": 0.25}]
    ruled = with_rules(make, rules)
    prepare(model, ruled)
    optimizer = ruled(model.parameters())
    rest = {p for group in optimizer.param_groups if "rule" in group for p in group["params"]}
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    half, whole = (model.get_parameter(name) - before[name] for name in ("4.conv.weight", "5.conv.weight"))
    torch.testing.assert_close(half, whole / 2)
    for name, old in ((name, old) for name, old in before.items() if model.get_parameter(name) in rest):
        rate, decay = 0.25 if name.endswith("bias") else 0.5, 0.25 if name.startswith("1.norm") else 0.0
        torch.testing.assert_close(model.get_parameter(name).detach(), old - rate * (1 + decay * old))


def test_of_rules_that_set_the_same_the_later_one_counts():
    rules = [
        {"names": "*", "weight_decay": 0.1, "lr_factor": 0.5, "frozen": True},
        {"names": "6.*", "weight_decay": 0.2, "frozen": False},
        {"names": "6.2.bias", "lr_factor": 2},
    ]
    model = batch_norm_net()
    found = {name: (group["weight_decay"], group["lr"]) for names, group in groups_of(rules, model) for name in names}
    assert found["0.0.weight"] == (0.1, 0.05)
    assert found["6.2.weight"] == (0.2, 0.05)
    assert found["6.2.bias"] == (0.2, 0.2)
    assert [name for name, p in model.named_parameters() if p.requires_grad] == ["6.2.weight", "6.2.bias"]


def test_every_part_of_a_model_has_the_same_groups_in_order():
    model = cifar_resnet(8)
    ruled = with_rules(Muon, [{"layers": "BatchNorm2d", "betas": [0.5, 0.6]}, {"names": "*conv1*", "momentum": 0.5}])
    prepare(model, ruled)

    def options(parameters):
        return [{k: v for k, v in group.items() if k != "params"} for group in ruled(parameters).param_groups]

    parts = [options([p]) for p in model.parameters()]
    assert all(part == parts[0] for part in parts)
    assert len(parts[0]) == 4  # matrices, those with another momentum, the rest, norms


REFUSED = [
    ({"names": 3, "frozen": True}, "3: expected patterns for names and layers"),
    ({"frozen": True}, "names no parameters; give names, layers, ndim"),
    ({"names": "*", "lr_factor": 0}, "lr_factor must be a number above 0, got 0"),
    ({"names": "*", "frozen": 1}, "frozen must be true or false, got 1"),
    ({"names": "*", "lr": 1.0}, "lr is not for rules to set; give lr_factor"),
    ({"names": "*wieght", "frozen": True}, r"parameter of the model is called '\*wieght'; near it are .*weight"),
    ({"layers": "Linea", "frozen": True}, "no layer of the model is called 'Linea'; near it are Linear"),
    ({"names": "*.bias", "ndim": 4, "frozen": True}, "is about no parameter: .* have 1, 2, 4 dim"),
    ({"names": "*", "momentumm": 1}, r"SGD has no option 'momentumm' for 0.0.weight; did you mean momentum\?"),
    ({"names": "*", "momentum": float("inf")}, "momentum must be a finite number, got inf"),
    ({"names": "*", "weight_decay": float("nan")}, "weight_decay must be a finite number, got nan"),
    ({"names": "*", "momentum": -1}, r"torch's SGD refuses .*'momentum': -1, .*; its options"),
]


@pytest.mark.parametrize(("rule", "message"), REFUSED)
def test_a_rule_that_cannot_be_followed_is_refused(rule, message):
    with pytest.raises(ConfigError, match=message):
        groups_of([rule])


def test_rules_are_a_list_and_freeze_only_by_the_trainer():
    with pytest.raises(ConfigError, match="rules: expected a list of rules, got 'frozen'"):
        with_rules(SGD, "frozen")
    mark_roles(model := batch_norm_net())
    with pytest.raises(ConfigError, match=r"rules freeze 0.0.weight, but it takes a gradient: give with_rules"):
        with_rules(SGD, [{"names": "*", "frozen": True}])(model.parameters())
