"""Gradients of weights that are deferred: the same bits as autograd's, or not deferred at all."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from adl_dist.errors import ConfigError
from adl_dist.stage.deferred import DeferredGradients


class Of(nn.Module):
    """A module whose forward is ``call`` (self, x), with these parts."""

    def __init__(self, call, **parts):
        super().__init__()
        self.call = call
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        return self.call(self, x)


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def frozen(module, *names):
    for name in names:
        module.get_parameter(name).requires_grad_(False)
    return module


def tripled(parameter):
    parameter.grad.mul_(3)


def hooked():
    torch.manual_seed(0)
    module = nn.Linear(6, 5)
    module.weight.register_hook(lambda grad: 2 * grad)
    module.bias.register_post_accumulate_grad_hook(tripled)
    return module


def tied():
    a, b = nn.Linear(6, 6), nn.Linear(6, 6)
    b.weight = a.weight
    return nn.Sequential(a, nn.Tanh(), b)


def penalised(m, x):
    """Adds a gradient's gradient, which depends on the weights."""
    y = m.a(x)
    (slope,) = torch.autograd.grad(y.pow(2).sum(), x, create_graph=True)
    return torch.tanh(y) + slope.pow(2).sum()


def transposed():
    layer = nn.Linear(6, 5)
    layer.weight = nn.Parameter(layer.weight.detach().t().contiguous().t())
    return layer


def scripted():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return torch.jit.script(nn.Sequential(nn.Linear(6, 5)))


def with_double_weights(m, x):
    return torch.func.functional_call(m.a, {"weight": 2 * m.w}, (x,))


def in_place(m, x):
    return m.b(torch.relu_(m.a(x)))


def twice_backward(m, x):
    """As a fixed point's: a hook goes through the layer once more, for the gradient of its input alone."""
    y = torch.tanh(m.a(x))
    inner = x.detach().requires_grad_()
    again = torch.tanh(m.a(inner))
    y.register_hook(lambda grad: grad + torch.autograd.grad(again, inner, grad)[0])
    return y


def remembering(m, x):
    """Feeds a moving mean of its inputs, which the next forward writes to, to a layer."""
    with torch.no_grad():
        m.memory.mul_(0.5).add_(x.detach().mean(0, keepdim=True))
    return x + m.a(m.memory[:])


def with_memory():
    module = Of(remembering, a=nn.Linear(6, 6))
    module.register_buffer("memory", torch.zeros(1, 6))
    return module


LINEAR, IMAGE = (3, 6), (3, 4, 7, 7)
CONV = {"bias": False, "padding": 1}
# A module, the shape of its input, and the parameters whose gradients are deferred.
PUT_OFF = {
    "linear": (nn.Linear(6, 5), LINEAR, ["weight", "bias"]),
    "linear of a sequence": (nn.Linear(6, 5), (3, 4, 6), ["weight", "bias"]),
    "convolution with bias": (nn.Conv2d(4, 8, 3, stride=2), IMAGE, ["weight", "bias"]),
    "grouped": (nn.Conv2d(4, 8, 3, groups=2, dilation=2), IMAGE, ["weight", "bias"]),
    "channels last": (nn.Conv2d(4, 8, 3, **CONV).to(memory_format=torch.channels_last), IMAGE, ["weight"]),
    "over a line": (nn.Conv1d(4, 8, 3), (3, 4, 9), ["weight", "bias"]),
    "frozen bias": (frozen(nn.Conv2d(4, 8, 3), "bias"), IMAGE, ["weight"]),
    "called three times": (
        Of(lambda m, x: m.a(torch.tanh(m.a(torch.tanh(m.a(x))))), a=nn.Linear(6, 6)),
        LINEAR,
        ["a.weight", "a.bias"],
    ),
    "weights in another format": (transposed(), LINEAR, ["weight", "bias"]),
    "in place": (Of(in_place, a=nn.Linear(6, 6), b=nn.Linear(6, 6, False)), LINEAR, ["a.weight", "a.bias", "b.weight"]),
    "around a norm": (nn.Sequential(nn.Conv2d(4, 8, 3, **CONV), nn.BatchNorm2d(8), nn.ReLU(True)), IMAGE, ["0.weight"]),
    "replayed": (
        Of(lambda m, x: checkpoint(m.a, x, use_reentrant=False), a=nn.Sequential(nn.Linear(6, 6), nn.Tanh())),
        LINEAR,
        ["a.0.weight", "a.0.bias"],
    ),
    "with a backward in its own": (Of(twice_backward, a=nn.Linear(6, 6)), LINEAR, ["a.weight", "a.bias"]),
}  # fmt: skip
LEFT = {
    "frozen weight": (frozen(nn.Linear(6, 5), "weight"), LINEAR),
    "hooks": (hooked, LINEAR),
    "tied": (tied(), LINEAR),
    "a subclass of its own": (Doubled(6, 5), LINEAR),
    "a parametrization": (parametrizations.weight_norm(nn.Linear(6, 5)), LINEAR),
    "circular padding": (nn.Conv2d(4, 8, 3, padding=1, padding_mode="circular"), IMAGE),
    "weights of others": (
        Of(with_double_weights, a=nn.Linear(6, 6), w=nn.Parameter(torch.ones(6, 6))),
        LINEAR,
    ),
    "mapped": (Of(lambda m, x: torch.vmap(m.a)(x), a=nn.Linear(6, 5)), (2, 3, 6)),
    "torchscript": (scripted(), LINEAR),
    "replayed in a nested backward": (
        Of(lambda m, x: checkpoint(m.a, x, use_reentrant=True), a=nn.Sequential(nn.Linear(6, 6), nn.Tanh())),
        LINEAR,
    ),
}  # fmt: skip


