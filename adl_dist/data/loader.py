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
import traceback
import warnings
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate, pairwise
from multiprocessing.context import BaseContext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from adl_dist.errors import DataError, place_of
from adl_dist.seeds import stream_seed, stream_seeds

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


def check_dataset(dataset: object, *, name: str, min_samples: int) -> None:
    """Refuse a dataset that cannot be trained on; ``name``, for the message: ``training`` or ``validation``.

    Raises:
        DataError: not a map-style dataset, empty, or smaller than ``min_samples``, for example those of one update.
    """
    kind = type(dataset).__name__
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise DataError(
            f"{name} dataset: expected a map-style torch Dataset of (input, target), with __len__ and __getitem__, got "
            f"{kind}; samples are visited by index, so that any number of stages sees the same ones: wrap it in such "
            "a class"
        )
    size = len(dataset)
    if size == 0:
        raise DataError(f"{name} dataset: expected samples, but {kind} is empty; check data.root and the split")
    if size < min_samples:
        raise DataError(
            f"{name} dataset: expected at least {min_samples} samples, but {kind} has {size}; use a larger dataset or "
            f"train.batch_size={size} or less"
        )


class Loader:
    """Loads micro-batches of given sizes in the order of an epoch.

    Right before ``dataset[index]`` the global random streams that transforms draw from (torch on the CPU, Python's,
    numpy's legacy one) are seeded by (seed, epoch, index): whatever a user's transform does is repeated for any
    number of workers, any micro-batch sizes and after any resume. The process's own streams stay where they are. A
    ``TensorDataset`` of two tensors on the CPU, or a ``Subset`` of one, draws nothing and is spared this.

    Workers import the user's script again, so one that uses them needs ``if __name__ == "__main__":``.
    """

    def __init__(
        self, dataset: Dataset[Any], *, seed: int, shuffle: bool, num_workers: int = 0, pin_memory: bool = False
    ) -> None:
        self._dataset, self._seed, self._shuffle, self._pin_memory = dataset, seed, shuffle, pin_memory
        self.num_samples: int = len(dataset)  # type: ignore[arg-type]
        self.num_workers = num_workers  # processes that load; 0: the caller's own
        # Those of the process, not of the thread that will ask for batches: that one may be bound to a few.
        self._cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None

    def batches(
        self, epoch: int, sizes: Sequence[int], *, first_sample: int = 0
    ) -> Generator[tuple[Tensor, Tensor], None, None]:
        """Yield one epoch's micro-batches; workers live from the first one until the generator ends or is closed.

        Args:
            epoch: e, counted from 0 over the run.
            sizes: samples in each micro-batch; samples beyond their sum are not visited.
            first_sample: the place in the epoch's order to begin at.

        Yields:
            (input [size, ...], target [size, ...]) on the CPU, stacked from the samples' own dtypes and shapes; a
            Python float becomes torch's default dtype.

        Raises:
            DataError: too few samples for ``sizes``, a sample that is not a pair of tensors or numbers, two samples
                of a micro-batch that differ in shape or dtype, what the dataset itself raises, with the index of the
                sample, or a dataset that cannot be sent to workers.
        """
        order = epoch_order(self.num_samples, seed=self._seed, epoch=epoch, shuffle=self._shuffle)[first_sample:]
        if sum(sizes) > len(order) or min(sizes, default=1) < 1:
            raise DataError(
                f"epoch {epoch + 1}: expected micro-batches of at least 1 sample, {len(order)} in all, got sizes "
                f"{list(sizes)}, {sum(sizes)} in all"
            )
        order = order[: sum(sizes)]
        micro_batches: Dataset[Any] = _rows_of(self._dataset, order) or _Samples(
            self._dataset, order, stream_seeds(self._seed, "sample", epoch, last=order)
        )
        places = [slice(start, stop) for start, stop in pairwise(accumulate(sizes, initial=0))]
        num_workers = min(self.num_workers, len(sizes))  # the one sample that shapes are agreed with needs one
        if not num_workers and not self._pin_memory:  # what torch's would do, at a fraction of the price
            with _gaussian_kept():
                for place in places:
                    yield _loaded(micro_batches[place])
            return
        loading = DataLoader(
            micro_batches,
            sampler=places,
            batch_size=None,  # an element of the dataset is a whole micro-batch already
            num_workers=num_workers,
            pin_memory=self._pin_memory,
            multiprocessing_context=_worker_context() if num_workers else None,
            worker_init_fn=partial(_begin_worker, self._cores),
            # Its draws seed the workers, which seed again for each sample. Without it they would come from the
            # process's global stream and move it.
            generator=torch.Generator().manual_seed(0),
        )
        iterator = self._begun(loading)
        try:
            for loaded in iterator:
                yield _loaded(loaded)
        finally:
            # The iterator would do this when it is collected, but the traceback of an error keeps it alive.
            getattr(iterator, "_shutdown_workers", lambda: None)()
            for worker in getattr(iterator, "_workers", ()):  # one that is stuck: it takes no SIGTERM
                worker.kill()

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


