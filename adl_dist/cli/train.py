"""``adl-dist train``."""

import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from adl_dist.checkpoint.policy import CheckpointPolicy
from adl_dist.checkpoint.run_dir import RunFolder
from adl_dist.cli import sweep
from adl_dist.cli.config import instantiate
from adl_dist.cli.config.compose import print_keys, renamed_words, with_values
from adl_dist.cli.config.schema import RunConfig
from adl_dist.distributed import parent_process
from adl_dist.distributed.affinity import num_cores
from adl_dist.distributed.device import check_device, set_for_nccl
from adl_dist.distributed.network import check_named_interfaces
from adl_dist.distributed.world import launched_rank, launched_world_size
from adl_dist.errors import DivergedError, Exit
from adl_dist.launch.local import launch_local
from adl_dist.report import announced, final_table, say
from adl_dist.report.page import REPORT

MANY = 4  # processes for each core, from which on the model is read first, to see whether it has so many stages


def train(overrides: list[str]) -> None:
    """Run ``adl-dist train`` as a rank, a parent of ranks, or a sweep."""
    if {"-h", "--help"} & set(overrides):
        print_keys([each for each in overrides if each not in ("-h", "--help")])
        return
    overrides = renamed_words(overrides)  # once: the ranks and runs that are started get the present names
    asked_for = sweep.requested(overrides)
    if isinstance(asked_for, sweep.Sweep):
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
            instantiate.check_cut(config)
    say(f"starting {num_processes} processes on {num_cores()} cores ...")
    return launch_local(
        command, num_processes=num_processes, max_restarts=num_restarts, passes_stops_on=passes_stops_on
    )


def _ending(summary: Mapping[str, Any], config: RunConfig) -> str:
    lines, run_dir = [final_table(summary)], str(config.run_dir)
    if "stopped" in summary:
        return lines[0]
    lines += ["", f"run folder       {run_dir}"]
    if config.runtime.report:
        lines.append(f"report           {run_dir}/{REPORT}")
    if config.runtime.tensorboard:
        lines.append(f"learning curves  tensorboard --logdir {shlex.quote(run_dir.rpartition('/')[0] or '.')}")
    return "\n".join([*lines, f"plain weights    adl-dist export run_dir={shlex.quote(run_dir)} out=model.pt"])
