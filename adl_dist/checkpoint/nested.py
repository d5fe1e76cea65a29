"""Values as an optimizer keeps them - tensors, numbers, text, and any nesting of these - as tensors and JSON, and back.

What comes back is equal to the bit and of the same type: a Python int stays one, a tuple stays a tuple, a tensor has
its dtype, and its strides, because a product of matrices may be rounded otherwise with others.
"""

import hashlib
import io
import json
import pickle
from collections.abc import Iterable, Mapping
from types import BuiltinFunctionType, FunctionType, GeneratorType, MappingProxyType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from adl_dist.checkpoint import storage

PLAIN = (bool, int, float, str, type(None))
# What a mark takes for one thing, whatever it holds: some of it is saved elsewhere, and the rest is code.
CONSTANT = nn.Parameter | nn.Module | type | FunctionType | BuiltinFunctionType | MethodType | ModuleType
KINDS = "tensors, numbers, text, None, and lists, tuples and dictionaries of these"


class Unstorable(Exception):
    """No checkpoint can hold a value; the text says which one, and why."""


class Packer:
    """Turns values into JSON, and collects their tensors by name."""

    def __init__(self, own: Mapping[str, Tensor], device: torch.device) -> None:
        """Begin with the tensors that the values may not share memory with, by name; they are on ``device``."""
        self.tensors: dict[str, Tensor] = {}
        self._device = device
        self._names = {id(tensor): name for name, tensor in own.items()}
        self._at = {tensor.data_ptr(): name for name, tensor in own.items()}

    def packed(self, name: str, value: Any) -> Any:
        """Return the JSON of ``value``, in which a tensor is the name by which it is in ``tensors``.

        Raises:
            Unstorable: it is or holds what cannot be restored.
        """
        kind = type(value)
        if kind in PLAIN:
            return value
        if kind is list:
            return [self.packed(f"{name}.{i}", one) for i, one in enumerate(value)]
        if kind is tuple:
            return {"tuple": [self.packed(f"{name}.{i}", one) for i, one in enumerate(value)]}
        if kind is dict:
            pairs = [(key, f"{name}.{self._names.get(id(key), key)}", one) for key, one in value.items()]
            return {"dict": [[self._key(name, key), self.packed(full, one)] for key, full, one in pairs]}
        if kind is Tensor:
            return self._tensor(name, value)
        raise Unstorable(f"{name} is a {kind.__name__}; expected {KINDS}")

    def _key(self, name: str, key: Any) -> Any:
        if isinstance(key, nn.Parameter) and id(key) in self._names:
            return {"parameter": self._names[id(key)]}
        if not all(type(part) in PLAIN for part in (key if type(key) is tuple else (key,))):
            raise Unstorable(f"{name} has a key that is a {type(key).__name__}; expected text or numbers")
        if key in self._names:
            raise Unstorable(f"{name} has the id() of a parameter for a key, which is another one in every process")
        return self.packed(name, key)

    def _tensor(self, name: str, tensor: Tensor) -> dict[str, Any]:
        if reason := storage.why_unstorable(tensor):
            raise Unstorable(f"{name}: {reason}")
        if name in self.tensors:
            raise Unstorable(f"{name} is the name of two values")
        if tensor.numel() and (other := self._at.setdefault(tensor.data_ptr(), name)) != name:
            raise Unstorable(f"{name} shares its memory with {other}; expected a tensor of its own, as clone() makes")
        self.tensors[name] = tensor
        leaf: dict[str, Any] = {"tensor": name}
        is_dense = (
            1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)) == tensor.numel()
        )
        if is_dense and not tensor.is_contiguous():
            leaf["strides"] = list(tensor.stride())
        if self._device.type != "cpu":  # on the CPU the two are the same
            leaf["with_parameter"] = tensor.device.type != "cpu"
        return leaf


def unpacked(
    packed: Any,
    tensors: Mapping[str, Tensor],
    *,
    device: torch.device,
    steps_on_cpu: bool,
    own: Mapping[str, Tensor] = MappingProxyType({}),
) -> Any:
    """Return the value that became ``packed``, with its tensors on ``device`` or the CPU, as they were.

    ``own`` are the tensors that it does not hold but may have for keys, by the names that they were packed with.
    Where it was saved on the CPU, all are on ``device``, except what is called ``step`` if ``steps_on_cpu``.
    """

    def value_of(packed: Any) -> Any:
        if isinstance(packed, list):
            return [value_of(one) for one in packed]
        if not isinstance(packed, dict):
            return packed
        if "tuple" in packed:
            return tuple(value_of(one) for one in packed["tuple"])
        if "parameter" in packed:
            return own[packed["parameter"]]
        if "dict" in packed:
            return {value_of(key): value_of(one) for key, one in packed["dict"]}
        value, is_step = tensors[packed["tensor"]], packed["tensor"].rpartition(".")[2] == "step"
        if "strides" in packed:
            value = torch.empty_strided(value.shape, packed["strides"], dtype=value.dtype).copy_(value)
        return value.to(device) if packed.get("with_parameter", not (is_step and steps_on_cpu)) else value

    return value_of(packed)


def tensor_names(packed: Any) -> Iterable[str]:
    """Yield the names of all tensors of a packed value."""
    if isinstance(packed, list):
        for one in packed:
            yield from tensor_names(one)
    elif isinstance(packed, dict):
        if "tensor" in packed:
            yield packed["tensor"]
        for one in (*packed.get("tuple", ()), *(one for pair in packed.get("dict", ()) for one in pair)):
            yield from tensor_names(one)


def mark(value: Any) -> str:
    """Return a short text that is another one if ``value`` has changed, whatever it is.

    Parameters, modules and functions count as what they are and not as what they hold.
    """
    packer = Packer({}, torch.device("cpu"))
    try:
        text = json.dumps(packer.packed("", value))
        return hashlib.sha256(text.encode() + b"".join(map(digest, packer.tensors.values()))).hexdigest()
    except Unstorable:
        pass
    stream = io.BytesIO()
    try:
        _Marker(stream).dump(value)
    except Exception:  # a lock, a file, a process group: nothing that could be compared
        return type(value).__qualname__
    return hashlib.sha256(stream.getvalue()).hexdigest()


def digest(tensor: Tensor) -> bytes:
    """Return a checksum of dtype, shape and content."""
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    content = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(f"{tensor.dtype}{tuple(tensor.shape)}".encode() + content.numpy().tobytes()).digest()


class _Marker(pickle.Pickler):
    """Writes what is never read: it counts only whether that is the same again."""

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, CONSTANT):
            return "constant"
        if isinstance(value, GeneratorType):  # what it draws is hidden, but not whether it has begun
            return f"generator {value.gi_frame and value.gi_frame.f_lasti}"
        return digest(value) if isinstance(value, Tensor) else None
