"""Two real micro-batches of different sizes, which every rank tries the model out with at the start."""

import io
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from adl_dist.batch import Batch, Layout, layout_of, mapped, tensors_of
from adl_dist.errors import DataError
from adl_dist.schedule.run_plan import Plan
from adl_dist.training.agreement import SAMPLES, reaching, read_bytes
from adl_dist.training.input import DeviceLoader, in_format
from adl_dist.transport.spec import VARIES, TensorSpec

# Samples of each. Two sizes, or a dimension that is always 4 could not be told from that of the batch; both even, for
# models that halve it. Two are enough for BatchNorm after 1 x 1 features, and each more makes the start slower.
SIZES = 2, 4
OTHER_SIZES = 1, 3  # tried in addition, for a micro-batch of one sample, and for every other odd number
NUM_SAMPLES = sum(SIZES)
NUM_LOOKED_AT = 64  # samples, where lengths change, of which the least and the greatest are found
NUM_BETWEEN = 2  # lengths between these that are tried, too
PART_BYTES = 2**22  # of one message: torch's store takes 8 MiB at most


class MicroBatch(NamedTuple):
    """Input [B, ...] as stage 0 gets it, but in the plain memory format, and target [B, ...] on the CPU."""

    input_: Batch
    target: Batch


class Samples(NamedTuple):
    """The data of the trial at the start."""

    pair: tuple[MicroBatch, MicroBatch]  # of SIZES samples
    trains: bool  # whether there are training data
    other_sizes: tuple[int, ...] = ()  # of OTHER_SIZES, those that training micro-batches are like
    # Of SIZES[0] samples each, and of several lengths, where these change from one micro-batch to another; else none.
    lengths: tuple[MicroBatch, ...] = ()
    # All sizes of micro-batches that the run has in training and in evaluation.
    sizes: tuple[tuple[int, ...], tuple[int, ...]] = (), ()

    @classmethod
    def of(cls, input_: Batch, target: Batch, *, trains: bool = False, sizes: Iterable[int] = ()) -> "Samples":
        """Divide up samples, input [n, ...] and target [n, ...], and repeat them if they are too few.

        ``sizes`` are those of the training micro-batches.
        """
        batch = MicroBatch(input_, target)
        return cls((_rows(batch, 0, SIZES[0]), _rows(batch, SIZES[0], SIZES[1])), trains, _others(sizes))

    @classmethod
    def of_lengths(cls, batches: Sequence[MicroBatch], *, trains: bool, sizes: Iterable[int]) -> "Samples":
        """Take micro-batches of two samples each and of different lengths, the least and the greatest first."""
        pair = _rows(batches[0], 0, SIZES[0]), _rows(batches[1], 0, SIZES[1])
        return cls(pair, trains, _others(sizes), tuple(_rows(batch, 0, SIZES[0]) for batch in batches))

    @property
    def varies(self) -> bool:
        """Whether lengths change from one micro-batch to another."""
        return bool(self.lengths)

    @property
    def readings(self) -> list[tuple[Batch, Batch]]:
        """Inputs of two micro-batches of SIZES samples and of one length, for each of the lengths."""
        if not self.varies:
            return [(self.pair[0].input_, self.pair[1].input_)]
        return [(batch.input_, _rows(batch, 0, SIZES[1]).input_) for batch in self.lengths]

    def of_size(self, size: int) -> MicroBatch:
        """Return a micro-batch of ``size`` samples, as many as the larger one of the pair at most."""
        input_, target = self.pair[1]
        return MicroBatch(input_[:size], target[:size])

    def repeated(self, size: int) -> MicroBatch:
        """Return a micro-batch of any ``size``, of the same samples again and again."""
        return _rows(self.pair[1], 0, size)

    @property
    def one(self) -> tuple[Batch, Batch]:
        """Input [1, ...] and target [1, ...]."""
        input_, target = self.pair[0]
        return input_[:1], target[:1]

    def to(self, device: torch.device, *, channels_last: bool) -> "Samples":
        """Return the same samples on ``device``, images in that memory format if ``channels_last``."""

        def placed(batch: MicroBatch) -> MicroBatch:
            input_ = mapped(batch.input_, lambda tensor: in_format(tensor.to(device), channels_last=channels_last))
            return MicroBatch(input_, batch.target)

        pair = placed(self.pair[0]), placed(self.pair[1])
        return self._replace(pair=pair, lengths=tuple(map(placed, self.lengths)))


