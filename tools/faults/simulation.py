"""One seed: a run that is disturbed, started again as often as it takes, and compared with the undisturbed one."""

import errno
import json
import logging
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adl_dist import Trainer
from adl_dist.checkpoint import layout
from adl_dist.errors import AdlError, CheckpointError
from adl_dist.report.recorder import METRICS
from tools.faults.disk import DiskFault
from tools.faults.jobs import draw_job
from tools.faults.order import Weather
from tools.faults.plan import Attempt, Damage, StageBroke, Step, StepFault, draw_plan
from tools.faults.process import Process

SEEDS_PER_JOB = 10
MOST_STARTS = 10
CALM = Attempt(weather=Weather(seed=0))
TIMINGS = ("train/samples_per_second", "stage/busy_share", "stage/peak_memory")  # the only values that may differ
UNREADABLE = "unreadable"
OF_FAILURES = (UNREADABLE, "checkpoint/failed")
MEMORY = Path("/dev/shm")


@dataclass
class End:
    """What a run has in the end.

    Attributes:
        weights: of the model.
        checkpoints: their names, oldest first.
        newest: the tensors of the newest, optimizer state among them, as they are stored.
        values: of metrics.jsonl; those that measure time and memory are 0.
    """

    weights: dict[str, Tensor]
    checkpoints: list[str]
    newest: dict[str, bytes]
    values: dict[tuple[Any, ...], float]


@dataclass
class Story:
    """What happened to a seed.

    Attributes:
        seed: it.
        lines: what was planted and what came of it.
        struck: the kinds of faults that came.
        wrong: what should not have happened; nothing if all is well.
    """

    seed: int
    lines: list[str] = field(default_factory=list)
    struck: list[str] = field(default_factory=list)
    wrong: str = ""


def simulate(seed: int) -> Story:
    """Disturb the run of ``seed`` and start it again until it ends."""
    number = seed // SEEDS_PER_JOB
    job, (expected, whole) = draw_job(number), undisturbed(number)
    num_events = {place: len(events) for place, events in whole.events.items()}
    plan = draw_plan(seed, num_stages=job.num_stages, num_events=num_events, stops=job.stops_as_planned)
    story = Story(seed, [f"seed {seed}: {job}"])
    total_updates = int(expected.checkpoints[-1].removeprefix("update-"))
    is_whole = True  # whether every checkpoint and every record must be there
    spoilt: dict[Path, bytes] = {}  # files of checkpoints that nobody should go on from, and what they hold
    with folder() as scratch:
        run_dir = scratch / "run"
        for start in range(MOST_STARTS):
            attempt = plan[start] if start < len(plan) else CALM
            # A checkpoint that was saved there again is a good one.
            spoilt = {file: held for file, held in spoilt.items() if file.is_file() and file.read_bytes() == held}
            damaged = _damage(run_dir, attempt.damage) if attempt.damage is not None else None
            if damaged is not None:
                is_whole = False
                spoilt[damaged] = damaged.read_bytes()
            saved = layout.complete(run_dir / "checkpoints")
            done = int(saved[-1].name.removeprefix("update-")) / total_updates if saved else 0.0
            process, error = Process(job, run_dir, attempt), None
            try:
                trainer, summary = process.run(steps_left=int(whole.num_steps * (1 - done)))
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as raised:
                error = raised
            story.lines.append(f"  start {start + 1}: {attempt}")
            if damaged is not None:
                story.struck.append("checkpoint damaged")
                story.lines.append(f"    damaged: {damaged}")
            if process.struck:
                story.struck.append(_kind(attempt))
                story.lines.append(f"    struck: {process.struck}")
            stopped = summary.get("stopped") if error is None else None
            how = (
                "killed" if process.is_dead else repr(error) if error else f"stopped: {stopped}" if stopped else "ended"
            )
            story.lines.append(f"    {how}")
            if process.is_dead:
                process.bury()
            elif error is None and process.disk_failures:
                is_whole = False  # and whatever could not be written at the end is due at the next start
            elif stopped:
                if stopped["drain_changed_result"] or not _is_asked_to_stop(attempt):
                    story.wrong = f"start {start + 1} stopped, which nothing of what was planted explains"
                    break
            elif error is None:
                story.wrong = _differences(end_of(trainer, run_dir), expected, run_dir, is_whole=is_whole)
                break
            elif _is_refusal(error, run_dir) and {file.parent for file in spoilt}.issuperset(saved):
                shutil.rmtree(run_dir)  # "start again with another run_dir"
                spoilt.clear()
            elif not _is_due(error, process):
                story.wrong = f"start {start + 1} ended with {error!r}, which nothing of what was planted explains"
                break
        else:
            story.wrong = f"not at its end after {MOST_STARTS} starts"
    story.lines.append(f"  {story.wrong or 'as the undisturbed run'}")
    return story


