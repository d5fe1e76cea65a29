#!/usr/bin/env python3
"""What the engine itself costs: a model that computes next to nothing, all stages in one process, one thread.

    python benchmarks/overhead.py [K] [ROUNDS]

Next to it, by hand, what torch takes for the same: each stage's forward and backward from a leaf of its own, the loss,
and the optimizer steps. The difference, per micro-batch and stage, is everything that the engine adds: loading, the
schedule, channels, weight versions, statistics, records. The same with a dataset of the user's, whose random numbers
are seeded for each sample, with a run folder, and with a run folder and ``runtime.trace`` shows what each of these
costs; what is written at the end is not counted.
"""

import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import adl_dist

NUM_MICRO_BATCHES, M = 4000, 4


class Scale(nn.Module):
    """One multiplication by one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        """Scale ``x``."""
        return x * self.weight


ZEROS = TensorDataset(*[torch.zeros(NUM_MICRO_BATCHES, 8)] * 2)  # one sample is one micro-batch


class OwnDataset(Dataset[tuple[Tensor, Tensor]]):
    """The same data from a dataset that may draw random numbers, as far as the loader knows."""

    def __len__(self) -> int:
        return NUM_MICRO_BATCHES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return ZEROS[index]  # type: ignore[return-value]


def mean_square(out: Tensor, target: Tensor) -> Tensor:
    """Return the loss."""
    return (out - target).square().mean()


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return an optimizer with momentum, as users choose it."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def engine(num_stages: int, *, seeded: bool = False, recorded: bool = False, traced: bool = False) -> float:
    """Return the seconds of an epoch of ADL.

    Args:
        num_stages: K.
        seeded: with a dataset that is seeded for each sample.
        recorded: with a run folder, but no TensorBoard.
        traced: and with a trace.
    """
    trainer = adl_dist.Trainer(
        nn.Sequential(*(Scale() for _ in range(num_stages))),
        loss_fn=mean_square,
        optimizer=sgd,
        method=adl_dist.method("adl", accumulation_steps=M),
        num_stages=num_stages,
        processes=adl_dist.ProcessOptions(threads=1),
    )
    with tempfile.TemporaryDirectory() if recorded or traced else nullcontext() as folder:
        done = trainer.fit(
            OwnDataset() if seeded else ZEROS,
            epochs=1,
            batch_size=M,
            monitoring=adl_dist.Monitoring(quiet=True, tensorboard=False, trace=traced),
            run_dir=folder,
        )
    return float(done["train_seconds"])


def by_hand(num_stages: int) -> float:
    """Return the seconds of the same calls of torch, without an engine."""
    stages = [Scale() for _ in range(num_stages)]
    optimizers = [sgd(stage.parameters()) for stage in stages]
    start = time.perf_counter()
    for b in range(NUM_MICRO_BATCHES):
        x, target = (t.unsqueeze(0) for t in ZEROS[b])
        leaves, outs = [], []
        for k, stage in enumerate(stages):
            leaves.append(x if k == 0 else outs[-1].detach().requires_grad_())
            outs.append(stage(leaves[-1]))
        torch.autograd.backward(mean_square(outs[-1], target) / M)
        for k in range(num_stages - 2, -1, -1):
            torch.autograd.backward(outs[k], leaves[k + 1].grad)
        if b % M == M - 1:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return time.perf_counter() - start


def main() -> None:
    """Measure all of them by turns, and print medians."""
    numbers = [int(word) for word in sys.argv[1:3]]
    num_stages, rounds = [*numbers, *(2, 5)[len(numbers) :]]
    torch.set_num_threads(1)
    ways = (
        lambda: engine(num_stages),
        lambda: by_hand(num_stages),
        lambda: engine(num_stages, seeded=True),
        lambda: engine(num_stages, recorded=True),
        lambda: engine(num_stages, traced=True),
    )
    seconds: list[list[float]] = [[] for _ in ways]
    for turn in range(rounds + 1):  # one to warm up
        for n in random.Random(turn).sample(range(len(ways)), k=len(ways)):  # what one leaves to do slows the next
            seconds[n].append(ways[n]())
    per_step = 1e6 / NUM_MICRO_BATCHES / num_stages
    ours, manual, seeded, recorded, traced = ([s * per_step for s in of_way[1:]] for of_way in seconds)
    print(f"K = {num_stages}, per micro-batch and stage, medians of {rounds}:")
    print(
        f"engine {statistics.median(ours):.0f} us, the same calls of torch by hand {statistics.median(manual):.0f} us"
    )
    for what, more, less in (
        ("engine", ours, manual),
        ("seeding of samples", seeded, ours),
        ("run folder", recorded, ours),
        ("trace", traced, recorded),
    ):
        added = [a - b for a, b in zip(more, less, strict=True)]
        print(f"added by the {what} {statistics.median(added):.0f} us ({min(added):.0f} .. {max(added):.0f})")


if __name__ == "__main__":
    main()
