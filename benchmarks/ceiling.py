#!/usr/bin/env python3
"""Measure how much more two cores do at once than one alone: programs that share nothing but the machine.

    python benchmarks/ceiling.py

No way to train on two cores can gain more than this over one.
"""

import multiprocessing
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

SECONDS = 1.5


def _repeat(work: Callable[[], object]) -> float:
    """Return how often ``work`` is done per second."""
    torch.set_num_threads(1)
    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < SECONDS:
        work()
        count += 1
    return count / SECONDS


def products(_: int) -> float:
    """Matrix products that stay in the cache."""
    a = torch.randn(256, 256)
    return _repeat(lambda: a @ a)


def sums(_: int) -> float:
    """Sums over 2 MiB, as large as an activation of ResNet-56."""
    a = torch.zeros(2 << 18)
    out = torch.zeros_like(a)
    return _repeat(lambda: torch.add(a, 1, out=out))


def convolutions(_: int) -> float:
    """Forward and backward of a layer of ResNet-56."""
    torch.set_num_threads(1)
    layer = nn.Conv2d(16, 16, 3, padding=1).to(memory_format=torch.channels_last)
    x = torch.randn(32, 16, 32, 32).to(memory_format=torch.channels_last).requires_grad_()

    def work() -> Tensor:
        out = layer(x).sum()
        out.backward()
        return out

    return _repeat(work)


def main() -> None:
    """Measure each alone and twice at once, three times by turns."""
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        for work in (products, sums, convolutions):
            ratios = []
            for _ in range(3):
                alone = pool.apply(work, (0,))
                ratios.append(sum(pool.map(work, (0, 1), chunksize=1)) / alone)
            text, title = ", ".join(f"{r:.2f}" for r in sorted(ratios)), (work.__doc__ or "").rstrip(".")
            print(f"{title:<60} two at once: {text} x one")


if __name__ == "__main__":
    main()
