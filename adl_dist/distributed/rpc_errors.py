"""Calls over the control plane to processes that may be gone."""

import contextlib
from collections.abc import Iterator

from adl_dist.errors import ChannelError


def is_timeout(error: RuntimeError) -> bool:
    """Whether RPC says that a process has not answered in time, which may be busy; of one that is gone it says why."""
    return "more than set timeout" in str(error)


@contextlib.contextmanager
def translate_rpc_errors(whom: str) -> Iterator[None]:
    """Raise ChannelError, that ``whom`` is gone or late, in place of RPC's own error."""
    try:
        yield
    except RuntimeError as error:
        said, _, _ = str(error).partition("\n")
        what = "does not answer in time" if is_timeout(error) else "is gone"
        raise ChannelError(f"control plane: {whom} {what}: {said}") from error