@lru_cache(maxsize=2)
def undisturbed(number: int) -> tuple[End, Process]:
    """The run of a job that nothing happens to."""
    with folder() as scratch:
        process = Process(draw_job(number), scratch / "run", CALM)
        trainer, _ = process.run(steps_left=0)
        return end_of(trainer, scratch / "run"), process


def end_of(trainer: Trainer, run_dir: Path) -> End:
    """What ``trainer`` and ``run_dir`` hold."""
    saved = layout.complete(run_dir / "checkpoints")
    return End(
        weights=trainer.full_state_dict(),
        checkpoints=[path.name for path in saved],
        newest={file.name: file.read_bytes() for file in saved[-1].glob("*.safetensors")},
        values=_values(run_dir / METRICS),
    )


def _values(metrics: Path) -> dict[tuple[Any, ...], float]:
    """Values by (name, stage, update, how often that came before); a line that cannot be read counts as one."""
    values: dict[tuple[Any, ...], float] = {}
    times = Counter[tuple[Any, ...]]()
    for line in metrics.read_text().splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            record = {"name": UNREADABLE, "update": 0, "value": 0.0}
        key = record["name"], record.get("stage"), record["update"]
        values[*key, times[key]] = record["value"] if record["name"] not in TIMINGS else 0.0
        times[key] += 1
    return values


@contextmanager
def folder() -> Iterator[Path]:
    """A folder in memory where there is such a place; no log of a run in it stays open."""
    where = MEMORY if os.access(MEMORY, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="adl-dist-faults-", dir=where) as name:
        try:
            yield Path(name)
        finally:
            logger = logging.getLogger("adl_dist")
            for handler in [h for h in logger.handlers if isinstance(h, logging.FileHandler)]:
                logger.removeHandler(handler)
                handler.close()


def _damage(run_dir: Path, damage: Damage) -> Path | None:
    """Do it; return the file that is damaged now, if there is a checkpoint."""
    saved = layout.complete(run_dir / "checkpoints")
    files = sorted(file for file in saved[-1].iterdir() if file.stat().st_size) if saved else []
    if not files:
        return None
    file = files[int(damage.file * len(files))]
    place = int(damage.place * file.stat().st_size)
    if damage.flips:
        content = bytearray(file.read_bytes())
        content[place] ^= 1
        file.write_bytes(content)
    else:
        os.truncate(file, place)
    return file


def _kind(attempt: Attempt) -> str:
    match attempt.fault:
        case StepFault(what=what):
            return f"{what.value} between actions"
        case DiskFault(error=None, place=place):
            return f"killed while writing {place}"
        case DiskFault(error=error, place=place):
            return f"{errno.errorcode[error]} while writing {place}"
    raise AssertionError("no fault struck")


def _is_asked_to_stop(attempt: Attempt) -> bool:
    return isinstance(attempt.fault, StepFault) and attempt.fault.what is Step.ASKED_TO_STOP


def _is_refusal(error: BaseException, run_dir: Path) -> bool:
    """Whether ``error`` says that there is no good checkpoint, and what to do."""
    told = str(error)
    names = "is damaged: " in told and str(run_dir / "checkpoints") in told
    return isinstance(error, CheckpointError) and names and told.endswith("start again with another run_dir")


def _is_due(error: BaseException, process: Process) -> bool:
    """Whether ``error`` follows from what was planted, and says so."""
    if isinstance(error, StageBroke):
        return True
    if not process.disk_failures:
        return False
    told = any("(planted)" in str(one) for one in _chain(error))
    return told and isinstance(error, OSError | AdlError)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _differences(end: End, expected: End, run_dir: Path, *, is_whole: bool) -> str:
    """What is not as it should be; nothing if all is."""
    wrong = [f"weights: {name}" for name, w in expected.weights.items() if not torch.equal(w, end.weights[name])]
    if end.checkpoints[-1] != expected.checkpoints[-1] or end.newest != expected.newest:
        wrong.append(f"newest checkpoint: another {end.checkpoints[-1]}")
    # One that was due to be removed when the process died, or could not be, stays until the next save.
    saved, due = set(end.checkpoints), set(expected.checkpoints)
    if is_whole and (due - saved or len(saved - due) > 1):
        wrong.append(f"checkpoints: {end.checkpoints} instead of {expected.checkpoints}")
    lost = [key for key in expected.values if key not in end.values]
    wrong += [f"metrics: {key} lost" for key in lost if is_whole]
    there = {key: value for key, value in end.values.items() if is_whole or key[0] not in OF_FAILURES}
    wrong += [f"metrics: {key}" for key, value in there.items() if expected.values.get(key) != value]
    for place in (run_dir, run_dir / "checkpoints"):
        wrong += [f"left behind: {path.name}" for path in place.glob(".*")]
    if not (run_dir / "summary.json").is_file():
        wrong.append("no summary.json")
    return ", ".join(wrong)
