"""A loss that is none, and one that broadcasts, are refused before training; any other is let through."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from adl_dist.errors import ConfigError
from adl_dist.stage.loss import try_loss
from adl_dist.training import build


def squared(output, target):
    return ((output - target) ** 2).mean()


def squeezing(output, target):
    return F.mse_loss(output.squeeze(1), target)


def of_a_column(output, target):
    return ((output[:, 0] - target) ** 2).mean()


@pytest.mark.parametrize("loss_fn", [nn.MSELoss(), nn.L1Loss(), F.huber_loss, squared])
@pytest.mark.parametrize(("out", "target"), [([2, 1], [2]), ([3], [3, 1]), ([2, 1, 4], [2, 4])])
def test_a_loss_of_every_output_with_every_target_is_refused(loss_fn, out, target):
    with pytest.raises(ConfigError, match=r"stage 3: the model returns \[B.*broadcasting\); give both one shape"):
        try_loss(3, "numbers", torch.rand(out), torch.rand(target), loss_fn)


@pytest.mark.parametrize(
    ("loss_fn", "out", "target"),
    [
        (squeezing, torch.rand(2, 1), torch.zeros(2)),
        (of_a_column, torch.rand(2, 1), torch.zeros(2)),
        (nn.MSELoss(), torch.zeros(2, 1), torch.zeros(2, 1)),
        (nn.CrossEntropyLoss(), torch.zeros(2, 2), torch.zeros(2, dtype=torch.int64)),
        (nn.CrossEntropyLoss(), torch.zeros(2, 5), torch.zeros(2, 5)),
        (lambda output, target: output[0].mean(), (torch.rand(2, 1), torch.rand(2)), torch.zeros(2)),
    ],
)
def test_a_loss_that_does_not_broadcast_is_let_through(loss_fn, out, target):
    assert try_loss(0, "numbers", out, target, loss_fn).ndim == 0


@pytest.mark.parametrize(
    ("loss", "found"),
    [(None, "returned None"), (0.5, "returned a float"), (torch.zeros(2), r"returned a Tensor\[2\]"),
     ((torch.tensor(0.5), 1, 2), r"returned a Tensor, a int, a int"),
     ((torch.tensor(0.5), {}), r"returned a Tensor, a dict"), ((torch.zeros(2), 1), r"returned a Tensor\[2\], a int")],
)  # fmt: skip
def test_what_is_no_number_is_no_loss(loss, found):
    with pytest.raises(ConfigError, match=f"stage 1: the loss {found} for float"):
        try_loss(1, "float32[B, 3] and int64[B]", None, None, lambda out, target: loss)


def test_compile_without_a_compiler_is_refused():
    build.check_compiler(torch.device("cpu"))
    # torch's own patch: pytest's would not put the compiler back, for all tests that follow.
    missing = torch._inductor.config.patch({"cpp.cxx": (None, "/nowhere/g++")})
    told = r"runtime.compile=true needs a C\+\+ compiler .* omit runtime.compile"
    with missing, pytest.raises(ConfigError, match=told):
        build.check_compiler(torch.device("cpu"))
    build.check_compiler(torch.device("cpu"))
