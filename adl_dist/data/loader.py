"""Micro-batches that depend only on (seed, epoch, index)."""

import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import pickle
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import cached_property, partial
from itertools import accumulate, pairwise
from multiprocessing.context import BaseContext
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_structure
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, get_worker_info

from adl_dist.batch import Structure, describe_structure, map_batch
from adl_dist.data.collate import Pair, as_pair, collated, stacked
from adl_dist.data.loading import PLAIN, Loading, check_dataset
from adl_dist.data.small_images import SmallImages
from adl_dist.data.stream import Stream, is_iterable, own_code, seeded
from adl_dist.data.tokens import Windows
from adl_dist.errors import DataError, in_one_line
from adl_dist.seeds import stream_seed, stream_seeds
from adl_dist.streams import seed_streams, streams_kept

Task = tuple[int, NDArray[np.int64], NDArray[np.uint64]]  # a micro-batch: epoch, indices of its samples, their seeds

# Signals to a whole process group or job are for the process that trains. It needs data until its pipeline is empty.
_NOT_FOR_WORKERS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
NEEDS = (
    "it needs memory, open files (ulimit -n), shared memory in /dev/shm (docker run --shm-size=8g), the dataset in a "
    "module that it can import, and a script that works only under `if __name__ == '__main__':`; or use num_workers=0"
)
T = TypeVar("T")
# From indices [B] and seeds [B] to inputs [B, ...] and targets [B, ...].
Take = Callable[[NDArray[np.int64], NDArray[np.uint64]], tuple[Tensor, Tensor]]


def epoch_order(num_samples: int, *, seed: int, epoch: int, shuffle: bool) -> NDArray[np.int64]:
    """Return the order [n] in which ``epoch`` visits the samples.

    With ``shuffle`` each epoch has its own permutation; otherwise the order is 0 to n-1.
    """
    # An array, here and for the seeds: a million samples as Python numbers take a tenth of a gigabyte.
    if not shuffle:
        return np.arange(num_samples)
    generator = torch.Generator().manual_seed(stream_seed(seed, "order", epoch))
    return torch.randperm(num_samples, generator=generator).numpy()


