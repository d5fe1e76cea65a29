"""Muon is torch's own for its matrices; the rest is torch's AdamW or SGD."""

from functools import partial

import pytest
import torch
from torch import nn

from adl_dist.optimizers import Muon, mark_roles
from tests.support.commands import assert_same

UPDATES = 23


def net(dtype=torch.float64):
    """A convolution [6, 8], a matrix [5, 24], a frozen one, a table, a norm and a head."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 6, 2), nn.Flatten(), nn.Linear(24, 5), nn.LayerNorm(5), nn.Linear(5, 5), nn.Linear(5, 3)]
    model = nn.Sequential(*layers).to(dtype)
    model[4].weight.requires_grad_(False)
    mark_roles(model)
    return model


def gradients(model, update):
    """Fixed gradients, some of which are missing in some updates."""
    draw = torch.Generator().manual_seed(update)
    made = {}
    for place, (name, p) in enumerate(model.named_parameters()):
        grad = torch.randn(p.shape, generator=draw, dtype=torch.float64).to(p.dtype)
        made[name] = grad if p.requires_grad and (update + place) % 4 else None
    return made


def stepped(model, optimizer, updates=range(UPDATES)):
    for update in updates:
        for name, grad in gradients(model, update).items():
            model.get_parameter(name).grad = grad
        optimizer.step()
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


class Matrices(nn.Module):
    """The matrices of a model [out, rest] as parameters of their own, and the rest, for torch's optimizers."""

    def __init__(self, model):
        super().__init__()
        self.of = {name: nn.Parameter(p.detach().clone()) for name, p in model.named_parameters()}
        self.matrices = {name: nn.Parameter(self.of[name].detach().flatten(1)) for name in ("0.weight", "2.weight")}

    def step(self, optimizers, update, model):
        for name, grad in gradients(model, update).items():
            self.of[name].grad = grad
            if name in self.matrices:
                self.matrices[name].grad = None if grad is None else grad.flatten(1)
        for optimizer in optimizers:
            optimizer.step()

    def weights(self):
        return {name: self.matrices.get(name, p).detach().view(p.shape) for name, p in self.of.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("options", "of_matrices", "rest"),
    [
        ({}, {"lr": 0.02, "weight_decay": 0.1}, partial(torch.optim.AdamW, lr=3e-3, betas=(0.9, 0.95), weight_decay=0)),
        (
            {"lr": 0.3, "weight_decay": 0.7, "momentum": 0.5, "nesterov": False, "adjust_lr_fn": "match_rms_adamw",
             "rest": "sgd", "rest_lr": 0.2, "rest_options": {"weight_decay": 0.3, "nesterov": True}},
            {"lr": 0.3, "weight_decay": 0.7, "momentum": 0.5, "nesterov": False, "adjust_lr_fn": "match_rms_adamw"},
            partial(torch.optim.SGD, lr=0.2, momentum=0.9, weight_decay=0.3, nesterov=True),
        ),
    ],
    ids=["by default", "with all options"],
)  # fmt: skip
def test_muon_is_torchs_muon_and_torchs_optimizer_bit_for_bit(options, of_matrices, rest, dtype):
    model = net(dtype)
    twin = Matrices(model)
    others = [p for name, p in twin.of.items() if name not in twin.matrices]
    optimizers = torch.optim.Muon(twin.matrices.values(), **of_matrices), rest(others)
    for update in range(UPDATES):
        twin.step(optimizers, update, model)
    assert_same(stepped(model, Muon(model.parameters(), **options)), twin.weights())


BOTH = pytest.mark.parametrize("make", [Muon, partial(Muon, rest="sgd")], ids=["adamw", "sgd"])


@BOTH
def test_the_memory_format_of_weights_changes_no_bit(make):
    plain, other = net(), net().to(memory_format=torch.channels_last)
    assert not other[0].weight.is_contiguous()
    assert_same(stepped(other, make(other.parameters())), stepped(plain, make(plain.parameters())))


@BOTH
def test_without_a_gradient_nothing_moves_nor_is_remembered(make):
    model = net()
    optimizer = make(model.parameters(), weight_decay=0.5, rest_options={"weight_decay": 0.5})
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer.step()
    model[0].weight.grad = torch.ones_like(model[0].weight)
    optimizer.step()
    moved = [name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])]
    assert moved == ["0.weight"]
    assert [*optimizer.state] == [model[0].weight]
