"""Commands and functions in separate processes, all ended when one fails."""

import contextlib
import multiprocessing
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from adl_dist.distributed.parent_process import LAUNCHER, end_with_launcher
from adl_dist.errors import ConfigError
from adl_dist.launch.signals import signal_name

POLL_SECONDS = 0.05
SECONDS_TO_END = 10.0
SECONDS_TO_TELL = 3.0  # for the others to report, once one of them has failed
ERROR_PREFIX = "adl-dist: error: "


T = TypeVar("T")


def apart(function: Callable[..., T], calls: Sequence[tuple[Any, ...]], *, seconds: float | None = None) -> list[T]:
    """Return ``function(*call)`` of all ``calls``, each from a new process."""
    os.environ[LAUNCHER] = str(os.getpid())  # they end with this process
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(len(calls), mp_context=spawn, initializer=end_with_launcher)
    try:
        return list(pool.map(function, *zip(*calls, strict=True), timeout=seconds))
    except BaseException as error:
        for process in multiprocessing.active_children():
            process.terminate()
        if isinstance(error, BrokenProcessPool):
            raise ConfigError("a process that measures was killed; is there enough memory?") from error
        raise
    finally:
        pool.shutdown()
        del os.environ[LAUNCHER]


class ChildFailed(Exception):
    """A command failed or timed out; the text is one line."""


@dataclass(frozen=True, kw_only=True)
class Child:
    """A command to run."""

    command: Sequence[str]  # the program and its arguments
    log: Path  # file that its output is appended to
    environment: Mapping[str, str] = field(default_factory=dict)  # in addition to this process's
    ends_with_us: bool = True  # it looks for our process id and ends with us; not where another command stands between


def run_together(children: Sequence[Child], *, timeout_seconds: float | None = None) -> None:
    """Run ``children`` in parallel; raise ChildFailed on error or timeout."""
    running: list[subprocess.Popen[bytes]] = []
    deadline = time.monotonic() + (timeout_seconds or float("inf"))
    try:
        for child in children:
            child.log.unlink(missing_ok=True)  # of an earlier run, whose error is not this one's
            running.append(start(child))
        while None in (codes := [process.poll() for process in running]):
            if any(codes):
                _wait(running, min(deadline, time.monotonic() + SECONDS_TO_TELL))
                break
            if time.monotonic() > deadline:
                raise ChildFailed(f"still ran after {timeout_seconds:.0f} s and was ended; see {children[0].log}")
            time.sleep(POLL_SECONDS)  # no portable call waits for several processes
        failed = [(c, p) for c, p in zip(children, running, strict=True) if p.returncode]
    finally:
        end_all(running)
    if failed:
        errors = [line for child, _ in failed if (line := last_error(child.log))]
        raise ChildFailed(errors[0] if errors else f"{how_it_ended(failed[0][1].returncode)}, without an error message")


def how_it_ended(code: int) -> str:
    """Describe an exit code other than 0."""
    return f"killed by {signal_name(-code)}" if code < 0 else f"exit code {code}"


def end_all(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End running processes by SIGTERM, then their sessions by SIGKILL."""
    for process in processes:
        if process.poll() is None:
            process.terminate()
    _wait(processes, time.monotonic() + SECONDS_TO_END)
    for process in processes:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def start(child: Child) -> subprocess.Popen[bytes]:
    """Start ``child`` in a session of its own, out of reach of a Ctrl-C.

    Its output is appended to its log. Raise ChildFailed if it cannot be started.
    """
    child.log.parent.mkdir(parents=True, exist_ok=True)
    ours = {LAUNCHER: str(os.getpid())} if child.ends_with_us else {}
    with child.log.open("ab") as out:
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": subprocess.STDOUT}
        environment = {**os.environ, **child.environment, **ours}
        try:
            return subprocess.Popen(child.command, **streams, env=environment, start_new_session=True)
        except OSError as error:
            raise ChildFailed(f"{child.command[0]} cannot be started: {error.strerror}") from error


def _wait(processes: Sequence[subprocess.Popen[bytes]], deadline: float) -> None:
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))


def last_error(log: Path) -> str:
    """Return the last error in a log, or else its last line, or ""."""
    text = log.read_text(errors="replace") if log.is_file() else ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line.removeprefix(ERROR_PREFIX) for line in lines if line.startswith(ERROR_PREFIX)]
    return (errors or lines or [""])[-1]
