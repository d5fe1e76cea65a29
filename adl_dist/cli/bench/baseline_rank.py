"""One process of one of torch's own ways to train: ``python -m adl_dist.cli.bench.baseline_rank TASK.json RANK``."""

import json
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset

from adl_dist.baselines import Clock, Updates, joined, train_alone, train_replica, train_stage
from adl_dist.cli.bench.data import feed_of
from adl_dist.cli.bench.entries import Kind
from adl_dist.cli.config import instantiate
from adl_dist.cli.config.compose import compose_run
from adl_dist.cli.config.schema import RunConfig
from adl_dist.data.loader import epoch_order
from adl_dist.distributed.affinity import bound_to
from adl_dist.distributed.device import choose_device
from adl_dist.distributed.parent_process import end_with_launcher
from adl_dist.errors import AdlError
from adl_dist.monitor.memory import peak_memory_bytes
from adl_dist.optim import build_lr_schedule
from adl_dist.partition import cut
from adl_dist.stage import to_channels_last
from adl_dist.transport import TensorSpec


@dataclass(frozen=True, kw_only=True)
class Task:
    """What all ranks of one run do.

    Attributes:
        kind: of contender.
        words: that make the configuration.
        size: number of processes.
        sizes: units of each stage.
        granularity: of the units.
        overwrites: for each stage, for each tensor that arrives, whether it is written to.
        target: what the loss takes beside the output, as plain values.
        threads: of each process.
        cores: of each process; None: any.
        micro_batches: of one update.
        samples: of one update, all ranks together.
        num_updates: how long.
        rendezvous: where ranks meet.
        folder: for results.
    """

    kind: Kind
    words: Sequence[str]
    size: int
    sizes: Sequence[int]
    granularity: str
    overwrites: Sequence[Sequence[bool]]
    target: dict[str, Any]
    threads: int
    cores: Sequence[Sequence[int]] | None
    micro_batches: int
    samples: int
    num_updates: int
    rendezvous: str
    folder: str

    def save(self, path: Path) -> None:
        """Write it down for the ranks."""
        path.write_text(json.dumps(asdict(self)))


def result_file(folder: Path, rank: int) -> Path:
    """What ``rank`` has measured."""
    return folder / f"rank{rank}.json"


def carry_out(task: Task, rank: int) -> dict[str, Any]:
    """Train as rank ``rank`` of ``task``.

    Returns:
        When each update ended, in seconds since the first one did, and the peak memory in bytes.
    """
    config, _ = compose_run(task.words)
    with instantiate.precision(config).apply(threads=task.threads):
        return _carry_out(task, rank, config)


def _carry_out(task: Task, rank: int, config: RunConfig) -> dict[str, Any]:
    device = choose_device(config.runtime.device.value)
    model = instantiate.build_model(config).to(getattr(torch, config.dtype.value))
    if task.kind in ("gpipe", "1f1b"):
        model = cut(model, num_stages=task.size, balance=task.sizes, granularity=task.granularity)[rank]
    model = model.to(device)
    if config.runtime.channels_last:
        to_channels_last(model)
    clock = Clock(device)
    if task.size == 1:
        _train(task, rank, config, model, device, clock)
    else:
        timeout = config.runtime.timeout_seconds
        with joined(rank, task.size, device=device, rendezvous=task.rendezvous, timeout_seconds=timeout):
            _train(task, rank, config, model, device, clock)
    return {"ends": clock.seconds(), "peak_memory_bytes": peak_memory_bytes()}


def _train(task: Task, rank: int, config: RunConfig, model: nn.Module, device: torch.device, clock: Clock) -> None:
    updates, loss_fn = _updates(task, config, model, clock), instantiate.build_loss(config)
    if isinstance(loss_fn, nn.Module):
        loss_fn.to(device, getattr(torch, config.dtype.value))
    size = {"loop": task.samples // task.micro_batches, "ddp": task.samples // task.size}.get(task.kind, task.samples)
    is_fed = task.kind in ("loop", "ddp") or rank == 0
    batches = _batches(task, config, device, size, rank=rank if task.kind == "ddp" else None) if is_fed else None
    # As late as ours: what serves messages is started by now, and what loads data knows all cores.
    with bound_to(None if task.cores is None else task.cores[rank]):
        if task.kind == "loop":
            assert batches is not None
            train_alone(
                model,
                batches,
                num_updates=task.num_updates,
                micro_batches=task.micro_batches,
                loss_fn=loss_fn,
                updates=updates,
            )
        elif task.kind == "ddp":
            assert batches is not None
            train_replica(model, batches, device=device, num_updates=task.num_updates, loss_fn=loss_fn, updates=updates)
        else:
            train_stage(
                model,
                batches,
                schedule=task.kind,
                rank=rank,
                num_stages=task.size,
                device=device,
                channels_last=config.runtime.channels_last,
                overwrites=task.overwrites[rank],
                target=TensorSpec.from_json(task.target).empty(task.samples, torch.device("cpu")),
                num_updates=task.num_updates,
                micro_batches=task.micro_batches,
                loss_fn=loss_fn,
                updates=updates,
            )


def _updates(task: Task, config: RunConfig, model: nn.Module, clock: Clock) -> Updates:
    parameters = list(model.parameters())
    if not parameters:  # a stage of nothing but pooling
        return Updates(optimizer=None, lr_schedule=None, clock=clock)
    optimizer = instantiate.build_optimizer(config)(parameters)
    length = {"updates_per_epoch": task.num_updates, "total_updates": task.num_updates}
    schedule = build_lr_schedule(instantiate.lr_schedule(config), optimizer, **length)
    return Updates(optimizer=optimizer, lr_schedule=schedule, clock=clock)


def _batches(
    task: Task, config: RunConfig, device: torch.device, size: int, *, rank: int | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """The run's samples in batches of ``size``; with ``rank``, its share of each update's."""
    train: Dataset[Any] = instantiate.build_data(config)[0]
    shuffle = config.data.get("shuffle", True)
    if rank is not None:
        order = epoch_order(len(train), seed=config.seed, epoch=0, shuffle=shuffle)  # type: ignore[arg-type]
        train = Subset(train, [order[i] for i in range(len(order)) if i % task.samples // size == rank])
        shuffle = False
    num_batches = len(train) // size  # type: ignore[arg-type]
    return feed_of(train, config, device, shuffle=shuffle).batches(0, [size] * num_batches)


def main(arguments: Sequence[str]) -> None:
    """Carry out a task and write down what came of it; an error is told in one line."""
    end_with_launcher()
    task = Task(**json.loads(Path(arguments[0]).read_text()))
    rank = int(arguments[1])
    try:
        found = carry_out(task, rank)
    except Exception as error:
        said = " ".join(str(error).split())
        kind = "" if isinstance(error, AdlError) else f"rank {rank}: {type(error).__name__}: "
        sys.stderr.write(f"{traceback.format_exc()}\nadl-dist: error: {kind}{said}\n")
        sys.stderr.flush()
        os._exit(1)  # must not wait in some destructor for peers that wait for it
    result_file(Path(task.folder), rank).write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
