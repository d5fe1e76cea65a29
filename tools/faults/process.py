"""One start of a run, as if it were a process of its own, with whatever was planted into it."""

import io
import shutil
from contextlib import ExitStack, redirect_stderr
from pathlib import Path
from typing import Any
from unittest.mock import patch

from adl_dist import Trainer, engine
from adl_dist.checkpoint import async_save
from adl_dist.control import run_socket, worker
from adl_dist.control.requests import Ask
from adl_dist.engine import StageContext
from adl_dist.schedule import Action
from adl_dist.training import build
from tools.faults.background import Background
from tools.faults.disk import Died, Disk, DiskFault, Event
from tools.faults.jobs import Job
from tools.faults.order import Clock, WatchedChannel
from tools.faults.plan import Attempt, StageBroke, Step, StepFault


class Process:
    """One start of a run as a process of its own: what it does to the disk after its death has not been done."""

    def __init__(self, job: Job, run_dir: Path, attempt: Attempt) -> None:
        self._job, self._run_dir, self._attempt = job, run_dir, attempt
        self._as_it_died = run_dir.with_name(f"{run_dir.name}-as-it-died")
        fault = attempt.fault
        self._disk = Disk(run_dir, fault if isinstance(fault, DiskFault) else None, self._die)
        self._fatal_step: int | None = None
        self._background = Background(seed=attempt.weather.seed, most_late=attempt.weather.most_late)
        self.is_dead = False
        self.num_steps = 0

    def run(self, *, steps_left: int) -> tuple[Trainer, dict[str, Any]]:
        """Train to the end, ``steps_left`` actions from here, more or less; return trainer and summary."""
        if isinstance(self._attempt.fault, StepFault):
            self._fatal_step = int(self._attempt.fault.share * steps_left)
        clock = Clock(self._attempt.weather)
        with ExitStack() as stack:
            stack.enter_context(patch.object(engine, "step", self._stepping(engine.step)))
            stack.enter_context(patch.object(worker, "replay", clock.replay))
            stack.enter_context(patch.object(build, "LocalChannel", WatchedChannel))
            stack.enter_context(patch.object(async_save, "threading", self._background.threading))
            # Nobody asks this run anything, and its listener takes a twentieth of a second to end.
            stack.enter_context(patch.object(run_socket.LiveControl, "start", lambda self: None))
            stack.enter_context(redirect_stderr(io.StringIO()))  # warnings
            stack.enter_context(self._disk.watched())
            return self._job.train(self._run_dir, self._begin)

    def _begin(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def bury(self) -> None:
        """Leave the folder as it was when the process died."""
        shutil.rmtree(self._run_dir)
        self._as_it_died.rename(self._run_dir)

    @property
    def events(self) -> dict[str, list[Event]]:
        """What it did to the disk."""
        return self._disk.events

    @property
    def struck(self) -> str:
        """Where the fault came; nothing if it did not."""
        if self._fatal_step is not None:
            return f"before action {self._fatal_step}" if self.num_steps > self._fatal_step else ""
        return str(self._disk.struck or "")

    @property
    def disk_failures(self) -> list[OSError]:
        """What the disk told it."""
        return self._disk.failures

    def _stepping(self, step: Any) -> Any:
        def stepped(action: Action, context: StageContext) -> None:
            if self.is_dead:
                raise Died
            self._background.tick()
            self.num_steps += 1
            if self.num_steps - 1 == self._fatal_step:
                assert isinstance(self._attempt.fault, StepFault)
                match self._attempt.fault.what:
                    case Step.KILLED:
                        raise self._die()
                    case Step.RAISES:
                        raise StageBroke(f"stage {context.stage.index} at {action}")
                    case Step.ASKED_TO_STOP:
                        self._trainer.requests.ask(Ask.STOP, "the simulation")
            step(action, context)

        return stepped

    def _die(self) -> Died:
        self.is_dead = True
        self._disk.end()
        self._background.end()
        shutil.copytree(self._run_dir, self._as_it_died)
        return Died()
