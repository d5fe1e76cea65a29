"""What a model does, as a list of torch's operations: by it a cut model on meta is compared with the uncut one.

On ``torch.device("meta")`` there are no values, but every operation is there, also those of the backward, with what it
reads and writes. Two models that do the same operations with the same tensors in the same order compute the same. So do
two whose output and gradients come about by the same operations, whatever else they do: each operation has a hash of
its name and of the hashes of what it reads, and so of all that its result depends on.
"""

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from adl_dist.batch import Batch, call
from adl_dist.training.trial.homes import Around, Homes


class Operation(NamedTuple):
    """One call of an operator: its name, its arguments, tensors by where they come from, and a hash of all before."""

    name: str
    arguments: str
    value: str

    def __str__(self) -> str:
        return f"{self.name}{self.arguments}"


class Recorder(TorchDispatchMode):
    """Notes the operations that are called inside.

    Attributes:
        operations: in the order they were called.
        recomputed: names of parameters that a backward computed with again, as activation checkpointing does.
        written: names of parameters and buffers that a forward has written to.
        results: hashes of the tensors of the output, in order, and of the gradient of each parameter, by name.
        stage: the stage whose forward is running, if it must compute with its own tensors only.
    """

    def __init__(self, model: nn.Module, homes: Homes | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[Operation] = []
        self.recomputed, self.written = set[str](), set[str]()
        self.results: dict[str, str] = {}
        self.stage: int | None = None
        self._homes, self._is_backward = homes, False
        named = (*model.named_buffers(), *model.named_parameters())
        self._names = {_storage(tensor): (name, tensor) for name, tensor in named}
        self._origins: dict[int, str] = {}  # of other tensors
        self._values: dict[int, str] = {}  # by memory: the hash of what has written it
        self._kept: list[Tensor] = []  # so that no address is used a second time

    def take(self, batch: Any, name: str, value: str | None = None) -> None:
        """Know the tensors in ``batch`` by ``name``, and by ``value`` what they hold; None: by the name, too."""
        for place, leaf in enumerate(leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)):
            self._origins.setdefault(_storage(leaf), f"{name}[{place}]")
            self._values.setdefault(_storage(leaf), f"{value or name}[{place}]")
            self._kept.append(leaf)

    def backward(self, value: Any) -> None:
        """Go back from all tensors in ``value`` that have a history."""
        ends = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.requires_grad]
        self._is_backward = True
        with self:
            torch.autograd.backward(ends, [torch.ones_like(end) for end in ends])

    def end(self, output: Any, model: nn.Module) -> None:
        """Note the results: ``output``, and what are gradients of the parameters of ``model`` now."""
        leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        self.results = {f"output {place}": self._hashed(leaf) for place, leaf in enumerate(leaves)}
        grads = ((name, p.grad) for name, p in model.named_parameters())
        self.results |= {f"the gradient of {name}": self._hashed(grad) for name, grad in grads if grad is not None}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and _storage(leaf) in self._names:
                self._note_use(*self._names[_storage(leaf)])
        shown = tree_map(self._shown, (args, kwargs or {}))
        made_by = f"{func}{tree_map(self._hashed, (args, kwargs or {}))}"
        value = hashlib.blake2b(made_by.encode(), digest_size=16).hexdigest()
        for tensor in written_by(func, args, kwargs or {}):
            self._values[_storage(tensor)] = value
            if _storage(tensor) in self._names and not self._is_backward:
                self.written.add(self._names[_storage(tensor)][0])
        out = func(*args, **(kwargs or {}))
        self.take(out, f"operation {len(self.operations)}", value)
        self.operations.append(Operation(str(func), repr(shown), value))
        return out

    def _note_use(self, name: str, tensor: Tensor) -> None:
        if self._is_backward and torch.is_grad_enabled():  # which it is for a forward only
            self.recomputed.add(name)
        if self._homes is not None and self.stage is not None:
            self._homes.check(name, tensor, self.stage)

    def _shown(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        place = _storage(leaf)
        origin = self._names[place][0] if place in self._names else self._origins.get(place, "a new tensor")
        return f"{origin} {_form(leaf)}"

    def _hashed(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        place = _storage(leaf)
        name = self._names[place][0] if place in self._names else "a new tensor"
        return f"{self._values.get(place, name)} {_form(leaf)}"


def record(
    stages: Sequence[nn.Module],
    model: nn.Module,
    batch: Batch,
    *,
    homes: Homes | None = None,
    around: Around = lambda k: nullcontext(),
    graph: bool = True,
) -> Recorder:
    """Return what ``stages``, which are ``model`` or its parts, do with ``batch``, which is on meta; and backward.

    ``homes``: each stage must compute with its own tensors only. ``around(k)``: what stage k runs in. ``graph``:
    whether there is a backward, too.

    Raises:
        PartitionError: a stage computes with a tensor of another one.
    """
    recorder = Recorder(model, homes)
    value: Any = batch.clone()
    recorder.take(value, "input")
    with torch.set_grad_enabled(graph), torch.device("meta"):
        for k, stage in enumerate(stages):
            recorder.stage = k
            with around(k), recorder:
                value = call(stage, value)
        recorder.stage = None
        if graph:
            recorder.backward(value)
    recorder.end(value, model)
    return recorder


def first_difference(expected: Recorder, found: Recorder, *, all_of_it: bool) -> tuple[str, str] | None:
    """Return what differs first, of both; None: both do the same.

    With ``all_of_it`` they have to do the same operations in the same order, else what leads to the same results.
    """
    if not all_of_it and expected.results == found.results:
        return None
    if all_of_it:
        for one, other in zip_longest(expected.operations, found.operations):
            if one != other:
                return str(one or "nothing more"), str(other or "nothing more")
        return None
    values = {operation.value for operation in found.operations}
    for operation in expected.operations:
        if operation.value not in values:
            return str(operation), "nothing of that kind"
    names = expected.results.keys() | found.results.keys()
    name = min(name for name in names if expected.results.get(name) != found.results.get(name))
    return f"what makes {name}", "something else"


def _form(tensor: Tensor) -> str:
    return f"{tensor.dtype} {[*tensor.shape]} {tensor.stride()} {tensor.storage_offset()}"


def written_by(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors that an operation of torch's writes to, also by ``out=`` and in lists."""
    found = list[Tensor]()
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[place] if place < len(args) else kwargs.get(argument.name)
            found += [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)]
    return found


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
