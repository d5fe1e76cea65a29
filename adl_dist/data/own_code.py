"""Errors of the user's code in one line."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from adl_dist.errors import DataError, in_one_line, place_of


@contextmanager
def own_code(what: str) -> Iterator[None]:
    """Turn errors of the user's code into a DataError.

    It begins with ``what`` and names the line.
    """
    try:
        yield
    except (DataError, KeyboardInterrupt):
        raise
    except BaseException as error:  # it can raise anything
        raised = in_one_line(error)
        refusal = DataError(f"{what} raised {raised}{place_of(error)}")
        if isinstance(error, OSError | MemoryError) and not isinstance(error, FileNotFoundError | PermissionError):
            refusal.exit_code = 1  # a disk or a server that may be there again when the run is restarted
        refusal.add_note(traceback.format_exc())  # for the log; a worker's error arrives without its cause
        raise refusal from error
