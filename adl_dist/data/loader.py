"""Micro-batches whose samples, order and augmentation are functions of (seed, epoch, index) and of nothing else."""

import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import pickle
import random
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate, pairwise
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from adl_dist.batch import Layout, layout_of
from adl_dist.data.collate import Pair, as_pair, collated, described, in_layout, stacked
from adl_dist.data.loading import PLAIN, Loading, check_dataset
from adl_dist.data.own_code import own_code
from adl_dist.data.rows import rows_of
from adl_dist.data.stream import Stream, is_iterable
from adl_dist.errors import DataError
from adl_dist.seeds import stream_seed, stream_seeds
from adl_dist.streams import seed_streams

# What is sent to a whole process group or job is for the process that trains. It may have to stop, and until its
# pipeline is empty it needs data.
_NOT_FOR_WORKERS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
# Takes the place of numpy's generator while samples are loaded: to copy a state out and in would take 70 us.
_FOR_SAMPLES = np.random.MT19937(0)


def epoch_order(num_samples: int, *, seed: int, epoch: int, shuffle: bool) -> NDArray[np.int64]:
    """Return the order [n] in which ``epoch`` visits the samples: a permutation of its own, or 0 to n-1."""
    # An array, here and for the seeds: as Python numbers a million samples take a tenth of a gigabyte.
    if not shuffle:
        return np.arange(num_samples)
    generator = torch.Generator().manual_seed(stream_seed(seed, "order", epoch))
    return torch.randperm(num_samples, generator=generator).numpy()


