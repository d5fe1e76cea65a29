"""The outputs of a run: checkpoints, records, display and callbacks."""

import json
import os
import platform
import shlex
import socket
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from adl_dist import __version__
from adl_dist.checkpoint.policy import CheckpointPolicy
from adl_dist.control.callback_queue import CallbackQueue
from adl_dist.control.coordinator import CheckpointContext
from adl_dist.control.messages import Summary
from adl_dist.control.worker import LocalWorker
from adl_dist.errors import ConfigError
from adl_dist.partition.imbalance import is_uneven
from adl_dist.report import MetricsWriter, Progress, say, tell, warn
from adl_dist.report.callbacks import Callbacks
from adl_dist.report.files import write_atomically
from adl_dist.report.recorder import TENSORBOARD
from adl_dist.report.runs import START, flatten
from adl_dist.report.tables import counted
from adl_dist.stage import TrainSpec
from adl_dist.stage.metrics import metrics_of
from adl_dist.training.options import Monitoring
from adl_dist.training.partitioned_model import PartitionedModel
from adl_dist.wording import worded

# Of a script's model, under torchrun.
APART = (
    "note: the model of each process holds the trained weights of its own stage only, also for callbacks; "
    "trainer.full_state_dict(), called on every rank after fit, has all"
)
OF_RANK_0 = ""  # the run folder of a rank that was given none: rank 0's, if it has one


