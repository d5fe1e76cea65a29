"""The temporary folder of a launcher, where its ranks meet. No torch.

A launcher that is killed cannot remove its folder. So each holds a lock in it, which the kernel lets go of, and the
next one removes folders whose lock is free.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

PREFIX = "adl-dist-launch-"
LOCK = "lock"  # a file: over NFS, a lock on a folder is not seen from other hosts


@contextlib.contextmanager
def launch_folder() -> Iterator[Path]:
    """Make a new folder, removed in the end, and remove those that killed launchers of this user have left.

    Raises:
        OSError: there is no room for temporary files.
    """
    _sweep()
    folder, lock = _make()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _make() -> tuple[Path, int]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT)
        # Another launcher may have taken the new folder for an old one, just before it was locked.
        if _is_held(lock) and (folder / LOCK).exists():
            return folder, lock
        os.close(lock)


def _sweep() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # it is another user's, or gone meanwhile
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            lock = os.open(folder / LOCK, os.O_RDWR)
            try:
                if _is_held(lock):
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


def _is_held(lock: int) -> bool:
    """Return whether this process holds ``lock`` now."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