class Loader:
    """A loader of micro-batches of given sizes in the order of an epoch.

    Right before ``dataset[index]`` the global random streams that transforms draw from (torch on the CPU, Python's,
    numpy's legacy one) are seeded by (seed, epoch, index). So a user's transform draws the same numbers for any number
    of workers, any micro-batch sizes and after any resume. The process's own streams do not move. Datasets of
    :func:`rows_of` need no seeding: tensors and tokens draw nothing, and small images draw the same numbers from a
    generator of their own.

    A sampler is seeded by (seed, epoch), and a ``collate_fn`` by (seed, epoch, index of its first sample).

    Workers import the user's script again, so a script that uses them needs ``if __name__ == "__main__":``.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        seed: int,
        shuffle: bool,
        num_workers: int = 0,
        pin_memory: bool = False,
        loading: Loading = PLAIN,
    ) -> None:
        """Open a dataset; an iterable one is not shuffled.

        Raises:
            DataError: If :func:`check_dataset` refuses the dataset, or it is iterable and there are workers.
        """
        self._dataset, self._seed, self._shuffle, self._pin_memory = dataset, seed, shuffle, pin_memory
        self._loading = loading
        self.stream = Stream(dataset, seed) if is_iterable(dataset) else None
        if self.stream is not None and num_workers:
            raise DataError(
                f"{type(dataset).__name__} is iterable, and {num_workers} processes that load would each read all of "
                "it; use data.num_workers=0"
            )
        self.num_samples = check_dataset(dataset, name="the", min_samples=1, loading=loading)
        self.num_workers = num_workers  # processes that load; 0: the caller's own
        self._structures: list[Structure] | None = None  # of the first input and target
        self._kept: DataLoader[Any] | None = None  # with persistent workers, once they have started
        self._tasks = list[Task]()  # of the present epoch; persistent workers read it
        # The cores of the process, because the thread that asks for batches may be bound to fewer.
        self._cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None

    def batches(self, epoch: int, sizes: Sequence[int], *, first_sample: int = 0) -> Generator[Pair, None, None]:
        """Yield one epoch's micro-batches.

        Workers live from the first micro-batch until the generator ends or is closed. Persistent workers live until
        :meth:`close`, or until an error.

        Args:
            epoch: e, counted from 0 over the run.
            sizes: samples in each micro-batch; samples beyond their sum are not visited.
            first_sample: the place in the epoch's order to begin at.

        Yields:
            (input [size, ...], target [size, ...]) on the CPU, each a tensor or several of them, stacked from the
            samples' own dtypes and shapes, or collated; a Python float becomes torch's default dtype.

        Raises:
            DataError: If a sample is not a pair of tensors or numbers, two samples of a micro-batch differ in shape or
                dtype, the dataset itself raises, or a worker fails.
        """
        self._tasks[:] = tasks = self._tasks_of(epoch, first_sample, sizes)
        num_workers = min(self.num_workers, len(sizes))  # one sample, which shapes are agreed with, needs one worker
        keeps = self._loading.persistent_workers and num_workers == self.num_workers > 0
        iterator = self._started(num_workers, self._tasks if keeps else tasks, keeps=keeps)
        is_usable = False
        try:
            for loaded in iterator:
                yield self._checked(loaded)
            is_usable = True
        except (RuntimeError, OSError) as error:
            if num_workers:
                raise _failed(error) from error
            raise
        except GeneratorExit:
            is_usable = True  # torch's iterator drops the rest when it begins again
            raise
        finally:
            if not (keeps and is_usable):
                _end_workers(iterator)
                self._kept = None if keeps else self._kept

    def close(self) -> None:
        """End persistent workers; the next epoch starts new ones."""
        if self._kept is not None:
            _end_workers(self._kept._iterator)
            self._kept = None

    def order(self, epoch: int) -> NDArray[np.int64]:
        """Return the indices that ``epoch`` visits, in their order [n].

        Raises:
            DataError: If the sampler yields fewer indices than its length, or a value that is no index.
        """
        sampler, num = self._loading.sampler, self.num_samples
        if sampler is None:
            whole = len(self._dataset)  # type: ignore[arg-type]
            return epoch_order(whole, seed=self._seed, epoch=epoch, shuffle=self._shuffle)[:num]
        seed = stream_seed(self._seed, "order", epoch)
        kind = type(sampler).__name__
        with seeded(seed), own_code(f"sampler: {kind}"):
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
            if isinstance(generator := getattr(sampler, "generator", None), torch.Generator):
                generator.manual_seed(seed)
            indices = [*sampler]
        if wrong := [index for index in indices if not isinstance(index, int | np.integer)]:
            raise DataError(
                f"sampler: {kind} yields {type(wrong[0]).__name__}, expected indices; micro-batches are made of them "
                "by train.batch_size"
            )
        if len(indices) < num:
            raise DataError(f"sampler: {kind} yields {len(indices)} indices in epoch {epoch + 1}, expected {num}")
        return np.array(indices[:num], dtype=np.int64)

    def _tasks_of(self, epoch: int, first_sample: int, sizes: Sequence[int]) -> list[Task]:
        """Return the tasks of micro-batches of ``sizes`` from ``first_sample`` on."""
        last = first_sample + sum(sizes)
        if self.stream is not None:
            self.stream.begin(epoch, first_sample)
            order = np.arange(first_sample, last)
        else:
            order = self.order(epoch)[first_sample:last]
        seeds = stream_seeds(self._seed, "sample", epoch, last=order)
        places = [slice(start, stop) for start, stop in pairwise(accumulate(sizes, initial=0))]
        return [(epoch, order[place], seeds[place]) for place in places]

    def _started(self, num_workers: int, tasks: list[Task], *, keeps: bool) -> Iterator[Any]:
        """Start workers, if any; return torch's iterator over the micro-batches."""
        loader = self._kept if keeps else None
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="Got pickle error")  # the DataError says it
                if num_workers <= len(self._cores or ()):  # torch counts the fewer cores that this thread is bound to
                    warnings.filterwarnings("ignore", message="This DataLoader will create")
                loader = loader or self._torch_loader(num_workers, tasks, keeps=keeps)
                iterator = iter(loader)
        except (OSError, RuntimeError) as error:
            raise _failed(error) from error
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise DataError(
                f"{type(self._dataset).__name__} or its collate_fn cannot be sent to the processes that load data: "
                f"{error}; define functions and classes at the top of a module, not inside of functions or as lambdas, "
                "or use data.num_workers=0"
            ) from error
        self._kept = loader if keeps else self._kept
        return iterator

    def _torch_loader(self, num_workers: int, tasks: list[Task], *, keeps: bool) -> DataLoader[Any]:
        return DataLoader(
            # A stream is read by this process.
            _MicroBatches(self._dataset, self._seed, self._loading.collate_fn, self.stream),
            sampler=tasks,
            batch_size=None,  # an element of the dataset is a whole micro-batch already
            collate_fn=_as_it_is,
            num_workers=num_workers,
            pin_memory=self._pin_memory,
            multiprocessing_context=_worker_context() if num_workers else None,
            worker_init_fn=partial(_begin_worker, self._cores),
            # Without it the workers' own seeds would be drawn from the process's global stream.
            generator=torch.Generator().manual_seed(0),
            persistent_workers=keeps,
        )

    def _checked(self, micro_batch: "Pair | DataError") -> Pair:
        """Return ``micro_batch``, or raise the error that is in its place.

        Raise DataError if its containers differ from those of the first micro-batch.
        """
        if isinstance(micro_batch, DataError):
            raise micro_batch
        # torch makes lists of tuples where it pins memory.
        input_, target = (tuple(part) if isinstance(part, list) else part for part in micro_batch)
        structures = [tree_structure(input_), tree_structure(target)]
        if self._structures is None:
            self._structures = structures
        if structures != self._structures:
            expected, found = (" and ".join(map(describe_structure, of)) for of in (self._structures, structures))
            raise DataError(
                f"input and target of a micro-batch are {found}, but those before were {expected}; let all samples "
                "have the same tuples, or dictionaries with the same keys"
            )
        return input_, target


