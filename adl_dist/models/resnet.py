"""Residual networks for images, assembled unit by unit.

They are CIFAR's (He et al. 2016, section 4.2, and the CIFAR form of ResNet-18 and ResNet-34), wide ones (Zagoruyko and
Komodakis 2016), and ResNet-18 with squeeze and excitation (Hu et al., TPAMI 2020) for images of ImageNet's size.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from adl_dist.errors import ConfigError

INITS = ("he", "torch")
REDUCTION = 16  # r of the squeeze-and-excitation paper


class OptionA(nn.Module):
    """Shortcut without parameters: every second pixel, and new zero channels.

    Half of the zeros are on each side, or, with ``zeros_after``, all after the input's channels, as in the code of DDG
    and FR.
    """

    def __init__(self, in_channels: int, out_channels: int, *, zeros_after: bool = False) -> None:
        super().__init__()
        new = out_channels - in_channels
        before = 0 if zeros_after else new // 2
        self.zeros = (before, new - before)

    def forward(self, x: Tensor) -> Tensor:
        """Return [B, C + zeros, ceil(H/2), ceil(W/2)] of ``x`` [B, C, H, W]."""
        return F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, *self.zeros))


def option_b(in_channels: int, out_channels: int) -> nn.Module:
    """Build a shortcut with a 1x1 convolution of stride 2 and BatchNorm."""
    conv = nn.Conv2d(in_channels, out_channels, 1, stride=2, bias=False)
    return nn.Sequential(OrderedDict(conv=conv, bn=nn.BatchNorm2d(out_channels)))


SHORTCUTS: dict[str, Callable[[int, int], nn.Module]] = {
    "A": OptionA,
    "A_after": partial(OptionA, zeros_after=True),
    "B": option_b,
}


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut, activated after the sum.

    The first ReLU works in place because nothing else reads the output of BatchNorm. The last must not, because a
    block may be the end of a stage. With stride 2 the channels may change; ``shortcut`` is a key of ``SHORTCUTS``.
    """

    def __init__(self, in_channels: int, out_channels: int, stride: int, *, shortcut: str) -> None:
        super().__init__()
        # Built first: modules draw their weights in this order, and the meaning of a seed must not change.
        around = nn.Identity() if stride == 1 else SHORTCUTS[shortcut](in_channels, out_channels)
        self.conv1 = conv3x3(in_channels, out_channels, stride)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.relu1 = nn.ReLU(inplace=True)
        self.conv2 = conv3x3(out_channels, out_channels, 1)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.shortcut = around
        self.relu2 = nn.ReLU()

    def residual(self, x: Tensor) -> Tensor:
        """Return the residual branch, of the output's shape."""
        out: Tensor = self.bn2(self.conv2(self.relu1(self.bn1(self.conv1(x)))))
        return out

    def forward(self, x: Tensor) -> Tensor:
        """Return [B, out, ceil(H/stride), ceil(W/stride)] of ``x`` [B, in, H, W]."""
        out: Tensor = self.relu2(self.residual(x) + self.shortcut(x))
        return out


def blocks_per_layer(depth: int, beyond: int) -> int:
    """Return n of ``depth`` = 6n + ``beyond``, the blocks in each of 3 layers."""
    num_blocks, rest = divmod(depth - beyond, 6)
    if rest or num_blocks < 1:
        below = 6 * num_blocks + beyond
        nearest = f"{below} and {below + 6}" if num_blocks >= 1 else f"{6 + beyond}"
        raise ConfigError(f"model.depth={depth} is not 6n+{beyond} with n >= 1; the nearest that is: {nearest}")
    return num_blocks


def conv3x3(in_channels: int, out_channels: int, stride: int) -> nn.Conv2d:
    """Build a padded convolution without bias; a BatchNorm follows."""
    return nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=False)


