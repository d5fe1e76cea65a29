"""Printing, logging and ending of a process, though a file system, a stream or a thread may hang.

What may wait for a disk or for a reader is done in a thread of its own, and waited for only so long.
"""

import logging
import os
import sys
import threading
import time
from collections.abc import Callable

from adl_dist.report import tell

logger = logging.getLogger("adl_dist")

GRACE_SECONDS = 0.2  # in which the answer to the last message leaves
PRINT_SECONDS = 0.5  # that a line may take to be written
END_SECONDS = 5.0  # that an end may take, whatever hangs


def run_bounded(seconds: float, do: Callable[[], None]) -> None:
    """Call ``do``; return when it has, or leave it to itself after ``seconds``."""
    thread = threading.Thread(target=do, daemon=True)
    thread.start()
    thread.join(seconds)


def print_bounded(text: str, level: int = logging.WARNING) -> None:
    """Print ``text`` on standard error, then log it; return in any case."""
    run_bounded(PRINT_SECONDS, lambda: tell(sys.stderr, text + "\n"))
    log_bounded(text, level)


def log_bounded(text: str, level: int) -> None:
    """Write ``text`` into this process's log; return in any case."""
    if logger.hasHandlers():  # without any, logging would write to standard error by itself
        run_bounded(PRINT_SECONDS, lambda: logger.log(level, "%s", text))


def exit_deadline() -> None:
    """Have this process end with exit code 1 after ``END_SECONDS``, if it has not done so by itself."""
    timer = threading.Timer(END_SECONDS, os._exit, (1,))
    timer.daemon = True
    timer.start()


def end() -> None:
    """End this process with exit code 1, whatever its main thread waits for, and whatever would wait for that."""
    exit_deadline()
    time.sleep(GRACE_SECONDS)
    run_bounded(PRINT_SECONDS, _flush)
    os._exit(1)


def _flush() -> None:
    for handler in logger.handlers:
        handler.flush()
    for stream in (sys.stdout, sys.stderr):
        tell(stream, "")
