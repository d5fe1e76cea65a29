"""Two real micro-batches of different sizes for the trial at the start."""

import io
from base64 import b64decode, b64encode
from dataclasses import replace
from typing import NamedTuple

import torch
from torch.utils._pytree import tree_structure

from adl_dist.batch import Batch, describe_structure, device_of, map_batch, num_samples, rows_of, tensors_of
from adl_dist.errors import DataError
from adl_dist.schedule.run_plan import Plan
from adl_dist.training.input import DeviceLoader, in_format
from adl_dist.training.startup_sync import Agreement
from adl_dist.transport.spec import VARIES, TensorSpec

# Samples of each. Two sizes, or a dimension that is always 4 could not be told from that of the batch; both even, for
# models that halve it. Two are enough for BatchNorm after 1 x 1 features, and each more makes the start slower.
SIZES = 2, 4
NUM_SAMPLES = sum(SIZES)
NUM_LOOKED_AT = 64  # samples, where lengths change, of which the least and the greatest are found
NUM_BETWEEN = 2  # lengths between these that are tried, too
PART_BYTES = 2**22  # of one message: torch's store takes 8 MiB at most


class MicroBatch(NamedTuple):
    """Input [B, ...] in the plain memory format, and target on the CPU."""

    input_: Batch
    target: Batch

    @property
    def shapes(self) -> tuple[torch.Size, ...]:
        """The shapes of a sample's input and target."""
        return tuple(tensor.shape[1:] for of in self for tensor in tensors_of(of))

    def rows(self, first: int, size: int) -> "MicroBatch":
        """Return ``size`` samples from the ``first`` on, repeated if needed."""
        rows = torch.arange(first, first + size) % num_samples(self.input_)
        return MicroBatch(*(map_batch(torch.Tensor.contiguous, rows_of(of, rows.to(device_of(of)))) for of in self))


class Samples(NamedTuple):
    """The data of the trial at the start."""

    pair: tuple[MicroBatch, MicroBatch]  # of SIZES samples
    trains: bool = False  # whether there are training data
    # Of SIZES[0] samples each, and of several lengths, where these change from one micro-batch to another; else none.
    lengths: tuple[MicroBatch, ...] = ()
    # All sizes of micro-batches that the run has in training and in evaluation.
    sizes: tuple[tuple[int, ...], tuple[int, ...]] = (), ()

    @classmethod
    def of(cls, input_: Batch, target: Batch) -> "Samples":
        """Divide samples [n, ...] into two micro-batches, repeated if needed."""
        batch = MicroBatch(input_, target)
        return cls((batch.rows(0, SIZES[0]), batch.rows(SIZES[0], SIZES[1])))

    @property
    def varies(self) -> bool:
        """``True`` if lengths change from one micro-batch to the next."""
        return bool(self.lengths)

    @property
    def readings(self) -> list[tuple[Batch, Batch]]:
        """For each length, the inputs of two micro-batches of SIZES samples."""
        if not self.varies:
            return [(self.pair[0].input_, self.pair[1].input_)]
        return [(batch.input_, batch.rows(0, SIZES[1]).input_) for batch in self.lengths]

    def repeated(self, size: int) -> MicroBatch:
        """Return a micro-batch of any ``size``, of repeated samples."""
        return self.pair[1].rows(0, size)

    @property
    def one(self) -> tuple[Batch, Batch]:
        """Input [1, ...] and target [1, ...]."""
        input_, target = self.pair[0].rows(0, 1)
        return input_, target

    def to(self, device: torch.device, *, channels_last: bool) -> "Samples":
        """Return the samples on ``device``, in a memory format."""

        def place(batch: MicroBatch) -> MicroBatch:
            input_ = map_batch(lambda tensor: in_format(tensor.to(device), channels_last=channels_last), batch.input_)
            return MicroBatch(input_, batch.target)

        return self._replace(
            pair=(place(self.pair[0]), place(self.pair[1])), lengths=tuple(place(batch) for batch in self.lengths)
        )


