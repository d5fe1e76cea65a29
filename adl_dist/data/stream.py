"""An iterable dataset: read in its own order, continued where it was left."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch.utils.data import IterableDataset

from adl_dist.data.own_code import own_code
from adl_dist.errors import DataError
from adl_dist.seeds import stream_seed


@dataclass(frozen=True)
class Place:
    """Where a stream is: so many samples of an epoch have been read; ``state`` is its own, if it tells one."""

    epoch: int
    sample: int
    state: Any = None


def is_iterable(dataset: object) -> bool:
    """Whether ``dataset`` is read by ``iter`` alone."""
    return isinstance(dataset, IterableDataset) or (
        hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__")
    )


class Stream:
    """Reads the samples of an epoch one after the other.

    An epoch begins with ``set_epoch(epoch)``, if the dataset has it, and ``iter(dataset)``. In the midst of an epoch it
    is continued by ``load_state_dict`` and ``iter``, if it has ``state_dict``, too; else it is read from the beginning
    of the epoch once more, up to the place.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        self._dataset, self._seed = dataset, seed
        self._has_state = all(callable(getattr(dataset, name, None)) for name in ("state_dict", "load_state_dict"))
        self._iterator: Iterator[Any] | None = None
        self._at: Place | None = None  # where the iterator is
        self._resumed: Place | None = None  # from a checkpoint

    def place(self) -> Place | None:
        """Return where it is now, for a checkpoint; None: at the beginning of an epoch."""
        if self._at is None:
            return self._resumed
        with own_code(f"training dataset: {type(self._dataset).__name__}.state_dict()"):
            state = self._dataset.state_dict() if self._has_state else None
        return Place(self._at.epoch, self._at.sample, state)

    def resume(self, place: Place) -> None:
        """Be at the ``place`` of a checkpoint when that is asked for."""
        self._resumed, self._at, self._iterator = place, None, None

    def begin(self, epoch: int, first_sample: int, seeded: Callable[[int], AbstractContextManager[None]]) -> None:
        """Be at ``first_sample`` of ``epoch``; what runs of the dataset runs in ``seeded(seed)``."""
        if self._at is not None and (self._at.epoch, self._at.sample) == (epoch, first_sample) and first_sample:
            return
        kept = self._resumed
        with seeded(stream_seed(self._seed, "stream", epoch)), own_code(type(self._dataset).__name__):
            if hasattr(self._dataset, "set_epoch"):
                self._dataset.set_epoch(epoch)
            is_kept = kept is not None and (kept.epoch, kept.sample) == (epoch, first_sample)
            if is_kept and first_sample and kept is not None and kept.state is not None and self._has_state:
                self._dataset.load_state_dict(kept.state)
                skipped = first_sample
            else:
                skipped = 0
            self._iterator = iter(self._dataset)
        if self._iterator is self._dataset:
            raise DataError(
                f"{type(self._dataset).__name__} is an iterator, which can be read once only; expected a dataset whose "
                "__iter__ begins at the start again, because the model is tried out with its first samples"
            )
        self._at = Place(epoch, skipped)
        for place in range(skipped, first_sample):
            with seeded(self.seed_of(place)):
                self.next()

    def seed_of(self, place: int) -> int:
        """Return the seed for the sample at ``place`` of the epoch."""
        assert self._at is not None
        return stream_seed(self._seed, "sample", self._at.epoch, place)

    @property
    def position(self) -> int:
        """The place of the next sample in the epoch."""
        assert self._at is not None
        return self._at.sample

    def next(self) -> Any:
        """Return the next sample; raise DataError if there is none."""
        assert self._iterator is not None
        assert self._at is not None
        with own_code(f"sample {self._at.sample}: {type(self._dataset).__name__}"):
            sample = next(self._iterator, self)
        if sample is self:
            raise DataError(
                f"{type(self._dataset).__name__} ended after {self._at.sample} samples of epoch {self._at.epoch + 1}, "
                "fewer than its __len__ or samples_per_epoch says; correct that number"
            )
        self._at = Place(self._at.epoch, self._at.sample + 1)
        return sample
