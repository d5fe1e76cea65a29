"""The temporary folder of a launcher, where its ranks meet. No torch.

A killed launcher cannot remove its folder. So each launcher holds a lock in it, which the kernel releases, and the
next launcher removes folders with a free lock.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

PREFIX, NEW_PREFIX = "adl-dist-launch-", "adl-dist-new-"
LOCK = "lock"  # a file: over NFS, other hosts do not see a lock on a folder


@contextlib.contextmanager
def launch_folder() -> Iterator[Path]:
    """Yield a new folder; remove the folders of killed launchers.

    Raises:
        OSError: If there is no room for temporary files.
    """
    _sweep()
    folder = Path(tempfile.mkdtemp(prefix=NEW_PREFIX))
    try:
        with (folder / LOCK).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            # Renamed only once it is locked, or another launcher would remove it as an old one.
            folder = folder.rename(folder.with_name(PREFIX + folder.name.removeprefix(NEW_PREFIX)))
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _sweep() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # of another user, or just removed
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            with (folder / LOCK).open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises if it is held
                shutil.rmtree(folder, ignore_errors=True)
