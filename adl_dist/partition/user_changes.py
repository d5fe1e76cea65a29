"""Changes of a model by its user between segments, for a stage's copy."""

import copy
import hashlib
import pickle
from collections.abc import Collection, Iterator
from contextlib import suppress
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from adl_dist.batch import version_of
from adl_dist.errors import PartitionError, in_one_line
from adl_dist.partition.absent import Itself
from adl_dist.partition.containers import tensors_in
from adl_dist.partition.intercept import OF_TORCH
from adl_dist.partition.recording import module_named, put_tensor, tensor_named

_OWN = {*OF_TORCH, "training", "forward"}  # attributes of which the copies have their own
_SIMPLE = {bool, int, float, str, type(None)}
# Objects that stand for themselves: their content is followed elsewhere, or not at all.
_WHOLE = Tensor, nn.Module, torch.Generator, type, FunctionType, BuiltinFunctionType, MethodType


class UserChanges:
    """The user's model and a stage's copy, compared attribute by attribute.

    Tensors that both have need no comparison. Copies of others follow the model's.
    """

    def __init__(self, model: nn.Module, twin: nn.Module, *, copies: Collection[str], shared: Collection[str]) -> None:
        """Note the present state of ``model``, from which ``twin`` was copied.

        ``copies`` are names of tensors of which ``twin`` has a copy, and ``shared`` of buffers and attributes that both
        have.
        """
        self._twin, self._shared = twin, {*shared}
        self._pairs = [(ref(mine), other) for mine, other in zip(model.modules(), twin.modules(), strict=True)]
        self._names = {id(module): name for name, module in twin.named_modules()}
        known: dict[int, Any] = {}
        self._keys = [_keys_of(module, known) for module in model.modules()]
        self._parts: dict[int, list[int]] = {}  # of each module of the model when the first segment began
        # Tensors as last seen, by name: (the copy's, the model's).
        self._seen = {name: (tensor_named(twin, name), tensor_named(model, name)) for name in (*copies, *shared)}

    def take(self) -> bool:
        """Take over the changes; return whether shapes may differ by them.

        These are attributes, hooks, ``requires_grad`` and elements of tensors.

        Raises:
            PartitionError: If a module or a parameter is another one, or a buffer in the state dict has another shape.
        """
        if (model := self._pairs[0][0]()) is None:  # deleted by the user
            return False
        changed, has_new_gradients, known = [], False, dict[int, Any]()
        for number, (mine, twin) in enumerate(self._pairs):
            module = mine()
            if module is twin:  # a ScriptModule has no copy
                continue
            if module is None or self._parts.setdefault(number, parts := _parts(module)) != parts:
                raise _not_as_cut(self._names[id(twin)] or type(model).__name__)
            now, before = _keys_of(module, known), self._keys[number]
            names = [name for name in {**before, **now} if name not in now or before.get(name) != now[name]]
            changed += [(module, twin, n) for n in names if n not in now or vars(module)[n] is not vars(twin).get(n, n)]
            self._keys[number] = now
            for key, parameter in module._parameters.items():
                other = twin._parameters.get(key)
                if parameter is not None and other is not None and other.requires_grad != parameter.requires_grad:
                    other.requires_grad_(parameter.requires_grad)
                    has_new_gradients = True
        memo = self._memo() if changed else {}
        for module, twin, key in changed:
            _copy_attribute(module, twin, key, memo)
        self._take_tensors(model)
        return has_new_gradients or bool(changed)

    def _memo(self) -> dict[int, Any]:
        """Return a memo of deepcopy, with the copies of modules and tensors."""
        memo: dict[int, Any] = {}
        for mine, twin in self._pairs:
            if (module := mine()) is not None:
                memo |= {id(module): twin}
                for theirs, own in ((module._parameters, twin._parameters), (module._buffers, twin._buffers)):
                    memo |= {id(tensor): own[key] for key, tensor in theirs.items() if key in own}
        return memo

    def _take_tensors(self, model: nn.Module) -> None:
        made: dict[int, Tensor] = {}  # of a tensor with two names, one copy
        for name, (own_before, theirs_before) in self._seen.items():
            own, theirs = tensor_named(self._twin, name), tensor_named(model, name)
            is_replaced, is_assigned = theirs is not theirs_before, own is not own_before  # by the user, by a forward
            if own is theirs or not isinstance(own, Tensor) or own.is_meta or (is_assigned and not is_replaced):
                continue
            path, _, key = name.rpartition(".")
            module, is_alike = module_named(model, path), isinstance(theirs, Tensor) and theirs.shape == own.shape
            if not is_alike and key not in {*vars(module), *module._non_persistent_buffers_set}:
                raise _not_as_cut(name)
            if isinstance(theirs, Tensor) and is_replaced:
                is_like = (theirs.dtype, theirs.device) == (own.dtype, own.device) and not theirs.requires_grad
                if name in self._shared and is_like:
                    own = theirs
                elif id(theirs) in made:
                    own = made[id(theirs)]
                else:
                    own = made[id(theirs)] = theirs.detach().to(own.device, own.dtype, copy=True)
                put_tensor(module_named(self._twin, path), name, own)
            elif isinstance(theirs, Tensor):
                own.detach().copy_(theirs.detach())
            self._seen[name] = own, theirs

    def replaces(self, name: str, new: Tensor) -> Iterator[nn.Module]:
        """Note that ``new`` replaces a tensor, and yield the user's module.

        The caller replaces it there, and in the copy.
        """
        if name in self._seen:
            self._seen[name] = new, new if name in self._shared else self._seen[name][1]
        if (model := self._pairs[0][0]()) is not None:
            yield module_named(model, name.rpartition(".")[0])

    def give(self, extra_states: Collection[nn.Module]) -> None:
        """Put buffers and ``extra_states`` of the copy into the user's model."""
        for number, (mine, twin) in enumerate(self._pairs):
            if (module := mine()) is not None and twin in extra_states:
                module.set_extra_state(copy.deepcopy(twin.get_extra_state()))
                self._keys[number] = _keys_of(module, {})
            for key, own in twin._buffers.items() if module is not twin else ():
                name = f"{self._names[id(twin)]}.{key}".lstrip(".")
                if name not in self._shared or own is None or own.is_meta:
                    continue
                if module is None or module._buffers.get(key) is not self._seen[name][1]:  # replaced by the user
                    continue
                # A table may no longer fit the numbers that the model keeps with it.
                if key not in module._non_persistent_buffers_set or _numbers_of(twin) == _numbers_of(module):
                    module._buffers[key] = own
                    self._seen[name] = own, own


