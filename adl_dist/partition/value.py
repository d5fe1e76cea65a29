"""Tensors followed through a forward: values and foreign parameters.

A value depends on the batch. It is *absent* on the stages that do not have its elements: it is on meta, with shape and
dtype. Each value has a label, the same on all stages: the call that made it, and its place in the result. Calls are
counted by the module whose forward makes them, so that labels follow from the path that a forward takes.
"""

from typing import Any

import torch
from torch import Tensor, nn

Label = tuple[str, str, Any, int]  # path of the calling forward, name, how many calls before, place in the result
native = torch._C.DisableTorchFunctionSubclass
EVERYWHERE = -1  # in the place of a stage: every stage computes it


class Mark:
    """The label of a value, the first stage that has it, and its absence.

    Attributes:
        label: None if the value does not depend on the batch, but on parameters or inputs that this stage lacks.
        stage: the first stage that has the value.
        absent: whether this stage lacks the value's elements.
        data: the tensor that this stage has made from an absent value by writing to it.
        cache: the results that the value comes from, if it is used again in each micro-batch.
    """

    __slots__ = ("absent", "cache", "data", "label", "stage")

    def __init__(self, label: Label | None, stage: int, absent: bool) -> None:
        self.label, self.stage, self.absent = label, stage, absent
        self.data: Tensor | None = None
        self.cache: Any = None


class Watch:
    """The recorder or stage that follows the running forward, if any."""

    active: Any = None


class Value(Tensor):
    """A value of the batch in a followed forward."""

    mark: Mark

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        watch = Watch.active
        if watch is None:
            with native():
                return func(*args, **(kwargs or {}))
        return watch.function(func, args, kwargs or {})


class ForeignParameter(nn.Parameter):
    """A parameter of another stage, on meta."""

    mark = Mark(None, EVERYWHERE, absent=True)
    __torch_function__ = Value.__torch_function__


class _Applied:
    """A torch.autograd.Function call, kept whole because of its backward."""

    def __init__(self, function: Any) -> None:
        self._function, self.__name__ = function, f"{function.__name__}.apply"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        watch, Watch.active = Watch.active, None
        try:
            return _apply(self._function)(*args, **kwargs)
        finally:
            Watch.active = watch


_applied: dict[Any, _Applied] = {}
_native_apply = next(vars(kind)["apply"] for kind in torch.autograd.Function.__mro__ if "apply" in vars(kind))


def _apply(function: Any) -> Any:
    return _native_apply.__get__(None, function)


def _follow_apply(function: Any, *args: Any, **kwargs: Any) -> Any:
    watch = Watch.active
    if watch is None or not watch.follows_functions:
        return _apply(function)(*args, **kwargs)
    if function not in _applied:
        _applied[function] = _Applied(function)
    return watch.function(_applied[function], args, kwargs)


# torch hands no call of an autograd function to __torch_function__. Outside of a followed forward this changes nothing.
torch.autograd.Function.apply = classmethod(_follow_apply)


def turn_into(tensor: Any, kind: type) -> None:
    """Change the class of a tensor in place."""
    tensor.__class__ = kind


def as_value(tensor: Tensor, mark: Mark) -> Tensor:
    """Turn ``tensor`` into a value in place, and return it."""
    vars(tensor)["mark"] = mark
    turn_into(tensor, Value)
    return tensor


def as_tensor(tensor: Tensor) -> Tensor:
    """Turn a value back into a plain tensor in place, and return it."""
    if type(tensor) is Value:
        turn_into(tensor, Tensor)
    return tensor


def absent_tensor(shape: Any, stride: Any, dtype: torch.dtype, *, requires_grad: bool) -> Tensor:
    """Return a meta tensor of this shape, stride and dtype, without data."""
    made = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    return made.requires_grad_() if requires_grad else made


def foreign_parameter(parameter: nn.Parameter) -> nn.Parameter:
    """Return a meta parameter like ``parameter``, for stages without it."""
    made = nn.Parameter(
        torch.empty_like(parameter, device="meta", requires_grad=False), requires_grad=parameter.requires_grad
    )
    made.__class__ = ForeignParameter
    return made
