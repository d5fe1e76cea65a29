"""Absent results: meta tensors in the place of other stages' results.

Shapes are never guessed. A call runs once on meta tensors for each signature of its arguments. A call that asks for
elements cannot run there. The sizes of its results must then equal sizes of its arguments in all recorded runs, and the
stage that computes the call checks this in each micro-batch.
"""

import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module

from adl_dist.errors import in_one_line
from adl_dist.partition.containers import map_leaves, map_tensors, other_leaves, tensors_in, unique_tensors
from adl_dist.partition.intercept import OF_TORCH
from adl_dist.partition.value import Mark, Value, Watch, absent_tensor, as_value, native

META = torch.device("meta")
_SIMPLE = {int, float, bool, str, type(None), torch.dtype, torch.device, torch.Size, torch.memory_format}


def signature(value: Any) -> Any:
    """Return a hashable key; arguments with equal keys give equal shapes.

    Raises:
        TypeError: If an argument is an object of a type that has no key.
    """
    kind = type(value)
    if kind in _SIMPLE:
        return kind, value
    if isinstance(value, Tensor):
        return value.shape, value.dtype, value.requires_grad, value.stride() if value.ndim > 3 else None
    if isinstance(value, (list, tuple)):
        return kind, *map(signature, value)
    if isinstance(value, dict):
        return kind, *((key, signature(one)) for key, one in value.items())
    if kind is slice:
        return kind, signature((value.start, value.stop, value.step))
    if kind is type(Ellipsis):
        return kind
    if isinstance(value, np.generic):
        return kind, value
    raise TypeError(f"a {kind.__name__} among the arguments")


def module_signature(module: nn.Module) -> Any:
    """Return a hashable key of a module's class, attributes and shapes."""
    tensors = (*module._parameters.items(), *module._buffers.items())
    attributes = [(key, value) for key, value in vars(module).items() if key not in OF_TORCH]
    return (
        type(module),
        *((key, None if tensor is None else signature(tensor)) for key, tensor in tensors),
        *((key, _of_attribute(value)) for key, value in attributes),
        *((key, None if child is None else module_signature(child)) for key, child in module._modules.items()),
    )


class Itself:
    """A key for an object's identity; it keeps the object and so its id()."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __hash__(self) -> int:
        return id(self._value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Itself) and other._value is self._value


def _of_attribute(value: Any) -> Any:
    try:
        return signature(value)
    except TypeError:
        return Itself(value)


def _is_autocast() -> bool:
    return torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu")


def infer(
    function: Callable[..., Any], args: Any, kwargs: Any, module: nn.Module | None = None
) -> tuple[Any, list[Tensor]]:
    """Run ``function`` with meta tensors in place of its argument tensors.

    If ``module`` is given, ``function`` must be a call of it; its parameters, buffers and attribute tensors are
    replaced by meta tensors as well. Under autocast, which has no effect on meta, floating-point tensors are float32,
    and only the shapes of the result are right.

    Returns:
        The result, and the meta tensors that replaced the distinct argument tensors, in order.
    """
    watch, Watch.active = Watch.active, None
    pythons, numpys = random.getstate(), np.random.get_state()
    made: dict[int, Tensor] = {}
    tables: list[tuple[dict[str, Any], str, Tensor]] = []  # tensors that are plain attributes
    is_cast = _is_autocast()

    def on_meta(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            dtype = torch.float32 if is_cast and tensor.is_floating_point() else tensor.dtype
            twin = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=META)
            if tensor.requires_grad:
                twin.requires_grad_()
                twin = twin if isinstance(tensor, nn.Parameter) else twin.clone()
            made[id(tensor)] = twin
        return made[id(tensor)]

    def given(leaf: Any) -> Any:
        return on_meta(leaf) if isinstance(leaf, Tensor) else META if isinstance(leaf, torch.device) else leaf

    try:
        with torch._C._EnableTorchFunction(), native(), META:
            args, kwargs = map_leaves(given, (args, kwargs))
            twins = [*made.values()]
            state = {}
            if module is not None:
                state = {n: on_meta(t) for n, t in (*module.named_parameters(), *module.named_buffers())}
                parts = map(vars, module.modules())
                tables = [(part, key, t) for part in parts for key, t in part.items() if isinstance(t, Tensor)]
                for attributes, key, tensor in tables:
                    attributes[key] = on_meta(tensor)
            with nullcontext() if module is None else _reparametrize_module(module, state):
                return function(*args, **kwargs), twins
    finally:
        for attributes, key, tensor in tables:
            attributes[key] = tensor
        Watch.active = watch
        random.setstate(pythons)
        np.random.set_state(numpys)


def is_masked(args: Any, kwargs: Any, has: Callable[[Tensor], bool]) -> bool:
    """Return whether ``has`` holds for all tensors but the first argument.

    These tensors are masks or indices. Without any, the result is False.
    """
    masks = tensors_in((args[1:], kwargs))
    return bool(masks) and all(map(has, masks))


def _on_zeros(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run a function with zeros for absent tensors, to get its result sizes."""

    def zeros(tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).zero_()
        return made.requires_grad_(tensor.requires_grad)

    return function(*map_tensors(zeros, args), **kwargs)


