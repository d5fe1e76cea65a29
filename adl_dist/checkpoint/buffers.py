"""What a forward moves and no ``state_dict`` holds: non-persistent buffers, and values in attributes of modules.

Most non-persistent buffers are constants that are computed again, like the tables of rotary embeddings, and most
attributes are settings. What has moved since the run began is state of the run: a counter, a memory of earlier batches.
It is saved next to the model, under its own name in any cut; also a cache that a forward would make again, because that
cannot be known. Tensors are saved as tensors, all else as JSON, and what holds others as in an optimizer's state.
"""

import json
from collections.abc import Iterator, Mapping, Set
from typing import Any

import torch
from torch import Tensor, nn

from adl_dist.checkpoint import nested, storage
from adl_dist.checkpoint.nested import Packer, Unstorable
from adl_dist.checkpoint.storage import Shard, Stored
from adl_dist.errors import ConfigError
from adl_dist.partition.piece import StageModule
from adl_dist.partition.state_walk import OF_TORCH

VALUE = "attribute:"  # begins the names of values in a file's metadata, which has entries of its own
_CONTAINERS = (list, tuple, dict)
_CONSTANT = nested.CONSTANT | torch.dtype | torch.device | torch.layout | torch.memory_format


class FreshBuffers:
    """What these of a stage's module were when the run began."""

    def __init__(self, module: nn.Module) -> None:
        """Look at them, before the first update and before a checkpoint is read."""
        self._marks = {name: _mark(value) for name, value in _present(module)}
        self._others = {name for name, value in _attributes(module) if not _is_kept(value)}
        self._restored: set[str] = set()  # from a checkpoint: no longer what a new model has

    def moved(self, module: nn.Module) -> Shard:
        """Return those that are others now; raise ConfigError if one of them cannot be saved."""
        for name, value in _attributes(module):
            if not _is_kept(value) and name not in self._others and not isinstance(value, _CONSTANT):
                raise _unsavable(f"{name} is a {type(value).__name__} now; expected {nested.KINDS}")
        tensors, texts, packer = {}, {}, Packer({}, _device_of(module))
        for name, value in _present(module):
            if name not in self._restored and self._marks.get(name) == _mark(value):
                continue
            if isinstance(value, Tensor):
                if reason := storage.why_unstorable(value):
                    raise _unsavable(f"{name}: {reason}")
                tensors[name] = value.detach()
                continue
            try:
                texts[f"{VALUE}{name}"] = json.dumps(packer.packed(name, value))
            except Unstorable as error:
                raise _unsavable(str(error)) from None
        return Shard(tensors | {name: tensor.detach() for name, tensor in packer.tensors.items()}, texts)

    def restored(self, names: Set[str]) -> None:
        """Remember that these come from a checkpoint, so that the next one holds them, too."""
        self._restored |= names


def is_saved(module: nn.Module, name: str) -> bool:
    """Return whether a checkpoint holds what ``name`` of ``module`` is moved to, if that can be saved.

    ``name`` may be that of an element, like ``memory[0]``. What is not there yet may become anything;
    :meth:`FreshBuffers.moved` refuses the rest.
    """
    path, _, key = name.partition("[")[0].rpartition(".")
    owner = dict(module.named_modules(remove_duplicate=False)).get(path)
    if owner is None or key in owner._buffers:
        return owner is not None
    return key.isidentifier() and _is_kept(owner.__dict__.get(key))


def restore(module: nn.Module, tensors: Mapping[str, Stored], texts: Mapping[str, str]) -> set[str]:
    """Give ``module`` what was saved for it; return the names of that."""
    owners, device = dict(module.named_modules(remove_duplicate=False)), _device_of(module)
    values = {name.removeprefix(VALUE): text for name, text in texts.items() if name.startswith(VALUE)}
    packed = {name: json.loads(text) for name, text in values.items() if _is_place(owners, name)}
    of_values = {*nested.tensor_names([*packed.values()])}
    own = {name for name in tensors if _is_place(owners, name)} - of_values
    read = dict(storage.read({name: tensors[name] for name in own | of_values}))
    for name, value in packed.items():
        path, _, key = name.rpartition(".")
        found = nested.unpacked(value, read, device=device, steps_on_cpu=False)
        owners[path].__dict__[key] = found
    for name in own:
        path, _, key = name.rpartition(".")
        owner, value = owners[path], read[name]
        held = owner._buffers if key in owner._buffers else owner.__dict__
        present = held.get(key)
        if isinstance(present, Tensor) and present.shape == value.shape and present.dtype == value.dtype:
            present.data.copy_(value)  # in place: others may hold it, too
        else:  # the forward puts new ones in its place
            held[key] = value.to(device)
    return own | packed.keys()


def _is_place(owners: Mapping[str, nn.Module], name: str) -> bool:
    path, _, key = name.rpartition(".")
    if (owner := owners.get(path)) is None:
        return False
    # Of a module whose forward is cut each stage has a bare one with what that stage uses; the rest is another's.
    is_bare = type(owner) is nn.Module or isinstance(owner, StageModule)
    return not is_bare or key in owner._buffers or key in owner.__dict__


def _unsavable(text: str) -> ConfigError:
    return ConfigError(
        f"run_dir: what a forward leaves in the model cannot be saved: {text}. Without it a resumed run would differ; "
        "register it as a buffer, or train without run_dir"
    )


def _device_of(module: nn.Module) -> torch.device:
    return next((t.device for t in (*module.parameters(), *module.buffers())), torch.device("cpu"))


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for path, owner in module.named_modules(remove_duplicate=False):
        dot = f"{path}." if path else ""
        for key, value in owner.__dict__.items():
            if key not in OF_TORCH and key.isidentifier():
                yield f"{dot}{key}", tuple(value) if isinstance(value, torch.Size) else value


def _present(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for path, owner in module.named_modules(remove_duplicate=False):
        dot = f"{path}." if path else ""
        for key in sorted(owner._non_persistent_buffers_set):
            if (buffer := owner._buffers.get(key)) is not None:
                yield f"{dot}{key}", buffer
    yield from ((name, value) for name, value in _attributes(module) if _is_kept(value) and value is not None)


def _is_kept(value: object) -> bool:
    is_tensor = isinstance(value, Tensor) and not isinstance(value, nn.Parameter)
    return is_tensor or value is None or isinstance(value, bool | int | float | str) or type(value) in _CONTAINERS


def _mark(value: Any) -> object:
    return (
        nested.mark(value)
        if type(value) in _CONTAINERS
        else nested.digest(value)
        if isinstance(value, Tensor)
        else value
    )
