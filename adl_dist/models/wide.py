"""Wide residual networks (Zagoruyko and Komodakis 2016)."""

from collections import OrderedDict
from functools import partial

from torch import Tensor, nn

from adl_dist.errors import ConfigError
from adl_dist.models.resnet import assemble, blocks_per_layer, check_counts, conv3x3, he_init, pool_and_classify


class PreActivationBlock(nn.Module):
    """BatchNorm and ReLU before each of two 3x3 convolutions, dropout between them, and nothing after the sum.

    Where the number of channels changes, the shortcut is a 1x1 convolution of the activated input. No ReLU in place
    touches what others read: each overwrites what its BatchNorm wrote.

    Args:
        in_channels: channels of the input.
        out_channels: channels of the output.
        stride: 1, or 2 to halve the image.
        dropout: probability.
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
        self.projection = (
            None if in_channels == out_channels else nn.Conv2d(in_channels, out_channels, 1, stride, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return [B, out, ceil(H/stride), ceil(W/stride)] of ``x`` [B, in, H, W]."""
        activated = self.relu1(self.bn1(x))
        residual: Tensor = self.conv2(self.dropout(self.relu2(self.bn2(self.conv1(activated)))))
        return residual + (x if self.projection is None else self.projection(activated))


def wide_resnet(
    depth: int = 28, widen_factor: int = 10, num_classes: int = 10, in_channels: int = 3, *, dropout: float = 0.0
) -> nn.Sequential:
    """WRN-(6n+4)-k: three layers of n blocks with 16k, 32k and 64k channels.

    Args:
        depth: 6n+4 with n >= 1: 16, 22, 28, 40, ...
        widen_factor: k.
        num_classes: outputs.
        in_channels: 3 for colour, 1 for grey. Images may have any size from 4x4.
        dropout: probability, inside each block; the paper's is 0 or 0.3.

    Returns:
        float[B, in_channels, H, W] -> float[B, num_classes], in units ``stem``, ``layer1_0`` ...
        ``layer3_{n-1}``, ``head``.

    Raises:
        ConfigError: a depth of another form, a count below 1, a dropout outside [0, 1).
    """
    num_blocks = blocks_per_layer(depth, beyond=4)
    check_counts(num_classes, in_channels)
    if widen_factor < 1:
        raise ConfigError(f"model.widen_factor must be at least 1, got {widen_factor}")
    if not 0 <= dropout < 1:
        raise ConfigError(f"model.dropout must be at least 0 and below 1, got {dropout}")
    model = assemble(
        nn.Sequential(OrderedDict(conv=conv3x3(in_channels, 16, 1))),
        16,
        [16 * widen_factor, 32 * widen_factor, 64 * widen_factor],
        [num_blocks] * 3,
        block=partial(PreActivationBlock, dropout=dropout),
        head=partial(_head, num_classes=num_classes),
    )
    he_init(model)
    return model


def _head(width: int, *, num_classes: int) -> OrderedDict[str, nn.Module]:
    activation = {"bn": nn.BatchNorm2d(width), "relu": nn.ReLU(inplace=True)}
    return OrderedDict(**activation, **pool_and_classify(width, num_classes))
