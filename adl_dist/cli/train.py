"""``adl-dist train`` and ``evaluate``."""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

import torch

from adl_dist.checkpoint.identity import class_name
from adl_dist.checkpoint.policy import CheckpointPolicy
from adl_dist.checkpoint.run_dir import RunFolder, chosen_checkpoint
from adl_dist.cli.config import instantiate
from adl_dist.cli.config.compose import content_of, is_of_script, print_keys, renamed_words, with_values
from adl_dist.cli.config.schema import RunConfig
from adl_dist.cli.run_folder import OF_MODEL, named_folder, wants_averages
from adl_dist.cli.sweep import command as sweep
from adl_dist.cli.sweep.request import Sweep, requested
from adl_dist.distributed import parent_process
from adl_dist.distributed.affinity import num_cores
from adl_dist.distributed.device import check_device, set_for_nccl
from adl_dist.distributed.network import check_named_interfaces
from adl_dist.distributed.world import launched_rank, launched_world_size
from adl_dist.errors import ConfigError, DivergedError, Exit
from adl_dist.launch.local import launch_local
from adl_dist.report import announced, final_table, say, tell
from adl_dist.report.page import REPORT

MANY = 4  # processes for each core, from which on the model is read first, to see whether it has so many stages


def train(overrides: list[str]) -> None:
    """Run ``adl-dist train`` as a rank, a parent of ranks, or a sweep."""
    if {"-h", "--help"} & set(overrides):
        print_keys([each for each in overrides if each not in ("-h", "--help")])
        return
    overrides = renamed_words(overrides)  # once: the ranks and runs that are started get the present names
    asked_for = requested(overrides)
    if isinstance(asked_for, Sweep):
        raise Exit(sweep.run(asked_for))
    config, plain = asked_for
    assert config.run_dir is not None
    folder, here = RunFolder(config.run_dir), Path.cwd()  # before the user's code may change the working directory
    instantiate.check_targets(config)
    if launched_world_size() is not None and config.runtime.device == "cuda":
        set_for_nccl()
    check_device(config.runtime.device)
    num_processes, stands_alone = config.pipeline.num_processes, not parent_process.is_part_of_more()
    starts_ranks = config.runtime.processes and num_processes > 1 and launched_world_size() is None
    if launched_world_size() is None:  # otherwise only rank 0 may see it
        folder.check(plain, resume=config.resume, waits=not starts_ranks)
    if starts_ranks:
        os.chdir(here)
        raise Exit(_run_ranks(config, ["train", *with_values(overrides, plain)], passes_stops_on=stands_alone))
    trainer = instantiate.trainer(config, handle_signals=stands_alone)
    train_data, val_data = instantiate.build_data(config.data) if trainer.needs_data else (None, None)
    try:
        summary = trainer.fit(
            train_data,
            epochs=config.train.epochs,
            batch_size=config.train.batch_size,
            val_dataset=val_data,
            run_dir=folder.place,
            resume=config.resume,
            max_updates=config.train.max_updates,
            eval_every_updates=config.train.eval_every_updates,
            shuffle=config.data.get("shuffle", True),
            num_workers=config.data.get("num_workers", 0),
            loading=instantiate.loading(config, train_data),
            checkpoints=config.build(CheckpointPolicy),
            monitoring=instantiate.monitoring(config),
            callbacks=instantiate.callbacks(config),
            config=plain,
        )
    except DivergedError as error:
        folder.write_divergence(error)
        raise
    if launched_rank() == 0:
        say(_ending(summary, config))
    if "stopped" in summary:
        if launched_world_size() is None:
            raise Exit(parent_process.STOPPED_CODE)
        # Under a launcher the code would count as a failure.
        parent_process.flag_stopped()


def _run_ranks(config: RunConfig, command: list[str], *, passes_stops_on: bool) -> int:
    """Start the processes of a run here, and return their exit code."""
    check_named_interfaces()
    num_processes, num_restarts = config.pipeline.num_processes, config.runtime.max_restarts
    if num_processes > MANY * num_cores():  # to start them takes longer than to read the model here
        with announced("looking for the places where the model can be cut"):
            sweep.check_cut(config, has_data=True)
    say(f"starting {num_processes} processes on {num_cores()} cores ...")
    return launch_local(
        command, num_processes=num_processes, max_restarts=num_restarts, passes_stops_on=passes_stops_on
    )


def evaluate(arguments: list[str]) -> None:
    """Run ``adl-dist evaluate``: evaluate a checkpoint in this process, uncut."""
    run_dir, options, words = named_folder("evaluate", arguments, ("checkpoint", "ema"), groups=OF_MODEL)
    config = instantiate.run_with(run_dir, words)
    _check_loss(run_dir, config, words)
    if config.runtime.device == "cuda" and not torch.cuda.is_available():
        config.runtime.device = "cpu"
        note = "has runtime.device=cuda, but torch finds no CUDA device here; computing on the CPU"
        tell(sys.stderr, f"adl-dist: {run_dir} {note}\n")
    path = chosen_checkpoint(run_dir, options.get("checkpoint"))
    trainer = instantiate.evaluator(config)
    trainer.load_checkpoint(path, ema=wants_averages(options))
    _, val_data = instantiate.build_data(config.data)
    micro_batch_size = config.train.batch_size // config.method.micro_batches_per_update
    how = {"num_workers": config.data.get("num_workers", 0), "loading": instantiate.loading(config, None)}
    metrics = trainer.evaluate(val_data, batch_size=micro_batch_size, **how)
    shown = [f"{n.replace('_', ' ')} {v:{'.2%' if n.endswith('accuracy') else '.4f'}}" for n, v in metrics.items()]
    say(f"{path}: {', '.join(shown)}, {len(val_data)} samples")  # type: ignore[arg-type]


def _check_loss(run_dir: PurePath, config: RunConfig, words: Sequence[str]) -> None:
    """Refuse the default loss for a script's run that was trained with another."""
    plain = content_of(run_dir)
    if not is_of_script(plain) or any(word.startswith("loss") for word in words):
        return
    name = plain["loss"]["name"]
    if name not in (class_name(instantiate.build_loss(config)), class_name(torch.nn.functional.cross_entropy)):
        raise ConfigError(
            f"{run_dir} is the run of a script whose loss was {name}; add loss._target_=MODULE.NAME, which makes it or "
            "is it, and its arguments, or loss=cross_entropy to evaluate by torch's cross-entropy"
        )


def _ending(summary: Mapping[str, Any], config: RunConfig) -> str:
    lines, run_dir = [final_table(summary)], config.run_dir
    if "ended_by" in summary:
        lines += ["", f"ended by {summary['ended_by']}"]
    if "stopped" in summary:
        return lines[0]
    lines += ["", f"run folder       {run_dir}"]
    if config.runtime.report:
        lines.append(f"report           {run_dir}/{REPORT}")
    if config.runtime.tensorboard:
        lines.append(f"learning curves  tensorboard --logdir {Path(str(run_dir)).parent}")
    return "\n".join([*lines, f"plain weights    adl-dist export run_dir={run_dir} out=model.pt"])
