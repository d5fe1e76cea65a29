"""The transforms of an image, by torchvision's v2: first its geometry, then float32 and the statistics."""

from collections.abc import Sequence
from typing import Any

import torch

Statistics = tuple[Sequence[float], Sequence[float]]  # mean and standard deviation per channel, of values in [0, 1]

CIFAR10_STATISTICS: Statistics = ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
CIFAR100_STATISTICS: Statistics = ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))
DIGITS_STATISTICS: Statistics = ((0.3053,), (0.3760,))
IMAGENET_STATISTICS: Statistics = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def transform(statistics: Statistics, geometry: Sequence[Any]) -> Any:
    """PIL image -> normalised float32[C, H, W]; ``geometry`` comes first, because PIL is faster than tensors at it."""
    from torchvision.transforms import v2

    to_float = [v2.ToImage(), v2.ToPureTensor(), v2.ToDtype(torch.float32, scale=True)]
    return v2.Compose([*geometry, *to_float, v2.Normalize(*statistics)])


def crop_and_flip(image_size: int) -> list[Any]:
    """Augmentation of small images: pad by an eighth, crop, flip."""
    from torchvision.transforms import v2

    return [v2.RandomCrop(image_size, padding=image_size // 8), v2.RandomHorizontalFlip()]


def resized_crop_and_flip(image_size: int) -> list[Any]:
    """Augmentation of large images: a part of 8 to 100 % of the area, resized, flip (arXiv:1409.4842, section 6)."""
    from torchvision.transforms import v2

    return [v2.RandomResizedCrop(image_size), v2.RandomHorizontalFlip()]