class Loader:
    """Loads micro-batches of given sizes in the order of an epoch.

    Right before ``dataset[index]`` the global random streams that transforms draw from (torch on the CPU, Python's,
    numpy's legacy one) are seeded by (seed, epoch, index): whatever a user's transform does is repeated for any
    number of workers, any micro-batch sizes and after any resume. The process's own streams stay where they are. A
    ``TensorDataset`` of two tensors on the CPU, windows of tokens, or a ``Subset`` of one draws nothing and is spared
    this; small images in memory draw the same numbers from a stream of their own.

    A sampler is seeded by (seed, epoch), and a ``collate_fn`` by (seed, epoch, index of its first sample).

    Workers import the user's script again, so one that uses them needs ``if __name__ == "__main__":``.
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
        """Take what :func:`check_dataset` accepts; an iterable dataset is not shuffled, and read by this process."""
        self._dataset, self._seed, self._shuffle, self._pin_memory = dataset, seed, shuffle, pin_memory
        self._loading = loading
        self.stream = Stream(dataset, seed) if is_iterable(dataset) else None  # of an iterable dataset
        if self.stream is not None and num_workers:
            raise DataError(
                f"{type(dataset).__name__} is iterable, and {num_workers} processes that load would each read all of "
                "it; use data.num_workers=0"
            )
        self.num_samples = check_dataset(dataset, name="the", min_samples=1, loading=loading)
        self.layouts: tuple[Layout | None, Layout | None] | None = None  # of input and target; None: not known yet
        self.num_workers = num_workers  # processes that load; 0: the caller's own
        self._kept: DataLoader[Any] | None = None  # with the processes that it started; None: there are none yet
        self._tasks = list[Task]()  # what they are to load in the present epoch
        # Those of the process, not of the thread that will ask for batches: that one may be bound to a few.
        self._cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None

    def batches(self, epoch: int, sizes: Sequence[int], *, first_sample: int = 0) -> Generator[Pair, None, None]:
        """Yield one epoch's micro-batches; workers live from the first one until the generator ends or is closed.

        Those that are to be kept live until :meth:`close`, or until an error.

        Args:
            epoch: e, counted from 0 over the run.
            sizes: samples in each micro-batch; samples beyond their sum are not visited.
            first_sample: the place in the epoch's order to begin at.

        Yields:
            (input [size, ...], target [size, ...]) on the CPU, each a tensor or several of them, stacked from the
            samples' own dtypes and shapes, or collated; a Python float becomes torch's default dtype.

        Raises:
            DataError: too few samples for ``sizes``, a sample that is not a pair of tensors or numbers, two samples
                of a micro-batch that differ in shape or dtype, what the dataset itself raises, with the index of the
                sample, or a dataset that cannot be sent to workers.
        """
        available = self.num_samples - first_sample
        if sum(sizes) > available or min(sizes, default=1) < 1:
            raise DataError(
                f"epoch {epoch + 1}: expected micro-batches of at least 1 sample, {available} in all, got sizes "
                f"{list(sizes)}, {sum(sizes)} in all"
            )
        places = [slice(start, stop) for start, stop in pairwise(accumulate(sizes, initial=0))]
        num_workers = min(self.num_workers, len(sizes))  # the one sample that shapes are agreed with needs one
        if self._loading.persistent_workers and 0 < self.num_workers == num_workers:
            yield from self._by_kept(epoch, first_sample, places)
            return
        micro_batches = self._micro_batches(epoch, first_sample, sum(sizes))
        if not num_workers and not self._pin_memory:  # what torch's would do, at a fraction of the price
            with _gaussian_kept():
                for place in places:
                    yield self._checked(micro_batches[place])
            return
        iterator = self._begun(self._torchs_own(micro_batches, places, num_workers))
        try:
            for loaded in _as_it_comes(iterator):
                yield self._checked(loaded)
        finally:
            _end_workers(iterator)

    def _by_kept(self, epoch: int, first_sample: int, places: Sequence[slice]) -> Generator[Pair, None, None]:
        """Yield the micro-batches at ``places`` behind the first sample from processes that stay."""
        last = first_sample + places[-1].stop
        order = self.order(epoch)[first_sample:last]
        seeds = stream_seeds(self._seed, "sample", epoch, last=order)
        self._tasks[:] = [(epoch, order[place], seeds[place]) for place in places]
        if self._kept is None:
            tasks = _Tasks(self._dataset, self._seed, self._loading.collate_fn)
            self._kept = self._torchs_own(tasks, self._tasks, self.num_workers)
        # It drops what was asked for and not taken, if the epoch before did not come to its end.
        iterator, is_usable = self._begun(self._kept), False
        try:
            for loaded in _as_it_comes(iterator):
                yield self._checked(loaded)
            is_usable = True
        except GeneratorExit:
            is_usable = True
            raise
        finally:
            if not is_usable:
                self.close()

    def close(self) -> None:
        """End the workers that were kept; the next epoch starts others."""
        if self._kept is not None:
            _end_workers(self._kept._iterator)
            self._kept = None

    def _torchs_own(self, dataset: Dataset[Any], sampler: Sequence[Any], num_workers: int) -> DataLoader[Any]:
        return DataLoader(
            dataset,
            sampler=sampler,
            batch_size=None,  # an element of the dataset is a whole micro-batch already
            num_workers=num_workers,
            pin_memory=self._pin_memory,
            multiprocessing_context=_worker_context() if num_workers else None,
            worker_init_fn=partial(_begin_worker, self._cores),
            # Its draws seed the workers, which seed again for each sample. Without it they would come from the
            # process's global stream and move it.
            generator=torch.Generator().manual_seed(0),
            persistent_workers=sampler is self._tasks,
        )

    def order(self, epoch: int) -> NDArray[np.int64]:
        """Return the indices that ``epoch`` visits, in their order [n].

        Raises:
            DataError: the sampler does not give as many indices as it says.
        """
        sampler, num = self._loading.sampler, self.num_samples
        if sampler is None:
            whole = len(self._dataset)  # type: ignore[arg-type]
            return epoch_order(whole, seed=self._seed, epoch=epoch, shuffle=self._shuffle)[:num]
        seed = stream_seed(self._seed, "order", epoch)
        kind = type(sampler).__name__
        with _seeded(seed), own_code(f"sampler: {kind}"):
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

    def _micro_batches(self, epoch: int, first_sample: int, num_samples: int) -> Dataset[Any]:
        """Return the micro-batches of so many samples, by their places behind the first one."""
        collate = _collate_of(self._loading.collate_fn, self._seed, epoch)
        if self.stream is not None:
            self.stream.begin(epoch, first_sample, _seeded)
            return _Streamed(self._dataset, self.stream, collate)
        order = self.order(epoch)[first_sample : first_sample + num_samples]
        seeds = partial(stream_seeds, self._seed, "sample", epoch, last=order)
        return _of_samples(self._dataset, order, seeds, collate)

    def _checked(self, micro_batch: "Pair | DataError") -> Pair:
        """Return a micro-batch as it was loaded, in the containers of the first one."""
        if isinstance(micro_batch, DataError):
            raise micro_batch
        input_, target = micro_batch  # torch's DataLoader makes it a list
        if type(input_) is Tensor and type(target) is Tensor and self.layouts == NO_LAYOUTS:
            return input_, target
        if self.layouts is None:
            self.layouts = layout_of(input_), layout_of(target)
        pair = in_layout(input_, self.layouts[0]), in_layout(target, self.layouts[1])
        if pair[0] is None or pair[1] is None:
            expected = " and ".join("a tensor" if layout is None else str(layout) for layout in self.layouts)
            raise DataError(
                f"a micro-batch is (input {described(input_)}, target {described(target)}), but those before were "
                f"{expected}; let all samples have the same tuples, or dictionaries with the same keys"
            )
        return pair[0], pair[1]

    def _begun(self, loading: DataLoader[Any]) -> Iterator[Any]:
        """Start the workers of ``loading``, if it has any."""
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="Got pickle error")  # said below
                return iter(loading)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise DataError(
                f"{type(self._dataset).__name__} cannot be sent to the processes that load data: {error}; define its "
                "functions and classes at the top of a module, not inside of functions or as lambdas, or use "
                "data.num_workers=0"
            ) from error


Collate = Callable[[list[Any], list[int]], Pair]  # of samples and their indices
Task = tuple[int, NDArray[np.int64], NDArray[np.uint64]]  # a micro-batch: epoch, indices, seeds
NO_LAYOUTS = (None, None)  # input and target are a tensor each


class _Samples(Dataset["Pair | DataError"]):
    """The micro-batches of one epoch, by their places in its order: loaded sample by sample, here or in a worker."""

    def __init__(
        self, dataset: Dataset[Any], order: NDArray[np.int64], seeds: NDArray[np.uint64], collate: Collate | None
    ) -> None:
        self._dataset, self._order, self._seeds, self._collate = dataset, order, seeds, collate

    def __getitem__(self, places: slice) -> "Pair | DataError":
        # A DataError is returned, not raised: raised in a worker it would reach the user as torch's copy of a
        # traceback, with the one line that matters at its end.
        samples: list[Any] = []
        indices: list[int] = self._order[places].tolist()
        try:
            with _streams_restored():
                for index, seed in zip(indices, self._seeds[places].tolist(), strict=True):
                    seed_streams(seed)
                    with own_code(f"sample {index}: {type(self._dataset).__name__}"):
                        sample = self._dataset[index]
                    samples.append(sample if self._collate is not None else as_pair(sample, index))
                return stacked(samples, indices) if self._collate is None else self._collate(samples, indices)
        except DataError as error:
            return error


class _Tasks(Dataset["Pair | DataError"]):
    """The micro-batches of any epoch, each named by what it is made of."""

    def __init__(self, dataset: Dataset[Any], seed: int, collate_fn: Callable[[list[Any]], Any] | None) -> None:
        self._dataset, self._seed, self._collate_fn = dataset, seed, collate_fn

    def __getitem__(self, task: Task) -> "Pair | DataError":
        epoch, order, seeds = task
        collate = _collate_of(self._collate_fn, self._seed, epoch)
        loaded: Pair | DataError = _of_samples(self._dataset, order, lambda: seeds, collate)[slice(0, len(order))]
        return loaded


def _of_samples(
    dataset: Dataset[Any], order: NDArray[np.int64], seeds: Callable[[], NDArray[np.uint64]], collate: Collate | None
) -> Dataset[Any]:
    """Return the micro-batches of the samples ``order`` [n], by their places in it; they draw by ``seeds`` [n]."""
    rows = rows_of(dataset, order, seeds) if collate is None else None
    return rows or _Samples(dataset, order, seeds(), collate)


class _Streamed(Dataset["Pair | DataError"]):
    """The micro-batches of an iterable dataset, which come one after the other, whatever places are asked for."""

    def __init__(self, dataset: Dataset[Any], stream: Stream, collate: Collate | None) -> None:
        self._dataset, self._stream, self._collate = dataset, stream, collate

    def __getitem__(self, places: slice) -> "Pair | DataError":
        samples: list[Any] = []
        first = self._stream.position
        indices = [*range(first, first + places.stop - places.start)]
        try:
            with _streams_restored():
                for index in indices:
                    seed_streams(self._stream.seed_of(index))
                    sample = self._stream.next()
                    samples.append(sample if self._collate is not None else as_pair(sample, index))
                return stacked(samples, indices) if self._collate is None else self._collate(samples, indices)
        except DataError as error:
            return error


def _collate_of(collate_fn: Callable[[list[Any]], Any] | None, seed: int, epoch: int) -> Collate | None:
    return partial(_collated, collate_fn, seed, epoch) if collate_fn is not None else None


def _collated(collate_fn: Callable[[list[Any]], Any], seed: int, epoch: int, samples: list[Any], at: list[int]) -> Pair:
    """Collate ``samples`` with the indices ``at``; what that draws depends on the first of them."""
    seed_streams(stream_seed(seed, "collate", epoch, at[0]))
    return collated(collate_fn, samples, at)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Have the global random streams begin at ``seed`` inside."""
    with _streams_restored():
        seed_streams(seed)
        yield


