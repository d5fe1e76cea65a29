"""One process of a torch baseline, with its task in a JSON file.

Its command is ``python -m adl_dist.cli.bench.baseline_rank TASK.json``.
"""

import json
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.data import Subset

from adl_dist.baselines.diloco import OuterStep
from adl_dist.baselines.loop import Training, joined, replicated, train_alone
from adl_dist.baselines.pipelining import SCHEDULES, train_stage
from adl_dist.cli.bench.entries import REPLICAS, Kind
from adl_dist.cli.config import instantiate
from adl_dist.cli.config.compose import compose_run
from adl_dist.cli.config.schema import RunConfig
from adl_dist.data.loader import epoch_order
from adl_dist.distributed.affinity import bound_to, cores_here, own_cores, tune_malloc
from adl_dist.distributed.device import choose_device
from adl_dist.distributed.parent_process import end_with_launcher
from adl_dist.errors import AdlError
from adl_dist.monitor.memory import peak_memory
from adl_dist.optim import build_lr_schedule
from adl_dist.stage import in_dtype, in_memory_format
from adl_dist.transport.spec import TensorSpec


def run(
    rank: int,
    *,
    kind: Kind,
    argv: Sequence[str],
    target: dict[str, Any],
    inner_updates: int | None = None,
) -> dict[str, Any]:
    """Train as one rank, with the allocator, threads and cores of our ranks.

    ``argv``: overrides for the configuration (K, M, the cut, the number of updates, threads).
    ``target``: the fields of a :class:`TensorSpec` of the targets.
    ``inner_updates``: DiLoCo's H, the updates between two exchanges; None for other kinds.

    Returns:
        ``ends``, when each update ended, in seconds after the first one; and ``peak_memory_bytes``.
    """
    config, _ = compose_run(argv)
    K, M = config.partition.num_stages, config.pipeline.micro_batches_per_update
    size = 1 if kind == "loop" else config.pipeline.num_processes
    device, dtype = choose_device(config.runtime.device), getattr(torch, config.dtype)
    channels_last, num_updates = config.runtime.channels_last, config.train.max_updates
    assert num_updates is not None
    tune_malloc()
    with instantiate.precision(config).apply(threads=config.runtime.threads or 1):
        model = in_dtype(instantiate.build_model(config), dtype)
        if kind in SCHEDULES:
            chain = instantiate.read_units(config, model, keeps="as torch's pipelines do not sum gradients over stages")
            sizes = instantiate.chosen_sizes(chain, K, config.partition.balance)
            (model,) = chain.stages(model, chain.plan(sizes), sizes, [rank])
        model = model.to(device)
        if channels_last:
            in_memory_format(model, channels_last=True)
        loss_fn = instantiate.build_loss(config)
        if isinstance(loss_fn, nn.Module):
            loss_fn.to(device, dtype)
        training = Training(device=device, num_updates=num_updates, micro_batches=M, loss_fn=loss_fn)
        if parameters := list(model.parameters()):  # there are none in a stage of nothing but pooling
            training.optimizer = instantiate.build_optimizer(config)(parameters)
            length = {"updates_per_epoch": num_updates, "total_updates": num_updates}
            training.lr_schedule = build_lr_schedule(instantiate.lr_schedule(config), training.optimizer, **length)
        with joined(rank, size, device=device, timeout_seconds=config.runtime.timeout_seconds):
            batches = rank_batches(kind, rank, size, config, device)
            # Pin after gloo and loader threads exist, as our own ranks do, so that both pin the same threads.
            is_pinned = config.runtime.bind_cores and size > 1 and device.type == "cpu"
            with bound_to(own_cores([cores_here()] * size, rank) if is_pinned else None):
                if kind in SCHEDULES:
                    targets = TensorSpec(**target).empty(config.train.batch_size, torch.device("cpu"))
                    borders: dict[str, Any] = {"channels_last": channels_last, "target": targets}
                    train_stage(model, batches, training, schedule=kind, **borders)
                else:
                    assert batches is not None
                    train_alone(replica_of(kind, model, training, inner_updates), batches, training)
    return {"ends": training.ends(), "peak_memory_bytes": peak_memory()["peak_memory_bytes"]}


def replica_of(kind: Kind, model: nn.Module, training: Training, inner_updates: int | None) -> nn.Module:
    """Return ``model``, wrapped for DDP; add the outer step for DiLoCo."""
    if inner_updates is not None:
        training.after_step = OuterStep(model, inner_updates=inner_updates)
    return replicated(model, training.device) if kind == "ddp" else model


def share_of_epoch(
    kind: Kind, rank: int, size: int, config: RunConfig, train: Any, *, epoch: int
) -> tuple[Subset[Any], bool]:
    """Return a replica's samples of an epoch, and whether to shuffle them.

    DDP's replicas share each batch of the epoch's one order; each replica of DiLoCo has its own shard of the data.
    """
    samples, shuffle = config.train.batch_size, config.data.get("shuffle", True)
    if kind == "diloco":
        return Subset(train, list(range(rank, len(train) // size * size, size))), shuffle
    share = samples // size
    order = epoch_order(len(train), seed=config.seed, epoch=epoch, shuffle=shuffle).tolist()
    return Subset(train, [order[i] for i in range(len(order)) if i % samples // share == rank]), False


def rank_batches(
    kind: Kind, rank: int, size: int, config: RunConfig, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]] | None:
    """Return the batches of ``rank``; None for a pipeline's later stages.

    Each is (input on ``device``, target): a micro-batch of a loop, a replica's share, or a pipeline's whole batch.
    """
    if kind in SCHEDULES and rank > 0:
        return None
    samples, shuffle = config.train.batch_size, config.data.get("shuffle", True)
    train: Any = instantiate.build_data(config.data)[0]
    batch_size = samples
    if kind == "loop":
        batch_size = samples // config.method.micro_batches_per_update
    elif kind in REPLICAS:
        batch_size = samples // size
        train, shuffle = share_of_epoch(kind, rank, size, config, train, epoch=0)
    loader = instantiate.device_loader(config, device, shuffle=shuffle, dataset=train)
    batches = loader.batches(0, [batch_size] * (len(train) // batch_size))
    return cast(Iterator[tuple[Tensor, Tensor]], batches)  # anything else was refused by the survey


def main(task_file: Path, rank: int) -> None:
    """Run a task and write ``rank{r}.json``; after an error exit with 1."""
    end_with_launcher()
    try:
        result = run(rank, **json.loads(task_file.read_text()))
    except Exception as error:
        prefix = "" if isinstance(error, AdlError) else f"rank {rank}: {type(error).__name__}: "
        sys.stderr.write(f"{traceback.format_exc()}\nadl-dist: error: {prefix}{' '.join(str(error).split())}\n")
        sys.stderr.flush()
        os._exit(1)  # must not wait in some destructor for peers that wait for it
    task_file.with_name(f"rank{rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(os.environ["RANK"]))
