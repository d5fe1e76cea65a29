#!/usr/bin/env python3
"""The delays that the engine needs for its full speed: K processes whose kernels, and whose links, take a given time.

    python benchmarks/delays.py [--stages 2 3 4] [--links 0 0.1 0.25 0.5] [--rounds 3] [--work 0.06] [--steps 4]

The engine, its schedules, its processes and its messages over gloo are the real ones. In place of the kernels, a layer
sleeps a third of ``--work`` seconds in its forward, for the gradient of its input, and for those of its weights, so
that more stages than cores can be timed. A message that has come waits at its receiver until it is as old as a link of
that share of the work makes it; its sender does not wait. The target, which goes from the first stage straight to the
last, is as slow as an act on the same way.

Timed is the steady state: from one forward of the last stage to another, whole groups later, while stage 0 still loads.
Every round times each list of delays once, in turn. ``auto`` are the least delays for these times, as ``adl-dist plan``
finds them.
"""

import argparse
import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from itertools import combinations_with_replacement
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

import adl_dist
from adl_dist.report.tables import text_table
from adl_dist.schedule import Costs, Method, Pipeline
from adl_dist.schedule.least_delays import with_least_delays
from adl_dist.schedule.timing import time_per_update
from adl_dist.stage import deferred
from adl_dist.transport import process
from adl_dist.transport.wire import Wire

WARM_UP, TIMED = 12, 36  # micro-batches; both are whole groups for M of 1, 2, 3, 4, 6 and 12
ROWS = {  # the rule for the delays, and whether the backward is split
    "ADL, 2(K-1-k)": ("decoupled", False),
    "minimal, K-1-k": ("minimal", False),
    "auto": ("auto", False),
    "ADL, split": ("decoupled", True),
    "minimal, split": ("minimal", True),
    "third, split": ("third", True),
    "auto, split": ("auto", True),
}
AS_FAST = 1.03  # the goal: of ADL's time, with half of its staleness
began: list[float] = []  # forwards of the last stage, in seconds of a clock that all processes share


class Case(NamedTuple):
    """One thing to be timed."""

    link: float  # share of a stage's work on a micro-batch
    delays: tuple[int, ...]
    split: bool


class Sleep(torch.autograd.Function):
    """The identity, which takes its time in both directions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        """Sleep, and return ``x``."""
        ctx.backward_seconds = backward
        time.sleep(forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Sleep as long as was said then."""
        time.sleep(ctx.backward_seconds)
        return grad, None, None


class Layer(nn.Module):
    """A linear layer of one number, around which is slept; what is learnt does not matter."""

    def __init__(self, part: float, *, split: bool, is_last: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1)
        self.part, self.split, self.is_last = part, split, is_last

    def forward(self, x: Tensor) -> Tensor:
        """Pass ``x`` [B, 1] on."""
        if self.is_last:
            began.append(time.monotonic())
        # The gradients of the weights are a part of this backward, unless they are deferred.
        return Sleep.apply(self.linear(x), self.part, self.part * (1 if self.split else 2))


class SlowLinear(deferred._Linear):
    """What computes the gradients of a split linear layer, and sleeps for those of the weights."""

    part = 0.0  # seconds

    def gradients(self, grad: Tensor, x: Tensor, weight: Tensor, wanted: deferred.Wanted) -> deferred.Gradients:
        """Return them after a while."""
        if wanted[1]:
            time.sleep(self.part)
        return super().gradients(grad, x, weight, wanted)


