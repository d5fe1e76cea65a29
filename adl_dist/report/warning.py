"""Messages to the user and the log; an output that fails never ends a run."""

import logging
import shutil
import sys
import textwrap
from contextlib import suppress
from typing import IO, Any

from adl_dist.wording import worded

logger = logging.getLogger("adl_dist")


def tell(stream: IO[str] | None, text: str) -> None:
    """Write ``text`` in one piece, from any thread.

    Letters outside of the stream's encoding become escapes.
    """
    with suppress(OSError, ValueError):
        if stream is not None:
            if stream.isatty():
                text = _fitted(text, shutil.get_terminal_size().columns)
            encoding = getattr(stream, "encoding", None) or "utf-8"
            text = text.encode(encoding, "backslashreplace").decode(encoding)
            stream.write(text)  # one write: lines of several threads do not mix
            stream.flush()


def _fitted(text: str, width: int) -> str:
    """Break the lines of ``text`` between words, if they are wider than a terminal."""
    how: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False, "subsequent_indent": "  "}
    lines = [line if len(line) <= width else "\n".join(textwrap.wrap(line, width, **how)) for line in text.split("\n")]
    return "\n".join(lines)


def say(text: str) -> None:
    """Write ``text`` as a line to standard output."""
    tell(sys.stdout, worded(text) + "\n")


def warn(text: str) -> None:
    """Write a warning to standard error and the log, from any thread."""
    tell(sys.stderr, f"adl-dist: warning: {worded(text)}\n")
    logger.warning("%s", text)
