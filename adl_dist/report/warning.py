"""What must reach the user although training goes on."""

import logging
import sys

logger = logging.getLogger("adl_dist")


def warn(text: str) -> None:
    """Say ``text`` on standard error and in this process's log. Any thread may call it."""
    sys.stderr.write(f"adl-dist: warning: {text}\n")  # one write: lines of several threads do not mix
    sys.stderr.flush()
    logger.warning("%s", text)
