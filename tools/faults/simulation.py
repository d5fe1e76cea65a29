"""One seed: a run that is disturbed, started again as often as it takes, and compared with the undisturbed one."""

import errno
import os
import shutil
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import torch

from adl_dist.checkpoint import layout
from adl_dist.checkpoint.run_dir import log_to
from adl_dist.errors import AdlError, CheckpointError
from tests.support.kill import RunEnd
from tools.faults.jobs import draw_job
from tools.faults.plan import Attempt, StageBroke, Step, StepFault, draw_plan
from tools.faults.process import Process

SEEDS_PER_JOB = 10
MOST_STARTS = 10
CALM = Attempt()
MEMORY = Path("/dev/shm")


@dataclass
class Story:
    """What was planted into a seed's run, and what came of it."""

    seed: int
    lines: list[str]
    struck: list[str] = field(default_factory=list)  # the kinds of faults that came
    wrong: str = ""  # what should not have happened; nothing if all is well


def simulate(seed):
    """Disturb the run of ``seed`` and start it again until it ends."""
    with folder() as scratch:
        story = _Simulation(seed, scratch / "run").run()
    story.lines.append(f"  {story.wrong or 'as the undisturbed run'}")
    return story


@lru_cache(maxsize=2)
def undisturbed(number):
    """The run of a job that nothing happens to: its weights, and what it left."""
    with folder() as scratch:
        process = Process(draw_job(number), scratch / "run", CALM)
        trainer, _ = process.run(steps_left=0)
        return trainer.full_state_dict(), RunEnd(scratch / "run"), process


@contextmanager
def folder():
    """A folder in memory where there is such a place; no log of a run in it stays open."""
    where = MEMORY if os.access(MEMORY, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="adl-dist-faults-", dir=where) as name:
        try:
            yield Path(name)
        finally:
            log_to(None)


class _Simulation:
    """The starts of one seed's run in ``run_dir``."""

    def __init__(self, seed, run_dir):
        number = seed // SEEDS_PER_JOB
        self._job, self._run_dir = draw_job(number), run_dir
        self._weights, self._expected, self._whole = undisturbed(number)
        self._plan = draw_plan(seed, num_events=self._whole.disk.num_events, stops=self._job.stops_as_planned)
        self._story = Story(seed, [f"seed {seed}: {self._job}"])
        self._is_whole = True  # whether every checkpoint and every record must be there
        self._spoilt = {}  # damaged files of checkpoints, from which no run should continue

    def run(self):
        for start in range(MOST_STARTS):
            attempt = self._plan[start] if start < len(self._plan) else CALM
            self._story.lines.append(f"  start {start + 1}: {attempt}")
            if self._is_over(attempt):
                return self._story
        self._story.wrong = f"not at its end after {MOST_STARTS} starts"
        return self._story

    def _is_over(self, attempt):
        """Start the run once; return whether it has ended, as it should or with something wrong."""
        story = self._story
        self._damage(attempt.damage)
        saved = layout.complete(self._run_dir / "checkpoints")
        done = int(saved[-1].name[-8:]) / int(self._expected.checkpoints[-1][-8:]) if saved else 0.0  # update-00000042
        process, error, summary = Process(self._job, self._run_dir, attempt), None, {}
        try:
            trainer, summary = process.run(steps_left=int(self._whole.num_steps * (1 - done)))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as raised:
            error = raised
        if process.struck:
            story.struck.append(_kind(attempt))
            story.lines.append(f"    struck: {process.struck}")
        stopped, is_dead = summary.get("stopped"), process.disk.is_dead
        how = "killed" if is_dead else repr(error) if error else f"stopped: {stopped}" if stopped else "ended"
        story.lines.append(f"    {how}")
        if is_dead:
            process.bury()
        elif error is None and process.disk.failures:
            self._is_whole = False  # and whatever could not be written at the end is due at the next start
        elif stopped:
            is_asked = isinstance(attempt.fault, StepFault) and attempt.fault.what is Step.ASKED_TO_STOP
            if stopped["drain_changed_result"] or not is_asked:
                story.wrong = "stopped, which nothing of what was planted explains"
        elif error is None:
            weights = trainer.full_state_dict()
            wrong = [f"weights: {name}" for name, w in self._weights.items() if not torch.equal(w, weights[name])]
            wrong += RunEnd(self._run_dir).differences(self._expected, is_whole=self._is_whole)
            story.wrong = ", ".join(wrong)
            return True
        elif _is_refusal(error, self._run_dir) and {file.parent for file in self._spoilt}.issuperset(saved):
            shutil.rmtree(self._run_dir)  # "start again with another run_dir"
            self._spoilt.clear()
        elif not isinstance(error, StageBroke) and not _is_due(error, process):
            story.wrong = f"ended with {error!r}, which nothing of what was planted explains"
        return bool(story.wrong)

    def _damage(self, damage):
        """Damage a file of the newest checkpoint, if there is one."""
        # A checkpoint that was saved there again is a good one.
        self._spoilt = {f: held for f, held in self._spoilt.items() if f.is_file() and f.read_bytes() == held}
        saved = layout.complete(self._run_dir / "checkpoints")
        files = sorted(file for file in saved[-1].iterdir() if file.stat().st_size) if saved else []
        if damage is None or not files:
            return
        file = files[int(damage.file * len(files))]
        content = bytearray(file.read_bytes())
        place = int(damage.place * len(content))
        if damage.flips:
            content[place] ^= 1
        file.write_bytes(content if damage.flips else content[:place])
        self._is_whole = False
        self._spoilt[file] = file.read_bytes()
        self._story.struck.append("checkpoint damaged")
        self._story.lines.append(f"    damaged: {file}")


def _kind(attempt):
    if isinstance(attempt.fault, StepFault):
        return f"{attempt.fault.what.value} between actions"
    how = errno.errorcode[attempt.fault.error] if attempt.fault.error else "killed"
    return f"{how} while writing {attempt.fault.place}"


def _is_refusal(error, run_dir):
    """Whether ``error`` says that there is no good checkpoint, and what to do."""
    text = str(error)
    names = "is damaged: " in text and str(run_dir / "checkpoints") in text
    return isinstance(error, CheckpointError) and names and text.endswith("start again with another run_dir")


def _is_due(error, process):
    """Whether ``error`` follows from what was planted, and says so."""
    causes = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(cause)
    is_planted = any("(planted)" in str(cause) for cause in causes)
    return bool(process.disk.failures) and is_planted and isinstance(error, OSError | AdlError)