def take(training: DeviceLoader | None, validation: DeviceLoader | None, plan: Plan | None) -> Samples | None:
    """Return the first samples of the data, and the sizes of ``plan``.

    Return None without a loader.

    Raises:
        DataError: If training and validation data have samples of different shapes or dtypes.
    """
    loader = training or validation
    if loader is None:
        return None
    segments = () if plan is None else (plan.first_epoch.sizes if training is not None else (), plan.evaluation.sizes)
    sizes = tuple(tuple(sorted({*of})) for of in segments) or ((), ())
    fewest = min((size for of in sizes for size in of), default=SIZES[0])
    samples = _of_lengths(loader, fewest) if loader.varies else Samples.of(*_first(loader, NUM_SAMPLES))
    if training is not None and validation is not None:
        pairs = samples.one, _first(validation, 1)
        specs = [[_describe(batch, with_sizes=not loader.varies) for batch in pair] for pair in pairs]
        if specs[0] != specs[1]:
            raise DataError(
                f"validation dataset: its samples are {' and '.join(specs[1])}, but those of the training dataset are "
                f"{' and '.join(specs[0])}; give both the same shape and dtype"
            )
    return samples._replace(trains=training is not None, sizes=sizes)  # type: ignore[arg-type]


def _describe(batch: Batch, *, with_sizes: bool) -> str:
    specs = map(TensorSpec.of, tensors_of(batch))
    shown = [str(spec if with_sizes else replace(spec, shape=(VARIES,) * len(spec.shape))) for spec in specs]
    structure = tree_structure(batch)
    return ("" if structure.is_leaf() else f"{describe_structure(structure)}: ") + ", ".join(shown)


def _of_lengths(loader: DeviceLoader, fewest: int) -> Samples:
    """Return samples of several lengths; the pair has a short and a long one.

    Half of the samples read are in micro-batches of SIZES[1] different samples, the others in small ones. These have
    SIZES[0] samples, or one if the run has micro-batches of one (``fewest``): its lengths may differ, but not every
    ``collate_fn`` accepts a single sample.
    """
    num, small = min(NUM_LOOKED_AT, loader.num_samples), min(SIZES[0], fewest)
    large = min(SIZES[1], num)
    sizes = [large] * max(1, num // 2 // large)
    sizes += [small] * ((num - sum(sizes)) // small)
    with loader.tried(sizes) as batches:
        found = [MicroBatch(*batch) for batch in batches]
    of_shape = {batch.shapes: batch for batch in reversed(found)}
    by_size = sorted(of_shape.values(), key=_length)
    some = by_size[1:-1]
    lengths = [by_size[0], by_size[-1], *some[:: max(1, -(-len(some) // NUM_BETWEEN))]]
    second = max(found[: sizes.count(large)], key=_length)  # of different samples, by which a mean is recognised
    if second.shapes == lengths[0].shapes:
        second = lengths[1]
    pair = lengths[0].rows(0, SIZES[0]), second.rows(0, SIZES[1])
    return Samples(pair, lengths=tuple(batch.rows(0, SIZES[0]) for batch in lengths))


def _length(batch: MicroBatch) -> int:
    return sum(tensor[0].numel() for tensor in tensors_of(batch.input_))


def _first(loader: DeviceLoader, count: int) -> tuple[Batch, Batch]:
    with loader.tried([min(count, loader.num_samples)]) as batches:
        return next(batches)


def share(agreement: Agreement, samples: Samples | None) -> Samples:
    """Return the ``samples`` of rank 0 on all ranks; others have None."""
    if agreement.size == 1 and samples is not None:
        return samples
    file = io.BytesIO()
    if samples is not None:
        torch.save(samples.to(torch.device("cpu"), channels_last=False), file)
    content, num_parts = file.getvalue(), agreement.first(-(-len(file.getvalue()) // PART_BYTES))
    starts = range(0, num_parts * PART_BYTES, PART_BYTES)
    parts = [agreement.first(b64encode(content[start : start + PART_BYTES]).decode()) for start in starts]
    if samples is not None:
        return samples
    with torch.serialization.safe_globals([MicroBatch, Samples]):
        shared: Samples = torch.load(io.BytesIO(b"".join(map(b64decode, parts))), weights_only=True)
    return shared
