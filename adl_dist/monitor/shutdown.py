"""A shutdown that prints and logs, although a disk or thread may hang.

Work that may wait for a disk or a reader runs in a second thread, with a time limit.
"""

import logging
import os
import sys
import threading
import time
from collections.abc import Callable

from adl_dist.report import tell

logger = logging.getLogger("adl_dist")

GRACE_SECONDS = 0.2  # for the answer to the last message to leave
PRINT_SECONDS = 0.5  # limit for writing a line
END_SECONDS = 5.0  # limit for an exit, whatever hangs


def run_bounded(seconds: float, do: Callable[[], None]) -> None:
    """Call ``do`` in a second thread; wait for it at most ``seconds``."""
    thread = threading.Thread(target=do, daemon=True)
    thread.start()
    thread.join(seconds)


def print_bounded(text: str, level: int = logging.WARNING) -> None:
    """Print ``text`` on standard error, then log it, within a time limit."""
    run_bounded(PRINT_SECONDS, lambda: tell(sys.stderr, text + "\n"))
    log_bounded(text, level)


def log_bounded(text: str, level: int) -> None:
    """Write ``text`` into this process's log, within a time limit."""
    if logger.hasHandlers():  # without any, logging would write to standard error by itself
        run_bounded(PRINT_SECONDS, lambda: logger.log(level, "%s", text))


def exit_deadline() -> None:
    """Exit with code 1 after ``END_SECONDS``, unless ended before."""
    timer = threading.Timer(END_SECONDS, os._exit, (1,))
    timer.daemon = True
    timer.start()


def end() -> None:
    """Exit with code 1, even if the main thread waits for something."""
    exit_deadline()
    time.sleep(GRACE_SECONDS)
    run_bounded(PRINT_SECONDS, _flush)
    os._exit(1)


def _flush() -> None:
    for handler in logger.handlers:
        handler.flush()
    for stream in (sys.stdout, sys.stderr):
        tell(stream, "")
