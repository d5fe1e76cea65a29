"""The networks of the papers, against published counts, hand computation and torchvision."""

import itertools
import math

import pytest
import torch
import torchvision
from torch import nn
from torch.nn import functional as F

from adl_dist.cli.config.compose import compose_run
from adl_dist.cli.config.instantiate import build_model
from adl_dist.models import cifar_resnet, cifar_resnet18, se_resnet18
from adl_dist.models.resnet import OptionA, PreActivationBlock, SqueezeExcitation
from tests.support.tiers import covering


@pytest.fixture(autouse=True)
def _initial_weights_are_the_same_every_time():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def images(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


COUNTS = {
    "resnet20": 269_722, "resnet32": 464_154, "resnet44": 658_586, "resnet56": 853_018, "resnet98": 1_533_530,
    "resnet110": 1_727_962, "resnet164": 2_602_906, "resnet1202": 19_421_274, "resnet18": 11_173_962,
    "resnet34": 21_282_122, "wrn28_10": 36_479_194, "se_resnet18 data.num_classes=1000": 11_776_552,
    "torchvision data.num_classes=1000": 11_689_512,
}  # fmt: skip


@pytest.mark.parametrize("preset", covering(COUNTS, COUNTS.keys() - {"resnet98", "resnet164", "resnet1202"}))
def test_parameter_counts_are_the_published_ones(preset):
    config, _ = compose_run([*f"model={preset}".split(), "data.in_channels=3"])
    with torch.device("meta"):
        model = build_model(config)
    assert sum(p.numel() for p in model.parameters()) == COUNTS[preset]


@pytest.mark.parametrize(("shortcut", "before"), [("A", 2), ("A_after", 0)])
def test_shortcut_option_a_is_every_second_pixel_and_zeros(shortcut, before):
    """Zeros on both sides, or after as in the code of DDG."""
    x = images(2, 4, 5, 6)
    expected = torch.zeros(2, 8, 3, 3)
    for c, row, column in itertools.product(range(4), range(3), range(3)):
        expected[:, before + c, row, column] = x[:, c, 2 * row, 2 * column]
    model = cifar_resnet(8, width=4, shortcut=shortcut)
    assert isinstance(model.layer2_0.shortcut, OptionA)
    assert torch.equal(model.layer2_0.shortcut(x), expected)


def test_pool_size_6_sees_the_upper_left_6_by_6():
    model = cifar_resnet(8, pool_size=6).eval()
    maps = model[:-1](x := images(2, 3, 32, 32))
    seen = maps[:, :, :6, :6].mean((2, 3))
    torch.testing.assert_close(model(x), F.linear(seen, model.head.fc.weight, model.head.fc.bias))
    assert not torch.allclose(model(x), cifar_resnet(8).eval()(x))


@pytest.mark.parametrize("training", [True, False])
def test_resnet18_is_torchvisions_with_a_small_stem_to_the_bit(training):
    theirs = torchvision.models.resnet18(num_classes=7)
    theirs.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    theirs.maxpool = nn.Identity()
    ours = cifar_resnet18(num_classes=7)
    values = list(theirs.state_dict().values())
    assert len(values) == len(ours.state_dict())
    ours.load_state_dict(dict(zip(ours.state_dict(), values, strict=True)))
    ours.train(training)
    theirs.train(training)
    assert torch.equal(ours(images(2, 3, 16, 16)), theirs(images(2, 3, 16, 16)))


@pytest.mark.parametrize(("channels", "stride"), [((4, 4), 1), ((4, 8), 1), ((4, 8), 2)])
def test_a_wide_block_is_the_papers_equation(channels, stride):
    block = PreActivationBlock(*channels, stride, dropout=0.3).eval()
    state, x = dict(block.named_parameters()), images(2, 4, 5, 5)
    activated = F.relu(x / math.sqrt(1 + 1e-5))  # BatchNorm at its beginning: mean 0, variance 1
    inner = F.relu(F.conv2d(activated, state["conv1.weight"], stride=stride, padding=1) / math.sqrt(1 + 1e-5))
    residual = F.conv2d(inner, state["conv2.weight"], padding=1)
    around = x if channels == (4, 4) else F.conv2d(activated, state["projection.weight"], stride=stride)
    torch.testing.assert_close(block(x), residual + around)


def test_squeeze_and_excitation_scales_channels():
    gate, x = SqueezeExcitation(32), images(2, 32, 3, 5)
    expected = torch.empty_like(x)
    for b in range(2):
        means = torch.stack([x[b, c].mean() for c in range(32)])
        scale = 1 / (1 + torch.exp(-gate.fc2.weight @ (gate.fc1.weight @ means).clamp(min=0)))
        for c in range(32):
            expected[b, c] = scale[c] * x[b, c]
    assert gate.fc1.weight.shape == (2, 32)  # reduction 16
    torch.testing.assert_close(gate(x), expected)


def test_se_resnet18_with_half_gates_is_torchvisions():
    theirs = torchvision.models.resnet18(num_classes=7)
    ours = se_resnet18(num_classes=7)
    names = [name for name in ours.state_dict() if ".se." not in name]
    values = theirs.state_dict().values()
    ours.load_state_dict(dict(zip(names, values, strict=True)), strict=False)
    for module in ours.modules():
        if isinstance(module, SqueezeExcitation):
            nn.init.zeros_(module.fc2.weight)  # sigmoid(0) is 1/2, exactly
    for name, parameter in theirs.named_parameters():
        if "bn2" in name:
            parameter.data /= 2
    x = images(2, 3, 64, 64)
    assert torch.equal(ours(x), theirs(x))


def test_weights_of_a_torchvision_model_go_in_by_init_from(tmp_path):
    words = ["model=torchvision", "model.name=squeezenet1_1", "data.num_classes=4", "seed=1"]
    weights = torchvision.models.squeezenet1_1(num_classes=4).state_dict()
    torch.save(weights, tmp_path / "state.pt")
    drawn = build_model(compose_run(words)[0]).state_dict()
    loaded = build_model(compose_run([*words, f"init_from={tmp_path / 'state.pt'}"])[0]).state_dict()
    assert not torch.equal(drawn["features.0.weight"], weights["features.0.weight"])
    assert loaded.keys() == weights.keys()
    assert all(torch.equal(loaded[name], weights[name]) for name in weights)
