"""Micro-batches taken at once from tensors, small images and tokens.

Measured on CIFAR-10 with augmentation, one core: 24 us an image, 120 one by one; ResNet-20 trains an image in 2,900.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset

from adl_dist.data.small_images import SmallImages
from adl_dist.data.tokens import Windows

# From indices [B] and seeds [B] to inputs [B, ...] and targets [B, ...].
Take = Callable[[NDArray[np.int64], NDArray[np.uint64]], tuple[Tensor, Tensor]]


def rows_of(dataset: Dataset[Any]) -> Take | None:
    """Return a function that takes many samples of tensors, small images, windows or a ``Subset``.

    None for all others: a class derived from these may treat its samples in its own way.
    """
    if type(dataset) is Subset:
        inner, subset = rows_of(dataset.dataset), np.asarray(dataset.indices)
        return None if inner is None else lambda indices, seeds: inner(subset[indices], seeds)
    if isinstance(dataset, SmallImages | Windows) and type(dataset) in (SmallImages, Windows):
        return lambda indices, seeds: dataset.batch(torch.from_numpy(indices.astype(np.int64)), seeds)
    if type(dataset) is not TensorDataset or len(dataset.tensors) != 2 or not all(map(_is_plain, dataset.tensors)):
        return None
    inputs, targets = dataset.tensors

    def take(indices: NDArray[np.int64], seeds: NDArray[np.uint64]) -> tuple[Tensor, Tensor]:
        rows = torch.from_numpy(indices.astype(np.int64))
        return inputs.index_select(0, rows), targets.index_select(0, rows)

    return take


def _is_plain(tensor: Tensor) -> bool:
    """Return whether rows taken at once equal rows taken one by one."""
    is_plain = type(tensor) is Tensor and tensor.device.type == "cpu" and tensor.layout == torch.strided
    return is_plain and tensor.is_contiguous()