def call_signature(args: Any, kwargs: Any) -> Any:
    """Return the signature of a call, or None if an argument has none."""
    try:
        return torch.is_grad_enabled(), _is_autocast(), signature((args, kwargs))
    except TypeError:
        return None


class Given(int):
    """The index of an argument tensor that a call returns in its result."""


def _template(out: Any, given: Sequence[Tensor]) -> Any:
    """Return ``out`` on meta, with a ``Given`` for each ``given`` tensor."""
    places = {id(tensor): Given(place) for place, tensor in enumerate(given)}

    def without_elements(tensor: Tensor) -> Any:
        made = absent_tensor(tensor.shape, tensor.stride(), tensor.dtype, requires_grad=tensor.requires_grad)
        return places.get(id(tensor), made)

    return map_tensors(without_elements, out)


class RecordedResults:
    """The shapes and dtypes of one call's results in the recorded runs.

    Attributes:
        by_rule: whether meta tensors cannot predict the shapes, because the call asks for elements. The sizes of its
            results must then equal sizes of its arguments in all runs.
    """

    def __init__(self) -> None:
        self.by_rule = False
        self._runs: dict[Any, tuple[list[torch.Size], Any]] = {}  # by signature: shapes of the arguments, and result

    def note(self, key: Any, args: Any, out: Any) -> None:
        """Record the shapes of one run with the signature ``key``."""
        if key is None or key not in self._runs or self.by_rule:
            with torch._C.DisableTorchFunction():
                shapes = [tensor.shape for tensor in tensors_in(args)]
                self._runs[key or object()] = shapes, _template(out, unique_tensors(args))

    def follow_arguments(self) -> bool:
        """Return whether argument sizes determine the result sizes in all runs."""
        try:
            for shapes, _ in self._runs.values():
                self.by_sizes([torch.empty(shape, device=META) for shape in shapes])
        except ValueError:
            return False
        return True

    def known(self, key: Any) -> Any:
        """Return the meta result recorded for the signature ``key``, or None."""
        return None if self.by_rule or key not in self._runs else self._runs[key][1]

    def by_sizes(self, args: Any) -> Any:
        """Return the meta result for ``args`` of new sizes, or raise a ValueError.

        Each of its sizes is that of an argument's dimension, if equal to it in all recorded runs, or a constant.
        """
        shapes = [tensor.shape for tensor in tensors_in(args)]
        all_runs = [*self._runs.values()]
        alike = [(given, out) for given, out in all_runs if list(map(len, given)) == list(map(len, shapes))]
        runs = [(given, tensors_in(out)) for given, out in alike]
        numbers = [[*other_leaves(out)] for _, out in all_runs]
        if any(one != numbers[0] for one in numbers):
            raise ValueError("it returns numbers that differ between the recorded runs")
        if not runs or len({tuple(map(len, (t.shape for t in outs))) for _, outs in runs}) > 1:
            raise ValueError("no recorded run has such arguments")
        place = iter(range(len(runs[0][1])))

        def sized(tensor: Tensor) -> Tensor:
            number = next(place)
            sizes = [self._size([outs[number].shape[d] for _, outs in runs], runs, shapes) for d in range(tensor.ndim)]
            made = torch.empty(sizes, dtype=tensor.dtype, device=META)
            return made.requires_grad_(tensor.requires_grad)

        return map_tensors(sized, alike[0][1])

    @staticmethod
    def _size(seen: Sequence[int], runs: Sequence[Any], shapes: Sequence[torch.Size]) -> int:
        sources = [
            (arg, dim)
            for arg, shape in enumerate(shapes)
            for dim in range(len(shape))
            if all(given[arg][dim] == size for (given, _), size in zip(runs, seen, strict=True))
        ]
        found = {shapes[arg][dim] for arg, dim in sources}
        if not found and len(set(seen)) == 1 and len(runs) > 1:
            return seen[0]
        if len(found) != 1:
            raise ValueError("its sizes are no sizes of its arguments")
        return found.pop()


