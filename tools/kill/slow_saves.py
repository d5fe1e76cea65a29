"""What the killed runs train on; the module of it is loaded by every rank, and can slow down its saves."""

import os
import time
from typing import Any

from torch.utils.data import Dataset

from adl_dist.checkpoint.layout import HashedFile
from tests.support.kill import few_digits

SLOW = "slow-saves"  # a file in the working directory
SECONDS_PER_WRITE = 0.01  # of some seventy that a rank does to save

_write = HashedFile.write


def digits() -> tuple[Dataset[Any], Dataset[Any]]:
    """For ``data._target_``: see :func:`few_digits`; while the file SLOW exists, checkpoints are written slowly."""
    HashedFile.write = _write_slowly  # type: ignore[method-assign]
    return few_digits()


def _write_slowly(self: HashedFile, data: Any, /) -> int:
    if os.path.exists(SLOW):
        time.sleep(SECONDS_PER_WRITE)
    return _write(self, data)
