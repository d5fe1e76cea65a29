"""Micro-batches of a dataset that is nothing but tensors, small images, or tokens of a file: rows, taken at once."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset

from adl_dist.data.own_code import own_code
from adl_dist.data.small_images import SmallImages
from adl_dist.data.tokens import Windows
from adl_dist.errors import DataError

Seeds = NDArray[np.uint64]


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """The micro-batches of one epoch, by their places in its order: rows of tensors, taken at once."""

    def __init__(self, inputs: Tensor, targets: Tensor, rows: Tensor) -> None:
        self._inputs, self._targets, self._rows = inputs, targets, rows

    def __getitem__(self, places: slice) -> tuple[Tensor, Tensor]:
        rows = self._rows[places]
        return self._inputs.index_select(0, rows), self._targets.index_select(0, rows)


class ImageRows(Dataset[tuple[Tensor, Tensor]]):
    """The micro-batches of one epoch of small images, by their places in its order."""

    def __init__(self, dataset: SmallImages, rows: Tensor, seeds: Seeds) -> None:
        self._dataset, self._rows, self._seeds = dataset, rows, seeds

    def __getitem__(self, places: slice) -> tuple[Tensor, Tensor]:
        return self._dataset.batch(self._rows[places], self._seeds[places])


class WindowRows(Dataset["tuple[Tensor, Tensor] | DataError"]):
    """The micro-batches of one epoch of windows of tokens, by their places in its order; an error is returned."""

    def __init__(self, dataset: Windows, rows: Tensor) -> None:
        self._dataset, self._rows = dataset, rows

    def __getitem__(self, places: slice) -> tuple[Tensor, Tensor] | DataError:
        rows = self._rows[places]
        try:
            with own_code(f"sample {int(rows[0])}: {type(self._dataset).__name__}"):
                return self._dataset.batch(rows)
        except DataError as error:
            return error


def rows_of(
    dataset: Dataset[Any], order: NDArray[np.int64], seeds: Callable[[], Seeds]
) -> "Rows | ImageRows | WindowRows | None":
    """Return the samples ``order`` [n] of a dataset that can take many at once, or of a ``Subset`` of one.

    These are a ``TensorDataset`` of two plain CPU tensors, :class:`SmallImages`, which draw by the ``seeds`` [n] of
    samples, and :class:`Windows`.

    None for any other dataset, also of a class derived from these, which may treat its samples in its own way; and
    where a subset's indices are not places counted from 0, whose meaning, or error, is that of one by one.
    """
    rows, subsets = order, []
    while type(dataset) is Subset:
        subsets.append(dataset.indices)
        dataset = dataset.dataset
    is_plain = type(dataset) is TensorDataset and len(dataset.tensors) == 2 and all(map(_is_plain, dataset.tensors))
    if not is_plain and type(dataset) not in (SmallImages, Windows):
        return None
    for subset in subsets:
        try:
            of_subset = np.asarray(subset)
        except (TypeError, ValueError, RuntimeError):  # lists of several lengths, tensors on a GPU
            return None
        if of_subset.ndim != 1 or of_subset.dtype.kind not in "iu":
            return None
        rows = of_subset[rows]
    if rows.size and not 0 <= rows.min() <= rows.max() < len(dataset):  # type: ignore[arg-type]
        return None
    taken = torch.from_numpy(rows.astype(np.int64))
    if isinstance(dataset, SmallImages):
        return ImageRows(dataset, taken, seeds())
    if isinstance(dataset, Windows):
        return WindowRows(dataset, taken)
    assert isinstance(dataset, TensorDataset)
    inputs, targets = dataset.tensors
    return Rows(inputs, targets, taken)


def _is_plain(tensor: Tensor) -> bool:
    """Return whether rows taken at once equal rows taken one by one, in the same memory format."""
    if type(tensor) is not Tensor or tensor.device.type != "cpu" or tensor.layout != torch.strided:
        return False
    return not tensor.is_nested and not tensor.is_quantized and tensor.is_contiguous()
