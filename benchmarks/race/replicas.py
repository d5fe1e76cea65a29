"""K replicas train until the last epoch: ``python -m benchmarks.race.replicas KIND [H] KEY=VALUE ...``.

KIND is one of a bench's: ddp, or diloco with H, the updates between two exchanges.
K is ``partition.num_stages``. The first process starts the replicas; the run folder gets what the comparisons of runs
read: config.yaml, metrics.jsonl with the validation after each epoch, summary.json at the end or diverged.json.
"""

import json
import math
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch
import yaml
from torch import Tensor, nn
from torch.utils.data import Dataset

from adl_dist.baselines.diloco import OuterStep
from adl_dist.baselines.loop import Training, broadcast_number, joined, train_alone
from adl_dist.checkpoint.run_dir import CONFIG, DIVERGED, SUMMARY, make_folder
from adl_dist.cli.bench.baseline_rank import replica_of, share_of_epoch
from adl_dist.cli.bench.entries import REPLICAS, Kind
from adl_dist.cli.config import instantiate
from adl_dist.cli.config.compose import compose_run
from adl_dist.cli.config.schema import RunConfig
from adl_dist.cli.subprocesses import Child, ChildFailed, run_together
from adl_dist.distributed.affinity import tune_malloc
from adl_dist.distributed.device import choose_device
from adl_dist.distributed.network import GLOO, loopback
from adl_dist.distributed.parent_process import end_with_launcher
from adl_dist.errors import AdlError, ConfigError
from adl_dist.optim import build_lr_schedule
from adl_dist.report.files import write_atomically
from adl_dist.report.recorder import METRICS
from adl_dist.report.runs import CONTENDER
from adl_dist.stage import in_dtype, in_memory_format

PATIENCE = 1800.0  # seconds for which a replica waits for another one, which may evaluate
FOLDER = "ADL_DIST_REPLICAS"  # where the replicas meet; set where this process is one of them


def start(kind: str, inner_updates: int | None, words: Sequence[str]) -> None:
    """Start the replicas, wait for them, and write the run folder."""
    config, plain = compose_run(words)
    assert config.run_dir is not None
    folder, K = Path(config.run_dir), config.partition.num_stages
    make_folder(folder)
    contender = kind if inner_updates is None else f"{kind} H={inner_updates}"
    with write_atomically(folder / CONFIG) as unfinished:
        unfinished.write_text(yaml.safe_dump({**plain, CONTENDER: contender}, sort_keys=False))
    for file in (METRICS, SUMMARY, DIVERGED):  # of a run that was interrupted: this one starts from the beginning
        (folder / file).unlink(missing_ok=True)
    named = [kind, *([str(inner_updates)] if inner_updates else [])]
    with tempfile.TemporaryDirectory(prefix="adl-dist-replicas-") as place:
        shared = {FOLDER: place, "OMP_NUM_THREADS": str(config.threads), GLOO: loopback() or ""}
        command = [sys.executable, "-m", "benchmarks.race.replicas", *named, *words]
        ranks = [
            Child(
                command=command,
                log=folder / "logs" / f"rank{r}.log",
                environment={**shared, "RANK": str(r), "LOCAL_RANK": str(r)},  # the latter says which GPU
            )
            for r in range(K)
        ]
        run_together(ranks)


