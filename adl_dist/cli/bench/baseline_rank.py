"""One process of one of torch's own ways to train: ``python -m adl_dist.cli.bench.baseline_rank TASK.json``."""

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
from adl_dist.cli.bench.entries import Kind, device_loader
from adl_dist.cli.config import instantiate
from adl_dist.cli.config.compose import compose_run
from adl_dist.cli.config.schema import RunConfig
from adl_dist.data.loader import epoch_order
from adl_dist.distributed.affinity import bound_to, cores_here, own_cores, tune_malloc
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
    """The work of all ranks of one run.

    Attributes:
        kind: the training loop.
        argv: overrides that make the configuration: K, M, the cut, the number of updates, threads.
        overwrites: for each stage, for each tensor that arrives, whether the stage writes to it.
        target: shape and dtype of the targets, as plain values.
    """

    kind: Kind
    argv: Sequence[str]
    overwrites: Sequence[Sequence[bool]]
    target: dict[str, Any]

    def save(self, path: Path) -> None:
        """Write the task for the ranks, which write their results next to it."""
        path.write_text(json.dumps(asdict(self)))


def result_file(task_file: Path, rank: int) -> Path:
    """Return where ``rank`` writes its result."""
    return task_file.with_name(f"rank{rank}.json")


def run(task: Task, rank: int) -> dict[str, Any]:
    """Train as rank ``rank`` of ``task``, with the allocator, the threads and the cores of our own ranks.

    Returns:
        ``ends``: when each update ended, in seconds after the first one; and ``peak_memory_bytes``.
    """
    config, _ = compose_run(task.argv)
    device, size = choose_device(config.runtime.device.value), 1 if task.kind == "loop" else config.partition.num_stages
    tune_malloc()
    with instantiate.precision(config).apply(threads=config.runtime.threads or 1):
        model = instantiate.build_model(config).to(getattr(torch, config.dtype.value))
        if task.kind in ("gpipe", "1f1b"):
            balance, granularity = config.partition.balance, config.partition.granularity
            assert granularity is not None
            model = cut(model, num_stages=size, balance=balance, granularity=granularity.value)[rank]
        model = model.to(device)
        if config.runtime.channels_last:
            to_channels_last(model)
        clock = Clock(device)
        with joined(rank, size, device=device, timeout_seconds=config.runtime.timeout_seconds):
            _train(task, rank, size, config, model, device, clock)
    return {"ends": clock.seconds(), "peak_memory_bytes": peak_memory_bytes()}


def _train(
    task: Task, rank: int, size: int, config: RunConfig, model: nn.Module, device: torch.device, clock: Clock
) -> None:
    num_updates, M = config.train.max_updates, config.method.chosen().micro_batches_per_update
    assert num_updates is not None
    loss_fn = instantiate.build_loss(config)
    if isinstance(loss_fn, nn.Module):
        loss_fn.to(device, getattr(torch, config.dtype.value))
    updates = _updates(config, model, clock, num_updates)
    loaded = rank_batches(task.kind, rank, size, config, device)
    # Pin after gloo and loader threads exist, as our own ranks do, so that both pin the same threads.
    is_pinned = config.runtime.bind_cores and size > 1 and device.type == "cpu"
    with bound_to(own_cores([cores_here()] * size, rank) if is_pinned else None):
        if task.kind == "loop":
            assert loaded is not None
            train_alone(model, loaded, num_updates=num_updates, micro_batches=M, loss_fn=loss_fn, updates=updates)
        elif task.kind == "ddp":
            assert loaded is not None
            train_replica(model, loaded, device=device, num_updates=num_updates, loss_fn=loss_fn, updates=updates)
        else:
            train_stage(
                model,
                loaded,
                schedule=task.kind,
                rank=rank,
                num_stages=size,
                device=device,
                channels_last=config.runtime.channels_last,
                overwrites=task.overwrites[rank],
                target=TensorSpec.from_json(task.target).empty(config.train.batch_size, torch.device("cpu")),
                num_updates=num_updates,
                micro_batches=M,
                loss_fn=loss_fn,
                updates=updates,
            )


def _updates(config: RunConfig, model: nn.Module, clock: Clock, num_updates: int) -> Updates:
    parameters = list(model.parameters())
    if not parameters:  # a stage of nothing but pooling
        return Updates(optimizer=None, lr_schedule=None, clock=clock)
    optimizer = instantiate.build_optimizer(config)(parameters)
    length = {"updates_per_epoch": num_updates, "total_updates": num_updates}
    lr_schedule = build_lr_schedule(instantiate.lr_schedule(config), optimizer, **length)
    return Updates(optimizer=optimizer, lr_schedule=lr_schedule, clock=clock)


def rank_batches(
    kind: Kind, rank: int, size: int, config: RunConfig, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]] | None:
    """Return the batches of ``rank``: micro-batches of a loop, a replica's shares, whole ones of a pipeline's rank 0.

    Returns:
        (input on ``device``, target) one after another; None: the rank gets its input from another one.
    """
    if kind in ("gpipe", "1f1b") and rank > 0:
        return None
    samples = config.train.batch_size
    train: Dataset[Any] = instantiate.build_data(config)[0]
    shuffle = config.data.get("shuffle", True)
    batch_size = samples
    if kind == "loop":
        batch_size = samples // config.method.chosen().micro_batches_per_update
    elif kind == "ddp":
        batch_size = samples // size
        order = epoch_order(len(train), seed=config.seed, epoch=0, shuffle=shuffle)  # type: ignore[arg-type]
        train = Subset(train, [order[i] for i in range(len(order)) if i % samples // batch_size == rank])
        shuffle = False
    num_batches = len(train) // batch_size  # type: ignore[arg-type]
    return device_loader(train, config, device, shuffle=shuffle).batches(0, [batch_size] * num_batches)


def main(task_file: Path, rank: int) -> None:
    """Run the task and write the result; an error is one line for the bench, after a traceback for the log."""
    end_with_launcher()
    try:
        result = run(Task(**json.loads(task_file.read_text())), rank)
    except Exception as error:
        prefix = "" if isinstance(error, AdlError) else f"rank {rank}: {type(error).__name__}: "
        sys.stderr.write(f"{traceback.format_exc()}\nadl-dist: error: {prefix}{' '.join(str(error).split())}\n")
        sys.stderr.flush()
        os._exit(1)  # must not wait in some destructor for peers that wait for it
    result_file(task_file, rank).write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(os.environ["RANK"]))
