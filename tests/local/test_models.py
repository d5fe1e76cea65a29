"""The networks of the papers, against published counts, hand computation and torchvision."""

import math

import pytest
import torch
import torchvision
from torch import nn

from adl_dist.errors import ConfigError
from adl_dist.models import cifar_resnet, cifar_resnet18
from adl_dist.models.cifar import OptionA


@pytest.fixture(autouse=True)
def _initial_weights_are_the_same_every_time():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def images(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("model", "millions"),
    [
        (lambda: cifar_resnet(20), 0.270),
        (lambda: cifar_resnet(32), 0.464),
        (lambda: cifar_resnet(56), 0.853),
        (lambda: cifar_resnet(110), 1.728),
        (lambda: cifar_resnet18(), 11.174),
    ],
    ids=["resnet20", "resnet32", "resnet56", "resnet110", "resnet18"],
)
def test_parameter_counts_are_the_published_ones(model, millions):
    assert round(sum(p.numel() for p in model().parameters()) / 1e6, 3) == millions


def test_width_makes_a_resnet_as_narrow_and_no_shallower():
    narrow, wide = cifar_resnet(32, width=8), cifar_resnet(32)
    assert [name for name, _ in narrow.named_parameters()] == [name for name, _ in wide.named_parameters()]
    assert [narrow.get_submodule(f"layer{i}_0").conv2.out_channels for i in (1, 2, 3)] == [8, 16, 32]
    with pytest.raises(ConfigError, match=r"model\.width must be at least 1, got 0"):
        cifar_resnet(32, width=0)


def test_shortcut_option_a_is_every_second_pixel_between_zero_channels():
    x = images(2, 4, 5, 6)
    expected = torch.zeros(2, 8, 3, 3)
    for b in range(2):
        for c in range(4):
            for row in range(3):
                for column in range(3):
                    expected[b, 2 + c, row, column] = x[b, c, 2 * row, 2 * column]

    assert torch.equal(OptionA(4, 8)(x), expected)


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
    assert [name for name, _ in cifar_resnet(14).named_children()] == [
        "stem", "layer1_0", "layer1_1", "layer2_0", "layer2_1", "layer3_0", "layer3_1", "head",
    ]  # fmt: skip
    assert len(cifar_resnet18()) == 1 + 8 + 1


@pytest.mark.parametrize("make", [lambda: cifar_resnet(8), cifar_resnet18], ids=["resnet8", "resnet18"])
def test_no_unit_ends_or_begins_with_an_operation_in_place(make):
    """Between two units there may be a cut: what came in is someone else's, what goes out is on its way."""
    x = images(2, 3, 8, 8)
    for name, unit in make().named_children():
        received = x.detach().requires_grad_() * 1  # not a leaf, which autograd itself would protect
        x = unit(received)
        assert (received._version, x._version) == (0, 0), name


def test_each_layer_but_the_first_halves_the_image_and_doubles_the_channels():
    x, shapes = images(2, 3, 32, 32), []
    for unit in cifar_resnet(14)[:-1]:
        x = unit(x)
        shapes.append(tuple(x.shape[1:]))

    assert shapes == [(16, 32, 32)] * 3 + [(32, 16, 16)] * 2 + [(64, 8, 8)] * 2


def test_every_parameter_gets_a_gradient_from_grey_images_of_8_by_8():
    model = cifar_resnet(20, num_classes=4, in_channels=1)
    out = model(images(5, 1, 8, 8))
    out.square().sum().backward()

    assert out.shape == (5, 4)
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []


def test_convolutions_start_with_he_initialisation_over_the_fan_out():
    convs = [m for m in cifar_resnet18().modules() if isinstance(m, nn.Conv2d) and m.weight.numel() > 30_000]
    assert len(convs) > 15
    for conv in convs:
        expected = math.sqrt(2 / (conv.out_channels * conv.kernel_size[0] ** 2))
        assert conv.weight.std().item() == pytest.approx(expected, rel=0.02)


def test_memory_format_channels_last_survives_every_unit():
    model, x = cifar_resnet(8).to(memory_format=torch.channels_last), images(2, 3, 8, 8)
    x = x.contiguous(memory_format=torch.channels_last)
    for name, unit in list(model.named_children())[:-1]:
        x = unit(x)
        assert x.is_contiguous(memory_format=torch.channels_last), name


@pytest.mark.parametrize(
    ("depth", "nearest"), [(21, "20 and 26"), (19, "14 and 20"), (55, "50 and 56"), (2, "8"), (7, "8"), (-3, "8")]
)
def test_a_depth_that_is_not_6n_plus_2_is_refused_with_the_nearest_that_are(depth, nearest):
    with pytest.raises(ConfigError, match=rf"model\.depth={depth} is not 6n\+2 .* the nearest that is: {nearest}$"):
        cifar_resnet(depth)


def test_counts_below_one_are_refused():
    with pytest.raises(ConfigError, match=r"model\.num_classes and model\.in_channels must be at least 1, got 0 and 3"):
        cifar_resnet(20, num_classes=0)
    with pytest.raises(ConfigError, match="got 10 and 0"):
        cifar_resnet18(in_channels=0)
