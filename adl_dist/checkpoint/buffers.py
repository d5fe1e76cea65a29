"""Non-persistent buffers in a checkpoint: those that the forwards of the run have moved.

A model's ``state_dict`` omits them. Most are constants that are computed again, like the tables of rotary embeddings;
one that a forward writes to is state of the run, and is saved next to the model, under its own name in any cut.
"""

from collections.abc import Iterator, Mapping

from torch import Tensor, nn

from adl_dist.checkpoint import nested, storage
from adl_dist.checkpoint.storage import Stored
from adl_dist.errors import ConfigError

Place = tuple[nn.Module, str]  # the module that has a buffer, and the buffer's name there


class FreshBuffers:
    """What the non-persistent buffers of a stage's module held when the run began."""

    def __init__(self, module: nn.Module) -> None:
        """Look at them, before the first update and before a checkpoint is read."""
        self._marks = {name: nested.digest(buffer) for name, buffer in _present(module)}
        self._restored: set[str] = set()  # from a checkpoint: no longer what a new model has

    def moved(self, module: nn.Module) -> dict[str, Tensor]:
        """Return those that are others now, by name; raise ConfigError if one of them cannot be saved."""
        moved = {}
        for name, buffer in _present(module):
            if name in self._restored or self._marks.get(name) != nested.digest(buffer):
                if reason := storage.why_unstorable(buffer):
                    raise ConfigError(f"{name} of the model cannot be saved: {reason}")
                moved[name] = buffer
        return moved

    def restored(self, names: Mapping[str, Stored]) -> None:
        """Remember that these come from a checkpoint, so that the next one holds them, too."""
        self._restored |= names.keys()


def restore(module: nn.Module, stored: Mapping[str, Stored]) -> None:
    """Give the non-persistent buffers of ``module`` what was saved for them."""
    places = dict(_places(module))
    for name, value in storage.read({name: one for name, one in stored.items() if name in places}):
        owner, key = places[name]
        buffer = owner._buffers[key]
        if buffer is not None and buffer.shape == value.shape and buffer.dtype == value.dtype:
            buffer.copy_(value)  # in place: others may hold it, too
        else:  # the forward puts new ones in its place
            device = next((t.device for t in (*module.parameters(), *module.buffers())), value.device)
            owner._buffers[key] = value.to(device)


def _places(module: nn.Module) -> Iterator[tuple[str, Place]]:
    for path, owner in module.named_modules(remove_duplicate=False):
        for key in sorted(owner._non_persistent_buffers_set):
            yield f"{path}.{key}" if path else key, (owner, key)


def _present(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, (owner, key) in _places(module):
        if (buffer := owner._buffers.get(key)) is not None:
            yield name, buffer