def take(training: DeviceLoader | None, validation: DeviceLoader | None, plan: Plan | None) -> Samples | None:
    """Return the first samples in the order of the data, of training if there is any; None where no data is fed.

    With the sizes of the micro-batches of ``plan``.

    Raises:
        DataError: training and validation data have samples of different shapes or dtypes.
    """
    loader, other = (training, validation) if training is not None else (validation, None)
    if loader is None:
        return None
    trains, sizes = training is not None, [] if plan is None else plan.first_epoch.sizes
    if loader.varies:
        samples = Samples.of_lengths(_lengths(loader), trains=trains, sizes=sizes)
    else:
        samples = Samples.of(*_first(loader, NUM_SAMPLES), trains=trains, sizes=sizes)
    if other is not None:
        pairs = samples.one, _first(other, 1)
        specs = [[_described(batch, with_sizes=not loader.varies) for batch in pair] for pair in pairs]
        if specs[0] != specs[1]:
            raise DataError(
                f"validation dataset: its samples are {' and '.join(specs[1])}, but those of the training dataset are "
                f"{' and '.join(specs[0])}; give both the same shape and dtype"
            )
    evaluated = [] if plan is None else plan.evaluation.sizes
    return samples._replace(sizes=(tuple(sorted({*sizes})), tuple(sorted({*evaluated}))))


def _described(batch: Batch, *, with_sizes: bool) -> str:
    specs = map(TensorSpec.of, tensors_of(batch))
    shown = [spec if with_sizes else replace(spec, shape=(VARIES,) * len(spec.shape)) for spec in specs]
    layout = layout_of(batch)
    of_names = "" if layout is None else f"{layout}: "
    return of_names + ", ".join(map(str, shown))


def _lengths(loader: DeviceLoader) -> list[MicroBatch]:
    """Return micro-batches of two samples each: that of the least size, the greatest, and a few between them."""
    num = min(NUM_LOOKED_AT, loader.num_samples)
    sizes = [min(SIZES[0], num)] * max(1, num // SIZES[0])
    with closing(loader.batches(0, sizes)) as batches:
        found = {tuple(t.shape[1:] for t in tensors_of(x) + tensors_of(y)): MicroBatch(x, y) for x, y in batches}
    by_size = sorted(found.values(), key=lambda batch: sum(t.numel() for t in tensors_of(batch.input_)))
    some = by_size[1:-1]
    return [by_size[0], by_size[-1], *some[:: max(1, -(-len(some) // NUM_BETWEEN))]]


def _built(layout: Layout | None, tensors: Sequence[Tensor]) -> Batch:
    return tensors[0] if layout is None else layout.build(tuple(tensors))


def _rows(batch: MicroBatch, first: int, size: int) -> MicroBatch:
    """Return ``size`` samples, from the ``first`` on, beginning again behind the last."""
    rows = torch.arange(first, first + size) % len(batch.input_)
    input_ = batch.input_[rows.to(batch.input_.device)].contiguous()
    return MicroBatch(input_, batch.target[rows.to(batch.target.device)])


def _others(sizes: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted({min(size, OTHER_SIZES[1]) for size in sizes if size % 2}))


def share(store: dist.Store, samples: Samples | None, *, rank: int, size: int) -> Samples:
    """Return the ``samples`` of rank 0, which alone has some; every one of ``size`` ranks calls it.

    Raises:
        StageFailed, ChannelError: rank 0 has none, or does not answer.
    """
    if rank != 0:
        count = int(read_bytes(store, SAMPLES, 0))
        parts = (read_bytes(store, f"{SAMPLES}/{part}", 0) for part in range(count))
        kept = torch.load(io.BytesIO(b"".join(parts)), weights_only=True)
        built = [None if layout is None else Layout(*layout) for layout in kept["layouts"]]
        first, second, *more = (MicroBatch(*map(_built, built, both)) for both in kept["batches"])
        sizes = tuple(kept["sizes"][0]), tuple(kept["sizes"][1])
        return Samples((first, second), kept["trains"], tuple(kept["other_sizes"]), tuple(more), sizes)
    assert samples is not None
    if size > 1:
        file = io.BytesIO()
        batches = [
            [[tensor.cpu() for tensor in tensors_of(of)] for of in batch] for batch in (*samples.pair, *samples.lengths)
        ]
        layouts = [None if (at := layout_of(of)) is None else (at.count, at.names) for of in samples.one]
        kept = {"batches": batches, "layouts": layouts, "trains": samples.trains}
        numbers = {"other_sizes": list(samples.other_sizes), "sizes": [list(some) for some in samples.sizes]}
        torch.save({**kept, **numbers}, file)
        data: Any = file.getvalue()
        with reaching(0):
            for part, start in enumerate(range(0, len(data), PART_BYTES)):
                store.set(f"{SAMPLES}/{part}", data[start : start + PART_BYTES])
            store.set(SAMPLES, str(-(-len(data) // PART_BYTES)))
    return samples


def _first(loader: DeviceLoader, count: int) -> tuple[Batch, Batch]:
    with closing(loader.batches(0, [min(count, loader.num_samples)])) as batches:
        return next(batches)
