"""Messages to the user and the log; an output that fails never ends a run."""

import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO

from adl_dist.wording import worded

logger = logging.getLogger("adl_dist")

SAY_SECONDS = 3.0  # of silence


def tell(stream: IO[str] | None, text: str) -> None:
    """Write ``text`` in one piece, from any thread.

    Letters outside of the stream's encoding become escapes.
    """
    with suppress(OSError, ValueError):
        if stream is not None:
            encoding = getattr(stream, "encoding", None) or "utf-8"
            text = text.encode(encoding, "backslashreplace").decode(encoding)
            stream.write(text)  # one write: lines of several threads do not mix
            stream.flush()


def say(text: str) -> None:
    """Write ``text`` as a line to standard output."""
    tell(sys.stdout, worded(text) + "\n")


@contextmanager
def announced(text: str) -> Iterator[None]:
    """Print ``text`` if the block takes long, and again every minute."""
    done = threading.Event()

    def announce() -> None:
        wait = SAY_SECONDS
        while not done.wait(wait):
            say(f"{text} ...")
            wait = 60.0

    threading.Thread(target=announce, name="announced", daemon=True).start()
    try:
        yield
    finally:
        done.set()


def warn(text: str) -> None:
    """Write a warning to standard error and the log, from any thread."""
    tell(sys.stderr, f"adl-dist: warning: {worded(text)}\n")
    logger.warning("%s", text)
