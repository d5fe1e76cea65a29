"""An iterable dataset: read in its own order, continued by a resumed run."""

import copy
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from torch.utils.data import IterableDataset

from adl_dist.errors import DataError, in_one_line, place_of
from adl_dist.seeds import stream_seed
from adl_dist.streams import seed_streams, streams_kept


@dataclass(frozen=True)
class Place:
    """A position in a stream.

    ``sample`` samples of ``epoch`` have been read; ``state`` is the ``state_dict()`` of the dataset, if it has one.
    """

    epoch: int
    sample: int
    state: Any = None


@contextmanager
def own_code(what: str) -> Iterator[None]:
    """Turn errors of the user's code into a DataError of one line.

    Its text begins with ``what`` and names the line of code.
    """
    try:
        yield
    except (DataError, KeyboardInterrupt):
        raise
    except BaseException as error:  # it can raise anything
        raised = in_one_line(error)
        refusal = DataError(f"{what} raised {raised}{place_of(error)}")
        if isinstance(error, OSError | MemoryError) and not isinstance(error, FileNotFoundError | PermissionError):
            refusal.exit_code = 1  # a disk or a server that may be there again when the run is restarted
        refusal.add_note(traceback.format_exc())  # for the log; a worker's error arrives without its cause
        raise refusal from error


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the global random streams, and restore them at the end."""
    with streams_kept():
        seed_streams(seed)
        yield


def is_iterable(dataset: object) -> bool:
    """Return whether ``dataset`` can be read only by ``iter``."""
    return isinstance(dataset, IterableDataset) or (
        hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__")
    )


class Stream:
    """A reader of the samples of an epoch, one after the other.

    An epoch begins with ``set_epoch(epoch)``, if the dataset has this method, and ``iter(dataset)``. A dataset with
    ``state_dict`` and ``load_state_dict`` is continued in the middle of an epoch by its state. Any other dataset is
    read again from the beginning of the epoch up to the position.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        self._dataset, self._seed = dataset, seed
        self._has_state = all(callable(getattr(dataset, name, None)) for name in ("state_dict", "load_state_dict"))
        self._iterator: Iterator[Any] = iter(())
        self._at: Place | None = None  # of the iterator
        self._resumed: Place | None = None  # from a checkpoint

    def place(self) -> Place | None:
        """Return the position for a checkpoint, or None before the first sample."""
        if self._at is None:
            return self._resumed
        with own_code(f"training dataset: {type(self._dataset).__name__}.state_dict()"):
            state = self._dataset.state_dict() if self._has_state else None
        return Place(self._at.epoch, self._at.sample, state)

    def resume(self, place: Place) -> None:
        """Keep the ``place`` of a checkpoint, from which :meth:`begin` continues."""
        self._resumed, self._at = place, None

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """Restore the dataset's state after the block, which may read samples."""
        state = None
        with suppress(Exception), streams_kept():  # many have no state before their first sample
            state = copy.deepcopy(self._dataset.state_dict()) if self._has_state else None
        try:
            yield
        finally:
            self._iterator, self._at = iter(()), None  # first: a generator may write the state as it ends
            if state is not None:
                with own_code(f"{type(self._dataset).__name__}.load_state_dict()"):
                    self._dataset.load_state_dict(state)

    def begin(self, epoch: int, first_sample: int) -> None:
        """Move to ``first_sample`` of ``epoch``."""
        if first_sample and self._at is not None and (self._at.epoch, self._at.sample) == (epoch, first_sample):
            return
        length = len(self._dataset) if self._has_state and hasattr(self._dataset, "__len__") else None
        if self._at is not None and self._at.sample == length:
            with seeded(self._seed), own_code(type(self._dataset).__name__):
                next(self._iterator, None)  # what follows its last sample, and may move it to the start again
        kept, skipped = self._resumed, 0
        with seeded(stream_seed(self._seed, "stream", epoch)), own_code(type(self._dataset).__name__):
            if hasattr(self._dataset, "set_epoch"):
                self._dataset.set_epoch(epoch)
            is_kept = kept is not None and (kept.epoch, kept.sample) == (epoch, first_sample)
            if is_kept and first_sample and self._has_state and kept is not None and kept.state is not None:
                self._dataset.load_state_dict(kept.state)
                skipped = first_sample
            self._iterator = iter(self._dataset)
        if self._iterator is self._dataset:
            raise DataError(
                f"{type(self._dataset).__name__} is an iterator, which can be read once only; expected a dataset whose "
                "__iter__ begins at the start again, because the model is tried out with its first samples"
            )
        self._at = Place(epoch, skipped)
        for index in range(skipped, first_sample):
            with seeded(stream_seed(self._seed, "sample", epoch, index)), own_code(f"sample {index}"):
                self.next()

    def next(self) -> Any:
        """Return the next sample; DataError if the epoch has no more."""
        assert self._at is not None, "begin comes first"
        sample = next(self._iterator, self)
        if sample is self:
            raise DataError(
                f"{type(self._dataset).__name__} ended after {self._at.sample} samples of epoch {self._at.epoch + 1}, "
                "fewer than its __len__ or samples_per_epoch says; correct that number"
            )
        self._at = Place(self._at.epoch, self._at.sample + 1)
        return sample
