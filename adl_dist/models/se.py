"""ResNet-18 with squeeze and excitation (Hu et al., TPAMI 2020) for images of ImageNet's size."""

from collections import OrderedDict
from functools import partial

import torch
from torch import Tensor, nn

from adl_dist.models.resnet import BasicBlock, assemble, check_counts, he_init, pool_and_classify

REDUCTION = 16  # r of the paper


class SqueezeExcitation(nn.Module):
    """Scales each channel by a gate in (0, 1), a function of all channels' means.

    Without biases, as the paper advises for ResNets (section 6) and ADL's code has it;
    ``torchvision.ops.SqueezeExcitation`` has them.
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
    """A basic block whose residual is gated before the sum."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__(in_channels, out_channels, stride, shortcut="B")
        self.se = SqueezeExcitation(out_channels)

    def residual(self, x: Tensor) -> Tensor:
        """Return the summand to the shortcut, of the output's shape."""
        out: Tensor = self.se(super().residual(x))
        return out


def se_resnet18(num_classes: int = 1000, in_channels: int = 3) -> nn.Sequential:
    """SE-ResNet-18: torchvision's ResNet-18 with a gate after the second BatchNorm of each block, reduction 16.

    Args:
        num_classes: outputs.
        in_channels: 3 for colour, 1 for grey. Images may have any size from 32x32; the paper's is 224x224.

    Returns:
        float[B, in_channels, H, W] -> float[B, num_classes], in units ``stem``, ``layer1_0`` ... ``layer4_1``,
        ``head``.

    Raises:
        ConfigError: a count below 1.
    """
    check_counts(num_classes, in_channels)
    stem = {
        "conv": nn.Conv2d(in_channels, 64, 7, stride=2, padding=3, bias=False),
        "bn": nn.BatchNorm2d(64),
        "relu": nn.ReLU(inplace=True),
        "pool": nn.MaxPool2d(3, stride=2, padding=1),
    }
    model = assemble(
        nn.Sequential(OrderedDict(stem)),
        64,
        [64, 128, 256, 512],
        [2, 2, 2, 2],
        block=SEBasicBlock,
        head=partial(pool_and_classify, num_classes=num_classes),
    )
    he_init(model)
    return model
