"""What coding costs on this CPU, one thread, and below which speed of a link it takes less time than it saves there.

Run:   python benchmarks/codecs.py
"""

import time
from collections.abc import Callable
from typing import Any

import torch

from adl_dist.codecs import CODECS
from adl_dist.distributed.affinity import tune_malloc
from adl_dist.transport.coding import decode, encode
from adl_dist.transport.spec import TensorSpec

SIZE, NUMBERS, ROUNDS = 32, 1 << 15, 30
MEGABYTES = SIZE * NUMBERS * 4 / 1e6


def least(call: Callable[[], Any]) -> tuple[float, Any]:
    """Return the least seconds of several calls, and what the last one returns."""
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        result = call()
        times.append(time.perf_counter() - start)
    return min(times), result


def main() -> None:
    """Print one line per codec and direction."""
    torch.set_num_threads(1)
    tune_malloc()  # as a run does
    tensor = torch.randn(SIZE, NUMBERS, generator=torch.Generator().manual_seed(0))
    specs = (TensorSpec.of(tensor),)
    print("codec  what         code  decode  (ms per MB of float32)  MB sent  error   break-even (Gbit/s)")
    for codec in CODECS[1:]:
        for what, seed in (("activations", None), ("gradients", 0)):
            coding, buffer = least(lambda: encode(codec, specs, (tensor,), seed))  # noqa: B023
            decoding, (got,) = least(lambda: decode(codec, specs, SIZE, buffer))  # noqa: B023
            code, back = 1e3 * coding / MEGABYTES, 1e3 * decoding / MEGABYTES
            error, sent = float((got - tensor).norm() / tensor.norm()), buffer.nbytes / tensor.nbytes
            even = 8 * (1 - sent) / (code + back)
            print(f"{codec:6} {what:11} {code:5.2f}   {back:5.2f} {'':24}{sent:6.3f}   {error:6.2%}  {even:5.1f}")


if __name__ == "__main__":
    main()
