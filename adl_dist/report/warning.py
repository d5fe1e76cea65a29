"""Write to the user and the log without ending what runs."""

import logging
import sys
from contextlib import suppress
from typing import IO

logger = logging.getLogger("adl_dist")


def tell(stream: IO[str] | None, text: str) -> None:
    """Write ``text`` in one piece, from any thread; an output that is gone or full must not end a run.

    Letters that the stream's encoding does not have are written as escapes.
    """
    with suppress(OSError, ValueError):
        if stream is not None:
            encoding = getattr(stream, "encoding", None) or "utf-8"
            text = text.encode(encoding, "backslashreplace").decode(encoding)
            stream.write(text)  # one write: lines of several threads do not mix
            stream.flush()


def say(text: str) -> None:
    """Write ``text`` as a line to standard output."""
    tell(sys.stdout, text + "\n")


def warn(text: str) -> None:
    """Say ``text`` on standard error and in this process's log. Any thread may call it."""
    tell(sys.stderr, f"adl-dist: warning: {text}\n")
    logger.warning("%s", text)
