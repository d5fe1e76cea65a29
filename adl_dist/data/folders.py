"""Images in folders, ``root/train/<class>/`` and ``root/val/<class>/``, of any size; ImageNet is such a folder.

Small images are seen whole, as CIFAR's are; of large ones training sees random parts, as of ImageNet's.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from adl_dist.data.datasets import Datasets, one_line
from adl_dist.data.transforms import (
    CIFAR10_STATISTICS,
    IMAGENET_STATISTICS,
    Statistics,
    crop_and_flip,
    resized_crop_and_flip,
    transform,
)
from adl_dist.errors import ConfigError, DataError

LARGEST_SMALL_IMAGE = 64  # pixels


def imagefolder(
    root: str,
    augment: bool = True,
    image_size: int = 32,
    cache: bool = False,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> Datasets:
    """Open the images in ``root/train/<class>/`` and ``root/val/<class>/`` (or ``root/test/<class>/``).

    Up to 64 pixels, the shorter side of an image is resized to ``image_size``. Training pads by an eighth, crops and
    flips; validation crops the centre. Above, training crops a random part, resizes it and flips; validation resizes
    the shorter side to 256/224 of ``image_size`` and crops the centre.

    Args:
        root: the folder of the two folders, which hold the same classes.
        augment: False: training images are transformed like validation images.
        image_size: height and width in pixels.
        cache: keep images in memory as they are before anything random happens to them. Of use with
            ``data.num_workers=0`` only: workers end with their epoch, and forget.
        mean: means of red, green and blue, in [0, 1]. None: CIFAR-10's up to 64 pixels, ImageNet's above.
        std: standard deviations; given if and only if ``mean`` is.

    Raises:
        ConfigError: ``image_size``, ``mean`` or ``std`` out of range.
        DataError: a folder is missing, holds no images, or the two hold different classes. When it is loaded: an
            image cannot be read.
    """
    small = image_size <= LARGEST_SMALL_IMAGE
    statistics = _statistics(mean, std, CIFAR10_STATISTICS if small else IMAGENET_STATISTICS)
    return _open(root, statistics, small=small, augment=augment, image_size=image_size, cache=cache)


def imagenet(
    root: str = "datasets/imagenet", augment: bool = True, image_size: int = 224, num_classes: int = 1000
) -> Datasets:
    """ImageNet-1k (ILSVRC 2012): 1,281,167 and 50,000 colour images, in ``root/train/n*/`` and ``root/val/n*/``.

    These are the folders that people have, and those that torchvision's ImageNet unpacks. That class itself would
    want the devkit's archive next to them, only to name the classes. Class indices are the same: folders by name.
    Transforms and statistics are those of :func:`imagefolder` above 64 pixels, whatever the ``image_size``.

    Args:
        root: the folder that holds ``train`` and ``val``.
        augment: see :func:`imagefolder`.
        image_size: height and width in pixels.
        num_classes: the expected number. One folder that was not unpacked would shift the classes after it.

    Raises:
        ConfigError: ``image_size`` out of range.
        DataError: see :func:`imagefolder`; or there are more or fewer classes.
    """
    folder = Path(root).expanduser().absolute()
    try:
        return _open(
            root, IMAGENET_STATISTICS, small=False, augment=augment, image_size=image_size, num_classes=num_classes
        )
    except DataError as error:
        raise DataError(
            f"ImageNet: {error}. To make train and val, download ILSVRC2012_img_train.tar, ILSVRC2012_img_val.tar "
            f"and ILSVRC2012_devkit_t12.tar.gz (image-net.org, which wants a login) to {folder} and run there: "
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

    if image_size < 1:
        raise ConfigError(f"data.image_size must be at least 1 pixel, got {image_size}")
    train, validation = _train_and_validation(Path(root).expanduser().absolute())
    centre = (v2.Resize(image_size if small else round(image_size * 256 / 224)), [v2.CenterCrop(image_size)])
    random = (v2.Resize(image_size), crop_and_flip(image_size)) if small else (None, resized_crop_and_flip(image_size))
    try:
        datasets = [
            ImageFolder(str(path), transform(statistics, geometry), loader=_Reader(resize, cache=cache))
            for path, (resize, geometry) in ((train, random if augment else centre), (validation, centre))
        ]
    except FileNotFoundError as error:
        raise DataError(f"{train.parent}: expected images in one folder for each class: {one_line(error)}") from error
    num_found = len(datasets[0].classes)
    if num_classes is not None and num_found != num_classes:
        raise DataError(
            f"{train}: expected a folder for each of {num_classes} classes, found {num_found}; unpack the rest, or set "
            f"data.num_classes={num_found} if these are all"
        )
    if datasets[0].classes != datasets[1].classes:
        odd = sorted(set(datasets[0].classes) ^ set(datasets[1].classes))
        raise DataError(
            f"{train.parent}: expected the same classes in {train.name} and {validation.name}, but only one of them "
            f"has {', '.join(odd[:5])}{' ...' if len(odd) > 5 else ''}; class indices would not agree"
        )
    return datasets[0], datasets[1]


def _train_and_validation(folder: Path) -> tuple[Path, Path]:
    train = folder / "train"
    validation = folder / "val" if (folder / "val").is_dir() else folder / "test"
    for path, name, expected in ((train, "train", "train"), (validation, "validation", "val or test")):
        if not path.is_dir():
            raise DataError(
                f"{name} dataset: expected a folder {expected} in {folder}, with one folder for each class, got none; "
                "set data.root to the folder that holds the training and the validation images"
            )
    return train, validation


def _statistics(mean: Sequence[float] | None, std: Sequence[float] | None, default: Statistics) -> Statistics:
    if mean is None and std is None:
        return default
    for name, values, least in (("mean", mean, -math.inf), ("std", std, 0)):
        is_list = isinstance(values, list | tuple) and len(values) == 3
        if not is_list or not all(isinstance(v, int | float) and least < v < math.inf for v in values or ()):
            above = " above 0" if name == "std" else ""
            raise ConfigError(
                f"data.{name}={values}: expected three numbers{above}, of red, green and blue; data.mean and data.std "
                f"go together, for example data.mean={list(default[0])} data.std={list(default[1])}"
            )
    assert mean is not None
    assert std is not None
    return mean, std


class _Reader:
    """Reads an image, and resizes it if that is done alike in every epoch."""

    def __init__(self, resize: Callable[[Any], Any] | None, *, cache: bool) -> None:
        self._resize = resize
        self._kept: dict[str, Any] | None = {} if cache else None

    def __call__(self, path: str) -> Any:
        if self._kept is None:
            return self._read(path)
        if path not in self._kept:
            self._kept[path] = self._read(path)
        return self._kept[path]

    def _read(self, path: str) -> Any:
        from torchvision.datasets.folder import default_loader

        try:
            image = default_loader(path)
        except (OSError, SyntaxError, ValueError) as error:  # what PIL raises depends on the format and the damage
            raise DataError(
                f"{path}: expected an image, but it cannot be read ({one_line(error)}); replace or remove the file"
            ) from error
        return image if self._resize is None else self._resize(image)
