"""Runs as processes side by side. What became of one is read from its folder, so that a sweep can be gone on with."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from adl_dist.checkpoint.run_dir import SUMMARY
from adl_dist.cli.subprocesses import LOOK_SECONDS, end_all
from adl_dist.distributed.parent_process import LAUNCHER

OUTCOME = "outcome.json"
LOG = Path("logs") / "output.log"
DIVERGED = re.compile(r"stage \d+: .* at update (\d+) \(epoch (\d+)\); the last checkpoint is kept")


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run: ``adl-dist train words``.

    Attributes:
        title: how lines for people call it.
        words: of its command line.
        folder: its run folder.
        epochs: how long it is.
        max_updates: how long it is, if that comes first.
        threads: of each of its processes.
    """

    title: str
    words: Sequence[str]
    folder: Path
    epochs: int
    max_updates: int | None
    threads: int

    @property
    def settings(self) -> list[str]:
        """Its words but for the folder, which may be moved."""
        return [word for word in self.words if not word.startswith("run_dir=")]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a run.

    Attributes:
        status: ``open``: it has not come to its end, and is to be run.
        said: the same in a few words.
        update: where it diverged.
        epoch: the same, counted from 0.
        seconds: of wall clock that its last process took.
    """

    status: Literal["open", "complete", "diverged", "failed"]
    said: str = ""
    update: int | None = None
    epoch: int | None = None
    seconds: float = 0.0

    @property
    def is_open(self) -> bool:
        """Whether it is to be run: a failure may have been mended meanwhile, a divergence comes again."""
        return self.status in ("open", "failed")


@dataclass(kw_only=True)
class _Running:
    process: subprocess.Popen[bytes]
    log_begin: int
    started: float = field(default_factory=time.monotonic)


def outcome_of(job: Job) -> Outcome:
    """What the folder of ``job`` tells."""
    summary = _read(job.folder / SUMMARY)
    epochs, updates = summary.get("epochs", 0), summary.get("updates", 0)
    if epochs >= job.epochs or (job.max_updates is not None and updates >= job.max_updates):
        loss, accuracy = summary.get("validation_loss"), summary.get("validation_accuracy")
        said = f"{accuracy:.2%}".replace("%", " %") if accuracy is not None else f"loss {loss:.4f}" if loss else "done"
        return Outcome(status="complete", said=said)
    told = _read(job.folder / OUTCOME)
    settings = told.pop("settings", None)
    # With other settings it may end otherwise.
    return Outcome(**told) if settings == job.settings else Outcome(status="open")


def run_side_by_side(jobs: Sequence[Job], *, at_once: int) -> Iterator[tuple[Job, Outcome, float]]:
    """Run ``jobs``, ``at_once`` at a time, and end those that still run when the caller stops listening.

    Yields:
        Each job that has ended, with its outcome and the seconds since the first one started.
    """
    waiting, running = list(reversed(jobs)), dict[Path, tuple[Job, _Running]]()
    started = time.monotonic()
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                job = waiting.pop()
                running[job.folder] = job, _start(job)
            ended = [(job, run) for job, run in running.values() if run.process.poll() is not None]
            for job, run in ended:
                del running[job.folder]
                yield job, _conclude(job, run), time.monotonic() - started
            if not ended:
                time.sleep(LOOK_SECONDS)  # no portable call waits for several processes
    finally:
        end_all([run.process for _, run in running.values()])


def _start(job: Job) -> _Running:
    (job.folder / OUTCOME).unlink(missing_ok=True)
    log = job.folder / LOG
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as out:
        begin = out.tell()
        process = subprocess.Popen(
            [sys.executable, "-m", "adl_dist", "train", *job.words],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            # It ends with us, and numpy's threads are none beside torch's.
            env={**os.environ, LAUNCHER: str(os.getpid()), "OMP_NUM_THREADS": str(job.threads)},
            start_new_session=True,  # a Ctrl-C at the terminal is for us, who end it then
        )
    return _Running(process=process, log_begin=begin)


def _conclude(job: Job, run: _Running) -> Outcome:
    seconds = time.monotonic() - run.started
    outcome = outcome_of(job)
    if outcome.status == "complete":
        return Outcome(status="complete", said=outcome.said, seconds=seconds)
    with (job.folder / LOG).open("rb") as log:
        log.seek(run.log_begin)
        text = log.read().decode(errors="replace")
    code = run.process.returncode
    if code > 0 and (found := DIVERGED.search(text)):
        update, epoch = int(found[1]), int(found[2])
        said = f"diverged at update {update} (epoch {epoch})"
        outcome = Outcome(status="diverged", said=said, update=update, epoch=epoch, seconds=seconds)
    else:
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        outcome = Outcome(status="failed", said=f"failed ({how}; see {job.folder / LOG})", seconds=seconds)
    unfinished = job.folder / f".{OUTCOME}.saving"
    unfinished.write_text(json.dumps({**vars(outcome), "settings": job.settings}, indent=1) + "\n")
    os.replace(unfinished, job.folder / OUTCOME)
    return outcome


def _read(path: Path) -> dict[str, Any]:
    """What a JSON file holds; nothing if there is none, or a damaged one."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