def train(rank: int, kind: Kind, inner_updates: int | None, config: RunConfig, place: str) -> None:
    """Train as one of the replicas; the first one evaluates and writes."""
    size, batch = config.partition.num_stages, config.train.batch_size
    device, dtype = choose_device(config.runtime.device), getattr(torch, config.dtype)
    whole, validation = cast(tuple[Any, Any], instantiate.build_data(config.data))
    updates_per_epoch = len(whole) // batch
    tune_malloc()
    with instantiate.precision(config).apply(threads=config.runtime.threads or 1):
        model = in_dtype(instantiate.build_model(config), dtype, device)
        if config.runtime.channels_last:
            in_memory_format(model, channels_last=True)
        loss_fn = instantiate.build_loss(config)
        if isinstance(loss_fn, nn.Module):
            loss_fn.to(device, dtype)
        optimizer = instantiate.build_optimizer(config)(list(model.parameters()))
        length = {"updates_per_epoch": updates_per_epoch, "total_updates": updates_per_epoch * config.train.epochs}
        training = Training(
            device=device,
            num_updates=updates_per_epoch,
            micro_batches=1,
            loss_fn=loss_fn,
            optimizer=optimizer,
            lr_schedule=build_lr_schedule(instantiate.lr_schedule(config), optimizer, **length),
        )
        with joined(rank, size, device=device, rendezvous=f"file://{place}/store", timeout_seconds=PATIENCE):
            torch.manual_seed(config.seed + rank)  # dropout differs between replicas; weights are made already
            replica = replica_of(kind, model, training, inner_updates)
            outer = training.after_step if isinstance(training.after_step, OuterStep) else None
            for epoch in range(config.train.epochs):
                share, shuffle = share_of_epoch(kind, rank, size, config, whole, epoch=epoch)
                loader = instantiate.device_loader(config, device, shuffle=shuffle, dataset=share)
                sizes = [batch // size] * updates_per_epoch
                train_alone(replica, cast(Iterator[tuple[Tensor, Tensor]], loader.batches(epoch, sizes)), training)
                done = (epoch + 1) * updates_per_epoch
                metrics = _evaluated(model, outer, validation, config, training) if rank == 0 else {}
                loss = broadcast_number(metrics.get("loss", 0.0), device)
                if rank == 0:
                    _record(config, metrics, epoch=epoch, updates=outer.last if outer else done, done=done)
                if not math.isfinite(loss):
                    break


def _evaluated(
    model: nn.Module, outer: OuterStep | None, validation: Dataset[Any], config: RunConfig, training: Training
) -> dict[str, float]:
    """Return the loss and, for classes, the accuracy on ``validation``, of DiLoCo's common weights."""
    if outer is not None:
        with outer.common_weights():
            return evaluated(model, validation, config, training)
    return evaluated(model, validation, config, training)


@torch.no_grad()
def evaluated(model: nn.Module, validation: Dataset[Any], config: RunConfig, training: Training) -> dict[str, float]:
    """Return the mean loss of ``model`` over all samples of ``validation`` and, for classes, the accuracy."""
    num, batch = len(validation), config.train.batch_size  # type: ignore[arg-type]  # a dataset with indices
    sizes = [batch] * (num // batch) + [num % batch] * (num % batch > 0)
    loader = instantiate.device_loader(config, training.device, shuffle=False, dataset=validation)
    loss, correct, classed = 0.0, 0, 0
    model.eval()
    for input_, target in cast(Iterator[tuple[Tensor, Tensor]], loader.batches(0, sizes)):
        target = target.to(training.device)
        output = model(input_)
        loss += training.loss_fn(output, target).item() * len(target) / num
        if isinstance(output, Tensor) and output.ndim == 2 and target.ndim == 1 and not target.is_floating_point():
            correct, classed = correct + int((output.argmax(1) == target).sum()), classed + len(target)
    model.train()
    return {"loss": loss, **({"accuracy": correct / classed} if classed else {})}


def _record(config: RunConfig, metrics: dict[str, float], *, epoch: int, updates: int, done: int) -> None:
    """Append the validation after an epoch, whose weights know of so many ``updates``; at the end the summary."""
    folder = Path(str(config.run_dir))
    if not math.isfinite(metrics["loss"]):
        with write_atomically(folder / DIVERGED) as unfinished:
            unfinished.write_text(json.dumps({"update": done - 1, "epoch": epoch}) + "\n")
        return
    lines = [
        json.dumps({"name": f"validation/{name}", "value": value, "update": updates - 1, "epoch": epoch}) + "\n"
        for name, value in metrics.items()
    ]
    with (folder / METRICS).open("a") as file:
        file.writelines(lines)
    if epoch + 1 == config.train.epochs:
        summary = {"epochs": epoch + 1, "updates": done, **{f"validation_{k}": v for k, v in metrics.items()}}
        with write_atomically(folder / SUMMARY) as unfinished:
            unfinished.write_text(json.dumps(summary) + "\n")


def main(arguments: list[str]) -> None:
    """Run as the parent of the replicas or as one of them; an error is one line, and exit code 1."""
    end_with_launcher()
    kind, rest = arguments[0], arguments[1:]
    inner_updates = int(rest.pop(0)) if rest and rest[0].isdigit() else None
    try:
        if kind not in REPLICAS:
            raise ConfigError(f"there is no kind '{kind}' of replicas; choose of {', '.join(REPLICAS)}")
        if (place := os.environ.get(FOLDER)) is None:
            start(kind, inner_updates, rest)
        else:
            config, _ = compose_run(rest)
            train(int(os.environ["RANK"]), kind, inner_updates, config, place)
    except (AdlError, ChildFailed) as error:
        sys.stderr.write(f"adl-dist: error: {' '.join(str(error).split())}\n")
        sys.stderr.flush()
        os._exit(1)  # must not wait in some destructor for peers that wait for it


if __name__ == "__main__":
    main(sys.argv[1:])