class _MicroBatches(Dataset["Pair | DataError"]):
    """A dataset from tasks to micro-batches, loaded here or in a worker."""

    def __init__(
        self,
        dataset: Dataset[Any],
        seed: int,
        collate_fn: Callable[[list[Any]], Any] | None,
        stream: Stream | None = None,
    ) -> None:
        self._dataset, self._seed, self._collate_fn, self._stream = dataset, seed, collate_fn, stream

    @cached_property
    def _take(self) -> Take | None:
        """The function of :func:`rows_of`, or None, made in the calling process."""
        return rows_of(self._dataset) if self._collate_fn is None else None

    def __getitem__(self, task: Task) -> "Pair | DataError":
        """Load a micro-batch, or return the DataError.

        A DataError raised in a worker would arrive as text with a traceback.
        """
        try:
            pair = self._load(*task)
        except DataError as error:
            return error
        if get_worker_info() is not None:  # what fails in the thread of torch that sends is never known
            try:
                for part in pair:
                    map_batch(Tensor.share_memory_, part)
            except (RuntimeError, OSError) as error:
                return _failed(error)
        return pair

    def _load(self, epoch: int, indices: NDArray[np.int64], seeds: NDArray[np.uint64]) -> Pair:
        if self._take is not None:
            with own_code(f"sample {indices[0]}: {type(self._dataset).__name__}"):
                return self._take(indices, seeds)
        with streams_kept():
            return self._one_by_one(epoch, indices.tolist(), seeds.tolist())

    def _one_by_one(self, epoch: int, indices: list[int], seeds: list[int]) -> Pair:
        samples: list[Any] = []
        for index, seed in zip(indices, seeds, strict=True):
            seed_streams(seed)
            with own_code(f"sample {index}: {type(self._dataset).__name__}"):
                sample = self._dataset[index] if self._stream is None else self._stream.next()
            samples.append(sample if self._collate_fn is not None else as_pair(sample, f"sample {index}:"))
        if self._collate_fn is None:
            return stacked(samples, indices)
        seed_streams(stream_seed(self._seed, "collate", epoch, indices[0]))
        return collated(self._collate_fn, samples, indices)


def rows_of(dataset: Dataset[Any]) -> Take | None:
    """Return a function from indices and seeds to a micro-batch, or None.

    The function exists for tensors, small images, windows and a ``Subset`` of these. A class derived from these gets
    None, because it may treat its samples in its own way. Measured on CIFAR-10 with augmentation, one core: 24 us an
    image, 120 one by one; ResNet-20 trains an image in 2,900.
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


def _worker_context() -> BaseContext:
    # Not fork: this process runs threads of RPC and gloo, and a fork copies the locks that they hold but not the
    # threads that would release them. The server is clean, and imports once what each worker would import.
    context = multiprocessing.get_context("forkserver")
    used = [name for name in ("torchvision.transforms.v2",) if name in sys.modules]
    context.set_forkserver_preload(["__main__", __name__, *used])
    # Blocked signals stay blocked in the processes started here. The tracker unblocks them, so it has to run before.
    multiprocessing.resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _NOT_FOR_WORKERS)
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return context


def _failed(error: Exception) -> DataError:
    """Return the error of a worker, which torch describes."""
    return DataError(f"a process that loads data has failed ({in_one_line(error)}); {NEEDS}")


def _as_it_is(micro_batch: T) -> T:
    return micro_batch


def _end_workers(iterator: object) -> None:
    """End the worker processes of torch's iterator."""
    # It would do this itself when it is collected, but the traceback of an error keeps it alive.
    getattr(iterator, "_shutdown_workers", lambda: None)()
    for worker in getattr(iterator, "_workers", ()):  # a worker that is stuck takes no SIGTERM
        worker.kill()


def _begin_worker(cores: set[int] | None, worker: int) -> None:
    """Set up a worker to run on ``cores`` and end with its parent."""
    parent = multiprocessing.parent_process()
    assert parent is not None, f"loader worker {worker} runs outside of a worker process"
    for number in _NOT_FOR_WORKERS:  # again: the user's script may have started the server before
        signal.signal(number, signal.SIG_IGN)
    if cores is not None:
        os.sched_setaffinity(0, cores)

    def wait() -> None:  # torch's workers watch their parent, but that is the fork server, which stays while they do
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, name="end with parent", daemon=True).start()
