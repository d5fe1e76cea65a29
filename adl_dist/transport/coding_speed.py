"""What coding and decoding a message costs."""

import time

import torch

from adl_dist.codecs import CODECS
from adl_dist.transport.coding import decode, encode
from adl_dist.transport.spec import TensorSpec

NUMBERS = 1 << 18
ROUNDS = 20


def coding_seconds(device: torch.device) -> dict[str, float]:
    """Return, by codec, the seconds to code and to decode a byte, with random rounding: the least of several."""
    spec, found = TensorSpec((NUMBERS // 4,), "float32"), {}
    tensor = torch.randn(4, *spec.shape, generator=torch.Generator().manual_seed(0)).to(device)
    for codec in CODECS[1:]:
        times = []
        for _ in range(ROUNDS):
            start = time.perf_counter()
            decoded = decode(codec, (spec,), 4, encode(codec, (spec,), (tensor,), seed=0))
            float(decoded[0][0, 0])  # waits for a GPU
            times.append(time.perf_counter() - start)
        found[codec] = min(times) / tensor.nbytes
    return found
