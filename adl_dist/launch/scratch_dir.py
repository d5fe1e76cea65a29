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

PREFIX, NEW_PREFIX = "adl-dist-launch-", "adl-dist-new-"
LOCK = "lock"  # a file: over NFS, a lock on a folder is not seen from other hosts


@contextlib.contextmanager
def launch_folder() -> Iterator[Path]:
    """Make a new folder, removed in the end, and remove those that killed launchers of this user have left.

    Raises:
        OSError: there is no room for temporary files.
    """
    _sweep()
    folder = Path(tempfile.mkdtemp(prefix=NEW_PREFIX))
    try:
        with (folder / LOCK).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            # Only now, as another launcher would take it for an old one before it is locked.
            folder = folder.rename(folder.with_name(PREFIX + folder.name.removeprefix(NEW_PREFIX)))
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _sweep() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # it is another user's, or gone meanwhile
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            with (folder / LOCK).open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises if it is held
                shutil.rmtree(folder, ignore_errors=True)