def assemble(
    stem: Mapping[str, nn.Module],
    channels: Sequence[int],
    num_blocks: Sequence[int],
    block: Callable[[int, int, int], nn.Module],
    *,
    num_classes: int,
    before_head: Mapping[str, nn.Module] | None = None,
    pool_size: int | None = None,
) -> nn.Sequential:
    """Assemble a network of units: ``stem``, ``layer1_0``, ..., ``head``.

    Each layer has ``num_blocks`` blocks of ``channels``, made by ``block`` (channels in, out, stride); each layer but
    the first halves the image. ``stem`` holds one convolution, ``conv``. ``before_head`` are the head's layers before
    average pooling, which has windows of ``pool_size``, by default of the whole map.
    """
    units: OrderedDict[str, nn.Module] = OrderedDict(stem=nn.Sequential(OrderedDict(stem)))
    width: int = stem["conv"].out_channels  # type: ignore[assignment]
    for layer, (out, count) in enumerate(zip(channels, num_blocks, strict=True), start=1):
        for index in range(count):
            units[f"layer{layer}_{index}"] = block(width, out, 2 if layer > 1 and index == 0 else 1)
            width = out
    pool = nn.AdaptiveAvgPool2d(1) if pool_size is None else nn.AvgPool2d(pool_size)
    head = OrderedDict(before_head or {}, pool=pool, flatten=nn.Flatten(), fc=nn.Linear(width, num_classes))
    units["head"] = nn.Sequential(head)
    return nn.Sequential(units)


