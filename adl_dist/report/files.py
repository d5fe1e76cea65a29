"""Atomic writes."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def write_atomically(path: Path) -> Iterator[Path]:
    """Yield a temporary path, renamed to ``path`` at the end.

    The block creates a file or a folder there. After an error it is removed instead.
    """
    unfinished = path.with_name(f".{path.stem}.{os.getpid()}.saving{path.suffix}")
    try:
        yield unfinished
        unfinished.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            shutil.rmtree(unfinished) if unfinished.is_dir() else unfinished.unlink()
        raise
