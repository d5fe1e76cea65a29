"""Nested values of a ``state_dict()`` as tensors and JSON, and back.

The values are tensors, numbers, text, None, and any nesting of these in lists, tuples and dictionaries. A value read
back is equal to the bit and has the same type: an int stays an int, and a tuple a tuple. A dense tensor inside a nested
value keeps its strides, because other strides may change the rounding of a matrix product; others become contiguous.
"""

import json
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX

from adl_dist.checkpoint import tensor_files
from adl_dist.checkpoint.tensor_files import Shard, Stored

CPU = torch.device("cpu")
PLAIN = (bool, int, float, str, type(None))
KINDS = "tensors, numbers, text, None, and lists, tuples and dictionaries of these"
ENTRY = "entry:"  # begins the names of packed entries; no name of a module has a colon


class Unstorable(Exception):
    """A value that no checkpoint can hold, with its name and the reason."""


class Packer:
    """A converter of values to JSON that collects their tensors by name."""

    def __init__(self, device: torch.device = CPU) -> None:
        """Begin without tensors; ``device`` is the parameters' device."""
        self.tensors: dict[str, Tensor] = {}
        self._device = device
        self._names: dict[int, str] = {}  # of these, by address

    def packed(self, name: str, value: Any) -> Any:
        """Return ``value`` as JSON with names for tensors, or raise Unstorable."""
        kind = type(value)
        if kind in PLAIN:
            return value
        if kind is list:
            return [self.packed(f"{name}.{i}", one) for i, one in enumerate(value)]
        if kind is tuple:
            return {"tuple": [self.packed(f"{name}.{i}", one) for i, one in enumerate(value)]}
        if kind is dict:
            for key in value:
                if not all(type(part) in PLAIN for part in (key if type(key) is tuple else (key,))):
                    raise Unstorable(f"{name} has a key that is a {type(key).__name__}; expected text or numbers")
            return {"dict": [[self.packed(name, k), self.packed(f"{name}.{k}", one)] for k, one in value.items()]}
        if kind is Tensor:
            return self._tensor(name, value)
        raise Unstorable(f"{name} is a {kind.__name__}; expected {KINDS}")

    def _tensor(self, name: str, tensor: Tensor) -> dict[str, Any]:
        if reason := tensor_files.why_unstorable(tensor):
            raise Unstorable(f"{name}: {reason}")
        if name in self.tensors:
            raise Unstorable(f"{name} is the name of two values")
        if tensor.numel() and (other := self._names.setdefault(tensor.data_ptr(), name)) != name:
            raise Unstorable(f"{name} shares its memory with {other}; expected a tensor of its own, as clone() makes")
        self.tensors[name] = tensor
        leaf: dict[str, Any] = {"tensor": name}
        span = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        if span == tensor.numel() and not tensor.is_contiguous():
            leaf["strides"] = list(tensor.stride())
        if self._device.type != "cpu":  # on the CPU the two are the same
            leaf["with_parameter"] = tensor.device.type != "cpu"
        return leaf


def unpacked(
    texts: Mapping[str, str],
    stored: Mapping[str, Stored],
    device: torch.device = CPU,
    *,
    steps_on_cpu: bool = True,
) -> dict[str, Any]:
    """Return the values packed as ``texts``, with tensors from ``stored``.

    A tensor saved by a run on a GPU returns to ``device`` or the CPU, where it was. A tensor saved by a run on the CPU
    is put on ``device``, except one called ``step`` if ``steps_on_cpu``.
    """
    names: set[str] = set()
    read: dict[str, Tensor] = {}

    def find(packed: dict[str, Any]) -> None:
        names.update([packed["tensor"]] if "tensor" in packed else [])

    def value_of(packed: dict[str, Any]) -> Any:
        if "tuple" in packed:
            return tuple(packed["tuple"])
        if "dict" in packed:
            return dict(packed["dict"])
        if "tensor" not in packed:
            return packed
        value, is_step = read[packed["tensor"]], packed["tensor"].rpartition(".")[2] == "step"
        if "strides" in packed:
            value = torch.empty_strided(value.shape, packed["strides"], dtype=value.dtype).copy_(value)
        return value.to(device) if packed.get("with_parameter", not (is_step and steps_on_cpu)) else value

    for text in texts.values():
        json.loads(text, object_hook=find)
    read.update(tensor_files.read({name: stored[name] for name in names}))
    return {key: json.loads(text, object_hook=value_of) for key, text in texts.items()}


def is_extra_state(name: str) -> bool:
    """Return whether ``name`` is an entry made by ``get_extra_state``."""
    return name.rpartition(".")[2] == _EXTRA_STATE_KEY_SUFFIX


def packed_state(state: Mapping[str, Any]) -> Shard:
    """Return a ``state_dict()`` as tensors and JSON, or raise Unstorable."""
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor) and not is_extra_state(name)}
    for name, tensor in tensors.items():
        if reason := tensor_files.why_unstorable(tensor):
            raise Unstorable(f"{name}: {reason}")
    packer = Packer()
    others = {f"{ENTRY}{name}": value for name, value in state.items() if name not in tensors}
    try:
        texts = {name: json.dumps(packer.packed(name, value)) for name, value in others.items()}
    except Unstorable as error:
        raise Unstorable(str(error).removeprefix(ENTRY)) from None
    return Shard({**tensors, **packer.tensors}, texts)


def unpacked_state(stored: Mapping[str, Stored], texts: Mapping[str, str]) -> dict[str, Any]:
    """Return the ``state_dict()`` packed by :func:`packed_state`, on the CPU."""
    tensors = {name: at for name, at in stored.items() if not name.startswith(ENTRY)}
    entries = unpacked({name: text for name, text in texts.items() if name.startswith(ENTRY)}, stored)
    return dict(tensor_files.read(tensors)) | {name.removeprefix(ENTRY): value for name, value in entries.items()}


def of_this_version(found: Mapping[str, Any], state: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """Copy ``found`` with the module versions (``_metadata``) of ``state``.

    Without versions, modules would convert it as the state of a torch that knew none.
    """
    loaded = OrderedDict(found)
    vars(loaded)["_metadata"] = getattr(state, "_metadata", None)
    return loaded
