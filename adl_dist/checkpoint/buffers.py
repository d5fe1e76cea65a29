"""What a forward moves and no ``state_dict`` holds: non-persistent buffers, and tensors and numbers in attributes.

Most non-persistent buffers are constants that are computed again, like the tables of rotary embeddings, and most
attributes are settings. What has moved since the run began is state of the run: a counter, a memory of earlier batches.
It is saved next to the model, under its own name in any cut.
"""

import json
from collections.abc import Iterator, Mapping

from torch import Tensor, nn

from adl_dist.checkpoint import nested, storage
from adl_dist.checkpoint.storage import Shard, Stored
from adl_dist.errors import ConfigError

Place = tuple[nn.Module, str]  # the module that has it, and its name there
Value = Tensor | bool | int | float | str | None
NUMBER = "attribute:"  # begins the names of numbers in a file's metadata, which has entries of its own
_OF_TORCH = {*nn.Module().__dict__}  # the mode, hooks, and what is registered


class FreshBuffers:
    """What these of a stage's module were when the run began."""

    def __init__(self, module: nn.Module) -> None:
        """Look at them, before the first update and before a checkpoint is read."""
        self._marks = {name: _mark(value) for name, value in _present(module)}
        self._restored: set[str] = set()  # from a checkpoint: no longer what a new model has

    def moved(self, module: nn.Module) -> Shard:
        """Return those that are others now; raise ConfigError if one of them cannot be saved."""
        tensors, numbers = {}, {}
        for name, value in _present(module):
            if name not in self._restored and self._marks.get(name) == _mark(value):
                continue
            if not isinstance(value, Tensor):
                numbers[f"{NUMBER}{name}"] = json.dumps(value)
            elif reason := storage.why_unstorable(value):
                raise ConfigError(f"{name} of the model cannot be saved: {reason}")
            else:
                tensors[name] = value.detach()
        return Shard(tensors, numbers)

    def restored(self, tensors: Mapping[str, Stored], numbers: Mapping[str, str]) -> None:
        """Remember that these come from a checkpoint, so that the next one holds them, too."""
        self._restored |= tensors.keys() | {name.removeprefix(NUMBER) for name in numbers}


def is_saved(module: nn.Module, name: str) -> bool:
    """Return whether a checkpoint holds what ``name`` of ``module`` is moved to, if it stays of its kind."""
    path, _, key = name.rpartition(".")
    owner = dict(module.named_modules(remove_duplicate=False)).get(path)
    if owner is None or key in owner._buffers:
        return owner is not None
    return key.isidentifier() and _is_kept(owner.__dict__.get(key))  # None: not there yet


def restore(module: nn.Module, tensors: Mapping[str, Stored], numbers: Mapping[str, str]) -> None:
    """Give ``module`` what was saved for it."""
    owners = dict(module.named_modules(remove_duplicate=False))
    device = next((t.device for t in (*module.parameters(), *module.buffers())), None)
    for name, text in numbers.items():
        path, _, key = name.removeprefix(NUMBER).rpartition(".")
        if path in owners and name.startswith(NUMBER):
            owners[path].__dict__[key] = json.loads(text)
    wanted = {name: stored for name, stored in tensors.items() if name.rpartition(".")[0] in owners}
    for name, value in storage.read(wanted):
        path, _, key = name.rpartition(".")
        owner = owners[path]
        held = owner._buffers if key in owner._buffers else owner.__dict__
        present = held.get(key)
        if present is not None and present.shape == value.shape and present.dtype == value.dtype:
            present.data.copy_(value)  # in place: others may hold it, too
        else:  # the forward puts new ones in its place
            held[key] = value if device is None else value.to(device)


def _present(module: nn.Module) -> Iterator[tuple[str, Value]]:
    for path, owner in module.named_modules(remove_duplicate=False):
        dot = f"{path}." if path else ""
        for key in sorted(owner._non_persistent_buffers_set):
            if (buffer := owner._buffers.get(key)) is not None:
                yield f"{dot}{key}", buffer
        for key, value in owner.__dict__.items():
            if key not in _OF_TORCH and key.isidentifier() and _is_kept(value) and value is not None:
                yield f"{dot}{key}", value


def _is_kept(value: object) -> bool:
    is_tensor = isinstance(value, Tensor) and not isinstance(value, nn.Parameter)
    return is_tensor or value is None or isinstance(value, bool | int | float | str)


def _mark(value: Value) -> object:
    return nested.digest(value) if isinstance(value, Tensor) else value
