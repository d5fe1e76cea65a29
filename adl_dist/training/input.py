"""Micro-batches as inputs of the first stage, checked on its device.

They have the run's dtype and memory format.
"""

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from adl_dist.batch import Batch, as_classes, is_class_target, map_batch
from adl_dist.data import Loader, Loading, check_dataset
from adl_dist.data.loading import PLAIN
from adl_dist.errors import DataError
from adl_dist.stage import Precision, TrainSpec
from adl_dist.stage.loss import IGNORED, ClassLoss, LossTerms, class_loss
from adl_dist.transport.staging import to_device

Batches = Generator[tuple[Batch, Batch], None, None]
PREFETCHED = 2  # micro-batches for each process that loads: torch's default
UNDER_WAY = 4  # from pinned memory to a device


def in_format(tensor: Tensor, *, channels_last: bool) -> Tensor:
    """Return images in the memory format channels_last, if it is set."""
    if not channels_last or tensor.ndim != 4:
        return tensor
    return tensor.contiguous(memory_format=torch.channels_last)


class DeviceLoader:
    """The loader of stage 0: input on the device, target on the CPU."""

    def __init__(
        self,
        dataset: Dataset[Any] | None,
        name: str,
        *,
        seed: int,
        num_workers: int,
        device: torch.device,
        precision: Precision,
        shuffle: bool = False,
        min_samples: int = 1,
        loading: Loading = PLAIN,
    ) -> None:
        """Open the ``training`` or ``validation`` dataset.

        Raises:
            DataError: If the dataset is None, has fewer than ``min_samples``, or cannot be loaded.
        """
        if dataset is None:
            raise DataError(f"the {name} dataset is None on the rank that feeds the pipeline, rank 0; pass it there")
        check_dataset(dataset, name=name, min_samples=min_samples, loading=loading)
        how: dict[str, Any] = {"num_workers": num_workers, "pin_memory": device.type == "cuda", "loading": loading}
        self._loader = Loader(dataset, seed=seed, shuffle=shuffle, **how)
        self.varies = loading.collate_fn is not None  # whether lengths may change from one micro-batch to another
        self.stream = self._loader.stream  # of an iterable dataset; else None
        self.num_samples = self._loader.num_samples
        self.precision = precision  # of what is loaded; the memory format may be settled later on
        self._device, self._name = device, name
        self._check: Callable[[Batch, str], None] = lambda target, where: None

    def expect(self, spec: TrainSpec, terms: LossTerms | None, *, num_outputs: int | None) -> None:
        """Check targets from now on, see :func:`check_targets`."""
        may_ignore = terms is not None or spec.loss_reduction == "batch"
        classes = class_loss(spec.loss_fn)
        self._check = partial(check_targets, classes=classes, num_outputs=num_outputs, may_ignore=may_ignore)

    def batches(self, epoch: int, sizes: Sequence[int], *, first_sample: int = 0) -> Batches:
        """Yield micro-batches of ``sizes`` in the order of ``epoch``.

        Raises:
            DataError: If a sample cannot be loaded, a target is not a class, which torch would report only in the loss,
                or the loss ignores a target although its terms are not counted.
        """
        batches = self._named(self._loader.batches(epoch, sizes, first_sample=first_sample))
        for micro_batch, (input_, target) in enumerate(batches):
            self._check(target, f"{self._name} dataset: micro-batch {micro_batch} of epoch {epoch + 1}")
            if self._device.type != "cpu":
                # First, because a conversion on the CPU would leave the pinned memory that the copy needs; on a stream
                # of its own, to overlap with what is launched already.
                input_ = map_batch(partial(to_device, device=self._device), input_)
            floating = map_batch(self._floating, input_)
            formatted = partial(in_format, channels_last=bool(self.precision.channels_last))
            yield map_batch(formatted, floating), map_batch(self._floating, target)

    @property
    def num_loaded(self) -> int:
        """The most micro-batches in pinned memory at the same time."""
        return PREFETCHED * self._loader.num_workers + UNDER_WAY

    def _floating(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.precision.dtype) if tensor.is_floating_point() else tensor

    def _named(self, batches: Batches) -> Batches:
        try:
            yield from batches
        except DataError as error:
            named = DataError(f"{self._name} dataset: {error}")
            named.exit_code = error.exit_code
            raise named from error

    @contextmanager
    def tried(self, sizes: Sequence[int]) -> Iterator[Batches]:
        """Yield a generator of first micro-batches, and put back the dataset."""
        with nullcontext() if self.stream is None else self.stream.put_back(), closing(self.batches(0, sizes)) as found:
            yield found

    def close(self) -> None:
        """End the processes that load."""
        self._loader.close()

    def seconds_to_load(self, micro_batch_size: int) -> float:
        """Measure the seconds to load a micro-batch; 0 if workers load it."""
        if self._loader.num_workers:
            return 0.0
        times = min(4, self._loader.num_samples)
        sizes = [min(micro_batch_size, self._loader.num_samples // times)] * times
        seconds = []
        with self.tried(sizes) as batches:
            for _ in sizes:
                start = time.perf_counter()
                next(batches)
                seconds.append(time.perf_counter() - start)
        return min(seconds) * micro_batch_size / sizes[0]


def check_targets(
    target: Batch, where: str, *, classes: ClassLoss | None, num_outputs: int | None, may_ignore: bool
) -> None:
    """Raise DataError for an unexpected class in ``target`` [B, ...].

    If ``classes`` describes the loss and ``num_outputs`` is known, targets must be in [0, ``num_outputs``). Targets
    that the loss ignores are refused unless the loss ``may_ignore`` them. The error names ``where``.
    """
    if not isinstance(target, Tensor) or not is_class_target(target):
        return
    target, ignored = as_classes(target), IGNORED if classes is None else classes.ignore_index
    # Of several targets in a sample a class derived from torch's may want the outputs in another order.
    if classes is None or num_outputs is None or (target.ndim > 1 and not classes.is_torchs_own):
        if may_ignore:
            return
        wrong = target == ignored
    else:
        wrong = ((target < 0) | (target >= num_outputs)) & ((target != ignored) | (not may_ignore))
    if not bool(wrong.any()):
        return
    value = int(target[wrong][0])
    if value == ignored:
        raise DataError(
            f"{where} has target {value}, which torch's losses ignore; they are left out of the mean only if data "
            "and loss use another number, like loss.ignore_index=-1; give one of your own a "
            "num_terms(target), the number of terms that it averages over (docs/own.md), that of a model by "
            "loss_fn=adl_dist.losses.ModelLoss(num_terms=...)"
        )
    raise DataError(
        f"{where} has target {value}, but the model has {num_outputs} outputs, so targets must be in [0, "
        f"{num_outputs}); give the model an output for each class (model.num_classes), or correct the targets"
        + ", or use TokenCrossEntropy if the last dimension of the output has the classes"
        * (target.ndim > 1)
    )


@dataclass(frozen=True)
class Data:
    """The datasets of one call of the trainer, and how they are loaded."""

    training: Dataset[Any] | None
    validation: Dataset[Any] | None
    batch_size: int
    num_workers: int
    loading: Loading
    shuffle: bool = False
    trains: bool = True


class Loaders(NamedTuple):
    """The loaders that feed stage 0; other processes have none."""

    training: DeviceLoader | None = None
    validation: DeviceLoader | None = None

    @classmethod
    def open(cls, data: Data, spec: TrainSpec, device: torch.device) -> "Loaders":
        """Open the datasets for the first stage."""
        how: dict[str, Any] = {"seed": spec.seed, "num_workers": data.num_workers}
        load: Callable[..., DeviceLoader] = partial(DeviceLoader, device=device, precision=spec.precision, **how)
        training = validation = None
        if data.trains:
            least, loading = data.batch_size, data.loading
            training = load(data.training, "training", shuffle=data.shuffle, min_samples=least, loading=loading)
        if data.validation is not None or not data.trains:
            validation = load(data.validation, "validation", loading=data.loading.of_validation)
        return cls(training, validation)

    @property
    def first(self) -> DeviceLoader | None:
        """The loader of the trial's samples."""
        return self.training or self.validation

    @property
    def lengths(self) -> dict[str, int]:
        """The sizes as ``num_samples`` and ``num_validation`` of a plan.

        A missing loader counts 0.
        """
        names = ("num_samples", "num_validation")
        return {name: loader.num_samples if loader is not None else 0 for name, loader in zip(names, self, strict=True)}