@contextmanager
def _streams_restored() -> Iterator[None]:
    """Leave the process's global random streams as they were found; CUDA's are not touched at all."""
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    numpys_own = np.random.get_bit_generator()  # type: ignore[attr-defined]
    np.random.set_bit_generator(_FOR_SAMPLES)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)
        random.setstate(python_state)
        np.random.set_bit_generator(numpys_own)  # type: ignore[attr-defined]


@contextmanager
def _gaussian_kept() -> Iterator[None]:
    """Leave numpy the second half of a pair of Gaussians, which it drops when its generator is changed.

    Unless another one has drawn meanwhile: then it would come in the wrong place.
    """
    before = np.random.get_state(legacy=False)
    try:
        yield
    finally:
        now = np.random.get_state(legacy=False)
        if before["has_gauss"] and pickle.dumps(before["state"]) == pickle.dumps(now["state"]):
            np.random.set_state(before)


def _worker_context() -> BaseContext:
    # Not fork: this process runs threads of RPC and gloo, and a fork copies the locks that they hold but not the
    # threads that would release them. The server is clean, and imports once what each worker would import.
    context = multiprocessing.get_context("forkserver")
    used = [name for name in ("torchvision.transforms.v2",) if name in sys.modules]
    context.set_forkserver_preload(["__main__", __name__, *used])
    # Blocked signals stay blocked in what a process starts. The tracker unblocks them, so it has to run before.
    multiprocessing.resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _NOT_FOR_WORKERS)
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return context