class Links:
    """When each message was sent, in files that sender and receiver share, and how long it is to take."""

    def __init__(self, folder: Path, num_micro_batches: int) -> None:
        self.folder, self.num, self.seconds_per_hop = folder, num_micro_batches, 0.0

    def times(self, what: str, edge: process.Edge) -> Tensor:
        """Return the shared memory of one edge: a time for each micro-batch."""
        file = self.folder / f"{what}-{edge.sender}-{edge.receiver}"
        return torch.from_file(str(file), shared=True, size=self.num, dtype=torch.float64)

    def make_slow(self) -> None:
        """Have all messages between processes take their time from now on."""
        links = self

        class Sender(process.ProcessSender):
            def __init__(self, edge: process.Edge, wire: Wire, **more: Any) -> None:
                super().__init__(edge, wire, **more)
                self._times = links.times(wire.what, edge)

            def send(self, micro_batch: int, tensors: Any) -> None:
                self._times[micro_batch] = time.monotonic()
                super().send(micro_batch, tensors)

        class Receiver(process.ProcessReceiver):
            def __init__(self, edge: process.Edge, wire: Wire, **more: Any) -> None:
                super().__init__(edge, wire, **more)
                self._times, self._hops = links.times(wire.what, edge), abs(edge.sender - edge.receiver)

            def recv(self, micro_batch: int) -> Any:
                tensors = super().recv(micro_batch)
                arrives = float(self._times[micro_batch]) + self._hops * links.seconds_per_hop
                time.sleep(max(arrives - time.monotonic(), 0.0))
                return tensors

        from adl_dist.training import edges  # which makes the ends of all edges

        for ours in (Sender, Receiver):
            name = f"Process{ours.__name__}"
            assert getattr(edges, name) is getattr(process, name), "or messages would take no time"
            setattr(edges, name, ours)


class Zeros(Dataset[tuple[Tensor, Tensor]]):
    """Samples of one number each."""

    def __len__(self) -> int:
        return WARM_UP + TIMED + WARM_UP

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.zeros(1), torch.zeros(1)


def loss_fn(out: Tensor, target: Tensor) -> Tensor:
    """Return a number with a gradient."""
    return (out - target).mean()


def sgd(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Return an optimizer whose steps do not matter."""
    return torch.optim.SGD(parameters, lr=1e-3)


def method_of(case: Case, M: int) -> Method:
    """Return the method to be timed."""
    return adl_dist.method("adl", accumulation_steps=M, delay=case.delays, split_backward=case.split)


def timed(case: Case, K: int, M: int, work: float, links: Links) -> tuple[float, int]:
    """Return the seconds of one micro-batch on this rank, if it is the last stage, and the greatest staleness seen."""
    links.seconds_per_hop = case.link * work
    SlowLinear.part = work / 3
    began.clear()
    torch.manual_seed(0)
    splits = Pipeline(method_of(case, M), K).splits_backward
    trainer = adl_dist.Trainer(
        nn.Sequential(*(Layer(work / 3, split=splits(k), is_last=k == K - 1) for k in range(K))),
        loss_fn=loss_fn,
        optimizer=sgd,
        method=method_of(case, M),
        num_stages=K,
        partition=adl_dist.PartitionSpec(verify=False),
        processes=adl_dist.ProcessOptions(threads=1),
    )
    quiet = adl_dist.Monitoring(quiet=True)
    summary = trainer.fit(Zeros(), epochs=1, batch_size=M, shuffle=False, monitoring=quiet)
    trained = began[-len(Zeros()) :]  # without those of the trial before
    if dist.get_rank() < K - 1:
        return math.nan, 0
    seconds = (trained[WARM_UP + TIMED] - trained[WARM_UP]) / TIMED
    return seconds, max(stage["staleness_max"] for stage in summary["stages"])


def cases_of(K: int, M: int, links: Sequence[float]) -> dict[tuple[float, str], Case]:
    """Return the cases by link and row; several rows may have the same one."""
    cases = {}
    for link in links:
        costs = Costs(forward=[1 / 3] * K, backward=[2 / 3] * K, link=[link] * (K - 1))
        for row, (rule, split) in ROWS.items():
            method = adl_dist.method("adl", accumulation_steps=M, delay=rule, split_backward=split)
            method = with_least_delays(method, costs) if rule == "auto" else method
            cases[link, row] = Case(link, Pipeline(method, K).delays, split)
    return cases


def predicted(case: Case, K: int, M: int) -> float:
    """Return the time of a micro-batch in the timing model, in units of a stage's work."""
    costs = Costs(forward=[1 / 3] * K, backward=[2 / 3] * K, link=[case.link] * (K - 1))
    return time_per_update(Pipeline(method_of(case, M), K), costs) / M


def round_trip(case: Case, K: int) -> float:
    """Return the time of a micro-batch if nothing but round trips were in its way: max(1, trip / (d + 1))."""
    work = 2 / 3 if case.split else 1.0
    trips = [(K - k) * work + 2 * (K - 1 - k) * case.link for k in range(K)]
    return max(1.0, *(trip / (d + 1) for trip, d in zip(trips, case.delays, strict=True)))


def best_of_half(K: int, M: int, link: float) -> Case:
    """Return, of all delays with at most half of ADL's sum, the fastest in the timing model, of these the least."""
    most = K * (K - 1) // 2
    lists = (d[::-1] for d in combinations_with_replacement(range(2 * K - 1), K - 1))
    cases = [Case(link, (*d, 0), split) for d in lists if sum(d) <= most for split in (False, True)]
    return min(cases, key=lambda case: (round(predicted(case, K, M), 6), sum(case.delays), case.split))


def of_rank(flags: argparse.Namespace) -> None:
    """Time all cases, as one rank of K; the last one writes what it found."""
    K, M = int(os.environ["WORLD_SIZE"]), flags.steps
    with contextlib.suppress(OSError):  # who may: other work on the machine then holds up no stage
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(5))
    links = Links(Path(flags.folder), len(Zeros()))
    links.make_slow()
    deferred._Linear = SlowLinear
    cases = list(dict.fromkeys(cases_of(K, M, flags.links).values()))
    for number in range(flags.rounds):
        for case in cases[:: 1 if number % 2 == 0 else -1]:
            seconds, stalest = timed(case, K, M, flags.work, links)
            if dist.get_rank() == K - 1:
                with (Path(flags.folder) / "found.jsonl").open("a") as file:
                    file.write(json.dumps([case, seconds / flags.work, stalest]) + "\n")


