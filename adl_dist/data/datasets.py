"""Datasets by name.

Each function returns two map-style datasets, (train, validation), with samples (float32[C, H, W], class index). Only
the process of stage 0 builds them. torchvision and scikit-learn are imported late because each takes a second and most
processes never need them.
"""

import math
from collections.abc import Callable, Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset

from adl_dist.data.small_images import SmallImages
from adl_dist.errors import ConfigError, DataError, text_of
from adl_dist.seeds import stream_seed

MOST_KEPT = 64  # enlarged patterns of synthetic images
BLOCK_BYTES = 2**26  # above 2**25, for which malloc takes memory of its own
Datasets = tuple[Dataset[Any], Dataset[Any]]
Statistics = tuple[Sequence[float], Sequence[float]]  # mean and standard deviation per channel, of values in [0, 1]

CIFAR10_STATISTICS: Statistics = ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
CIFAR100_STATISTICS: Statistics = ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))
DIGITS_STATISTICS: Statistics = ((0.3053,), (0.3760,))
IMAGENET_STATISTICS: Statistics = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
LARGEST_SMALL_IMAGE = 64  # pixels; training sees random parts of larger images


def transform(statistics: Statistics, geometry: Sequence[Any]) -> Any:
    """Build a transform of PIL images to normalised float32[C, H, W].

    The transforms ``geometry`` come first because PIL is faster at them.
    """
    from torchvision.transforms import v2

    to_float = [v2.ToImage(), v2.ToPureTensor(), v2.ToDtype(torch.float32, scale=True)]
    return v2.Compose([*geometry, *to_float, v2.Normalize(*statistics)])


