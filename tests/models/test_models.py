"""The networks of the papers, against published counts, hand computation and torchvision."""

import itertools
import math
from functools import partial

import pytest
import torch
import torchvision
from torch import nn
from torch.nn import functional as F

from adl_dist.cli.config.compose import compose_run
from adl_dist.cli.config.instantiate import build_model
from adl_dist.errors import ConfigError
from adl_dist.models import cifar_resnet, cifar_resnet18, cifar_resnet34, se_resnet18, torchvision_model, wide_resnet
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


def test_units_are_stem_blocks_and_head_in_order():
    """Each layer but the first halves the image."""
    x, shapes = images(2, 3, 32, 32), {}
    for name, unit in cifar_resnet(14).named_children():
        x = unit(x)
        shapes[name] = tuple(x.shape[1:])
    of_layers = {"stem": (16, 32, 32)}
    for layer, shape in ((1, (16, 32, 32)), (2, (32, 16, 16)), (3, (64, 8, 8))):
        of_layers |= {f"layer{layer}_0": shape, f"layer{layer}_1": shape}
    assert list(shapes.items()) == [*of_layers.items(), ("head", (10,))]
    with torch.device("meta"):
        assert len(cifar_resnet18()) == len(se_resnet18()) == 1 + 8 + 1
        assert len(cifar_resnet34()) == 1 + 3 + 4 + 6 + 3 + 1
        assert len(wide_resnet(widen_factor=1)) == 1 + 12 + 1


NETWORKS = {"resnet8": partial(cifar_resnet, 8), "wrn10_2": partial(wide_resnet, 10, 2, dropout=0.5)}
NETWORKS |= {"resnet18": cifar_resnet18, "se_resnet18": se_resnet18}


@pytest.mark.parametrize("make", NETWORKS.values(), ids=NETWORKS)
def test_no_unit_ends_or_begins_in_place_or_in_another_format(make):
    """Between two units there may be a cut: what came in is someone else's, what goes out is on its way."""
    model, x = make().to(memory_format=torch.channels_last), images(2, 3, 32, 32)
    x = x.contiguous(memory_format=torch.channels_last)
    for name, unit in model.named_children():
        received = x.detach().requires_grad_() * 1  # not a leaf, which autograd itself would protect
        x = unit(received)
        assert (received._version, x._version) == (0, 0), name
        assert name == "head" or x.is_contiguous(memory_format=torch.channels_last), name


@pytest.mark.parametrize(
    ("make", "side"),
    [(partial(cifar_resnet, 20), 8), (partial(wide_resnet, 16, 2), 8), (cifar_resnet34, 8), (se_resnet18, 64)],
    ids=["resnet20", "wrn16_2", "resnet34", "se_resnet18"],
)
def test_every_parameter_gets_a_gradient_from_small_grey_images(make, side):
    model = make(num_classes=4, in_channels=1)
    out = model(images(5, 1, side, side))
    out.square().sum().backward()
    assert out.shape == (5, 4)
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []


DEPTHS = {21: "20 and 26", 19: "14 and 20", 55: "50 and 56", 2: "8", 7: "8", -3: "8"}
TORCHVISIONS = [
    ("resnet51", {}, "model.name=resnet51 is not one of torchvision's .* did you mean resnet50 or"),
    (5, {}, "model.name=5 is not one of torchvision's .* see torchvision.models.list_models"),
    ("fcn_resnet50", {}, "model.name=fcn_resnet50 is not one of torchvision's .* classification builders"),
    ("resnet18", {"num_classes": 0}, "model.num_classes must be at least 1, got 0"),
    ("resnet18", {"width_per_grup": 1}, "no key 'model.width_per_grup'; did you mean 'model.width_per_group'"),
    # ConvNeXt and MobileNetV3 would swallow what they do not know.
    ("convnext_tiny", {"dropuot": 0.1}, "no key 'model.dropuot'; torchvision's convnext_tiny takes block_setting"),
    ("resnet18", {"weights": "DEFAULT"}, "model.weights is not taken: nothing is downloaded; .* init_from=PATH"),
    ("resnet18", {"groups": 2}, "refuses model.groups=2: ValueError: BasicBlock only supports groups=1"),
]
MAKERS = (cifar_resnet18, cifar_resnet34, wide_resnet, se_resnet18)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        *(
            (partial(cifar_resnet, depth), rf"model\.depth={depth} is not 6n\+2 .* the nearest that is: {nearest}$")
            for depth, nearest in DEPTHS.items()
        ),
        (lambda: cifar_resnet(20, num_classes=0), r"model.num_classes and model.in_channels must be .*, got 0 and 3"),
        *((partial(make, num_classes=10, in_channels=0), "got 10 and 0") for make in MAKERS),
        (lambda: cifar_resnet(32, width=0), r"model\.width must be at least 1, got 0"),
        (lambda: cifar_resnet(20, shortcut="C"), "there is no model.shortcut=C; choose one of A, A_after, B"),
        (lambda: cifar_resnet(20, pool_size=0), "model.pool_size must be a whole number of at least 1, or null, got 0"),
        (lambda: cifar_resnet(20, pool_size="6"), "model.pool_size must be a whole number .* got '6'"),
        (lambda: cifar_resnet34(init="xavier"), "there is no model.init=xavier; choose one of he, torch"),
        (lambda: wide_resnet(26), r"model.depth=26 is not 6n\+4 with n >= 1; the nearest that is: 22 and 28"),
        (lambda: wide_resnet(4), r"model.depth=4 is not 6n\+4 .*: 10$"),
        (lambda: wide_resnet(10, 0), "model.widen_factor must be at least 1, got 0"),
        (lambda: wide_resnet(10, 1, dropout=1.0), "model.dropout must be at least 0 and below 1, got 1.0"),
        *((partial(torchvision_model, name, **options), message) for name, options, message in TORCHVISIONS),
    ],
)
def test_a_choice_that_is_none_is_refused_with_those_that_are(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


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


@pytest.mark.parametrize("name", ["googlenet", "inception_v3"])
def test_networks_with_auxiliary_heads_come_without_them(name):
    model = torchvision_model(name, num_classes=3)
    assert model.training
    side = 75 if name == "inception_v3" else 32
    assert model(images(2, 3, side, side)).shape == (2, 3)
    with torch.device("meta"):
        heads = [n for n, _ in torchvision_model(name, aux_logits=True).named_children() if "aux" in n.lower()]
    assert heads


def test_weights_of_a_torchvision_model_go_in_by_init_from(tmp_path):
    words = ["model=torchvision", "model.name=squeezenet1_1", "data.num_classes=4", "seed=1"]
    weights = torchvision.models.squeezenet1_1(num_classes=4).state_dict()
    torch.save(weights, tmp_path / "state.pt")
    drawn = build_model(compose_run(words)[0]).state_dict()
    loaded = build_model(compose_run([*words, f"init_from={tmp_path / 'state.pt'}"])[0]).state_dict()
    assert not torch.equal(drawn["features.0.weight"], weights["features.0.weight"])
    assert loaded.keys() == weights.keys()
    assert all(torch.equal(loaded[name], weights[name]) for name in weights)
