"""Files that appear whole or not at all."""

import contextlib
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def write_atomically(path: Path) -> Iterator[Path]:
    """Yield an unfinished file next to ``path`` to be written; rename it to ``path`` at the end of the block.

    If the block raises, the unfinished file is removed and ``path`` stays as it was. The suffix is kept, so that what
    chooses its format by the name of the file does.

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
