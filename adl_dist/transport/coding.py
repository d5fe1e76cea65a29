"""The coding of one message into one buffer of bytes, and back.

A block is up to 256 numbers of one sample, in the order of its memory, and has one scale: its largest magnitude over
the highest level, rounded up to 16 bits. Samples are coded separately, so that the codes of a sample do not depend on
its micro-batch. ``int4`` first rotates each block (fixed random signs, then a Hadamard matrix), so that one large
number does not use up the levels of 255 others. Sizes follow from the specs, without a header. training/edges.py and
wire.py decide which messages are coded.

Activations are rounded to the nearest level, gradients at random to one of the two nearest, so that their mean is
right. The random stream of each edge and micro-batch follows from the run's seed, so that a resume repeats it without
saved state. No later message makes up for the error: error feedback is for sums in the same coordinates over time, and
neither the activations of different samples nor their gradients are such sums.

A number that is not finite makes its whole block NaN, which the next stage detects. All computation is in float32.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from adl_dist.batch import Tensors
from adl_dist.codecs import BLOCK, LEVELS, SCALE_BYTES, coded_bytes, rotated_width
from adl_dist.seeds import stream_seed
from adl_dist.transport.spec import TensorSpec

ALIGNED = 16  # bytes; views of numbers must begin at a multiple of their size
# Keeps 16 bits of a float32's mantissa: 127 scales are then exact, and coding again changes nothing.
SCALE_MASK = -(1 << 8)
# For each number of levels: the bits of the greatest scale with only finite multiples.
GREATEST_SCALE = {
    levels: int(torch.tensor(torch.finfo(torch.float32).max / levels, dtype=torch.float32).view(torch.int32))
    & SCALE_MASK
    for levels in LEVELS.values()
}
NOISE_STEPS = 1 << 16


class Part(NamedTuple):
    """The place of one tensor in the buffer."""

    codec: str  # or "none"
    begin: int
    num_bytes: int


@lru_cache(maxsize=4096)
def layout(codec: str, specs: tuple[TensorSpec, ...], size: int) -> tuple[tuple[Part, ...], int]:
    """Return (place of each tensor, bytes of the buffer) for a message."""
    parts, end = [], 0
    for spec in specs:
        numbers = math.prod(spec.shape)
        coded = coded_bytes(codec, numbers, spec.itemsize) if spec.is_floating_point and spec.batched else None
        num_bytes = (size if spec.batched else 1) * (numbers * spec.itemsize if coded is None else coded)
        parts.append(Part("none" if coded is None else codec, end, num_bytes))
        end += -(-num_bytes // ALIGNED) * ALIGNED
    return tuple(parts), end


def encode(codec: str, specs: Sequence[TensorSpec], tensors: Sequence[Tensor], seed: int | None) -> Tensor:
    """Code ``tensors`` [B, ...] into a buffer [num_bytes], uint8.

    With ``seed`` numbers are rounded to a level at random, otherwise to the nearest level.
    """
    if not tensors:  # no gradient is wanted
        return torch.empty(0, dtype=torch.uint8)
    size = _num_samples(specs, tensors)
    parts, num_bytes = layout(codec, tuple(specs), size)
    buffer = torch.empty(num_bytes, dtype=torch.uint8, device=tensors[0].device)
    generator = None if seed is None else torch.Generator(buffer.device).manual_seed(seed)
    for spec, tensor, part in zip(specs, tensors, parts, strict=True):
        if not part.num_bytes:
            continue
        flat = spec.as_wire(tensor).reshape(size if spec.batched else 1, -1)
        place = buffer[part.begin : part.begin + part.num_bytes]
        if part.codec == "none":
            place.copy_(flat.view(torch.uint8).flatten())
        elif part.codec == "bf16":
            place.view(torch.bfloat16).copy_(flat.flatten())
        else:
            _quantise(part.codec, flat.float(), place, generator)
    return buffer


def _num_samples(specs: Sequence[TensorSpec], tensors: Sequence[Tensor]) -> int:
    return next((len(tensor) for spec, tensor in zip(specs, tensors, strict=True) if spec.batched), 1)


def decode(codec: str, specs: Sequence[TensorSpec], size: int, buffer: Tensor) -> Tensors:
    """Decode a ``buffer`` of :func:`encode` into new tensors [``size``, ...]."""
    tensors = []
    for spec, part in zip(specs, layout(codec, tuple(specs), size)[0], strict=True):
        tensor = spec.empty(size, buffer.device)
        if part.num_bytes:
            flat, place = spec.as_wire(tensor), buffer[part.begin : part.begin + part.num_bytes]
            if part.codec == "none":
                flat.reshape(-1).view(torch.uint8).copy_(place)
            elif part.codec == "bf16":
                flat.copy_(place.view(torch.bfloat16).view(flat.shape))
            else:
                rows = flat.view(size, -1)
                if rows.dtype is torch.float32:
                    _restore(part.codec, place, rows)
                else:
                    restored = torch.empty(rows.shape, dtype=torch.float32, device=rows.device)
                    _restore(part.codec, place, restored)
                    rows.copy_(restored)
        tensors.append(tensor)
    return tuple(tensors)


class _Blocks(NamedTuple):
    """The blocks of one width in each sample."""

    numbers: slice  # of a sample
    scales: slice
    in_sample: int  # number of blocks
    width: int  # in numbers of the sample
    coded_width: int  # in coded numbers


def _blocks(codec: str, numbers: int) -> list[_Blocks]:
    """Return the whole blocks of a sample, and the shorter block at its end."""
    whole, rest = divmod(numbers, BLOCK)
    found = [_Blocks(slice(0, whole * BLOCK), slice(0, whole), whole, BLOCK, BLOCK)] if whole else []
    if rest:
        coded = rotated_width(rest) if codec == "int4" else rest
        found.append(_Blocks(slice(whole * BLOCK, numbers), slice(whole, whole + 1), 1, rest, coded))
    return found


def _views(codec: str, place: Tensor, size: int, numbers: int) -> list[tuple[_Blocks, Tensor, Tensor]]:
    """Return [(blocks, scales [B, n, 1], codes [B, n, width])], as views."""
    blocks, begin = _blocks(codec, numbers), SCALE_BYTES * size * -(-numbers // BLOCK)
    scales = place[:begin].view(torch.float32).view(size, -1, 1)
    found = []
    for some in blocks:
        width = some.coded_width // 2 if codec == "int4" else some.coded_width
        end = begin + size * some.in_sample * width
        found.append((some, scales[:, some.scales], place[begin:end].view(size, some.in_sample, width)))
        begin = end
    return found


def _quantise(codec: str, flat: Tensor, place: Tensor, generator: torch.Generator | None) -> None:
    """Code ``flat`` [B, n], float32, into ``place``."""
    levels = LEVELS[codec]
    for some, scales, codes in _views(codec, place, *flat.shape):
        blocks = flat[:, some.numbers].reshape(len(flat), some.in_sample, some.width)
        if codec == "int4":
            blocks = _rotated(pad(blocks, (0, some.coded_width - some.width)), forward=True)
        scale = _scales(blocks.abs().amax(-1, keepdim=True), levels)
        multiples = blocks / scale
        if generator is not None:
            multiples.add_(_noise(multiples, generator), alpha=1 / NOISE_STEPS)
        multiples.round_().clamp_(-levels, levels)
        scales.copy_(scale)
        if codec == "int8":
            codes.view(torch.int8).copy_(multiples)
        else:  # two in a byte, from the two halves of the block
            low, high = multiples.chunk(2, dim=-1)
            codes.copy_(torch.add(low, high, alpha=16).add_(8 + 16 * 8))


def _scales(largest: Tensor, levels: int) -> Tensor:
    """Return the rounded scales, NaN for magnitudes that are not finite."""
    is_finite = largest.isfinite()  # first: rounding up turns the NaN of a GPU into -0.0
    # Divide by a tensor: for a Python number a GPU multiplies by the reciprocal, which rounds differently from a CPU.
    bits = largest.div(largest.new_full((), levels)).view(torch.int32).add_(~SCALE_MASK).bitwise_and_(SCALE_MASK)
    scales = bits.clamp_(max=GREATEST_SCALE[levels]).view(torch.float32)
    return scales.masked_fill_(scales == 0, 1.0).masked_fill_(~is_finite, math.nan)


def _restore(codec: str, place: Tensor, flat: Tensor) -> None:
    """Decode ``place`` into ``flat`` [B, n], float32."""
    for some, scales, codes in _views(codec, place, *flat.shape):
        into = flat[:, some.numbers].view(len(flat), some.in_sample, some.width)
        if codec == "int8":
            torch.mul(codes.view(torch.int8), scales, out=into)
        else:
            blocks = torch.cat((codes & 15, codes >> 4), dim=-1).float().sub_(8).mul_(scales)
            into.copy_(_rotated(blocks, forward=False)[..., : some.width])


def _noise(like: Tensor, generator: torch.Generator) -> Tensor:
    """Return random odd numbers, int16, from -32767 to 32767.

    Divided by ``NOISE_STEPS`` they are below a half, so that multiples of the scale do not change.
    """
    count = like.numel()
    words = torch.empty(-(-count // 4), dtype=torch.int64, device=like.device)
    words.random_(-(2**63), None, generator=generator)  # four at once, 20 times as fast
    return words.bitwise_or_(0x0001000100010001).view(torch.int16)[:count].view(like.shape)


def _rotated(blocks: Tensor, *, forward: bool) -> Tensor:
    """Rotate each block, of a power of two numbers, or rotate it back."""
    width = blocks.shape[-1]
    rows = 1 << (width.bit_length() - 1) // 2
    left, right = _hadamard(rows, blocks.device), _hadamard(width // rows, blocks.device)
    signs = _signs(blocks.device)[:width]
    if forward:
        blocks = blocks * signs
    # A large Hadamard matrix is the Kronecker product of two small ones: 32 products per number, not 256.
    mixed = (left @ blocks.view(-1, rows, width // rows) @ right).view(blocks.shape)
    return mixed if forward else mixed.mul_(signs)


@cache
def _hadamard(width: int, device: torch.device) -> Tensor:
    """Return Sylvester's Hadamard matrix, orthonormal and symmetric."""
    matrix = torch.ones(1, 1, dtype=torch.float32)
    while len(matrix) < width:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return (matrix / math.sqrt(width)).to(device)


