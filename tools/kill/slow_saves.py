"""What the killed runs train on; the module of it is loaded by every rank, and can slow down its saves."""

import os
import time
from typing import Any

from torch.utils.data import Dataset

from adl_dist.checkpoint import layout
from tests.support.kill import few_digits

SLOW = "slow-saves"  # a file in the working directory
SECONDS_PER_WRITE = 0.01  # of some seventy that a rank does to save

_write = layout.write_piece


def digits() -> tuple[Dataset[Any], Dataset[Any]]:
    """For ``data._target_``: see :func:`few_digits`; while the file SLOW exists, checkpoints are written slowly."""
    layout.write_piece = _write_slowly
    return few_digits()


def _write_slowly(file: Any, data: Any) -> None:
    if os.path.exists(SLOW):
        time.sleep(SECONDS_PER_WRITE)
    _write(file, data)
