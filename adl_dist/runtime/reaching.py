"""Calls over the control plane to processes that may be gone."""

import contextlib
from collections.abc import Iterator

from adl_dist.errors import ChannelError


@contextlib.contextmanager
def reaching(whom: str) -> Iterator[None]:
    """Raise ChannelError, that ``whom`` is gone, in place of RPC's own error."""
    try:
        yield
    except RuntimeError as error:
        said, _, _ = str(error).partition("\n")
        raise ChannelError(f"control plane: {whom} is gone: {said}") from error
