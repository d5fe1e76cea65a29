"""Codecs: what becomes of one message, in bytes, error and mean."""

import math

import pytest
import torch

from adl_dist.codecs import BLOCK, CODECS, LEVELS, coded_bytes
from adl_dist.transport.coding import decode, encode, layout
from adl_dist.transport.spec import TensorSpec

CODING = [codec for codec in CODECS if codec != "none"]
NAN, INF = float("nan"), float("inf")
over_codecs = pytest.mark.parametrize("codec", CODING)
# A sample of whole blocks, with a shorter block at its end, of less than a block, and images of two memory formats.
SHAPES = [(4, 512), (3, 700), (5, 30), (2, 3, 9, 11), (6, 1)]


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def there_and_back(codec, *tensors, seed=None):
    specs = tuple(TensorSpec.of(tensor) for tensor in tensors)
    buffer = encode(codec, specs, tensors, seed)
    assert (buffer.dtype, buffer.ndim, buffer.is_contiguous()) == (torch.uint8, 1, True)
    assert len(buffer) == layout(codec, specs, len(tensors[0]))[1], "the receiver knows the size beforehand"
    return decode(codec, specs, len(tensors[0]), buffer)


def in_blocks(tensor):
    """The numbers [B, n, 256] of each sample, in blocks filled up with zeros."""
    flat = tensor.reshape(len(tensor), -1)
    flat = torch.nn.functional.pad(flat, (0, -flat.shape[1] % BLOCK))
    return flat.view(len(flat), -1, BLOCK)


@pytest.mark.parametrize("seed", [None, 7])
@pytest.mark.parametrize("shape", SHAPES)
def test_no_number_of_a_block_is_further_off_than_its_scale(shape, seed):
    """Half of it where the nearest level is taken; 127 levels to either side."""
    tensor = drawn(*shape) * torch.logspace(-20, 20, math.prod(shape)).view(shape)
    (got,) = there_and_back("int8", tensor, seed=seed)
    scales = in_blocks(tensor).abs().amax(-1) / 127
    off = in_blocks(got - tensor).abs().amax(-1)
    assert (off <= scales * (0.5 if seed is None else 1.0) * (1 + 2**-14)).all()


@pytest.mark.parametrize("seed", [None, 7])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_rotated_block_is_off_by_its_levels_at_most(shape, seed):
    """A rotation keeps lengths: the error of a block is at most that of 256 coordinates, each off by its scale."""
    tensor = drawn(*shape)
    (got,) = there_and_back("int4", tensor, seed=seed)
    length, off = (in_blocks(t).norm(dim=-1) for t in (tensor, got - tensor))
    largest = length  # of a coordinate
    assert (off <= 16 * largest / LEVELS["int4"] * (0.5 if seed is None else 1.0) * (1 + 2**-14)).all()
    assert off.norm() < 0.25 * length.norm()


def test_a_rotation_spares_small_numbers_next_to_a_large_one():
    tensor = drawn(1, 256) * 0.01
    tensor[0, 77] = 100.0
    (got,) = there_and_back("int4", tensor)
    alone = (tensor / (100 / 7)).round()
    assert alone.count_nonzero() == 1, "without one they would be lost"
    assert (got - tensor).norm() < 0.11 * tensor.norm()
    relu = drawn(1, 256).abs()  # of one sign: without fixed signs all would add up in one coordinate
    assert (there_and_back("int4", relu)[0] - relu).norm() < 0.2 * relu.norm()


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_random_rounding_is_right_on_average(codec):
    """The mean of n codings is off by at most 5 standard errors, of which a number's is half a scale at most."""
    tensor, num = drawn(1, 300) * 3, 4000
    mean = there_and_back(codec, tensor.repeat(num, 1), seed=7)[0].double().mean(dim=0, keepdim=True)
    coordinate = tensor.abs().amax() if codec == "int8" else in_blocks(tensor).norm(dim=-1).amax()
    assert (mean - tensor).abs().max() < 5 * 0.5 * coordinate / LEVELS[codec] / math.sqrt(num)
    nearest = there_and_back(codec, tensor)[0]
    assert (nearest - tensor).norm() > 3 * (mean - tensor).norm(), "the bias that is avoided"


