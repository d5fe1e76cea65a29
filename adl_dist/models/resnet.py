"""The parts of residual networks for images, and their assembly unit by unit."""

from collections import OrderedDict
from collections.abc import Callable, Sequence

from torch import Tensor, nn
from torch.nn import functional as F

from adl_dist.errors import ConfigError


class OptionA(nn.Module):
    """Shortcut without parameters: every second pixel of each axis, and zeros for the channels that are new.

    Args:
        in_channels: C.
        out_channels: at least C.
        zeros_after: all zeros after the channels of the input, like DDG's and FR's code, not half on each side.
    """

    def __init__(self, in_channels: int, out_channels: int, *, zeros_after: bool = False) -> None:
        super().__init__()
        new = out_channels - in_channels
        before = 0 if zeros_after else new // 2
        self.zeros = (before, new - before)

    def forward(self, x: Tensor) -> Tensor:
        """Return [B, zeros + C + zeros, ceil(H/2), ceil(W/2)] of ``x`` [B, C, H, W]."""
        return F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, *self.zeros))


def option_b(in_channels: int, out_channels: int) -> nn.Module:
    """Shortcut with parameters: a 1x1 convolution of stride 2, normalised."""
    conv = nn.Conv2d(in_channels, out_channels, 1, stride=2, bias=False)
    return nn.Sequential(OrderedDict(conv=conv, bn=nn.BatchNorm2d(out_channels)))


SHORTCUTS: dict[str, Callable[[int, int], nn.Module]] = {
    "A": OptionA,
    "A_after": lambda in_channels, out_channels: OptionA(in_channels, out_channels, zeros_after=True),
    "B": option_b,
}


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut, activated after the sum.

    The first ReLU works in place because nothing else reads the output of BatchNorm: BatchNorm's backward needs its
    input, not its output. The last must not: a block may be the end of a stage, and its output another process's.

    Args:
        in_channels: channels of the input.
        out_channels: channels of the output.
        stride: 1, or 2 to halve the image, which is where the channels may change.
        shortcut: the shortcut at stride 2: a key of ``SHORTCUTS``.
    """

    def __init__(self, in_channels: int, out_channels: int, stride: int, *, shortcut: str) -> None:
        super().__init__()
        # Made first: modules draw their weights in the order they are made, and the meaning of a seed must not change.
        around = nn.Identity() if stride == 1 else SHORTCUTS[shortcut](in_channels, out_channels)
        self.conv1 = conv3x3(in_channels, out_channels, stride)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.relu1 = nn.ReLU(inplace=True)
        self.conv2 = conv3x3(out_channels, out_channels, 1)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.shortcut = around
        self.relu2 = nn.ReLU()

    def residual(self, x: Tensor) -> Tensor:
        """Return the summand to the shortcut, of the output's shape."""
        out: Tensor = self.bn2(self.conv2(self.relu1(self.bn1(self.conv1(x)))))
        return out

    def forward(self, x: Tensor) -> Tensor:
        """Return [B, out, ceil(H/stride), ceil(W/stride)] of ``x`` [B, in, H, W]."""
        out: Tensor = self.relu2(self.residual(x) + self.shortcut(x))
        return out


def blocks_per_layer(depth: int, beyond: int) -> int:
    """Return the n of ``depth`` = 6n + ``beyond``: three layers of n blocks of two convolutions, and further layers.

    Raises:
        ConfigError: a depth of another form; says the nearest that are.
    """
    num_blocks, rest = divmod(depth - beyond, 6)
    if rest or num_blocks < 1:
        below = 6 * num_blocks + beyond
        nearest = f"{below} and {below + 6}" if num_blocks >= 1 else f"{6 + beyond}"
        raise ConfigError(f"model.depth={depth} is not 6n+{beyond} with n >= 1; the nearest that is: {nearest}")
    return num_blocks


def check_counts(num_classes: int, in_channels: int) -> None:
    """Refuse what no network can have.

    Raises:
        ConfigError: a count below 1.
    """
    if num_classes < 1 or in_channels < 1:
        raise ConfigError(
            f"model.num_classes and model.in_channels must be at least 1, got {num_classes} and {in_channels}"
        )


def conv3x3(in_channels: int, out_channels: int, stride: int) -> nn.Conv2d:
    """Build a padded convolution. Without bias: a BatchNorm that follows subtracts the mean, and with it any bias."""
    return nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=False)


def small_stem(in_channels: int, width: int) -> nn.Module:
    """Build [B, in, H, W] -> [B, width, H, W] for small images: a 3x3 convolution of stride 1, no max-pooling."""
    # The ReLU is not in place: as the end of a stage it would hand out what autograd may still read.
    stem = {"conv": conv3x3(in_channels, width, 1), "bn": nn.BatchNorm2d(width), "relu": nn.ReLU()}
    return nn.Sequential(OrderedDict(stem))


def pool_and_classify(width: int, num_classes: int, pool_size: int | None = None) -> OrderedDict[str, nn.Module]:
    """Build the last layers: [B, width, H, W] -> [B, num_classes].

    Args:
        width: channels.
        num_classes: outputs.
        pool_size: side of the window that is averaged, of which one must fit; None: the whole image.
    """
    pool = nn.AdaptiveAvgPool2d(1) if pool_size is None else nn.AvgPool2d(pool_size)
    return OrderedDict(pool=pool, flatten=nn.Flatten(), fc=nn.Linear(width, num_classes))


def assemble(
    stem: nn.Module,
    stem_width: int,
    channels: Sequence[int],
    num_blocks: Sequence[int],
    block: Callable[[int, int, int], nn.Module],
    head: Callable[[int], OrderedDict[str, nn.Module]],
) -> nn.Sequential:
    """Put the units in a row: stem, one layer of blocks for each entry of ``channels``, head.

    Args:
        stem: the first unit.
        stem_width: channels that it puts out.
        channels: channels of the blocks of each layer. Each layer but the first halves the image.
        num_blocks: blocks of each layer.
        block: makes one from (channels in, channels out, stride).
        head: makes the layers of the last unit from its channels.

    Returns:
        The network in units ``stem``, ``layer1_0``, ``layer1_1``, ..., ``head``.
    """
    units: OrderedDict[str, nn.Module] = OrderedDict(stem=stem)
    width = stem_width
    for layer, (out, count) in enumerate(zip(channels, num_blocks, strict=True), start=1):
        for index in range(count):
            units[f"layer{layer}_{index}"] = block(width, out, 2 if layer > 1 and index == 0 else 1)
            width = out
    units["head"] = nn.Sequential(head(width))
    return nn.Sequential(units)


def he_init(model: nn.Module) -> None:
    """Draw the weights of all convolutions from N(0, 2 / fan out) (He et al. 2015)."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
