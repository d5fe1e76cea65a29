"""Mixed precision: what is lowered, what is not, and what is refused."""

from collections import OrderedDict

import pytest
import torch
from torch import nn

import adl_dist
from adl_dist.errors import ConfigError
from adl_dist.partition import cut
from tests.support.equations import by_the_equations
from tests.support.runs import (
    BALANCE,
    train,
    trainer_of,
)
from tests.support.toys import FixedImages, batch_norm_net
from tests.support.values import QUIET

LOWERED = {"autocast": torch.bfloat16}


class Autocasted(nn.Sequential):
    """Children under torch's own autocast."""

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(x)


def loss_fn(out, target):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return nn.functional.cross_entropy(out, target)


@pytest.mark.parametrize(("K", "weights"), [(1, "stash"), (2, "stash"), (4, "stash"), (3, "recompute")])
def test_stages_under_autocast_equal_the_equations_bit_for_bit(K, weights):
    """No tolerance would do: a last digit decides how autocast rounds a weight to bfloat16, and then all digits differ.

    Both sides make the same roundings in the same order, so they agree on any CPU, whichever kernels it has.
    """
    modules = [
        Autocasted(OrderedDict(part.named_children()))
        for part in cut(batch_norm_net(), num_stages=K, balance=BALANCE[K])
    ]
    expected = by_the_equations(K, 2, None, weights, modules=modules, dtype=torch.float32, loss_fn=loss_fn)
    state, _ = train(K, 2, torch.float32, options={"weights": weights}, **LOWERED)
    plain, _ = train(K, 2, torch.float32, options={"weights": weights})
    for name in expected:
        assert torch.equal(state[name], expected[name]), name
    # A cast in another place would show: without autocast they differ by 1e-2.
    assert not all(torch.equal(state[name], plain[name]) for name in state)


def test_bfloat16_crosses_the_cut_and_parameters_stay_float32():
    """Bfloat16 crosses the cut in both directions and parameters stay float32."""
    seen = {}
    model = batch_norm_net()
    model[3].register_forward_pre_hook(lambda _, given: seen.update(act=given[0].dtype))
    model[2].register_full_backward_pre_hook(lambda _, given: seen.update(grad=given[0].dtype))
    trainer = trainer_of(model, **LOWERED)
    trainer.fit(FixedImages(8), epochs=1, batch_size=4, monitoring=QUIET)
    assert seen == {"act": torch.bfloat16, "grad": torch.bfloat16}
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"autocast": torch.float16}, "runtime.autocast=float16 is not supported"),
        ({"autocast": torch.bfloat16, "dtype": torch.float64}, "lowers float32 only, but dtype=float64"),
        ({"autocast": torch.bfloat16, "method": adl_dist.method("paci")}, "may keep what was computed"),
    ],
)
def test_what_autocast_cannot_do_is_refused(options, expected):
    with pytest.raises(ConfigError, match=expected):
        trainer_of(batch_norm_net(), **options)