def test_random_rounding_repeats_with_its_seed_and_with_no_other():
    tensor = drawn(4, 300)
    first, again, other = (there_and_back("int8", tensor, seed=seed)[0] for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("codec", ["bf16", "int8"])
@pytest.mark.parametrize("shape", SHAPES)
def test_coding_twice_changes_no_bit(codec, shape):
    (once,) = there_and_back(codec, drawn(*shape))
    assert torch.equal(there_and_back(codec, once)[0], once)


@over_codecs
@pytest.mark.parametrize("seed", [None, 7])
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_what_is_not_finite_stays_so_in_its_block_alone(codec, seed, bad):
    tensor = drawn(2, 700)
    tensor[1, 300] = bad
    (got,) = there_and_back(codec, tensor, seed=seed)
    assert not got[1, 300].isfinite()
    assert got[0].isfinite().all()
    assert got[1, :256].isfinite().all()
    assert got[1, 512:].isfinite().all()
    if codec != "bf16":
        assert got[1, 256:512].isnan().all(), "none is hidden, on any CPU"


@pytest.mark.parametrize("seed", [None, 7])
def test_the_greatest_number_does_not_become_infinite(seed):
    """Masks of attention hold it where a -inf would make a whole row NaN."""
    tensor = torch.zeros(2, 300)
    tensor[:, :5] = torch.finfo(torch.float32).min
    (got,) = there_and_back("int8", tensor, seed=seed)
    torch.testing.assert_close(got, tensor, rtol=2**-14, atol=0)


@over_codecs
@pytest.mark.parametrize("seed", [None, 7])
def test_zeros_and_numbers_too_small_to_scale_come_back_finite(codec, seed):
    tensor = torch.zeros(3, 600)
    tensor[1] = 1e-44
    tensor[2] = torch.finfo(torch.float32).max / 32  # of larger ones a rotation may be infinite
    (got,) = there_and_back(codec, tensor, seed=seed)
    assert not got[0].any()
    assert got.isfinite().all()


@over_codecs
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_dtype_strides_and_memory_are_the_receivers_own(codec, channels_last, dtype):
    tensor = drawn(2, 32, 8, 8).to(dtype)
    tensor = tensor.to(memory_format=torch.channels_last) if channels_last else tensor
    before = tensor.clone()
    (got,) = there_and_back(codec, tensor)
    assert (got.dtype, got.stride()) == (tensor.dtype, tensor.stride())
    assert torch.equal(tensor, before), "what is sent stays as it is"
    assert (got - tensor).norm() <= 0.2 * tensor.norm()
    assert got.data_ptr() != tensor.data_ptr()


@over_codecs
def test_tensors_share_a_message_and_counting_numbers_stay(codec):
    """Whole numbers, booleans, complex ones, what has no element, and what a codec would not make smaller."""
    as_they_are = (
        torch.arange(12).view(2, 6), torch.tensor([[True], [False]]), torch.ones(2, 0), drawn(2, 8).to(torch.complex64),
        drawn(2).bfloat16(), torch.tensor([[1, 2, 3]] * 2, dtype=torch.int16),
    )  # fmt: skip
    first, *others, last = there_and_back(codec, drawn(2, 300), *as_they_are, drawn(2, 20, seed=1))
    for got, sent in zip(others, as_they_are, strict=True):
        assert (got.dtype, got.shape) == (sent.dtype, sent.shape)
        assert torch.equal(got, sent)
    assert not torch.equal(first, drawn(2, 300))
    assert not torch.equal(last, drawn(2, 20, seed=1))


@pytest.mark.parametrize(("codec", "per_number"), [("bf16", 2.0), ("int8", 1 + 4 / 256), ("int4", 0.5 + 4 / 256)])
def test_bytes_are_as_few_as_promised_and_never_more(codec, per_number):
    assert coded_bytes(codec, 2**16, 4) == 2**16 * per_number
    assert coded_bytes(codec, 1, 2) is None
    for numbers in range(1, 600):
        coded = coded_bytes(codec, numbers, 4)
        assert coded is None or coded < 4 * numbers
