"""ResNets for small images (He et al. 2016, section 4.2, and its CIFAR form of ResNet-18)."""

from collections import OrderedDict
from collections.abc import Callable, Sequence

from torch import Tensor, nn
from torch.nn import functional as F

from adl_dist.errors import ConfigError


class OptionA(nn.Module):
    """Shortcut without parameters: every second pixel of each axis, and zeros for the channels that are new."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.padding = (out_channels - in_channels) // 2

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C + 2 padding, ceil(H/2), ceil(W/2)], half of the zeros on each side."""
        return F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.padding, self.padding))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut, activated after the sum.

    The first ReLU works in place because nobody else reads what BatchNorm wrote: BatchNorm's backward needs its
    input, not its output. The last must not: a block may be the end of a stage, and its output another process's.
    """

    def __init__(self, in_channels: int, out_channels: int, *, stride: int, shortcut: nn.Module) -> None:
        super().__init__()
        self.conv1 = _conv3x3(in_channels, out_channels, stride)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.relu1 = nn.ReLU(inplace=True)
        self.conv2 = _conv3x3(out_channels, out_channels, 1)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.shortcut = shortcut
        self.relu2 = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """[B, in, H, W] -> [B, out, ceil(H/stride), ceil(W/stride)]."""
        residual = self.bn2(self.conv2(self.relu1(self.bn1(self.conv1(x)))))
        out: Tensor = self.relu2(residual + self.shortcut(x))
        return out


def cifar_resnet(depth: int, num_classes: int = 10, in_channels: int = 3, width: int = 16) -> nn.Sequential:
    """ResNet-(6n+2): three layers of n blocks, shortcuts of option A.

    Args:
        depth: 6n+2 with n >= 1: 20, 32, 44, 56, 110, ...
        num_classes: outputs.
        in_channels: 3 for colour, 1 for grey. Images may have any size from 4x4.
        width: channels of the first layer; the others have twice and four times as many. The paper's is 16.

    Returns:
        float[B, in_channels, H, W] -> float[B, num_classes], in units ``stem``, ``layer1_0`` ...
        ``layer3_{n-1}``, ``head``.

    Raises:
        ConfigError: a depth of another form, or a count below 1.
    """
    num_blocks, rest = divmod(depth - 2, 6)
    if rest or num_blocks < 1:
        below = 6 * num_blocks + 2
        nearest = f"{below} and {below + 6}" if num_blocks >= 1 else "8"
        raise ConfigError(f"model.depth={depth} is not 6n+2 with n >= 1; the nearest that is: {nearest}")

    def shortcut(in_channels: int, out_channels: int, stride: int) -> nn.Module:
        return nn.Identity() if stride == 1 else OptionA(in_channels, out_channels)

    if width < 1:
        raise ConfigError(f"model.width must be at least 1, got {width}")
    return _resnet(
        [width, 2 * width, 4 * width], [num_blocks] * 3, shortcut, num_classes=num_classes, in_channels=in_channels
    )


def cifar_resnet18(num_classes: int = 10, in_channels: int = 3) -> nn.Sequential:
    """ResNet-18 with a 3x3 stem of stride 1 and no max-pooling: four layers of two blocks, 64 to 512 channels.

    Args:
        num_classes: outputs.
        in_channels: 3 for colour, 1 for grey. Images may have any size from 8x8.

    Returns:
        float[B, in_channels, H, W] -> float[B, num_classes], in units ``stem``, ``layer1_0`` ... ``layer4_1``,
        ``head``.

    Raises:
        ConfigError: a count below 1.
    """

    def shortcut(in_channels: int, out_channels: int, stride: int) -> nn.Module:
        if stride == 1:
            return nn.Identity()
        conv = nn.Conv2d(in_channels, out_channels, 1, stride, bias=False)
        return nn.Sequential(OrderedDict(conv=conv, bn=nn.BatchNorm2d(out_channels)))

    return _resnet([64, 128, 256, 512], [2] * 4, shortcut, num_classes=num_classes, in_channels=in_channels)


def _resnet(
    channels: Sequence[int],
    num_blocks: Sequence[int],
    shortcut: Callable[[int, int, int], nn.Module],
    *,
    num_classes: int,
    in_channels: int,
) -> nn.Sequential:
    """Stem, one layer of blocks for each entry of ``channels``, head; each layer but the first halves the image.

    ``shortcut`` makes the shortcut of a block from (channels in, channels out, stride).
    """
    if num_classes < 1 or in_channels < 1:
        raise ConfigError(
            f"model.num_classes and model.in_channels must be at least 1, got {num_classes} and {in_channels}"
        )
    # The stem's ReLU is not in place: as the end of a stage it would hand out what autograd may still read.
    units: OrderedDict[str, nn.Module] = OrderedDict()
    stem = {"conv": _conv3x3(in_channels, channels[0], 1), "bn": nn.BatchNorm2d(channels[0]), "relu": nn.ReLU()}
    units["stem"] = nn.Sequential(OrderedDict(stem))
    width = channels[0]
    for layer, (out, count) in enumerate(zip(channels, num_blocks, strict=True), start=1):
        for block in range(count):
            stride = 2 if layer > 1 and block == 0 else 1
            units[f"layer{layer}_{block}"] = BasicBlock(
                width, out, stride=stride, shortcut=shortcut(width, out, stride)
            )
            width = out
    head = {"pool": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten(), "fc": nn.Linear(width, num_classes)}
    units["head"] = nn.Sequential(OrderedDict(head))
    model = nn.Sequential(units)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model


def _conv3x3(in_channels: int, out_channels: int, stride: int) -> nn.Conv2d:
    # No bias: the BatchNorm that follows subtracts the mean, and with it any bias.
    return nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=False)
