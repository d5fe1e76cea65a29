"""The oracle against sums on paper and versions of the papers: it is the reference of the equality tests."""

import pytest
import torch
from torch import nn

from tests.support.oracle import train_by_the_equations


class Scale(nn.Linear):
    """z to w z."""

    def __init__(self, w):
        super().__init__(1, 1, bias=False, dtype=torch.float64)
        nn.init.constant_(self.weight, w)


@pytest.mark.parametrize("weights", ["stash", "recompute", "latest"])
def test_the_policies_differ_as_a_sum_on_paper_says(weights):
    """Loss c a2 a1 x, x = 1; module 1 holds a1 and a2 and is one batch late, module 2 holds c."""
    lr, (a1, a2, c) = 0.5, (2.0, 3.0, 5.0)
    one = (torch.ones(1, 1, dtype=torch.float64), torch.zeros(1))
    modules, options = [nn.Sequential(Scale(a1), Scale(a2)), Scale(c)], {"M": 1, "lr": [lr, lr], "delays": [1, 0]}
    got = train_by_the_equations(modules, [[one, one]], loss_fn=lambda z, _: z.sum(), weights=weights, **options)
    # Batch 0: gradients a2 c, a1 c, a1 a2. Batch 1 meets the same a1, a2 and the new c, whose gradient is a1 a2.
    new_a1, new_a2, new_c = a1 - lr * a2 * c, a2 - lr * a1 * c, c - lr * a1 * a2
    of_a1, of_a2 = {
        "stash": (a2 * new_c, a1 * new_c),
        "recompute": (new_a2 * new_c, new_a1 * new_c),
        "latest": (new_a2 * new_c, a1 * new_c),
    }[weights]
    assert got["0.weight"].item() == new_a1 - lr * of_a1
    assert got["1.weight"].item() == new_a2 - lr * of_a2
    assert got["weight"].item() == new_c - lr * a1 * a2


class CountUpdates(nn.Module):
    """Adds its weight, whose gradient is always 1: after s updates with learning rate -r it is r s."""

    def __init__(self, name):
        super().__init__()
        self.register_parameter(name, nn.Parameter(torch.zeros((), dtype=torch.float64)))

    def forward(self, z):
        return z + next(self.parameters())


ADL = [(0, 0, 0), (0, 0, 0), (0, 0, 1), (0, 0, 1), (0, 1, 2), (0, 1, 2), (1, 2, 3), (1, 2, 3)]
DDG = [(0, 0, 0), (0, 0, 0), (0, 0, 1), (0, 1, 1), (1, 1, 2), (1, 2, 2), (2, 2, 3), (2, 3, 3)]
TWO_BW = [(0, 0, 0), (0, 0, 0), (0, 0, 0), (0, 0, 0), (1, 1, 1), (1, 1, 1), (2, 2, 2), (2, 2, 2)]


@pytest.mark.parametrize(
    ("weights", "delays", "expected"),
    [("stash", None, ADL), ("recompute", [4, 2, 0], ADL), ("stash", [2, 1, 0], DDG), ("2bw", None, TWO_BW)],
)
def test_a_batch_meets_the_versions_that_the_delays_name(weights, delays, expected):
    """M = 2; the second epoch starts from an empty pipeline and four updates."""
    seen = []

    def loss_fn(z, _):
        total = int(z.sum())
        seen.append((total % 100, total // 100 % 100, total // 10000))
        return z.sum()

    epochs = [[(torch.zeros(1, dtype=torch.float64), torch.zeros(1))] * 8] * 2
    rates = {"lr": [], "lr_of": lambda k, s: -(100.0 ** (k - 1))}
    modules = [CountUpdates(name) for name in "abc"]
    train_by_the_equations(modules, epochs, M=2, loss_fn=loss_fn, delays=delays, weights=weights, **rates)
    assert seen == expected + [tuple(4 + v for v in versions) for versions in expected]