class _Rows(Dataset[tuple[Tensor, Tensor]]):
    """The micro-batches of one epoch, by their places in its order: rows of tensors, taken at once."""

    def __init__(self, inputs: Tensor, targets: Tensor, rows: Tensor) -> None:
        self._inputs, self._targets, self._rows = inputs, targets, rows

    def __getitem__(self, places: slice) -> tuple[Tensor, Tensor]:
        rows = self._rows[places]
        return self._inputs.index_select(0, rows), self._targets.index_select(0, rows)


def _rows_of(dataset: Dataset[Any], order: NDArray[np.int64]) -> _Rows | None:
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
    return _Rows(*dataset.tensors, torch.from_numpy(rows.astype(np.int64)))


def _is_plain(tensor: Tensor) -> bool:
    """Return whether rows taken at once equal rows taken one by one, in the same memory format."""
    if type(tensor) is not Tensor or tensor.device.type != "cpu" or tensor.layout != torch.strided:
        return False
    return not tensor.is_nested and not tensor.is_quantized and tensor.is_contiguous()


class _Samples(Dataset["tuple[Tensor, Tensor] | DataError"]):
    """The micro-batches of one epoch, by their places in its order: loaded sample by sample, here or in a worker."""

    def __init__(self, dataset: Dataset[Any], order: NDArray[np.int64], seeds: NDArray[np.uint64]) -> None:
        self._dataset, self._order, self._seeds = dataset, order, seeds

    def __getitem__(self, places: slice) -> "tuple[Tensor, Tensor] | DataError":
        # A DataError is returned, not raised: raised in a worker it would reach the user as torch's copy of a
        # traceback, with the one line that matters at its end.
        samples: list[tuple[Tensor, Tensor]] = []
        indices: list[int] = self._order[places].tolist()
        try:
            with _streams_restored():
                for index, seed in zip(indices, self._seeds[places].tolist(), strict=True):
                    _seed_streams(seed)
                    samples.append(_as_pair(self._sample(index), index))
            _check_alike(samples, indices)
        except DataError as error:
            return error
        return torch.stack([input_ for input_, _ in samples]), torch.stack([target for _, target in samples])

    def _sample(self, index: int) -> Any:
        try:
            return self._dataset[index]
        except DataError:
            raise
        except (Exception, SystemExit) as error:  # the user's own code can raise anything
            raised = " ".join(f"{type(error).__name__}: {error}".split())
            refusal = DataError(f"sample {index}: {type(self._dataset).__name__} raised {raised}{place_of(error)}")
            if isinstance(error, OSError | MemoryError) and not isinstance(error, FileNotFoundError | PermissionError):
                refusal.exit_code = 1  # a disk or a server that may be there again when the run is restarted
            refusal.add_note(traceback.format_exc())  # for the log; a worker's error arrives without its cause
            raise refusal from error


def _loaded(micro_batch: "tuple[Tensor, Tensor] | DataError") -> tuple[Tensor, Tensor]:
    if isinstance(micro_batch, DataError):
        raise micro_batch
    input_, target = micro_batch  # torch's DataLoader makes it a list
    return input_, target


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


def _seed_streams(seed: int) -> None:
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed every GPU, too
    random.seed(seed)
    np.random.seed([seed & 0xFFFFFFFF, seed >> 32])  # takes words of 32 bits


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


def _as_pair(sample: Any, index: int) -> tuple[Tensor, Tensor]:
    if not isinstance(sample, tuple | list) or len(sample) != 2:
        kind = f"{type(sample).__name__} of {len(sample)}" if isinstance(sample, tuple | list) else _type_name(sample)
        raise DataError(
            f"sample {index}: expected a pair (input, target), got {kind}; let the dataset's __getitem__ return two "
            "values"
        )
    return _as_tensor(sample[0], "an input", index), _as_tensor(sample[1], "a target", index)


def _as_tensor(value: Any, what: str, index: int) -> Tensor:
    if isinstance(value, Tensor):  # torchvision's images are of a subclass, with rules of its own
        return value if type(value) is Tensor else value.as_subclass(Tensor)
    if isinstance(value, int | float):
        return torch.tensor(value)
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biuf":
        # A copy: torch takes no flipped, read-only or foreign-endian array.
        return torch.from_numpy(np.array(value, dtype=value.dtype.newbyteorder("=")))
    raise DataError(
        f"sample {index}: expected {what} that is a tensor, a numeric numpy array or a number, got "
        f"{_type_name(value)}; add a transform that converts it, for example torchvision's ToTensor for images"
    )


def _check_alike(samples: list[tuple[Tensor, Tensor]], indices: list[int]) -> None:
    first = samples[0]
    for index, sample in zip(indices[1:], samples[1:], strict=True):
        if any(t.shape != f.shape or t.dtype != f.dtype for t, f in zip(sample, first, strict=True)):
            raise DataError(
                f"sample {index}: expected {_describe(first)} like sample {indices[0]} of the same micro-batch, got "
                f"{_describe(sample)}; add a transform that gives all samples one shape and dtype"
            )


def _describe(sample: tuple[Tensor, Tensor]) -> str:
    input_, target = (f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in sample)
    return f"(input {input_}, target {target})"


def _type_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