def _as_it_comes(iterator: Iterator[Any]) -> Iterator[Any]:
    """Yield from torch's iterator; raise DataError if one of its workers has ended."""
    try:
        yield from iterator
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        script = getattr(sys.modules.get("__main__"), "__file__", None)
        cause = "was it killed, or is memory short? Use fewer of them (num_workers), or 0"
        if script is not None and "__name__" not in Path(script).read_text(errors="ignore"):
            cause = (
                f"these processes import {Path(script).name}, which does its work at once: put that under "
                "`if __name__ == '__main__':`, or use num_workers=0"
            )
        raise DataError(f"a process that loads data has ended ({error}); {cause}") from error


def _end_workers(iterator: object) -> None:
    """End the processes of torch's iterator, if it has any."""
    # It would do this itself when it is collected, but the traceback of an error keeps it alive.
    getattr(iterator, "_shutdown_workers", lambda: None)()
    for worker in getattr(iterator, "_workers", ()):  # one that is stuck: it takes no SIGTERM
        worker.kill()


def _begin_worker(cores: set[int] | None, worker: int) -> None:
    """Let a worker run on ``cores``, and end when the process that it loads for was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None, f"loader worker {worker} runs outside of a worker process"
    for number in _NOT_FOR_WORKERS:  # again: the server may be one that the user's script had started before
        signal.signal(number, signal.SIG_IGN)
    if cores is not None:
        os.sched_setaffinity(0, cores)

    def wait() -> None:  # torch's workers watch their parent, but that is the fork server, which stays while they do
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, name="end with parent", daemon=True).start()
