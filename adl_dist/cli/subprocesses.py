"""Runs commands in processes of their own, ends them all when one fails, and says why it did."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from adl_dist.distributed.parent_process import LAUNCHER

LOOK_SECONDS = 0.05
SECONDS_TO_END = 10.0
SECONDS_TO_TELL = 3.0  # which the others get to say what they know, once one of them has failed
SAYS_ERROR = "adl-dist: error: "


class ChildFailed(Exception):
    """A command ended with an error, or not in time; says so in one line."""


@dataclass(frozen=True, kw_only=True)
class Child:
    """A command to run.

    Attributes:
        command: its words.
        log: takes what it says.
        environment: variables in addition to this process's.
        ends_with_us: whether it looks for our process id and ends with us; not where another command stands between.
    """

    command: Sequence[str]
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    ends_with_us: bool = True


def run_together(children: Sequence[Child], *, timeout_seconds: float | None = None) -> None:
    """Run ``children`` side by side to their ends. Whatever happens, none is left.

    Raises:
        ChildFailed: one of them did, or they did not end in time.
    """
    running: list[subprocess.Popen[bytes]] = []
    deadline = time.monotonic() + (timeout_seconds or float("inf"))
    try:
        for child in children:
            running.append(_start(child))
        while None in (codes := [process.poll() for process in running]):
            if any(codes):
                _wait(running, min(deadline, time.monotonic() + SECONDS_TO_TELL))
                break
            if time.monotonic() > deadline:
                raise ChildFailed(f"still ran after {timeout_seconds:.0f} s and was ended; see {children[0].log}")
            time.sleep(LOOK_SECONDS)  # no portable call waits for several processes
        failed = [(c, p) for c, p in zip(children, running, strict=True) if p.returncode]
    finally:
        end_all(running)
    if failed:
        told = [line for child, _ in failed if (line := _last_error(child.log))]
        code = failed[0][1].returncode
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        raise ChildFailed(told[0] if told else f"{how}, without a word")


def end_all(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End what still runs, first politely; each process leads a session of its own, which ends with it."""
    for process in processes:
        if process.poll() is None:
            process.terminate()
    _wait(processes, time.monotonic() + SECONDS_TO_END)
    for process in processes:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _start(child: Child) -> subprocess.Popen[bytes]:
    child.log.parent.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, **child.environment}
    if child.ends_with_us:
        environment[LAUNCHER] = str(os.getpid())
    with child.log.open("wb") as out:
        try:
            return subprocess.Popen(
                child.command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # a Ctrl-C at the terminal is for us, who end it then
            )
        except OSError as error:
            raise ChildFailed(f"{child.command[0]} cannot be started: {error.strerror}") from error


def _wait(processes: Sequence[subprocess.Popen[bytes]], deadline: float) -> None:
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))


def _last_error(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line.removeprefix(SAYS_ERROR) for line in lines if line.startswith(SAYS_ERROR)]
    return (errors or lines or [""])[-1]
