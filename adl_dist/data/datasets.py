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

from adl_dist.errors import ConfigError, DataError
from adl_dist.seeds import stream_seed

Datasets = tuple[Dataset[Any], Dataset[Any]]

CIFAR10_STATISTICS = ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))  # mean and standard deviation per channel
CIFAR100_STATISTICS = ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))
DIGITS_STATISTICS = ((0.3053,), (0.3760,))
LARGEST_SMALL_IMAGE = 64  # pixels; beyond it, training wants ImageNet's transforms


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


def imagefolder(root: str, augment: bool = True, image_size: int = 32, cache: bool = False) -> Datasets:
    """Small images in ``root/train/<class>/`` and ``root/val/<class>/`` (or ``root/test/<class>/``).

    Args:
        root: holds the two folders, with the same classes.
        augment: pad by an eighth of the size, crop, and flip training images.
        image_size: height and width in pixels, at most 64. The shorter side of an image is resized to it, the
            longer one cropped.
        cache: keep images in memory once they have been decoded and resized (in each of ``data.num_workers``).

    Raises:
        ConfigError: an ``image_size`` out of range.
        DataError: a folder is missing, holds no images, or the two hold different classes.
    """
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import v2

    if not 1 <= image_size <= LARGEST_SMALL_IMAGE:
        raise ConfigError(
            f"data.image_size={image_size}: imagefolder takes images of 1 to {LARGEST_SMALL_IMAGE} pixels; the "
            "transforms for larger ones (random resized crops, as for ImageNet) are not there yet"
        )
    folder = Path(root).expanduser().absolute()
    train = folder / "train"
    validation = folder / "val" if (folder / "val").is_dir() else folder / "test"
    for path, name, expected in ((train, "train", "train"), (validation, "validation", "val or test")):
        if not path.is_dir():
            raise DataError(
                f"{name} dataset: expected a folder {expected} in {folder}, with one folder for each class, got none; "
                "set data.root to the folder that holds the training and the validation images"
            )
    fit = [v2.CenterCrop(image_size)]
    augmented = _crop_and_flip(image_size) if augment else fit
    load = _Resized(image_size, cache=cache)
    try:
        datasets = (
            ImageFolder(str(train), _transform(CIFAR10_STATISTICS, augmented), loader=load),
            ImageFolder(str(validation), _transform(CIFAR10_STATISTICS, fit), loader=load),
        )
    except FileNotFoundError as error:
        raise DataError(f"{folder}: expected images in one folder for each class: {_one_line(error)}") from error
    if datasets[0].classes != datasets[1].classes:
        odd = sorted(set(datasets[0].classes) ^ set(datasets[1].classes))
        raise DataError(
            f"{folder}: expected the same classes in {train.name} and {validation.name}, but only one of them has "
            f"{', '.join(odd[:5])}{' ...' if len(odd) > 5 else ''}; class indices would not agree"
        )
    return datasets


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
        num_samples: of the training dataset.
        num_validation: of the validation dataset.
        num_classes: sample i is of class i mod num_classes.
        in_channels: of an image.
        image_size: height and width in pixels.
        seed: of patterns and noise, not of the run.

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


class _Resized:
    """Reads an image and resizes its shorter side."""

    def __init__(self, size: int, *, cache: bool) -> None:
        from torchvision.transforms import v2

        self._resize = v2.Resize(size)
        self._kept: dict[str, Any] | None = {} if cache else None

    def __call__(self, path: str) -> Any:
        from torchvision.datasets.folder import default_loader

        if self._kept is None:
            return self._resize(default_loader(path))
        if path not in self._kept:
            self._kept[path] = self._resize(default_loader(path))
        return self._kept[path]


class _Synthetic(Dataset[tuple[Tensor, int]]):
    """Images computed from their index: any number of them takes no memory."""

    def __init__(self, num_samples: int, patterns: Tensor, image_size: int, seed: int, purpose: str) -> None:
        self._num_samples = num_samples
        self._patterns = patterns
        self._image_size = image_size
        self._seed = seed
        self._purpose = purpose

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if not 0 <= index < self._num_samples:
            raise IndexError(index)
        target = index % len(self._patterns)
        size = (self._image_size, self._image_size)
        pattern = F.interpolate(self._patterns[target : target + 1], size=size, mode="bilinear", align_corners=False)[0]
        generator = torch.Generator().manual_seed(stream_seed(self._seed, self._purpose, index))
        return pattern + torch.randn(pattern.shape, generator=generator), target


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


def _cifar(kind: Any, name: str, statistics: Any, *, root: str, augment: bool, download: bool) -> Datasets:
    folder = Path(root).expanduser().absolute()
    by_hand = f"unpack {kind.url} in {folder}, so that {folder / kind.base_folder} exists"
    train_transform = _transform(statistics, _crop_and_flip(32) if augment else [])
    try:
        return (
            kind(str(folder), train=True, transform=train_transform, download=download),
            kind(str(folder), train=False, transform=_transform(statistics, [])),
        )
    except (OSError, RuntimeError, HTTPException) as error:
        if download:
            raise DataError(
                f"{name} could not be downloaded to {folder}: {_one_line(error)}; check network and disk, or {by_hand}"
            ) from error
        found = "files are missing or damaged" if (folder / kind.base_folder).is_dir() else "nothing was found"
        raise DataError(
            f"{name}: expected its files in {folder / kind.base_folder}, but {found}; fetch them with "
            f"data.download=true, say where they are with data.root=FOLDER, or {by_hand}"
        ) from error


def _crop_and_flip(image_size: int) -> list[Any]:
    from torchvision.transforms import v2

    return [v2.RandomCrop(image_size, padding=image_size // 8), v2.RandomHorizontalFlip()]


def _transform(statistics: Any, geometry: list[Any]) -> Any:
    """PIL image -> normalised float32[C, H, W]; ``geometry`` comes first, because PIL is faster than tensors at it."""
    from torchvision.transforms import v2

    to_float = [v2.ToImage(), v2.ToPureTensor(), v2.ToDtype(torch.float32, scale=True)]
    return v2.Compose([*geometry, *to_float, v2.Normalize(*statistics)])


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