class Results:
    """The absent results of one call on one stage, cached by signature."""

    def __init__(
        self,
        shared: dict[Any, Any],
        recorded: RecordedResults | None = None,
        *,
        dtypes: Sequence[torch.dtype] = (),
        varies: bool = False,
        is_changed: bool = False,
    ) -> None:
        """Create an empty cache.

        Args:
            shared: templates of all calls of the model; equal layers share them.
            recorded: results of the recorded runs.
            dtypes: recorded dtypes of the results, which hold under autocast.
            varies: whether results may depend on more than the arguments.
            is_changed: whether the model has changed since it was recorded, so that shapes may differ.
        """
        self._shared, self._recorded, self._dtypes, self._varies = shared, recorded, dtypes, varies
        self._is_changed = is_changed
        self._kept: dict[Any, Any] = {}
        self._of_module: Any = None
        self.fast: tuple[Any, Any, bool] | None = None  # the last argument, its result, whether gradients were wanted

    def keep_last(self, arg: Tensor, out: Tensor) -> None:
        """Cache the result of a one-argument call if both tensors are absent."""
        if arg.is_meta and out.is_meta and out is not arg and not self._varies:
            self.fast = arg, out, torch.is_grad_enabled()

    def forget(self) -> None:
        """Drop the cached results, because one of them is being written to."""
        self._kept.clear()
        self.fast = None

    def get(
        self,
        function: Callable[..., Any],
        args: Any,
        kwargs: Any,
        *,
        label: tuple[str, str, Any],
        stages: Sequence[int],
        module: nn.Module | None = None,
    ) -> Any:
        """Return the absent result of a call.

        ``label`` is the call's key. ``stages`` has the stage of each tensor in the result; the last entry holds for all
        further tensors.

        Raises:
            ValueError: If the shapes of the result are not known.
        """
        key = None if self._varies else call_signature(args, kwargs)
        kept = self._kept.get(key) if key is not None else None
        if kept is None:
            template, is_kept = self._find(key, function, args, kwargs, module)
            kept = self._marked(template, label, stages)
            if key is not None and is_kept:
                self._kept[key] = kept
        return kept if type(kept) is Value else filled(kept, args, kwargs)

    def _marked(self, template: Any, label: tuple[str, str, Any], stages: Sequence[int]) -> Any:
        place, is_cast = count(), _is_autocast()

        def absent(leaf: Any) -> Any:
            if type(leaf) is Given:
                next(place)
            if not isinstance(leaf, Tensor):
                return leaf
            number = next(place)
            mark = Mark((*label, number), stages[min(number, len(stages) - 1)], absent=True)
            mark.cache = self
            dtype = self._dtypes[number] if is_cast and number < len(self._dtypes) else leaf.dtype
            made = absent_tensor(leaf.shape, leaf.stride(), dtype, requires_grad=leaf.requires_grad)
            return as_value(made, mark)

        return map_leaves(absent, template)

    def _find(self, key: Any, function: Any, args: Any, kwargs: Any, module: nn.Module | None) -> tuple[Any, bool]:
        """Return (template of the result, whether it may be cached)."""
        if key is not None:
            known = None if self._recorded is None or self._is_changed else self._recorded.known(key)
            if known is not None:
                return known, True
            if module is not None and self._of_module is None:
                self._of_module = module_signature(module)
            key = function if module is None else self._of_module, *key
            if (known := self._shared.get(key)) is not None:
                return known, True
        try:
            out, twins = infer(function, args, kwargs, module)
        except Exception as error:  # the user's own forward may ask for elements
            if module is None and is_masked(args, kwargs, lambda tensor: not tensor.is_meta):
                return _template(_on_zeros(function, args, kwargs), ()), False
            if self._recorded is None or not self._recorded.by_rule:
                raise ValueError(in_one_line(error)) from error
            return self._recorded.by_sizes((args, kwargs)), True
        is_own = getattr(function, "__name__", "") == "contiguous"  # always a value of its own
        template = _template(out, () if is_own else twins)
        if key is not None:
            self._shared[key] = template
        return template, True


def filled(kept: Any, args: Any, kwargs: Any) -> Any:
    """Copy a cached result, with the call's arguments in place of ``Given``."""
    unique = unique_tensors((args, kwargs))
    return map_leaves(lambda leaf: unique[leaf] if type(leaf) is Given else leaf, kept, copies=True)
