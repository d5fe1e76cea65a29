"""Muon is torch's own for its matrices, rotated Adam follows its equations; the rest is torch's AdamW or SGD."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from adl_dist.errors import ConfigError
from adl_dist.optimizers import Muon, RotatedAdam, mark_roles
from tests.support.commands import assert_same

UPDATES = 23  # the basis moves at 10 and 20


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


# --- Rotated Adam -----------------------------------------------------------------------------------------------------


def by_the_equations(
    weight, grads, *, lr=3e-3, b1=0.9, b2=0.99, eps=1e-8, decay=0.01, every=10, source="second", sides
):
    """The sheet of the docstring, line by line, for one matrix; the basis by Gram-Schmidt."""
    W = weight.clone()
    m, n = W.shape
    M, S, L, R = torch.zeros(m, n), torch.zeros(m, n), torch.zeros(m, m), torch.zeros(n, n)
    M, S, L, R = (x.double() for x in (M, S, L, R))
    U, V = torch.eye(m).double(), torch.eye(n).double()
    for t, G in enumerate(grads):
        M = b1 * M + (1 - b1) * G
        X = M if source == "first" else G
        L = b2 * L + (1 - b2) * X @ X.T
        R = b2 * R + (1 - b2) * X.T @ X
        if t > 0 and t % every == 0:
            U = orthogonal(L @ U) if "left" in sides else U
            V = orthogonal(R @ V) if "right" in sides else V
        S = b2 * S + (1 - b2) * (U.T @ G @ V) ** 2
        step = (U.T @ M @ V / (1 - b1 ** (t + 1))) / (torch.sqrt(S / (1 - b2 ** (t + 1))) + eps)
        W = W - lr * decay * W - lr * U @ step @ V.T
    return W


def orthogonal(columns):
    """The Q of qr, made another way, with the largest entry of each column positive."""
    made = []
    for column in columns.T:
        for _ in range(2):
            for other in made:
                column = column - (other @ column) * other
        column = column / column.norm()
        made.append(column * column[column.abs().argmax()].sign())
    return torch.stack(made, dim=1)


@pytest.mark.parametrize(
    ("shape", "options", "sides"),
    [
        ((6, 6), {}, "left right"),
        ((8, 2, 2, 2), {"source": "first", "every": 3}, "left right"),
        ((3, 7), {"rotation": "unilateral"}, "left"),
        ((7, 3), {"rotation": "unilateral", "betas": (0.8, 0.9), "eps": 1e-3}, "right"),
        ((4, 9), {"max_dim": 5, "lr": 0.1, "weight_decay": 0.5}, "left"),
        ((4, 9), {}, "left right"),
        ((4, 9), {"max_dim": 4}, "left"),
        ((4, 9), {"max_dim": 3}, ""),
        ((5, 5), {"rotation": "unilateral"}, "left"),
    ],
    ids=str,
)
def test_rotated_adam_follows_its_equations_to_1e_12(shape, options, sides):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(*shape[1::-1], shape[2:]) if len(shape) > 2 else nn.Linear(*shape[::-1]))
    model.append(nn.Linear(2, 2)).double()
    mark_roles(model)
    weight = model[0].weight
    optimizer = RotatedAdam(model.parameters(), **options)
    start, grads = weight.detach().flatten(1).clone(), torch.randn(UPDATES, *weight.shape, dtype=torch.float64)
    for grad in grads:
        weight.grad = grad.clone()
        optimizer.step()
    options = {key: value for key, value in options.items() if key not in ("max_dim", "rotation", "betas")} | (
        {"b1": 0.8, "b2": 0.9} if "betas" in options else {}
    )
    if "weight_decay" in options:
        options["decay"] = options.pop("weight_decay")
    expected = by_the_equations(start, grads.flatten(2), sides=sides.split(), **options)
    torch.testing.assert_close(weight.detach().flatten(1), expected, rtol=0, atol=1e-12)


def test_without_rotation_it_is_adamw():
    """To rounding: AdamW divides by other products of the same numbers."""
    model, options = net(), {"lr": 0.01, "betas": (0.8, 0.95), "weight_decay": 0.3}
    twin = copy.deepcopy(model)
    found = stepped(model, RotatedAdam(model.parameters(), max_dim=0, rest_lr=0.01, rest_options=options, **options))
    expected = stepped(twin, torch.optim.AdamW(twin.parameters(), **options))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)


def test_a_gradient_that_is_not_finite_raises_no_error():
    """Whether it ends the run is decided elsewhere, and on a GPU an update later."""
    model = net()
    optimizer = RotatedAdam(model.parameters())
    model[2].weight.grad = torch.full_like(model[2].weight, float("nan"))
    optimizer.step()
    assert model[2].weight.isnan().all()


# --- Both -------------------------------------------------------------------------------------------------------------

BOTH = pytest.mark.parametrize("make", [Muon, partial(Muon, rest="sgd"), RotatedAdam], ids=["muon", "sgd", "rotated"])


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


@BOTH
def test_a_schedule_moves_the_rates_of_both_groups(make):
    optimizer = make(net().parameters(), lr=0.04, rest_lr=0.3)
    schedule = LambdaLR(optimizer, lambda update: 1 / (1 + update))
    optimizer.step()
    schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.02, 0.15]


@BOTH
def test_a_stage_of_vectors_only_trains(make):
    model = net()
    norm = model[3]
    optimizer = make(norm.parameters())
    assert [len(group["params"]) for group in optimizer.param_groups] == [0, 2]
    norm.weight.grad = torch.ones_like(norm.weight)
    optimizer.step()
    assert not norm.weight.eq(1).any()


@BOTH
def test_its_state_dict_continues_it_bit_for_bit(make):
    whole = net()
    expected = stepped(whole, make(whole.parameters()))
    model = net()
    first = make(model.parameters())
    stepped(model, first, range(9))
    second = make(model.parameters(), lr=77.0)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert_same(stepped(model, second, range(9, UPDATES)), expected)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (partial(Muon, rest="adam"), "optimizer.rest: there is no 'adam'; choose one of adamw, sgd"),
        (
            partial(Muon, lr=-1.0),
            "optimizer: torch's Muon refuses .*: Learning rate should be >= 0 but is: -1.0; its options are lr",
        ),
        (
            partial(Muon, rest_lr=-1.0),
            "optimizer.rest_options: torch's AdamW refuses .*: Invalid learning rate: -1.0; .* or omit that",
        ),
        (
            partial(Muon, rest_options={"momentum": 1}),
            "optimizer.rest_options: torch's AdamW refuses .* 'momentum'; its options are lr, betas, eps, .*: correct",
        ),
        (
            partial(RotatedAdam, rotation="both"),
            "optimizer.rotation must be one of bilateral, unilateral, got both; correct it, or omit it for the default",
        ),
        (
            partial(RotatedAdam, betas=[0.9]),
            r"optimizer.betas must be two numbers in \[0, 1\), got \(0.9,\); correct it",
        ),
        (partial(RotatedAdam, every=0), "optimizer.every must be at least 1 update, got 0"),
    ],
    ids=str,
)
def test_a_wrong_option_is_refused_in_one_line(make, told):
    with pytest.raises(ConfigError, match=told):
        make(net().parameters())
