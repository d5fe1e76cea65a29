"""Micro-batches that are rows of tensors in memory: taken at once, with nothing to seed or to check."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """The micro-batches of one epoch."""

    def __init__(self, inputs: Tensor, targets: Tensor, indices: Sequence[Sequence[int]]) -> None:
        """Take rows ``indices`` [micro-batch][sample] of ``inputs`` [N, ...] and ``targets`` [N, ...]."""
        self._inputs, self._targets = inputs, targets
        of_all = torch.tensor([index for several in indices for index in several], dtype=torch.int64)
        self._indices = of_all.split([len(several) for several in indices])

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, micro_batch: int) -> tuple[Tensor, Tensor]:
        """Copy the rows of one micro-batch."""
        rows = self._indices[micro_batch]
        return self._inputs.index_select(0, rows), self._targets.index_select(0, rows)


def rows_of(dataset: Dataset[Any], indices: Sequence[Sequence[int]]) -> Rows | None:
    """The micro-batches of a ``TensorDataset`` of two tensors, or of a ``Subset`` of one.

    Args:
        dataset: any.
        indices: into it, of the samples of each micro-batch.

    Returns:
        None for any other dataset, also for a class derived from these: it may do with its samples what it likes.
    """
    while type(dataset) is Subset:
        indices = [[int(dataset.indices[index]) for index in several] for several in indices]
        dataset = dataset.dataset
    if type(dataset) is not TensorDataset or len(dataset.tensors) != 2:
        return None
    if any(type(tensor) is not Tensor or tensor.device.type != "cpu" for tensor in dataset.tensors):
        return None
    return Rows(*dataset.tensors, indices)