def crop_and_flip(image_size: int) -> list[Any]:
    """Build the augmentation of small images: pad by an eighth, crop, flip."""
    from torchvision.transforms import v2

    return [v2.RandomCrop(image_size, padding=image_size // 8), v2.RandomHorizontalFlip()]


def digits(augment: bool = True) -> Datasets:
    """Load scikit-learn's 8x8 digits: 1437 to train, 360 to validate.

    With ``augment`` training images are shifted at random by up to one pixel.
    """
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    pixels, classes = load_digits(return_X_y=True)  # float64[1797, 64] of 0..16
    images = torch.from_numpy(pixels).to(torch.float32).reshape(-1, 1, 8, 8) / 16
    # Stratified, and independent of the run's seed, which must not move a validation sample into training.
    train, validation = train_test_split(range(len(classes)), test_size=360, stratify=classes, random_state=0)
    return (
        SmallImages(images[train], classes[train].tolist(), DIGITS_STATISTICS, padding=int(augment)),
        SmallImages(images[validation], classes[validation].tolist(), DIGITS_STATISTICS),
    )


def cifar10(root: str = "datasets", augment: bool = True, download: bool = False) -> Datasets:
    """Load CIFAR-10: 50,000 and 10,000 colour images of 32x32, 10 classes.

    Args:
        root: the folder that holds ``cifar-10-batches-py``.
        augment: whether to pad training images by 4, crop and flip them.
        download: whether to fetch missing files.

    Raises:
        DataError: If files are missing, damaged, or cannot be fetched.
    """
    from torchvision.datasets import CIFAR10

    return _cifar(CIFAR10, "CIFAR-10", CIFAR10_STATISTICS, root=root, augment=augment, download=download)


def cifar100(root: str = "datasets", augment: bool = True, download: bool = False) -> Datasets:
    """Load CIFAR-100 as :func:`cifar10`, from ``cifar-100-python``."""
    from torchvision.datasets import CIFAR100

    return _cifar(CIFAR100, "CIFAR-100", CIFAR100_STATISTICS, root=root, augment=augment, download=download)


def _cifar(kind: Any, name: str, statistics: Statistics, *, root: str, augment: bool, download: bool) -> Datasets:
    folder = Path(root).expanduser().absolute()
    try:
        read = [kind(str(folder), train=is_train, download=download) for is_train in (True, False)]
    except (OSError, RuntimeError, HTTPException) as error:
        fetch = "check network and disk" if download else "fetch them with data.download=true"
        raise DataError(
            f"{name}: expected its files in {folder / kind.base_folder}, but {text_of(error)}; {fetch}, say where they "
            f"are with data.root=FOLDER, or unpack {kind.url} in {folder}"
        ) from error
    images = [torch.from_numpy(one.data).permute(0, 3, 1, 2) for one in read]  # from [N, H, W, C]
    return (
        SmallImages(images[0], read[0].targets, statistics, padding=4 * augment, flips=augment),
        SmallImages(images[1], read[1].targets, statistics),
    )


def imagefolder(
    root: str,
    augment: bool = True,
    image_size: int = 32,
    cache: bool = False,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    num_classes: int | None = None,
) -> Datasets:
    """Open the images in ``root/train/<class>/`` and ``root/val/<class>/``.

    ``root/test`` may take the place of ``root/val``. For an ``image_size`` up to 64 the shorter side is resized to it;
    training pads by an eighth, crops and flips, and validation crops the centre. For a larger one, training crops a
    random part (8 to 100 % of the area, arXiv:1409.4842, section 6), resizes it and flips; validation resizes the
    shorter side to 256/224 of ``image_size`` and crops the centre.

    Args:
        root: the folder of the two folders, which hold the same classes.
        augment: whether training images are cropped and flipped at random; otherwise they are transformed like
            validation images.
        image_size: height and width in pixels.
        cache: whether to keep images in memory after the first read, as they are before random transforms; workers keep
            theirs beyond an epoch with ``data.persistent_workers``.
        mean: means of red, green and blue, in [0, 1]; by default CIFAR-10's up to 64 pixels, ImageNet's above.
        std: standard deviations; needs ``mean``.
        num_classes: how many folders ``train`` must hold, if given.

    Raises:
        DataError: If a folder is missing, has no images or different classes, or, on loading, an image is unreadable.
        ConfigError: If only one of ``mean`` and ``std`` is given.
    """
    small = image_size <= LARGEST_SMALL_IMAGE
    statistics = CIFAR10_STATISTICS if small else IMAGENET_STATISTICS
    if (mean is None) != (std is None):
        raise ConfigError("data.mean and data.std go together: three numbers each, of red, green and blue")
    if mean is not None and std is not None:
        statistics = mean, std
    return _open(
        root, statistics, small=small, augment=augment, image_size=image_size, cache=cache, num_classes=num_classes
    )


def imagenet(
    root: str = "datasets/imagenet", augment: bool = True, image_size: int = 224, num_classes: int = 1000
) -> Datasets:
    """Open ImageNet-1k in ``root/train/n*/`` and ``root/val/n*/``.

    torchvision's ImageNet class makes these folders. It does not read them here, because it would need the devkit's
    archive, only to name the classes; class indices are the same. Transforms and statistics are those of
    :func:`imagefolder` above 64 pixels, for any ``image_size``.

    Raises:
        DataError: If files are missing, or there are not ``num_classes`` folders: a folder that was not unpacked would
            shift the classes after it.
    """
    statistics = IMAGENET_STATISTICS
    try:
        return _open(root, statistics, small=False, augment=augment, image_size=image_size, num_classes=num_classes)
    except DataError as error:
        raise DataError(
            f"ImageNet: {error}. To make train and val, download ILSVRC2012_img_train.tar, ILSVRC2012_img_val.tar "
            "and ILSVRC2012_devkit_t12.tar.gz (image-net.org, which wants a login) to "
            f"{Path(root).expanduser().absolute()} and run there: "
            "python -c \"from torchvision.datasets import ImageNet; [ImageNet('.', s) for s in ('train', 'val')]\""
        ) from error


def _open(
    root: str,
    statistics: Statistics,
    *,
    small: bool,
    augment: bool,
    image_size: int,
    cache: bool = False,
    num_classes: int | None = None,
) -> Datasets:
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import v2

    folder = Path(root).expanduser().absolute()
    train, validation = folder / "train", folder / ("val" if (folder / "val").is_dir() else "test")
    resize, geometry = v2.Resize(image_size if small else round(image_size * 256 / 224)), [v2.CenterCrop(image_size)]
    try:
        seen_whole = ImageFolder(str(validation), transform(statistics, geometry), loader=_Reader(resize, cache=cache))
        if augment and small:
            geometry = crop_and_flip(image_size)
        elif augment:
            resize, geometry = None, [v2.RandomResizedCrop(image_size), v2.RandomHorizontalFlip()]
        dataset = ImageFolder(str(train), transform(statistics, geometry), loader=_Reader(resize, cache=cache))
    except FileNotFoundError as error:
        missing = [path.name for path in (train, folder / "val") if not path.is_dir()]
        found = f"there is no {' and no '.join(missing)}" if missing else text_of(error)
        raise DataError(
            f"{folder}: expected the folders train and val (or test), each with one folder for each class, but "
            f"{found}; set data.root to the folder that holds them"
        ) from error
    num_found = len(dataset.classes)
    if num_classes is not None and num_found != num_classes:
        raise DataError(
            f"{train}: expected a folder for each of {num_classes} classes, found {num_found}; set "
            f"data.num_classes={num_found} if these are all, or complete them"
        )
    if dataset.classes != seen_whole.classes:
        odd = sorted(set(dataset.classes) ^ set(seen_whole.classes))
        raise DataError(
            f"{folder}: expected the same classes in {train.name} and {validation.name}, but only one of them "
            f"has {', '.join(odd[:5])}{' ...' if len(odd) > 5 else ''}; class indices would not agree"
        )
    return dataset, seen_whole


class _Reader:
    """A reader of images that applies the resizing that all epochs share."""

    def __init__(self, resize: Callable[[Any], Any] | None, *, cache: bool) -> None:
        self._resize, self._cache = resize, _DecodedImages() if cache else None

    def __call__(self, path: str) -> Any:
        from torchvision.datasets.folder import default_loader

        if self._cache is not None and (known := self._cache.get(path)) is not None:
            return known
        try:
            image = default_loader(path)
        except (OSError, SyntaxError, ValueError) as error:  # what PIL raises depends on the format and the damage
            raise DataError(
                f"{path}: expected an image, but it cannot be read ({text_of(error)}); replace or remove the file"
            ) from error
        image = image if self._resize is None else self._resize(image)
        if self._cache is not None:
            self._cache.put(path, image)
        return image


class _DecodedImages:
    """Decoded images [H, W, 3] by path, in few blocks of memory.

    Images allocated one by one would come to lie between activations, and keep malloc from using their memory again.
    """

    def __init__(self) -> None:
        self._block, self._used = np.empty(0, np.uint8), 0
        self._places: dict[str, tuple[NDArray[np.uint8], int, tuple[int, ...]]] = {}

    def __reduce__(self) -> Any:
        return _DecodedImages, ()  # each worker has its own

    def put(self, path: str, image: Any) -> None:
        """Keep a copy of ``image``, a PIL image."""
        pixels = np.asarray(image)
        if self._used + pixels.size > len(self._block):
            self._block, self._used = np.empty(max(BLOCK_BYTES, pixels.size), np.uint8), 0
        self._places[path] = self._block, self._used, pixels.shape
        self._pixels(path)[:] = pixels
        self._used += pixels.size

    def get(self, path: str) -> Any:
        """Return the image at ``path``, or None."""
        from PIL import Image

        return Image.fromarray(self._pixels(path)) if path in self._places else None

    def _pixels(self, path: str) -> NDArray[np.uint8]:
        block, start, shape = self._places[path]
        return block[start : start + math.prod(shape)].reshape(shape)


def synthetic(
    num_samples: int = 1024,
    num_validation: int = 256,
    num_classes: int = 10,
    in_channels: int = 3,
    image_size: int = 32,
    seed: int = 0,
) -> Datasets:
    """Make images that can be learnt.

    Image i is the smooth pattern of its class, i mod ``num_classes``, plus as much noise. ``seed`` is for patterns and
    noise; it is not the seed of the run.
    """
    generator = torch.Generator().manual_seed(stream_seed(seed, "synthetic patterns"))
    patterns = torch.randn(num_classes, in_channels, 4, 4, generator=generator)
    return (
        _Synthetic(num_samples, patterns, image_size, seed, "synthetic train"),
        _Synthetic(num_validation, patterns, image_size, seed, "synthetic validation"),
    )


class _Synthetic(Dataset[tuple[Tensor, int]]):
    """Images computed from their index: any number of them takes no memory."""

    def __init__(self, num_samples: int, patterns: Tensor, image_size: int, seed: int, purpose: str) -> None:
        self._num_samples, self._patterns, self._size = num_samples, patterns, (image_size, image_size)
        self._seed, self._purpose = seed, purpose
        self._enlarged: dict[int, Tensor] = {}

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if not 0 <= index < self._num_samples:
            raise IndexError(index)
        target = index % len(self._patterns)
        pattern = self._enlarged.get(target)
        if pattern is None:
            small = self._patterns[target : target + 1]
            pattern = F.interpolate(small, size=self._size, mode="bilinear", align_corners=False)[0]
            if len(self._enlarged) < MOST_KEPT:
                self._enlarged[target] = pattern
        generator = torch.Generator().manual_seed(stream_seed(self._seed, self._purpose, index))
        return torch.randn(pattern.shape, generator=generator).add_(pattern), target