@dataclass(frozen=True)
class Outputs:
    """The settings of checkpoints and records, and the user's callbacks."""

    checkpoints: CheckpointPolicy = field(default_factory=CheckpointPolicy)
    monitoring: Monitoring = field(default_factory=Monitoring)
    callbacks: Callbacks = field(default_factory=Callbacks)
    callback_queue: CallbackQueue = field(default_factory=CallbackQueue)
    notes: list[str] = field(default_factory=list)  # further lines for the user at the start

    def by_loss(self) -> "Outputs":
        """Let the loss choose the best weights, if no metric is named."""
        self.callbacks.follow_loss = True
        best = self.checkpoints.best_metric or "validation_loss"
        return replace(self, checkpoints=replace(self.checkpoints, best_metric=best))

    def check(
        self,
        run_dir: str | os.PathLike[str] | None,
        resume: str,
        spec: TrainSpec,
        *,
        is_distributed: bool,
    ) -> None:
        """Raise ConfigError for an output that this run cannot make."""
        monitoring, pipeline = self.monitoring, spec.pipeline
        given = {f"resume={resume}": resume != "auto", "trace=True": monitoring.trace, "loggers": monitoring.loggers}
        given["runtime.checkpoint_every_updates"] = self.checkpoints.every_updates
        if run_dir is None and (needing := [name for name, is_given in given.items() if is_given]):
            raise ConfigError(f"{needing[0]} needs a run_dir, but there is none; give one, or omit it")
        num_processes = pipeline.num_processes if is_distributed else 1
        if monitoring.memory and num_processes < pipeline.num_stages:
            raise ConfigError(
                f"runtime.profile_memory=true measures a process, but {pipeline.num_stages} stages share "
                f"{num_processes}; start one for each stage (runtime.processes=true, torchrun, and "
                "method.stages_per_process=1), or omit it"
            )
        for goal in (self.checkpoints.goal, *self.callbacks.goals):
            goal.check([metric.name for metric in metrics_of(spec.metrics, None)])

    def check_validation(self, has_validation: bool, every: int | None, *, saves: bool) -> None:
        """Raise ConfigError for an output that needs a missing validation.

        ``every`` is ``eval_every_updates``. With ``saves`` there are checkpoints, of which one may be the best.
        """
        given = {"runtime.keep_best=true": saves and self.checkpoints.keep_best, "EarlyStopping": self.callbacks.goals}
        given["train.eval_every_updates"] = every
        if not has_validation and (needing := [name for name, is_given in given.items() if is_given]):
            raise ConfigError(f"{needing[0]} needs a validation dataset, but there is none; give one, or omit it")

    def recorder(self, saving: CheckpointContext | None) -> MetricsWriter:
        """Return the recorder; it writes nothing if the run saves nothing."""
        if saving is None:
            return MetricsWriter(None)
        loggers = [*self.monitoring.loggers]
        if self.monitoring.tensorboard and TENSORBOARD not in loggers:
            loggers.insert(0, TENSORBOARD)
        settings = flatten(saving.config)
        shapes = {key for key, value in settings.items() if key.startswith("model.") and isinstance(value, list)}
        return MetricsWriter(
            saving.folder.path,
            loggers=loggers,
            settings={key: value for key, value in settings.items() if key not in shapes},
            stages_every=self.monitoring.stage_records_every,
            call=self.callback_queue.put,
        )

    def progress(
        self,
        worker: LocalWorker,
        partitioned: PartitionedModel,
        saving: CheckpointContext | None,
        eval_every_updates: int | None,
    ) -> Progress:
        """Return the display of the run; on rank 0 show notes about the cut."""
        pipeline = worker.pipeline
        progress = Progress(num_stages=pipeline.num_stages, quiet=self.monitoring.quiet, unit=worker.unit)
        if worker.world.rank > 0:
            return progress
        for note in (*self.notes, *partitioned.notes):
            progress.note(note)
        if eval_every_updates is not None and not pipeline.drain_is_exact:
            progress.note(
                f"note: train.eval_every_updates={eval_every_updates} empties the pipeline in mid-epoch, so gradients "
                "are less stale afterwards, and values differ from those of a run without"
            )
        if partitioned.warning is not None:
            warn(f"{partitioned.warning}; so {pipeline.num_stages} stages are hardly faster than one")
        if saving is not None:
            _write_start(saving.folder.path, worker, partitioned)
        return progress

    def tell_end(self, summary: Summary, epochs: int, *, is_measured: bool) -> None:
        """Print the cause of a stop, or a note that the cut is uneven.

        There is no note if the cut ``is_measured``, because it cannot be better.
        """
        if (stopped := summary.get("stopped")) is not None:
            complete = f"{stopped['epoch']} of {epochs} epochs complete"
            where = f"stopped at update {stopped['update']} ({complete}) by {stopped['why']}"
            note = (
                "; the pipeline was emptied in mid-epoch, so values will differ from those of a run that was not "
                "stopped (runtime.checkpoint_every_updates avoids that)"
            ) * stopped["drain_changed_result"]
            saved = "nothing is saved, because there is no run_dir"
            if stopped["checkpoint"] is not None:
                saved = f"saved {stopped['checkpoint']}; the same command resumes it{note}"
            tell(sys.stderr, worded(f"adl-dist: {where}; {saved}\n"))
            return
        if "ended_by" in summary and not self.monitoring.quiet:
            say(f"ended by {summary['ended_by']}")
        loads = [stage["busy_share"] for stage in summary["stages"]]
        if len(loads) > 1 and is_uneven(loads) and not is_measured and not self.monitoring.quiet:
            busy = ", ".join(f"{load:.0%}" for load in loads)
            say(
                f"note: stages were busy {busy} of the time: the cut is uneven; partition.balance=auto measures it, "
                "and cuts where it is best"
            )


def _write_start(folder: Path, worker: LocalWorker, partitioned: PartitionedModel) -> None:
    """Write the facts about a start that the report shows."""
    device, size = worker.world.device, worker.world.size
    program = "adl-dist" if Path(sys.argv[0]).name in ("__main__.py", "adl-dist") else sys.argv[0]
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    threads = "" if device.type == "cuda" else f", {counted(torch.get_num_threads(), 'thread')} each"
    facts = {
        "command": shlex.join([program, *sys.argv[1:]]),
        "host": socket.gethostname(),
        "device": f"{device.type} ({name}), {size} process{'es' * (size > 1)}{threads}",
        "parameters": partitioned.num_parameters,
        "stages": partitioned.stage_units,
        "software": f"adl_dist {__version__}, torch {torch.__version__}, Python {platform.python_version()}",
    }
    try:
        with write_atomically(folder / START) as unfinished:
            unfinished.write_text(json.dumps(facts) + "\n")
    except OSError as error:
        warn(f"{folder / START} cannot be written ({error.strerror}); the report will lack these facts")