def tables(K: int, flags: argparse.Namespace) -> list[str]:
    """Run the ranks, and return the lines about them."""
    M, links = flags.steps, flags.links
    with tempfile.TemporaryDirectory() as folder:
        words = [f"--{name}={getattr(flags, name)}" for name in ("rounds", "work", "steps")]
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=adl-dist", "--nnodes=1"),
            *(f"--nproc-per-node={K}", __file__, f"--folder={folder}", *words, "--links", *map(str, links)),
        ]
        subprocess.run(command, check=True)
        found: dict[Case, list[float]] = {}
        stalest: dict[Case, int] = {}
        for line in (Path(folder) / "found.jsonl").read_text().splitlines():
            (link, delays, split), share, most = json.loads(line)
            case = Case(link, tuple(delays), split)
            found.setdefault(case, []).append(share)
            stalest[case] = most
    lines = [f"K = {K}, M = {M}"]
    head = ("delays", "link", "d", "time", "least .. most", "of ADL's", "model", "bound", "staleness mean", "greatest")
    rows: list[tuple[object, ...]] = [head]
    for link in links:
        cases = {row: case for (of, row), case in cases_of(K, M, links).items() if of == link}
        of_adl = statistics.median(found[cases["ADL, 2(K-1-k)"]])
        for row, case in cases.items():
            times = found[case]
            median = statistics.median(times)
            rows.append(
                (
                    *(row, link, " ".join(map(str, case.delays)), f"{median:.3f}"),
                    *(f"{min(times):.3f} .. {max(times):.3f}", f"{median / of_adl:.3f}"),
                    *(f"{predicted(case, K, M):.3f}", f"{round_trip(case, K):.3f}"),
                    *(f"{sum(case.delays) / K / M:.3g}", stalest[case]),
                )
            )
        half = best_of_half(K, M, link)
        rows.append(
            (
                *("best of half", link, " ".join(map(str, half.delays)), "-", "-", "-"),
                *(f"{predicted(half, K, M):.3f}", f"{round_trip(half, K):.3f}"),
                *(f"{sum(half.delays) / K / M:.3g}", -(-half.delays[0] // M)),
            )
        )
    return [*lines, "", *text_table(rows), ""]


def main() -> None:
    """Print a table for each number of stages, as soon as it is there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, nargs="*", default=[2, 3, 4], help="K")
    parser.add_argument("--links", type=float, nargs="*", default=[0, 0.1, 0.25, 0.5], help="shares of a stage's work")
    parser.add_argument("--rounds", type=int, default=3, help="how often everything is timed")
    parser.add_argument("--work", type=float, default=0.06, help="seconds of a stage's work on a micro-batch")
    parser.add_argument("--steps", type=int, default=4, help="M, micro-batches per update")
    parser.add_argument("--folder", help=argparse.SUPPRESS)  # of the ranks
    flags = parser.parse_args()
    if flags.folder is not None:
        of_rank(flags)
        return
    for K in flags.stages:
        print("\n".join(tables(K, flags)), flush=True)


if __name__ == "__main__":
    main()