def he_init(model: nn.Sequential) -> nn.Sequential:
    """Draw convolution weights from N(0, 2 / fan out), and return ``model``.

    See He et al. 2015.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model


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
    """Build ResNet-(6n+2): three layers of n blocks.

    The defaults are those of He et al. The code of ADL and FDG has ``pool_size=6``, which averages the upper left 6x6
    of 8x8 for a 32x32 image, and ``init=torch``; the code of DDG and FR has ``shortcut=A_after``.

    Args:
        depth: 6n+2 with n >= 1: 20, 32, 44, 56, 98, 110, 164, ...
        num_classes: outputs.
        in_channels: 3 for colour, 1 for grey. Images may have any size from 4x4.
        width: channels of the first layer, 16 in the paper; the others have twice and four times as many.
        shortcut: where the image is halved: ``A`` for every second pixel and zero channels on both sides, ``A_after``
            for all zeros after the others, ``B`` for a 1x1 convolution and BatchNorm.
        pool_size: side of the window that the head averages; it must fit once into the last map, a quarter of the
            image. By default the whole map.
        init: weights of convolutions: ``he`` for normal over the fan out, ``torch`` for torch's defaults.

    Returns:
        float[B, in_channels, H, W] -> float[B, num_classes]: units ``stem``, ``layer1_0`` .. ``layer3_n-1``, ``head``.

    Raises:
        ConfigError: If the depth is not 6n+2, or ``shortcut`` or ``init`` is unknown.
    """
    num_blocks = blocks_per_layer(depth, beyond=2)
    if shortcut not in SHORTCUTS:
        raise ConfigError(f"there is no model.shortcut={shortcut}; choose one of {', '.join(SHORTCUTS)}")
    channels = [width, 2 * width, 4 * width]
    return _cifar(channels, [num_blocks] * 3, num_classes, in_channels, init, shortcut=shortcut, pool_size=pool_size)


def cifar_resnet18(num_classes: int = 10, in_channels: int = 3, *, init: str = "he") -> nn.Sequential:
    """Build ResNet-18 with a 3x3 stem of stride 1 and no max-pooling.

    Four layers of two blocks have 64 to 512 channels. float[B, in_channels, H, W] -> float[B, num_classes], from 8x8
    on; the code of ADL and FDG has ``init=torch``. Arguments and errors are those of :func:`cifar_resnet`.
    """
    return _cifar([64, 128, 256, 512], [2, 2, 2, 2], num_classes, in_channels, init)


def cifar_resnet34(num_classes: int = 10, in_channels: int = 3, *, init: str = "he") -> nn.Sequential:
    """Build ResNet-34, as :func:`cifar_resnet18` with 3, 4, 6 and 3 blocks."""
    return _cifar([64, 128, 256, 512], [3, 4, 6, 3], num_classes, in_channels, init)


def _cifar(
    channels: Sequence[int],
    num_blocks: Sequence[int],
    num_classes: int,
    in_channels: int,
    init: str,
    *,
    shortcut: str = "B",
    pool_size: int | None = None,
) -> nn.Sequential:
    if init not in INITS:
        raise ConfigError(f"there is no model.init={init}; choose one of {', '.join(INITS)}")
    width = channels[0]
    # The ReLU is not in place, because autograd may still read its input when it ends a stage.
    stem = OrderedDict(conv=conv3x3(in_channels, width, 1), bn=nn.BatchNorm2d(width), relu=nn.ReLU())
    block = partial(BasicBlock, shortcut=shortcut)
    model = assemble(stem, channels, num_blocks, block, num_classes=num_classes, pool_size=pool_size)
    return he_init(model) if init == "he" else model


class PreActivationBlock(nn.Module):
    """BatchNorm and ReLU before each of two 3x3 convolutions.

    Dropout is between them, and nothing after the sum. If the number of channels changes, the shortcut is a 1x1
    convolution of the activated input. Each ReLU works in place on the output of its BatchNorm, which nothing else
    reads.
    """

    def __init__(self, in_channels: int, out_channels: int, stride: int, *, dropout: float) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(in_channels)
        self.relu1 = nn.ReLU(inplace=True)
        self.conv1 = conv3x3(in_channels, out_channels, stride)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.relu2 = nn.ReLU(inplace=True)
        self.dropout = nn.Dropout(dropout)
        self.conv2 = conv3x3(out_channels, out_channels, 1)
        is_wider = in_channels != out_channels
        self.projection = nn.Conv2d(in_channels, out_channels, 1, stride, bias=False) if is_wider else None

    def forward(self, x: Tensor) -> Tensor:
        """Return [B, out, ceil(H/stride), ceil(W/stride)] of ``x`` [B, in, H, W]."""
        activated = self.relu1(self.bn1(x))
        residual: Tensor = self.conv2(self.dropout(self.relu2(self.bn2(self.conv1(activated)))))
        return residual + (x if self.projection is None else self.projection(activated))


def wide_resnet(
    depth: int = 28, widen_factor: int = 10, num_classes: int = 10, in_channels: int = 3, *, dropout: float = 0.0
) -> nn.Sequential:
    """Build WRN-(6n+4)-k, k = ``widen_factor``.

    Three layers of n blocks have 16k, 32k and 64k channels. ``dropout`` is the probability inside each block, 0 or 0.3
    in the paper. Other arguments and errors are those of :func:`cifar_resnet`.
    """
    num_blocks = blocks_per_layer(depth, beyond=4)
    stem = {"conv": conv3x3(in_channels, 16, 1)}
    channels = [16 * widen_factor, 32 * widen_factor, 64 * widen_factor]
    block = partial(PreActivationBlock, dropout=dropout)
    activation = OrderedDict(bn=nn.BatchNorm2d(channels[-1]), relu=nn.ReLU(inplace=True))
    return he_init(assemble(stem, channels, [num_blocks] * 3, block, num_classes=num_classes, before_head=activation))


class SqueezeExcitation(nn.Module):
    """A gate that scales each channel, computed from all channels' means.

    x sigmoid(W2 relu(W1 mean(x))), without biases, as Hu et al. advise for ResNets (section 6) and ADL's code does;
    torchvision's has them.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(channels, channels // REDUCTION, bias=False)
        self.fc2 = nn.Linear(channels // REDUCTION, channels, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` [B, C, H, W], each channel scaled."""
        gate = torch.sigmoid(self.fc2(torch.relu(self.fc1(x.mean((2, 3))))))
        return x * gate[:, :, None, None]


class SEBasicBlock(BasicBlock):
    """A basic block with a gate on the residual."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__(in_channels, out_channels, stride, shortcut="B")
        self.se = SqueezeExcitation(out_channels)

    def residual(self, x: Tensor) -> Tensor:
        """Return the gated residual branch, of the output's shape."""
        out: Tensor = self.se(super().residual(x))
        return out


def se_resnet18(num_classes: int = 1000, in_channels: int = 3) -> nn.Sequential:
    """Build SE-ResNet-18.

    It is torchvision's ResNet-18 with a gate after the second BatchNorm of each block, reduction 16. float[B,
    in_channels, H, W] -> float[B, num_classes], from 32x32 on, 224x224 in the paper; units ``stem``, ``layer1_0`` ..
    ``layer4_1``, ``head``.
    """
    stem = OrderedDict(
        conv=nn.Conv2d(in_channels, 64, 7, stride=2, padding=3, bias=False),
        bn=nn.BatchNorm2d(64),
        relu=nn.ReLU(inplace=True),
        pool=nn.MaxPool2d(3, stride=2, padding=1),
    )
    return he_init(assemble(stem, [64, 128, 256, 512], [2] * 4, SEBasicBlock, num_classes=num_classes))
