"""Micro-batches of a dataset that is nothing but tensors: rows, taken at once."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """The micro-batches of one epoch, by their places in its order: rows of tensors, taken at once."""

    def __init__(self, inputs: Tensor, targets: Tensor, rows: Tensor) -> None:
        self._inputs, self._targets, self._rows = inputs, targets, rows

    def __getitem__(self, places: slice) -> tuple[Tensor, Tensor]:
        rows = self._rows[places]
        return self._inputs.index_select(0, rows), self._targets.index_select(0, rows)


def rows_of(dataset: Dataset[Any], order: NDArray[np.int64]) -> Rows | None:
    """Return the samples ``order`` [n] of a ``TensorDataset`` of two plain CPU tensors, or of a ``Subset`` of one.

    None for any other dataset, also of a class derived from these, which may treat its samples in its own way; and
    where a subset's indices are not places counted from 0, whose meaning, or error, is that of one by one.
    """
    rows, subsets = order, []
    while type(dataset) is Subset:
        subsets.append(dataset.indices)
        dataset = dataset.dataset
    if type(dataset) is not TensorDataset or len(dataset.tensors) != 2 or not all(map(_is_plain, dataset.tensors)):
        return None
    for subset in subsets:
        try:
            of_subset = np.asarray(subset)
        except (TypeError, ValueError, RuntimeError):  # lists of several lengths, tensors on a GPU
            return None
        if of_subset.ndim != 1 or of_subset.dtype.kind not in "iu":
            return None
        rows = of_subset[rows]
    if rows.size and not 0 <= rows.min() <= rows.max() < len(dataset):
        return None
    return Rows(*dataset.tensors, torch.from_numpy(rows.astype(np.int64)))


def _is_plain(tensor: Tensor) -> bool:
    """Return whether rows taken at once equal rows taken one by one, in the same memory format."""
    if type(tensor) is not Tensor or tensor.device.type != "cpu" or tensor.layout != torch.strided:
        return False
    return not tensor.is_nested and not tensor.is_quantized and tensor.is_contiguous()
