"""Changes of a model by its user between segments, for a stage's copy."""

import copy
import hashlib
import io
import pickle
from collections.abc import Collection, Iterator
from contextlib import suppress
from typing import Any
from weakref import ref

from torch import Tensor, nn

from adl_dist.batch import version_of
from adl_dist.errors import PartitionError
from adl_dist.partition.absent import Itself
from adl_dist.partition.containers import tensors_in
from adl_dist.partition.intercept import OF_TORCH
from adl_dist.partition.recording import module_named, put_tensor, tensor_named

_OWN = {*OF_TORCH, "training", "forward"}  # attributes of which the copies have their own
_SIMPLE = {bool, int, float, str, type(None)}


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
        known: dict[int, Any] = {}
        self._contents = [_contents(module, known) for module in model.modules()]
        self._parts: dict[int, list[int]] = {}  # of each module of the model when the first segment began
        # Tensors as last seen, by name: (the copy's, the model's).
        self._seen = {name: (tensor_named(twin, name), tensor_named(model, name)) for name in (*copies, *shared)}

    def take(self) -> bool:
        """Take over the changes; return whether shapes may differ by them.

        These are attributes, hooks, ``requires_grad`` and elements of tensors.

        Raises:
            PartitionError: If a module or a parameter is another one, or a buffer in the state dict has another shape.
        """
        if (model := self._pairs[0][0]()) is None:  # the user has deleted it
            return False
        changed, has_new_gradients, known = [], False, dict[int, Any]()
        for number, (mine, twin) in enumerate(self._pairs):
            module = mine()
            if module is twin:  # a ScriptModule has no copy
                continue
            if module is None or self._parts.setdefault(number, parts := _parts(module)) != parts:
                name = next((n for n, part in self._twin.named_modules() if part is twin), "")
                raise _not_as_cut(name or type(model).__name__)
            now, before = _contents(module, known), self._contents[number]
            keys = [key for key, content in now.items() if before.get(key) != content]
            changed += [(module, twin, key) for key in keys if vars(module)[key] is not vars(twin).get(key, self)]
            self._contents[number] = now
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
        for name, (own_before, theirs_before) in self._seen.items():
            own, theirs = tensor_named(self._twin, name), tensor_named(model, name)
            is_assigned = own is not own_before and theirs is theirs_before  # by a forward
            if own is theirs or is_assigned or not isinstance(own, Tensor) or own.is_meta:
                continue
            path, _, key = name.rpartition(".")
            if isinstance(theirs, Tensor) and theirs.shape == own.shape:
                own.detach().copy_(theirs.detach())
            elif isinstance(theirs, Tensor) and key in module_named(model, path)._non_persistent_buffers_set:
                own = theirs.detach().to(own.device, own.dtype, copy=True)
                put_tensor(module_named(self._twin, path), name, own)
            elif key not in vars(module_named(model, path)):  # an attribute has been copied
                raise _not_as_cut(name)
            if name in self._shared and isinstance(theirs, Tensor):
                put_tensor(module_named(model, path), name, theirs := own)
            self._seen[name] = own, theirs

    def replaces(self, name: str, new: Tensor) -> Iterator[nn.Module]:
        """Yield the user's module with the tensor ``name``.

        The caller replaces the tensor there, and in the copy, by ``new``.
        """
        if name in self._seen:
            self._seen[name] = new, new if name in self._shared else self._seen[name][1]
        if (model := self._pairs[0][0]()) is not None:
            yield module_named(model, name.rpartition(".")[0])

    def give(self, extra_states: Collection[nn.Module]) -> None:
        """Put buffers and ``extra_states`` of the copy into the user's model."""
        for number, (mine, twin) in enumerate(self._pairs):
            if twin in extra_states and (module := mine()) is not None:
                module.set_extra_state(copy.deepcopy(twin.get_extra_state()))
                self._contents[number] = _contents(module, {})
        if (model := self._pairs[0][0]()) is None:
            return
        for name in self._shared:
            path, _, key = name.rpartition(".")
            module, own = module_named(model, path), tensor_named(self._twin, name)
            # Not a table, which would no longer fit numbers that the model keeps with it.
            is_state = key in module._buffers and key not in module._non_persistent_buffers_set
            is_theirs = tensor_named(model, name) is not self._seen[name][1]  # the user has assigned another one
            if is_state and not is_theirs and isinstance(own, Tensor) and not own.is_meta:
                put_tensor(module, name, own)
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


def _copy_attribute(module: nn.Module, twin: nn.Module, key: str, memo: dict[int, Any]) -> None:
    value, own = vars(module)[key], vars(twin).get(key)
    if key.endswith("_hooks"):
        vars(twin)[key] = copy.copy(value)
        return
    for tensor in tensors_in(value):  # of which those with a graph have no deepcopy
        memo.setdefault(id(tensor), tensor.detach().clone())
    if not (isinstance(own, Tensor) and own.is_meta):  # of a stage that lacks it
        vars(twin)[key] = copy.deepcopy(value, memo)


def _contents(module: nn.Module, known: dict[int, Any]) -> dict[str, Any]:
    """Return keys of the contents of the attributes that a user may change.

    ``known`` has those of objects by id, because modules may share them.
    """
    found: dict[str, Any] = {}
    for key, value in vars(module).items():
        if key in _OWN:
            continue
        if type(value) in _SIMPLE:
            found[key] = type(value), value
        elif key.endswith("_hooks") and isinstance(value, dict):
            found[key] = (*value.items(),)
        else:
            if id(value) not in known:
                known[id(value)] = _content(value)
            found[key] = known[id(value)]
    return found


def _content(value: Any) -> Any:
    """Return a key of the content of ``value``."""
    file = io.BytesIO()
    pickler = _Content(file)
    try:
        pickler.dump(value)
    except Exception:  # a container that refers to itself too deeply
        return Itself(value)
    return hashlib.blake2b(file.getbuffer()).digest(), tuple(map(Itself, pickler.objects))


class _Content(pickle.Pickler):
    """A pickler of plain content.

    Tensors and callable objects, and such as cannot be pickled, stand for themselves, with the version of a tensor.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.objects: list[Any] = []

    def reducer_override(self, value: Any) -> Any:
        """Return how ``value``, which is no plain container, is pickled."""
        if value is _object:
            return NotImplemented
        if not callable(value) and not isinstance(value, Tensor):
            with suppress(Exception):
                return value.__reduce_ex__(pickle.DEFAULT_PROTOCOL)
        self.objects.append(value)
        return _object, (len(self.objects), version_of(value) if isinstance(value, Tensor) else 0)


def _object(number: int, version: int) -> None:
    """Stand for an object that is not pickled."""
