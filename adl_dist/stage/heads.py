"""Local losses: heads that turn a stage's output into a loss of its own (greedy learning).

A head serves only to train its stage; it does not belong to the model and is not exported. Its functions know the
output by the shape of one sample: [C, H, W] of an image or [C] of features.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from adl_dist.errors import ConfigError
from adl_dist.stage.spec import LossFn
from adl_dist.streams import streams_kept

# Share of the similarity loss in predsim (Nokland and Eidnes 2019, section 3.3).
SIMILARITY_SHARE = 0.99


class LocalLoss(nn.Module):
    """The model's loss function on the output of an auxiliary classifier."""

    def __init__(self, classifier: nn.Module) -> None:
        super().__init__()
        self.classifier = classifier

    def forward(self, out: Tensor, target: Tensor, loss_fn: LossFn) -> Tensor:
        """Return the scalar loss of ``out`` [B, C, H, W] or [B, C] and ``target`` [B]."""
        return loss_fn(self.classifier(out), target)


class PredSim(LocalLoss):
    """Prediction and similarity matching (Nokland and Eidnes 2019).

    Adds to the classifier's loss one that wants samples of one class to be alike: the mean squared difference between
    two [B, B] matrices of cosine similarities, of the standard deviations of a convolution's feature maps, and of the
    one-hot targets.
    """

    def __init__(self, classifier: nn.Module, project: nn.Module, num_classes: int) -> None:
        super().__init__(classifier)
        self.project, self.num_classes = project, num_classes

    def forward(self, out: Tensor, target: Tensor, loss_fn: LossFn) -> Tensor:
        """Return the scalar loss of ``out`` [B, C, H, W] or [B, C] and ``target`` [B]."""
        predicted = super().forward(out, target, loss_fn)
        features = self.project(out)
        if features.ndim == 4:
            # The unbiased deviation of a single pixel is not defined; such a map is its own feature.
            features = features.flatten(2).std(dim=2) if features[0, 0].numel() > 1 else features.flatten(1)
        known = (target >= 0) & (target < self.num_classes)  # the others are what the model's loss ignores
        one_hot = F.one_hot(target[known], self.num_classes).to(features.dtype)
        similar = F.mse_loss(similarities(features[known]), similarities(one_hot))
        return torch.lerp(predicted, similar, SIMILARITY_SHARE)


def similarities(x: Tensor) -> Tensor:
    """Return the cosine similarities [B, B] of the centred rows of ``x`` [B, n]."""
    centred = x - x.mean(dim=1, keepdim=True)
    unit = centred / (1e-8 + centred.norm(dim=1, keepdim=True))
    cosines: Tensor = unit @ unit.T
    return cosines.clamp(-1, 1)


def mlp_sr(channels: int, size: int, num_classes: int, *, num_convolutions: int = 3) -> nn.Module:
    """MLP-SR of DGL (Belilovsky et al. 2020): reduce the image, three 1x1 convolutions, three layers, a classifier."""
    convolutions = [_conv(channels, kernel_size=1) for _ in range(num_convolutions)]
    layers = [nn.AdaptiveAvgPool2d(2), nn.Flatten(), *_layers(4 * channels), nn.Linear(4 * channels, num_classes)]
    return nn.Sequential(nn.AdaptiveAvgPool2d(math.ceil(size / 4)), *convolutions, *layers)


def mlp(channels: int, size: int, num_classes: int) -> nn.Module:
    """MLP of DGL: as ``mlp_sr`` without the convolutions; on features the layers alone."""
    if size == 0:
        return nn.Sequential(*_layers(channels), nn.Linear(channels, num_classes))
    return mlp_sr(channels, size, num_classes, num_convolutions=0)


def cnn(channels: int, size: int, num_classes: int) -> nn.Module:
    """CNN of DGL: two 3x3 convolutions at full resolution, then a linear classifier."""
    convolutions = [_conv(channels, kernel_size=3) for _ in range(2)]
    pool = [nn.AdaptiveAvgPool2d(2), nn.BatchNorm2d(channels), nn.Flatten()]
    return nn.Sequential(*convolutions, *pool, nn.Linear(4 * channels, num_classes))


def linear(channels: int, size: int, num_classes: int) -> nn.Module:
    """Build a plain local classifier (Mostafa et al. 2018)."""
    if size == 0:
        return nn.Linear(channels, num_classes)
    side = min(size, 2)
    return nn.Sequential(nn.AdaptiveAvgPool2d(side), nn.Flatten(), nn.Linear(channels * side**2, num_classes))


def _conv(channels: int, *, kernel_size: int) -> nn.Module:
    convolution = nn.Conv2d(channels, channels, kernel_size, padding=kernel_size // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(channels), nn.ReLU())


def _layers(width: int) -> list[nn.Module]:
    return [nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU()) for _ in range(3)]


# Each from (channels, height or width in pixels, classes); 0 pixels: features [B, C] instead of images.
CLASSIFIERS = {"mlp_sr": mlp_sr, "mlp": mlp, "cnn": cnn, "linear": linear}
# Heads whose BatchNorm may meet a single value per channel if there is a single sample.
NORMALISES_SAMPLES = ("mlp_sr", "mlp", "cnn")
OF_IMAGES = ("mlp_sr", "cnn")


def check_outs(name: str, stage: int, shapes: Sequence[tuple[int, ...]]) -> None:
    """Check that the head called ``name`` can be put on what ``stage`` sends on.

    Raises:
        ConfigError: it is not one tensor of images or features, or no images where convolutions need some.
    """
    if len(shapes) != 1 or len(shapes[0]) not in (1, 3):
        received = ", ".join(str(["B", *shape]) for shape in shapes)
        raise ConfigError(
            f"method=dgl puts a head on the output of stage {stage}: expected one tensor [B, C, H, W] or [B, C], "
            f"got {received}: choose another partition.balance"
        )
    if name in OF_IMAGES and len(shapes[0]) == 1:
        raise ConfigError(
            f"method.head={name} convolves images, but stage {stage} sends on features {['B', *shapes[0]]}; choose "
            "method.head=mlp or linear, or another partition.balance"
        )


def build_head(name: str, shape: tuple[int, ...], *, num_classes: int, seed: int) -> LocalLoss:
    """Build the head called ``name``, a key of ``CLASSIFIERS`` or ``predsim``, on outputs of ``shape``.

    Its weights are drawn by ``seed`` and nothing else.
    """
    channels, size = shape[0], max(shape[1:], default=0)
    with streams_kept():
        torch.manual_seed(seed)
        if name != "predsim":
            return LocalLoss(CLASSIFIERS[name](channels, size, num_classes))
        project: nn.Module = nn.Linear(channels, channels, bias=False)
        if size > 0:
            project = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        return PredSim(linear(channels, size, num_classes), project, num_classes)
