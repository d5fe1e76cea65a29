"""Atomic writes, and the check of a picture's file name."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from adl_dist.errors import ConfigError

PICTURES = (".svg", ".png", ".pdf")


@contextlib.contextmanager
def write_atomically(path: Path) -> Iterator[Path]:
    """Yield a temporary path of a file or folder, which becomes ``path`` at the end.

    After an error it is removed instead.
    """
    unfinished = path.with_name(f".{path.stem}.{os.getpid()}.saving{path.suffix}")
    try:
        yield unfinished
        unfinished.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            shutil.rmtree(unfinished) if unfinished.is_dir() else unfinished.unlink()
        raise


def check_out(path: Path) -> None:
    """Raise ConfigError unless ``--out path`` can hold a picture."""
    if path.suffix not in PICTURES:
        raise ConfigError(f"--out {path} must end in {', '.join(PICTURES)}; for example --out picture.svg")
    if not path.parent.is_dir():
        raise ConfigError(f"--out {path} cannot be written: folder {path.parent} does not exist; make it first")
