"""Files that appear whole or not at all."""

import contextlib
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def write_atomically(path: Path) -> Iterator[Path]:
    """Yield an unfinished file next to ``path``, of the same suffix; rename it to ``path`` at the end of the block.

    If the block raises, it is removed and ``path`` stays as it was.

    Raises:
        OSError: it cannot be renamed.
    """
    unfinished = path.with_name(f".{path.stem}.saving{path.suffix}")
    try:
        yield unfinished
        unfinished.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise
