"""ResNets for small images (He et al. 2016, section 4.2, and the CIFAR form of ResNet-18 and ResNet-34)."""

from collections.abc import Sequence
from functools import partial

from torch import nn

from adl_dist.errors import ConfigError
from adl_dist.models.resnet import (
    SHORTCUTS,
    BasicBlock,
    assemble,
    blocks_per_layer,
    check_counts,
    he_init,
    pool_and_classify,
    small_stem,
)

INITS = ("he", "torch")


def cifar_resnet(
    depth: int,
    num_classes: int = 10,
    in_channels: int = 3,
    width: int = 16,
    *,
    shortcut: str = "A",
    pool_size: int | None = None,
    init: str = "he",
) -> nn.Sequential:
    """ResNet-(6n+2): three layers of n blocks.

    The defaults are those of He et al. The code of ADL and FDG has ``pool_size=6``, which sees the upper left 6x6
    of the 8x8 that a 32x32 image comes to, and ``init=torch``; the code of DDG and FR has ``shortcut=A_after``.

    Args:
        depth: 6n+2 with n >= 1: 20, 32, 44, 56, 98, 110, 164, ...
        num_classes: outputs.
        in_channels: 3 for colour, 1 for grey. Images may have any size from 4x4.
        width: channels of the first layer; the others have twice and four times as many. The paper's is 16.
        shortcut: at the halving of the image: ``A`` every second pixel, and zero channels on both sides of the
            others; ``A_after`` the same with all zeros after them; ``B`` a 1x1 convolution and BatchNorm.
        pool_size: side of the window that the head averages; None: all that is there, which is a quarter of the
            image's side. Exactly one window must fit.
        init: weights of convolutions: ``he`` normal over the fan out; ``torch`` those that torch's layers begin with.

    Returns:
        float[B, in_channels, H, W] -> float[B, num_classes], in units ``stem``, ``layer1_0`` ...
        ``layer3_{n-1}``, ``head``.

    Raises:
        ConfigError: a depth of another form, a count below 1, or an unknown choice.
    """
    num_blocks = blocks_per_layer(depth, beyond=2)
    if width < 1:
        raise ConfigError(f"model.width must be at least 1, got {width}")
    if pool_size is not None and (type(pool_size) is not int or pool_size < 1):
        raise ConfigError(f"model.pool_size must be a whole number of at least 1, or null, got {pool_size!r}")
    if shortcut not in SHORTCUTS:
        raise ConfigError(f"there is no model.shortcut={shortcut}; choose one of {', '.join(SHORTCUTS)}")
    return _cifar(
        [width, 2 * width, 4 * width],
        [num_blocks] * 3,
        num_classes=num_classes,
        in_channels=in_channels,
        shortcut=shortcut,
        pool_size=pool_size,
        init=init,
    )


def cifar_resnet18(num_classes: int = 10, in_channels: int = 3, *, init: str = "he") -> nn.Sequential:
    """ResNet-18 with a 3x3 stem of stride 1 and no max-pooling: four layers of two blocks, 64 to 512 channels.

    Args:
        num_classes: outputs.
        in_channels: 3 for colour, 1 for grey. Images may have any size from 8x8.
        init: weights of convolutions: ``he`` normal over the fan out; ``torch`` those that torch's layers begin with,
            as in the code of ADL and FDG.

    Returns:
        float[B, in_channels, H, W] -> float[B, num_classes], in units ``stem``, ``layer1_0`` ... ``layer4_1``,
        ``head``.

    Raises:
        ConfigError: a count below 1, or an unknown choice.
    """
    return _cifar([64, 128, 256, 512], [2, 2, 2, 2], num_classes=num_classes, in_channels=in_channels, init=init)


def cifar_resnet34(num_classes: int = 10, in_channels: int = 3, *, init: str = "he") -> nn.Sequential:
    """ResNet-34 as :func:`cifar_resnet18`, with layers of 3, 4, 6 and 3 blocks: up to ``layer4_2``."""
    return _cifar([64, 128, 256, 512], [3, 4, 6, 3], num_classes=num_classes, in_channels=in_channels, init=init)


def _cifar(
    channels: Sequence[int],
    num_blocks: Sequence[int],
    *,
    num_classes: int,
    in_channels: int,
    shortcut: str = "B",
    pool_size: int | None = None,
    init: str,
) -> nn.Sequential:
    check_counts(num_classes, in_channels)
    if init not in INITS:
        raise ConfigError(f"there is no model.init={init}; choose one of {', '.join(INITS)}")
    model = assemble(
        small_stem(in_channels, channels[0]),
        channels[0],
        channels,
        num_blocks,
        block=partial(BasicBlock, shortcut=shortcut),
        head=partial(pool_and_classify, num_classes=num_classes, pool_size=pool_size),
    )
    if init == "he":
        he_init(model)
    return model
