"""Absent results: what a call of another stage returns, with shape and dtype but without elements.

Shapes are never guessed. The call runs once per signature of its arguments on fake tensors, which have no elements
either. Where that is impossible, because it asks for elements, the sizes of its results must be sizes of its arguments
in all recorded runs; the stage that computes it then checks them in each micro-batch.
"""

import copy
import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import cache
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils.stateless import _reparametrize_module

from adl_dist.partition.containers import map_tensors, other_leaves, tensors_in
from adl_dist.partition.value import Mark, Value, Watch, absent_tensor, as_value, native


class Given:
    """In the place of a result that is an argument: the place of that tensor among the arguments."""

    def __init__(self, place: int) -> None:
        self.place = place


META = torch.device("meta")


@cache
def _fake_mode() -> FakeTensorMode:
    return FakeTensorMode(allow_non_fake_inputs=True)


def signature(value: Any) -> Any:
    """Return a hashable value that is equal for arguments with results of equal shapes.

    Raises:
        TypeError: If an argument is an object that has no such value.
    """
    if isinstance(value, Tensor):
        return value.shape, value.dtype, value.requires_grad, value.stride() if value.ndim > 3 else None
    kind = type(value)
    if kind in (int, float, bool, str, type(None), torch.dtype, torch.device, torch.Size, torch.memory_format):
        return kind, value
    if isinstance(value, list | tuple):
        return kind, *map(signature, value)
    if isinstance(value, dict):
        return kind, *((key, signature(one)) for key, one in value.items())
    if kind is slice:
        return kind, signature((value.start, value.stop, value.step))
    if kind is type(Ellipsis):
        return kind
    raise TypeError(f"a {kind.__name__} among the arguments")


def infer(
    function: Callable[..., Any], args: Any, kwargs: Any, device: torch.device, module: nn.Module | None = None
) -> tuple[Any, list[Tensor]]:
    """Run ``function``, a call of ``module`` if that is given, on tensors without elements.

    Returns:
        Its result, and the tensors that took the place of the arguments, in order.
    """
    if not torch.is_autocast_enabled(device.type):  # of which tensors on meta know nothing
        with suppress(Exception):
            return _infer_on(META, function, args, kwargs, module)
    return _infer_on(device, function, args, kwargs, module)  # fake tensors take more time, and 100 MB for imports


def _infer_on(
    device: torch.device, function: Callable[..., Any], args: Any, kwargs: Any, module: nn.Module | None
) -> tuple[Any, list[Tensor]]:
    watch, Watch.active = Watch.active, None
    pythons, numpys = random.getstate(), np.random.get_state()
    made: dict[int, Tensor] = {}

    def without_elements(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            where = device if tensor.is_meta or device == META else tensor.device
            twin = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=where)
            if tensor.requires_grad:
                twin.requires_grad_()
                twin = twin if isinstance(tensor, nn.Parameter) else twin.clone()
            made[id(tensor)] = twin
        return made[id(tensor)]

    try:
        with native(), nullcontext() if device == META else _fake_mode():
            args, kwargs = map_tensors(without_elements, (args, kwargs))
            twins = [*made.values()]
            if module is None:
                return function(*args, **kwargs), twins
            state = {n: without_elements(t) for n, t in (*module.named_parameters(), *module.named_buffers())}
            with _reparametrize_module(module, state):
                return function(*args, **kwargs), twins
    finally:
        Watch.active = watch
        random.setstate(pythons)
        np.random.set_state(numpys)


def template_of(leaves: Sequence[Tensor], out: Any) -> tuple[Any, list[Tensor]]:
    """Return what :func:`infer` does, from the result ``out`` of a call that was made with ``leaves``."""
    with native():
        twins = {
            id(t): absent_tensor(t.shape, t.stride(), t.dtype, requires_grad=t.requires_grad)
            for t in (*leaves, *tensors_in(out))
        }
        return map_tensors(lambda t: twins[id(t)], out), [twins[i] for i in dict.fromkeys(map(id, leaves))]


