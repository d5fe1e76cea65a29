"""The example of an own optimizer follows its equations, and trains by its name."""

import json
import runpy

import pytest
import torch
from torch import nn

from adl_dist.optimizers import mark_roles
from tests.support.commands import ROOT, in_process, words

EXAMPLES = ROOT / "examples"
UPDATES = 23  # the basis moves at 10 and 20

rotated_adam = runpy.run_path(str(EXAMPLES / "rotated_adam.py"))["RotatedAdam"]


def by_the_equations(
    weight, grads, *, lr=3e-3, b1=0.9, b2=0.99, eps=1e-8, decay=0.01, every=10, source="second", sides
):
    """The sheet of the example, line by line, for one matrix; the basis by Gram-Schmidt."""
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
    optimizer = rotated_adam(model.parameters(), **options)
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


def test_it_trains_by_its_name(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    own = ["optimizer._target_=rotated_adam.RotatedAdam", "optimizer.rest=sgd", "train.max_updates=2"]
    outcome = in_process(*words(tmp_path, *own))
    assert outcome.code == 0, outcome
    assert json.loads((tmp_path / "summary.json").read_text())["updates"] == 2