def gradients(module, shape, *, split, num=3, dtype=None):
    """Return the gradients of ``num`` inputs, and those of the parameters, added up; and what was deferred."""
    if isinstance(module, torch.jit.ScriptModule):
        module.zero_grad()
    else:  # hooks are not copied
        module = copy.deepcopy(module) if isinstance(module, nn.Module) else module()
    deferred = DeferredGradients(module) if split else None
    inputs, kept = [], []
    for number in range(num):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(number), dtype=dtype).requires_grad_()
        inputs.append(x)
        if deferred is None:
            module(x).square().sum().backward()
            continue
        with deferred.ready():
            out = module(x).square().sum()
        with deferred.deferrable([out.grad_fn]) as later:
            out.backward()
        kept.append(later)
    early = {name for name, p in module.named_parameters() if p.grad is not None}
    for later in kept:
        deferred.compute(later)
    grads = {name: p.grad for name, p in module.named_parameters()}
    return [x.grad for x in inputs], grads, [n for n, grad in grads.items() if grad is not None and n not in early]


def assert_equal(got, expected):
    for mine, theirs in zip(got[0], expected[0], strict=True):
        assert torch.equal(mine, theirs)
    for name, theirs in expected[1].items():
        mine = got[1][name]
        assert (mine is None) == (theirs is None), name
        assert theirs is None or (torch.equal(mine, theirs) and mine.stride() == theirs.stride()), name


@pytest.mark.parametrize("case", PUT_OFF)
def test_what_is_put_off_has_autograds_bits(case):
    module, shape, names = PUT_OFF[case]
    got, expected = gradients(module, shape, split=True), gradients(module, shape, split=False)
    assert_equal(got, expected)
    assert got[2] == names


@pytest.mark.parametrize("case", LEFT)
def test_what_cannot_be_put_off_is_left_to_autograd(case):
    module, shape = LEFT[case]
    got = gradients(module, shape, split=True)
    assert_equal(got, gradients(module, shape, split=False))
    assert got[2] == []


def test_a_gradient_of_a_gradient_is_the_whole_one():
    module, shape = Of(penalised, a=nn.Linear(6, 6)).double(), LINEAR
    got, expected = (gradients(module, shape, split=split, dtype=torch.float64) for split in (True, False))
    for mine, theirs in zip((*got[0], *got[1].values()), (*expected[0], *expected[1].values()), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case", ["linear", "linear of a sequence", "convolution with bias", "around a norm"])
def test_under_autocast_the_casts_are_those_of_autocast(case):
    module, shape, names = PUT_OFF[case]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, expected = gradients(module, shape, split=True), gradients(module, shape, split=False)
    assert_equal(got, expected)
    assert got[2] == names


def test_a_module_is_left_as_it_was():
    module = nn.Sequential(nn.Linear(6, 5), nn.Tanh())
    before = {name: dict(vars(part)) for name, part in module.named_modules()}
    deferred = DeferredGradients(module)
    with deferred.ready():
        out = module(torch.ones(2, 6))
    loss = out.sum()
    with deferred.deferrable([loss.grad_fn]):
        loss.backward()
    assert {name: dict(vars(part)) for name, part in module.named_modules()} == before
    with pytest.raises(RuntimeError), deferred.ready():
        module(torch.ones(2, 7))
    assert "forward" not in vars(module[0])


def test_an_input_written_to_before_its_use_is_refused():
    with pytest.raises(ConfigError, match=r"^the model: the input of layer 'a' \(Linear\) was written .*=False"):
        gradients(with_memory(), LINEAR, split=True)


def test_a_gradient_written_to_before_its_use_is_refused():
    module = nn.Linear(6, 5)
    deferred, grad = DeferredGradients(module, "stage 1"), torch.ones(3, 5)
    with deferred.ready():
        out = module(torch.ones(3, 6))
    with deferred.deferrable([out.grad_fn]) as later:
        out.backward(grad)
    grad.zero_()
    with pytest.raises(ConfigError, match=r"^stage 1: the gradient of the output of layer 'Linear' \(Linear\) was"):
        deferred.compute(later)