def _on_zeros(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run a function whose sizes follow from elements that this stage has, as those of a mask, on zeros."""

    def zeros(tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor
        return torch.zeros((), dtype=tensor.dtype).expand(tensor.shape).requires_grad_(tensor.requires_grad)

    return function(*map_tensors(zeros, args), **kwargs)


_PRIMITIVES = (int, float, bool, str, type(None), torch.dtype, torch.device)


def _look(value: Any) -> Any:
    """Describe an argument for :func:`_is_like`: an absent tensor by itself, others by what shapes follow from."""
    if isinstance(value, Tensor):
        return value if value.is_meta else (value.shape, value.dtype, value.requires_grad)
    return type(value)(map(_look, value)) if type(value) in (list, tuple) else value


def _is_like(value: Any, known: Any) -> bool:
    if value is known:
        return True
    if isinstance(value, Tensor):
        return type(known) is tuple and not value.is_meta and known == (value.shape, value.dtype, value.requires_grad)
    if type(value) in (list, tuple):
        return type(known) is type(value) and len(known) == len(value) and all(map(_is_like, value, known))
    return type(value) is type(known) and type(value) in _PRIMITIVES and bool(value == known)


class SizeRule:
    """The sizes of results as sizes of arguments, from runs of different size; for calls that ask for elements."""

    def __init__(self) -> None:
        self._runs: list[tuple[list[torch.Size], Any]] = []

    def note(self, args: Any, out: Any) -> None:
        """Note one run."""
        with native():
            shapes = [tensor.shape for tensor in tensors_in(args)]
            specs = map_tensors(
                lambda t: absent_tensor(t.shape, t.stride(), t.dtype, requires_grad=t.requires_grad), out
            )
        self._runs.append((shapes, specs))

    def result(self, args: Any) -> Any:
        """Return the result for arguments of other sizes; raise ValueError if the runs do not tell it."""
        shapes = [tensor.shape for tensor in tensors_in(args)]
        runs = [
            (given, tensors_in(out)) for given, out in self._runs if list(map(len, given)) == list(map(len, shapes))
        ]
        numbers = [[*other_leaves(out)] for _, out in self._runs]
        if any(one != numbers[0] for one in numbers):
            raise ValueError("it returns numbers that differ between the recorded runs")
        if not runs or len({tuple(map(len, (t.shape for t in outs))) for _, outs in runs}) > 1:
            raise ValueError("no recorded run has such arguments")
        place = iter(range(len(runs[0][1])))

        def sized(tensor: Tensor) -> Tensor:
            number = next(place)
            sizes = [self._size([outs[number].shape[d] for _, outs in runs], runs, shapes) for d in range(tensor.ndim)]
            made = torch.empty(sizes, dtype=tensor.dtype, device="meta")
            return made.requires_grad_(tensor.requires_grad)

        return map_tensors(sized, self._runs[0][1])

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
    """The absent results of one call on one stage, kept for each signature of its arguments.

    ``templates``: their shapes, which other stages may know.
    """

    def __init__(
        self, rule: SizeRule | None = None, *, varies: bool = False, templates: dict[Any, Any] | None = None
    ) -> None:
        self._rule, self._varies = rule, varies
        self._templates: dict[Any, Any] = {} if templates is None else templates
        self._kept: dict[Any, Any] = {}
        self.fast: tuple[Any, Any, bool] | None = None  # the last argument, its result, whether gradients were wanted
        self._last: tuple[Any, Any, bool] | None = None  # likewise, of several arguments, as _look describes them

    def forget(self) -> None:
        """Drop the kept results, because one of them is being written to."""
        self._kept.clear()
        self.fast = self._last = None

    def remember(self, args: Any, kwargs: Any, out: Any) -> None:
        """Remember the result for arguments like these, for :meth:`again`."""
        self._last = (_look(args), {key: _look(one) for key, one in kwargs.items()}), out, torch.is_grad_enabled()

    def again(self, args: Any, kwargs: Any) -> Any:
        """Return the last result, if the arguments are like the last ones; else None."""
        if (last := self._last) is None or last[2] is not torch.is_grad_enabled():
            return None
        (of_args, of_kwargs), out, _ = last
        if kwargs.keys() != of_kwargs.keys() or not _is_like(args, of_args):
            return None
        for key, one in kwargs.items():
            if not _is_like(one, of_kwargs[key]):
                return None
        return out

    def get(
        self,
        function: Callable[..., Any],
        args: Any,
        kwargs: Any,
        *,
        label: tuple[str, str, Any],
        stages: Sequence[int],
        device: torch.device,
        module: nn.Module | None = None,
    ) -> Any:
        """Return the absent result of a call; ``stages``: of each tensor in it, the last for those that follow.

        Raises:
            ValueError: If its shapes are not known.
        """
        try:
            key = None if self._varies else (torch.is_grad_enabled(), signature((args, kwargs)))
        except TypeError:
            key = None
        if key is not None and (kept := self._kept.get(key)) is not None:
            return self._built(kept, args, kwargs)
        known = self._templates.get(key) if key is not None else None
        depends = False  # on elements that this stage has
        if known is not None:
            template, twins = known
        else:
            template, twins, depends = self._template(function, args, kwargs, device, module)
        given, place = {id(twin): Given(number) for number, twin in enumerate(twins)}, count()
        if label[1] == "contiguous":  # always a value of its own
            given = {}

        def absent(tensor: Tensor) -> Any:
            number = next(place)
            if id(tensor) in given:
                return given[id(tensor)]
            mark = Mark((*label, number), stages[min(number, len(stages) - 1)], absent=True)
            mark.cache = self
            made = absent_tensor(tensor.shape, tensor.stride(), tensor.dtype, requires_grad=tensor.requires_grad)
            return as_value(made, mark)

        kept = map_tensors(absent, template)
        if key is not None and not depends:
            self._kept[key], self._templates[key] = kept, (template, twins)
        return self._built(kept, args, kwargs)

    def _template(
        self, function: Any, args: Any, kwargs: Any, device: torch.device, module: Any
    ) -> tuple[Any, list[Tensor], bool]:
        try:
            return *infer(function, args, kwargs, device, module), False
        except Exception as error:  # the user's own forward may ask for elements
            if module is None and not any(t.is_meta for t in tensors_in(args[1:])):
                return _on_zeros(function, args, kwargs), [], True
            if self._rule is None:
                raise ValueError(f"{type(error).__name__}: {error}") from error
            return self._rule.result((args, kwargs)), [], False

    @staticmethod
    def _built(kept: Any, args: Any, kwargs: Any) -> Any:
        if type(kept) is Value:
            return kept
        return _rebuilt(kept, args, kwargs)


def _rebuilt(kept: Any, args: Any, kwargs: Any) -> Any:
    """Return ``kept`` with containers of its own, since the caller may change them, and with arguments put in."""
    if type(kept) is Given:
        unique: dict[int, Tensor] = {}
        for tensor in tensors_in((args, kwargs)):
            unique.setdefault(id(tensor), tensor)
        return [*unique.values()][kept.place]
    if isinstance(kept, Tensor):
        return kept
    if isinstance(kept, list | tuple):
        parts = [_rebuilt(one, args, kwargs) for one in kept]
        return type(kept)._make(parts) if hasattr(kept, "_make") else type(kept)(parts)
    made = copy.copy(kept)
    if isinstance(kept, dict):
        for key, one in kept.items():
            made[key] = _rebuilt(one, args, kwargs)
    elif hasattr(kept, "__dataclass_fields__"):
        for key in kept.__dataclass_fields__:
            object.__setattr__(made, key, _rebuilt(getattr(kept, key, None), args, kwargs))
    return made
