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
        collate_fn: from the list of a micro-batch's samples to (input, target), each a tensor [B, ...], a tuple or a
            dictionary of such; lengths may differ between micro-batches. By default samples are stacked.
        val_collate_fn: the same for validation, where mixup and cutmix have no place; by default ``collate_fn``.
        sampler: a torch ``Sampler`` of the indices that an epoch of training visits, in its order; by default each
            sample once, shuffled if ``data.shuffle``.
        samples_per_epoch: samples that an epoch of training visits; by default the length of the sampler or dataset.
        persistent_workers: whether to keep workers from one epoch to the next, with the dataset as it was when they
            began. A dataset that changes between epochs needs False.

    Raises:
        ConfigError: If an option has a wrong type.
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
        if (parts := getattr(self.sampler, "num_replicas", 1)) != 1:  # of data parallelism, like DistributedSampler
            raise ConfigError(
                f"sampler: {type(self.sampler).__name__} visits one of {parts} parts of the data, but stages share the "
                "samples of one; omit it, shuffle=True visits all in a new order"
            )
        if self.samples_per_epoch is not None and (
            not isinstance(self.samples_per_epoch, int) or self.samples_per_epoch < 1
        ):
            raise ConfigError(f"samples_per_epoch must be a whole number of at least 1, got {self.samples_per_epoch!r}")
        if type(self.persistent_workers) is not bool:
            raise ConfigError(f"persistent_workers must be true or false, got {self.persistent_workers!r}")


PLAIN = Loading()


def check_dataset(dataset: object, *, name: str, min_samples: int, loading: Loading = PLAIN) -> int:
    """Check a dataset and return the number of samples that an epoch visits.

    Raises:
        DataError: If it is not a dataset, is empty, or has fewer than ``min_samples``.
    """
    kind, way_out = type(dataset).__name__, None
    if isinstance(dataset, DataLoader):
        way_out = "give its dataset, its batch_size, shuffle and num_workers to fit, and the rest to Loading(...)"
    elif isinstance(dataset, tuple | list) and dataset and all(isinstance(part, Tensor) for part in dataset):
        way_out = "wrap the tensors: torch.utils.data.TensorDataset(x, y)"
    elif not is_iterable(dataset) and not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        way_out = "wrap it in such a class"
    if way_out is not None:
        raise DataError(
            f"{name} dataset: expected a torch Dataset of (input, target), with __len__ and __getitem__, or an "
            f"IterableDataset, got {kind}; {way_out}"
        )
    if is_iterable(dataset):
        size = _length_of_stream(dataset, name, loading)
    else:
        size = len(dataset) if loading.sampler is None else len(loading.sampler)  # type: ignore[arg-type]
    if size == 0:
        raise DataError(f"{name} dataset: expected samples, but {kind} is empty; check data.root and the split")
    if loading.samples_per_epoch is not None:
        if not is_iterable(dataset) and loading.samples_per_epoch > size:
            raise DataError(f"{name} dataset: samples_per_epoch is {loading.samples_per_epoch}, but there are {size}")
        size = loading.samples_per_epoch
    if size < min_samples:
        raise DataError(
            f"{name} dataset: expected at least {min_samples} samples, but {kind} has {size}; use a larger dataset or "
            f"train.batch_size={size} or less"
        )
    return size


def _length_of_stream(dataset: object, name: str, loading: Loading) -> int:
    kind = type(dataset).__name__
    if loading.sampler is not None:
        raise DataError(f"{name} dataset: {kind} is iterable and has an order of its own; use no sampler with it")
    if loading.samples_per_epoch is not None:
        return loading.samples_per_epoch
    try:
        return len(dataset)  # type: ignore[arg-type]
    except Exception:  # the user's code can raise anything
        way_out = ", or use data.samples_per_epoch (Loading(samples_per_epoch=...))" if name == "training" else ""
        raise DataError(
            f"{name} dataset: {kind} is iterable and does not say how many samples an epoch has, on which the length "
            f"of the run depends; give it a __len__{way_out}"
        ) from None
