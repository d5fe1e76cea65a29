"""What the killed runs train on; the module of it is loaded by every rank, and can slow down its saves."""

import os
import time

from torch.utils.data import Subset

import adl_dist.data
from adl_dist.checkpoint import storage

SLOW = "slow-saves"  # a file in the working directory
SECONDS_PER_WRITE = 0.01  # of some seventy that a rank does to save

_write = storage.write_piece


def digits():
    """For ``data._target_``: 150 augmented digits to train on and 40 to validate.

    While the file SLOW exists, checkpoints are written slowly.
    """
    storage.write_piece = _write_slowly
    train, validation = adl_dist.data.digits(augment=True)
    return Subset(train, range(150)), Subset(validation, range(40))


def _write_slowly(file, data):
    if os.path.exists(SLOW):
        time.sleep(SECONDS_PER_WRITE)
    _write(file, data)
