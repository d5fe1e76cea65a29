"""The measured cost of coding and decoding a message."""

import time

import torch

from adl_dist.codecs import CODECS, LEVELS, CodingCost, PerMessage
from adl_dist.transport.coding import decode, encode
from adl_dist.transport.spec import TensorSpec

FEW, MANY = 1 << 8, 1 << 16  # numbers of a sample
SAMPLES = 4
ROUNDS = 20
# Of activations, rounded to nearest, and of gradients, rounded at random.
SEEDS = {codec: (None, 0 if codec in LEVELS else None) for codec in CODECS[1:]}
CACHES = 16 << 20  # bytes, more than the caches of a core


def coding_costs(device: torch.device, *, threads: int | None = None) -> dict[str, CodingCost]:
    """Return the cost of coding and decoding a message, by codec.

    Other data fill the caches before each message, as in a stage. ``threads`` is a stage's number of threads, by
    default torch's.
    """
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads or before)
        return {codec: CodingCost(*(_measured(codec, device, seed) for seed in SEEDS[codec])) for codec in CODECS[1:]}
    finally:
        torch.set_num_threads(before)


def _measured(codec: str, device: torch.device, seed: int | None) -> PerMessage:
    (fewer, short), (more, long) = (_once(codec, device, seed, numbers) for numbers in (FEW, MANY))
    per_byte = max(0.0, (long - short) / (more - fewer))
    return PerMessage(fixed=max(0.0, min(short, long) - fewer * per_byte), per_byte=per_byte)


def _once(codec: str, device: torch.device, seed: int | None, numbers: int) -> tuple[int, float]:
    """Return (bytes of a message, seconds to code and decode it)."""
    spec = TensorSpec((numbers,), "float32")
    tensor = torch.randn(SAMPLES, numbers, generator=torch.Generator().manual_seed(0)).to(device)
    elsewhere, times = torch.zeros(CACHES, dtype=torch.uint8), []
    for _ in range(ROUNDS):
        elsewhere.add_(1)
        start = time.perf_counter()
        decoded = decode(codec, (spec,), SAMPLES, encode(codec, (spec,), (tensor,), seed=seed))
        float(decoded[0][0, 0])  # waits for a GPU
        times.append(time.perf_counter() - start)
    return tensor.nbytes, min(times)