def _not_as_cut(name: str) -> PartitionError:
    return PartitionError(
        f"'{name}' of the model has other modules, parameters or shapes than when it was cut; write to tensors in "
        "place, or make a new Trainer"
    )


def _parts(module: nn.Module) -> list[int]:
    """Return the ids of parameters, children and a forward of its own."""
    own_forward = vars(module).get("forward")
    return [*map(id, (*module._parameters.values(), *module._modules.values(), own_forward))]


def _copy_attribute(module: nn.Module, twin: nn.Module, name: str, memo: dict[int, Any]) -> None:
    if name not in vars(module):
        vars(twin).pop(name, None)
        return
    value, own = vars(module)[name], vars(twin).get(name)
    if name.endswith("_hooks"):
        vars(twin)[name] = copy.copy(value)
        return
    for tensor in tensors_in(value):  # of which those with a graph have no deepcopy
        memo.setdefault(id(tensor), tensor.detach().clone())
    if isinstance(own, Tensor) and own.is_meta:  # of a stage that lacks it
        return
    try:
        vars(twin)[name] = copy.deepcopy(value, memo)
    except Exception as error:
        raise PartitionError(
            f"'{name}' of {type(module).__name__} cannot be copied ({in_one_line(error)}), and each stage needs a "
            "copy; give its class a __deepcopy__, or use num_stages=1"
        ) from error


def _numbers_of(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if type(value) in _SIMPLE and name not in _OWN}


def _keys_of(module: nn.Module, known: dict[int, Any]) -> dict[str, Any]:
    """Return keys of the contents of the attributes that a user may change.

    ``known`` has those of objects by id, because modules may share them.
    """
    found: dict[str, Any] = {}
    for name, value in vars(module).items():
        if name in _OWN:
            continue
        if type(value) in _SIMPLE or (type(value) is tuple and _SIMPLE.issuperset(map(type, value))):
            found[name] = type(value), value
        elif isinstance(value, dict) and (not value or name.endswith("_hooks")):  # as most of a module's attributes
            found[name] = (*value.items(),)
        else:
            if id(value) not in known:
                known[id(value)] = _key_of(value)
            found[name] = known[id(value)]
    return found


def _key_of(value: Any) -> Any:
    """Return a key of the content of ``value``."""
    pickler = _Hashing()
    try:
        pickler.dump(value)
    except Exception:  # a container that refers to itself too deeply
        return Itself(value)
    return pickler.hash.digest(), tuple(map(Itself, pickler.objects))


class _Hashing(pickle.Pickler):
    """A pickler that hashes plain content.

    ``_WHOLE`` objects and those that cannot be pickled stand for themselves, tensors with their versions.
    """

    def __init__(self) -> None:
        self.hash, self.objects = hashlib.blake2b(), list[Any]()
        super().__init__(self, protocol=5, buffer_callback=lambda buffer: self.hash.update(buffer.raw()))

    def write(self, data: bytes) -> None:
        """Take the next bytes of the pickle."""
        self.hash.update(data)

    def reducer_override(self, value: Any) -> Any:
        """Return how ``value``, which is no plain container, is pickled."""
        if value is _object:
            return NotImplemented
        if not isinstance(value, _WHOLE):
            with suppress(Exception):
                return value.__reduce_ex__(5)
        self.objects.append(value)
        # An optimizer moves the version of a parameter.
        is_followed = isinstance(value, Tensor) and not isinstance(value, nn.Parameter)
        return _object, (len(self.objects), version_of(value) if is_followed else 0)


def _object(number: int, version: int) -> None:
    """Stand for an object that is not pickled."""
