"""Two real micro-batches of different sizes, which every rank tries the model out with at the start."""

import io
from collections.abc import Iterable
from contextlib import closing
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from adl_dist.errors import DataError
from adl_dist.training.agreement import SAMPLES, reaching, read_bytes
from adl_dist.training.input import DeviceLoader
from adl_dist.transport.spec import TensorSpec

# Samples of each. Two sizes, or a dimension that is always 4 could not be told from that of the batch; both even, for
# models that halve it. Two are enough for BatchNorm after 1 x 1 features, and each more makes the start slower.
SIZES = 2, 4
OTHER_SIZES = 1, 3  # tried in addition, for a micro-batch of one sample, and for every other odd number
NUM_SAMPLES = sum(SIZES)
PART_BYTES = 2**22  # of one message: torch's store takes 8 MiB at most


class MicroBatch(NamedTuple):
    """Input [B, ...] as stage 0 gets it, but in the plain memory format, and target [B, ...] on the CPU."""

    input_: Tensor
    target: Tensor


class Samples(NamedTuple):
    """The data of the trial at the start."""

    pair: tuple[MicroBatch, MicroBatch]  # of SIZES samples
    trains: bool  # whether there are training data
    other_sizes: tuple[int, ...] = ()  # of OTHER_SIZES, those that training micro-batches are like

    @classmethod
    def of(cls, input_: Tensor, target: Tensor, *, trains: bool = False, sizes: Iterable[int] = ()) -> "Samples":
        """Divide up samples, input [n, ...] and target [n, ...], and repeat them if they are too few.

        ``sizes`` are those of the training micro-batches.
        """
        places = torch.arange(NUM_SAMPLES) % len(input_)
        pair = [
            MicroBatch(input_[some.to(input_.device)].contiguous(), target[some.to(target.device)])
            for some in places.split(SIZES)
        ]
        others = sorted({min(size, OTHER_SIZES[1]) for size in sizes if size % 2})
        return cls((pair[0], pair[1]), trains, tuple(others))

    def of_size(self, size: int) -> MicroBatch:
        """Return a micro-batch of ``size`` samples, as many as the larger one of the pair at most."""
        input_, target = self.pair[1]
        return MicroBatch(input_[:size], target[:size])

    @property
    def one(self) -> tuple[Tensor, Tensor]:
        """Input [1, ...] and target [1, ...]."""
        input_, target = self.pair[0]
        return input_[:1], target[:1]

    def to(self, device: torch.device, *, channels_last: bool) -> "Samples":
        """Return the same samples on ``device``, images in that memory format if ``channels_last``."""

        def placed(batch: MicroBatch) -> MicroBatch:
            input_ = batch.input_.to(device)
            if channels_last and input_.ndim == 4:
                input_ = input_.contiguous(memory_format=torch.channels_last)
            return MicroBatch(input_, batch.target)

        return self._replace(pair=(placed(self.pair[0]), placed(self.pair[1])))


def take(training: DeviceLoader | None, validation: DeviceLoader | None, sizes: Iterable[int]) -> Samples | None:
    """Return the first samples in the order of the data, of training if there is any; None where no data is fed.

    ``sizes`` are those of the training micro-batches.

    Raises:
        DataError: training and validation data have samples of different shapes or dtypes.
    """
    loader, other = (training, validation) if training is not None else (validation, None)
    if loader is None:
        return None
    input_, target = _first(loader, NUM_SAMPLES)
    if other is not None:
        specs = [tuple(str(TensorSpec.of(x[:1])) for x in pair) for pair in ((input_, target), _first(other, 1))]
        if specs[0] != specs[1]:
            raise DataError(
                f"validation dataset: its samples are {' and '.join(specs[1])}, but those of the training dataset are "
                f"{' and '.join(specs[0])}; give both the same shape and dtype"
            )
    return Samples.of(input_, target, trains=training is not None, sizes=sizes)


def share(store: dist.Store, samples: Samples | None, *, rank: int, size: int) -> Samples:
    """Return the ``samples`` of rank 0, which alone has some; every one of ``size`` ranks calls it.

    Raises:
        StageFailed, ChannelError: rank 0 has none, or does not answer.
    """
    if rank != 0:
        count = int(read_bytes(store, SAMPLES, 0))
        parts = (read_bytes(store, f"{SAMPLES}/{part}", 0) for part in range(count))
        kept = torch.load(io.BytesIO(b"".join(parts)), weights_only=True)
        first, second = (MicroBatch(*tensors) for tensors in kept["pair"])
        return Samples((first, second), kept["trains"], tuple(kept["other_sizes"]))
    assert samples is not None
    if size > 1:
        file = io.BytesIO()
        pair = [[tensor.cpu() for tensor in batch] for batch in samples.pair]
        torch.save({"pair": pair, "trains": samples.trains, "other_sizes": list(samples.other_sizes)}, file)
        data: Any = file.getvalue()
        with reaching(0):
            for part, start in enumerate(range(0, len(data), PART_BYTES)):
                store.set(f"{SAMPLES}/{part}", data[start : start + PART_BYTES])
            store.set(SAMPLES, str(-(-len(data) // PART_BYTES)))
    return samples


def _first(loader: DeviceLoader, count: int) -> tuple[Tensor, Tensor]:
    with closing(loader.batches(0, [min(count, loader.num_samples)])) as batches:
        return next(batches)
