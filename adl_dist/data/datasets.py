"""Datasets by name: each function returns (train, validation), map-style, of (float32[C, H, W], class index).

Only the process of stage 0 builds them, so a download never meets another one and needs no lock. torchvision and
scikit-learn are imported where they are used: both take a second, and most processes never need them.
"""

from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset

from adl_dist.data.transforms import (
    CIFAR10_STATISTICS,
    CIFAR100_STATISTICS,
    DIGITS_STATISTICS,
    Statistics,
    crop_and_flip,
    transform,
)
from adl_dist.errors import ConfigError, DataError
from adl_dist.seeds import stream_seed

Datasets = tuple[Dataset[Any], Dataset[Any]]


def digits(augment: bool = True) -> Datasets:
    """scikit-learn's 8x8 handwritten digits: 1437 to train, 360 to validate, always the same; nothing to download.

    Args:
        augment: shift a training image by up to one pixel.
    """
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split
    from torchvision.transforms import v2

    pixels, classes = load_digits(return_X_y=True)  # float64[1797, 64] of 0..16
    images = torch.from_numpy(pixels).to(torch.float32).reshape(-1, 1, 8, 8) / 16
    # Every class in equal shares, and a constant of the dataset: another seed of the run must not move a validation
    # sample into training.
    train, validation = train_test_split(range(len(classes)), test_size=360, stratify=classes, random_state=0)
    normalise = v2.Normalize(*DIGITS_STATISTICS)
    shifted = v2.Compose([v2.RandomCrop(8, padding=1), normalise]) if augment else normalise
    return (
        _Images(images[train], classes[train].tolist(), shifted),
        _Images(images[validation], classes[validation].tolist(), normalise),
    )


def cifar10(root: str = "datasets", augment: bool = True, download: bool = False) -> Datasets:
    """CIFAR-10: 50,000 and 10,000 colour images of 32x32, 10 classes.

    Args:
        root: the folder that holds, or gets, ``cifar-10-batches-py``.
        augment: pad by 4, crop, and flip training images.
        download: fetch what is missing.

    Raises:
        DataError: files are missing, damaged, or cannot be fetched.
    """
    from torchvision.datasets import CIFAR10

    return _cifar(CIFAR10, "CIFAR-10", CIFAR10_STATISTICS, root=root, augment=augment, download=download)


def cifar100(root: str = "datasets", augment: bool = True, download: bool = False) -> Datasets:
    """CIFAR-100: as :func:`cifar10`, with 100 classes, in ``cifar-100-python``."""
    from torchvision.datasets import CIFAR100

    return _cifar(CIFAR100, "CIFAR-100", CIFAR100_STATISTICS, root=root, augment=augment, download=download)


def synthetic(
    num_samples: int = 1024,
    num_validation: int = 256,
    num_classes: int = 10,
    in_channels: int = 3,
    image_size: int = 32,
    seed: int = 0,
) -> Datasets:
    """Made-up images that can be learnt: a smooth pattern of the class plus as much noise.

    Args:
        num_samples: samples of the training dataset.
        num_validation: samples of the validation dataset.
        num_classes: sample i is of class i mod num_classes.
        in_channels: channels of an image.
        image_size: height and width in pixels.
        seed: the seed of patterns and noise, not the run's.

    Raises:
        ConfigError: a count below 1.
    """
    counts = {
        "num_samples": num_samples,
        "num_validation": num_validation,
        "num_classes": num_classes,
        "in_channels": in_channels,
        "image_size": image_size,
    }
    for key, count in counts.items():
        if count < 1:
            raise ConfigError(f"data.{key} must be at least 1, got {count}")
    generator = torch.Generator().manual_seed(stream_seed(seed, "synthetic patterns"))
    patterns = torch.randn(num_classes, in_channels, 4, 4, generator=generator)
    return (
        _Synthetic(num_samples, patterns, image_size, seed, "synthetic train"),
        _Synthetic(num_validation, patterns, image_size, seed, "synthetic validation"),
    )


MOST_KEPT = 64  # patterns in the size of the images


class _Synthetic(Dataset[tuple[Tensor, int]]):
    """Images computed from their index: any number of them takes no memory."""

    def __init__(self, num_samples: int, patterns: Tensor, image_size: int, seed: int, purpose: str) -> None:
        self._num_samples = num_samples
        self._patterns = patterns
        self._image_size = image_size
        self._seed = seed
        self._purpose = purpose
        self._enlarged: dict[int, Tensor] = {}

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if not 0 <= index < self._num_samples:
            raise IndexError(index)
        target = index % len(self._patterns)
        pattern = self._enlarged.get(target)
        if pattern is None:
            pattern = self._enlarge(target)
            if len(self._enlarged) < MOST_KEPT:
                self._enlarged[target] = pattern
        generator = torch.Generator().manual_seed(stream_seed(self._seed, self._purpose, index))
        return torch.randn(pattern.shape, generator=generator).add_(pattern), target

    def _enlarge(self, target: int) -> Tensor:
        size = (self._image_size, self._image_size)
        return F.interpolate(self._patterns[target : target + 1], size=size, mode="bilinear", align_corners=False)[0]


class _Images(Dataset[tuple[Tensor, int]]):
    """Images held in memory, with a transform."""

    def __init__(self, images: Tensor, targets: list[int], transform: Callable[[Tensor], Tensor]) -> None:
        self._images = images
        self._targets = targets
        self._transform = transform

    def __len__(self) -> int:
        return len(self._targets)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self._transform(self._images[index]), self._targets[index]


def _cifar(kind: Any, name: str, statistics: Statistics, *, root: str, augment: bool, download: bool) -> Datasets:
    folder = Path(root).expanduser().absolute()
    by_hand = f"unpack {kind.url} in {folder}, so that {folder / kind.base_folder} exists"
    train_transform = transform(statistics, crop_and_flip(32) if augment else [])
    try:
        return (
            kind(str(folder), train=True, transform=train_transform, download=download),
            kind(str(folder), train=False, transform=transform(statistics, [])),
        )
    except (OSError, RuntimeError, HTTPException) as error:
        if download:
            raise DataError(
                f"{name} could not be downloaded to {folder}: {one_line(error)}; check network and disk, or {by_hand}"
            ) from error
        state = "files are missing or damaged" if (folder / kind.base_folder).is_dir() else "nothing was found"
        raise DataError(
            f"{name}: expected its files in {folder / kind.base_folder}, but {state}; fetch them with "
            f"data.download=true, say where they are with data.root=FOLDER, or {by_hand}"
        ) from error


def one_line(error: BaseException) -> str:
    """Return the message of ``error`` without its line breaks."""
    return " ".join(str(error).split()) or type(error).__name__
