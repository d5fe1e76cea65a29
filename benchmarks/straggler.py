#!/usr/bin/env python3
"""What a stage that is slow at random costs each method: K = 4 processes whose layers take a given time.

    torchrun --rdzv-backend=adl-dist --nnodes=1 --nproc-per-node=4 benchmarks/straggler.py \\
        [--share 0.25] [--factor 2] [--stages 1] [--groups 40]

A layer sleeps 10 ms forward and 20 ms backward, so four stages fit on any machine and nothing but the schedule is
measured. Of the micro-batches of each slow stage a share, drawn by (stage, micro-batch), takes ``factor`` times as
long, forward and backward. Next to what was measured are the timing model's times for the very same draws, and those
of torch.distributed.pipelining.
"""

import argparse
import random
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.optim import Optimizer
from torch.utils.data import Dataset

import adl_dist
from adl_dist.schedule import Action, Method, Op, Pipeline
from adl_dist.schedule.timing import Costs, actions_of_all, makespan, simulate

K, M = 4, 4
FORWARD, BACKWARD = 0.010, 0.020  # seconds
Slow = Callable[[int, int], float]  # (stage, micro-batch) -> factor


class Sleep(torch.autograd.Function):
    """The identity, which takes its time in both directions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        """Sleep, and return ``x``."""
        ctx.factor = factor
        time.sleep(FORWARD * factor)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Sleep longer."""
        time.sleep(BACKWARD * ctx.factor)
        return grad, None


class Layer(nn.Module):
    """A weight that has no effect, and a sleep; what goes through it is the number of the micro-batch."""

    def __init__(self, stage: int, slow: Slow) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.stage, self.slow = stage, slow

    def forward(self, x: Tensor) -> Tensor:
        """Pass ``x`` [1, 1] on."""
        return Sleep.apply(x + 0 * self.weight, self.slow(self.stage, round(float(x.detach().flatten()[0]))))


class Numbers(Dataset[tuple[Tensor, Tensor]]):
    """Sample b is b."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.tensor([float(index)]), torch.tensor([0.0])


def loss_fn(out: Tensor, target: Tensor) -> Tensor:
    """Return a number with a gradient; what is learnt does not matter."""
    return (out - target).mean()


def sgd(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Return an optimizer whose steps do not matter either."""
    return torch.optim.SGD(parameters, lr=1e-3)


def ours(method: Method, slow: Slow, num_micro_batches: int) -> float:
    """Return the seconds of this engine, from the first load to the drained pipeline."""
    trainer = adl_dist.Trainer(
        nn.Sequential(*(Layer(k, slow) for k in range(K))),
        loss_fn=loss_fn,
        optimizer=sgd,
        method=method,
        num_stages=K,
        processes=adl_dist.ProcessOptions(threads=1),
    )
    data = Numbers(num_micro_batches)
    return trainer.fit(data, epochs=1, batch_size=M, shuffle=False, monitoring=adl_dist.Monitoring(quiet=True))[
        "train_seconds"
    ]


def predicted(method: Method, slow: Slow, num_micro_batches: int) -> float:
    """Return the seconds by the timing model, with free links."""

    def slowdown(stage: int, action: Action) -> float:
        return slow(stage, action.number) if action.op in (Op.FORWARD, Op.BACKWARD) else 1.0

    costs = Costs(forward=[FORWARD] * K, backward=[BACKWARD] * K)
    lists = actions_of_all(Pipeline(method, K), num_micro_batches=num_micro_batches)
    return makespan(simulate(lists, costs, slowdown=slowdown))


def torch_seconds(kind: type, slow: Slow, num_micro_batches: int) -> float:
    """Return the seconds of torch.distributed.pipelining."""
    rank = dist.get_rank()
    layer = Layer(rank, slow)
    optimizer = sgd(layer.parameters())
    run = kind(PipelineStage(layer, rank, K, torch.device("cpu")), n_microbatches=M, loss_fn=loss_fn)

    def step(first: int) -> None:
        inputs = [torch.arange(first, first + M, dtype=torch.float32).unsqueeze(1)] if rank == 0 else []
        run.step(*inputs, **({"target": torch.zeros(M, 1)} if rank == K - 1 else {}))
        optimizer.step()
        optimizer.zero_grad()

    step(0)  # agrees on shapes
    dist.barrier()
    start = time.perf_counter()
    for first in range(0, num_micro_batches, M):
        step(first)
    dist.barrier()
    return time.perf_counter() - start


def main() -> None:
    """Run all methods and print one table, in milliseconds per micro-batch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--share", type=float, default=0.25, help="of the micro-batches that are slow")
    parser.add_argument("--factor", type=float, default=2.0, help="by which they are")
    parser.add_argument("--stages", type=int, nargs="*", default=[1], help="which stages are slow at random")
    parser.add_argument("--groups", type=int, default=40, help="updates of one run")
    flags = parser.parse_args()
    N = flags.groups * M

    def steady(stage: int, micro_batch: int) -> float:
        return 1.0

    def at_random(stage: int, micro_batch: int) -> float:
        drawn = random.Random(f"{stage} {micro_batch}").random()
        return flags.factor if stage in flags.stages and drawn < flags.share else 1.0

    doubled = [4 * (K - 1 - k) for k in range(K)]
    methods = {
        "adl, delay minimal": adl_dist.method("adl", accumulation_steps=M, delay="minimal"),
        "adl, delay decoupled": adl_dist.method("adl", accumulation_steps=M),
        "adl, delay doubled": adl_dist.method("adl", accumulation_steps=M, delay=doubled),
        "gpipe": adl_dist.method("gpipe", accumulation_steps=M),
        "1f1b": adl_dist.method("1f1b", accumulation_steps=M),
    }
    lines = []
    for name, method in methods.items():
        figures = [f(method, slow, N) / N * 1e3 for slow in (steady, at_random) for f in (ours, predicted)]
        lines.append((name, *figures))
    for name, kind in (("torch gpipe", ScheduleGPipe), ("torch 1f1b", Schedule1F1B)):
        figures = [torch_seconds(kind, slow, N) / N * 1e3 for slow in (steady, at_random)]
        lines.append((name, figures[0], float("nan"), figures[1], float("nan")))
    if dist.get_rank() == 0:
        mean = [sum(at_random(k, b) for b in range(N)) / N * (FORWARD + BACKWARD) * 1e3 for k in range(K)]
        print(
            f"K = {K}, M = {M}, {N} micro-batches of {1e3 * (FORWARD + BACKWARD):.0f} ms per stage; stages "
            f"{flags.stages}: {flags.share:.0%} take {flags.factor:g} times as long (mean {max(mean):.1f} ms)"
        )
        print("ms per micro-batch      even: measured  model   at random: measured  model   slower by")
        for name, even, even_model, slow, slow_model in lines:
            print(f"{name:<24}{even:>14.1f}{even_model:>7.1f}{slow:>21.1f}{slow_model:>7.1f}{slow / even - 1:>11.0%}")
    dist.barrier()


if __name__ == "__main__":
    main()