@cache
def _signs(device: torch.device) -> Tensor:
    """Return 256 random signs, float32[256] of +-1, equal in every run."""
    generator = torch.Generator().manual_seed(stream_seed(0, "signs"))
    return torch.randint(0, 2, (BLOCK,), generator=generator).mul(2).sub(1).float().to(device)


class Coder:
    """The coder of the messages of one edge, with its measured error.

    Attributes:
        errors: (squared error, squared length), float64[2], of each tensor in some messages of the segment, on its
            device.
        num_bytes: bytes of the coded messages of the segment.
        plain_bytes: bytes of the same messages before coding.
    """

    EVERY = 16  # the error of one message in so many is measured

    def __init__(self, codec: str, seed_of: Callable[[int], int] | None = None) -> None:
        """Create a coder.

        ``seed_of`` maps a micro-batch to the seed of its rounding. Without it numbers are rounded to the nearest level.
        """
        self.codec, self._seed_of = codec, seed_of if codec in LEVELS else None
        self.begin()

    def begin(self) -> None:
        """Begin a segment."""
        self.errors: list[Tensor] = []
        self.num_bytes = self.plain_bytes = 0

    def encode(self, specs: Sequence[TensorSpec], tensors: Sequence[Tensor], micro_batch: int) -> Tensor:
        """Return the buffer to send, and note its bytes and error."""
        seed = None if self._seed_of is None else self._seed_of(micro_batch)
        buffer = encode(self.codec, specs, tensors, seed)
        self.num_bytes += buffer.nbytes
        self.plain_bytes += sum(tensor.nbytes for tensor in tensors)
        if micro_batch % self.EVERY == 0 and tensors:
            self._compare(specs, tensors, buffer)
        return buffer

    def decode(self, specs: Sequence[TensorSpec], size: int, buffer: Tensor) -> Tensors:
        """Return the tensors of ``size`` samples."""
        return decode(self.codec, specs, size, buffer)

    def relative_error(self) -> float | None:
        """Return the relative L2 error, or None if no finite message was measured."""
        pairs = [pair.tolist() for pair in self.errors]
        error, square = (math.fsum(pair[i] for pair in pairs if math.isfinite(sum(pair))) for i in range(2))
        return math.sqrt(error / square) if square > 0 else None

    def _compare(self, specs: Sequence[TensorSpec], tensors: Sequence[Tensor], buffer: Tensor) -> None:
        decoded = self.decode(specs, _num_samples(specs, tensors), buffer)
        for spec, sent, got in zip(specs, tensors, decoded, strict=True):
            if spec.is_floating_point and sent.numel():
                exact = sent.double()
                self.errors.append(torch.stack([(got.double() - exact).square().sum(), exact.square().sum()]))
