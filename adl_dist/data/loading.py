"""Options of loading, and the check of a dataset."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from adl_dist.data.stream import is_iterable
from adl_dist.errors import ConfigError, DataError


@dataclass(frozen=True, kw_only=True)
class Loading:
    """Options of how an epoch's samples become micro-batches.

    Attributes:
        collate_fn: a function from the list of a micro-batch's samples to (input, target), each a tensor [B, ...], or a
            tuple or dictionary of tensors; lengths may differ between micro-batches. By default samples are stacked.
        val_collate_fn: the same for validation, where mixup and cutmix have no place; by default ``collate_fn``.
        sampler: a torch ``Sampler`` of the indices that an epoch of training visits, in its order; by default each
            sample once, shuffled if ``data.shuffle``.
        samples_per_epoch: samples that an epoch of training visits; by default the length of the sampler or dataset.
        persistent_workers: whether to keep workers from one epoch to the next, with the dataset as it was when they
            began. A dataset that changes between epochs needs False.

    Raises:
        ConfigError: If ``sampler`` is no Sampler or visits only a part of the data, or an option has a wrong value.
    """

    collate_fn: Callable[[list[Any]], Any] | None = None
    val_collate_fn: Callable[[list[Any]], Any] | None = None
    sampler: Sampler[int] | None = None
    samples_per_epoch: int | None = None
    persistent_workers: bool = False

    @property
    def of_validation(self) -> "Loading":
        """The options for a validation dataset, which is visited once, in order."""
        collate_fn = self.val_collate_fn or self.collate_fn
        return Loading(collate_fn=collate_fn, persistent_workers=self.persistent_workers)

    def __post_init__(self) -> None:
        if self.sampler is not None and not (hasattr(self.sampler, "__iter__") and hasattr(self.sampler, "__len__")):
            raise ConfigError(
                f"sampler: expected a torch Sampler, with __iter__ and __len__, got {type(self.sampler).__name__}"
            )
        if type(self.persistent_workers) is not bool:
            raise ConfigError(f"persistent_workers must be true or false, got {self.persistent_workers!r}")
        if (parts := getattr(self.sampler, "num_replicas", 1)) != 1:  # of data parallelism, like DistributedSampler
            raise ConfigError(
                f"sampler: {type(self.sampler).__name__} visits one of {parts} parts of the data, but stages share the "
                "samples of one; omit it, shuffle=True visits all in a new order"
            )
        num = self.samples_per_epoch
        if num is not None and (type(num) is not int or num < 1):
            raise ConfigError(f"samples_per_epoch must be a whole number of at least 1, got {num!r}")


PLAIN = Loading()


def check_dataset(dataset: object, *, name: str, min_samples: int, loading: Loading = PLAIN) -> int:
    """Check a dataset and return the number of samples that an epoch visits.

    ``name`` is its name in messages, like ``training``.

    Raises:
        DataError: If ``dataset`` is not a dataset, has fewer samples than ``min_samples`` or ``samples_per_epoch``, or
            is iterable and has a sampler, or neither a length nor ``samples_per_epoch``.
    """
    kind, num = f"{name} dataset: {type(dataset).__name__}", loading.samples_per_epoch
    is_map = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    are_tensors = isinstance(dataset, tuple | list) and dataset and all(isinstance(part, Tensor) for part in dataset)
    if isinstance(dataset, DataLoader) or are_tensors or not (is_map or is_iterable(dataset)):
        raise DataError(
            f"{kind} is not a torch Dataset of (input, target), with __len__ and __getitem__, or an IterableDataset; "
            "wrap tensors in torch.utils.data.TensorDataset(x, y); of a DataLoader give the dataset, its batch_size, "
            "shuffle and num_workers to fit, and the rest to Loading(...)"
        )
    if is_iterable(dataset) and loading.sampler is not None:
        raise DataError(f"{kind} is iterable and has an order of its own; use no sampler with it")
    try:
        size = len(dataset if loading.sampler is None else loading.sampler)  # type: ignore[arg-type]
    except Exception:  # the user's code can raise anything
        if num is None:
            way_out = ", or use data.samples_per_epoch (Loading(samples_per_epoch=...))" if name == "training" else ""
            raise DataError(
                f"{kind} does not say how many samples an epoch has, on which the length of the run depends; give it a "
                f"__len__{way_out}"
            ) from None
        size = num
    if size == 0:
        raise DataError(f"{kind} is empty, expected samples; check data.root and the split")
    if num is not None and num > size and not is_iterable(dataset):
        raise DataError(f"{kind} has {size} samples, fewer than samples_per_epoch={num}")
    size = size if num is None else num
    if size < min_samples:
        raise DataError(
            f"{kind} has {size} samples, expected at least {min_samples} samples; use a larger dataset or "
            f"train.batch_size={size} or less"
        )
    return size
