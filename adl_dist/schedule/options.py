"""What the options of a method may be."""

import math
from collections.abc import Callable
from typing import get_args

from adl_dist.schedule.method_table import Head, LrIndex, Order, Recompute, Reduction, Weights


def _whole(value: object) -> bool:
    return type(value) is int


def _wholes(value: object) -> bool:
    return isinstance(value, tuple) and all(map(_whole, value))


def _number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]


def _numbers_or_none(value: object) -> bool:
    return value is None or (isinstance(value, tuple) and all(map(_number, value)))


# What each option must be, and whether a value is that.
TYPES: dict[str, tuple[str, Callable[[object], bool]]] = {
    "accumulation_steps": ("a whole number", _whole),
    "delay": ("a rule or a list of whole numbers, like [2,1,0]", lambda v: isinstance(v, str) or _wholes(v)),
    "gradient_shrink": ("a finite number", _number),
    "lr_factors": ("a list of finite numbers, like [2,1]", _numbers_or_none),
    "activation_queue": ("a whole number or a list of some, like [1,2]", lambda v: _whole(v) or _wholes(v)),
    "gradient_queue": ("a whole number or a list of some, like [1,2]", lambda v: _whole(v) or _wholes(v)),
    "buffer_size": ("a whole number", _whole),
    "buffer_reuse": ("a whole number", lambda v: v is None or _whole(v)),
    "stage_speeds": ("a list of finite numbers, like [1,0.5]", _numbers_or_none),
}
CHOICES = {
    "weights": get_args(Weights),
    "order": get_args(Order),
    "reduction": get_args(Reduction),
    "lr_index": get_args(LrIndex),
    "recompute": get_args(Recompute),
    "head": get_args(Head),
}
