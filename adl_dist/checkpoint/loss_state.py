"""The ``state_dict()`` of a loss, saved with the last stage for any cut."""

from collections.abc import Mapping
from typing import Any

from adl_dist.checkpoint import nested
from adl_dist.checkpoint.nested import Unstorable
from adl_dist.checkpoint.tensor_files import Shard, Stored
from adl_dist.errors import ConfigError


def shard_of(loss_fn: Any) -> Shard:
    """Return the state of ``loss_fn``, empty if it cannot save and restore it.

    Raises:
        ConfigError: If a part of the state cannot be saved.
    """
    if not hasattr(loss_fn, "state_dict") or not hasattr(loss_fn, "load_state_dict"):
        return Shard({})
    try:
        return nested.packed_state(loss_fn.state_dict())
    except Unstorable as error:
        raise ConfigError(
            f"state_dict() of the loss cannot be saved: {error}; let it return tensors, numbers and text, or train "
            "without run_dir"
        ) from None


def restore(loss_fn: Any, tensors: Mapping[str, Stored], texts: Mapping[str, str]) -> None:
    """Load the saved state into ``loss_fn``, if there is any."""
    if state := nested.unpacked_state(tensors, texts):
        loss_fn.load_state_dict(state)
