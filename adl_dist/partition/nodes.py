"""What one node of a torch.fx graph does."""

import operator
from typing import Any

import torch
from torch import fx

from adl_dist.errors import PartitionError

IN_PLACE = (
    *("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul", "iand", "ior", "ixor", "ilshift"),
    "irshift",
)
_SHAPE_ATTRIBUTES = {"shape", "ndim", "dtype", "device", "is_cuda", "layout"}
_SHAPE_METHODS = {"size", "dim", "ndimension", "numel", "nelement", "is_floating_point", "element_size", "type"}
ABOUT_TENSORS = {  # answers that do not depend on what is in a tensor
    *_SHAPE_ATTRIBUTES,
    *_SHAPE_METHODS,
    *("requires_grad", "is_leaf", "is_cpu", "is_meta", "is_sparse", "is_quantized", "is_nested", "itemsize", "nbytes"),
    *("is_complex", "is_contiguous", "stride", "is_inference", "is_signed", "is_conj", "is_neg", "is_tensor"),
}
_LIBRARIES = {"torch", "math", "_operator", "operator", "builtins"}
# What computes nothing worth a unit of its own: views, bookkeeping, containers.
_LIGHT = {
    *("getitem", "getattr", "flatten", "reshape", "view", "view_as", "permute", "transpose", "movedim", "contiguous"),
    *("expand", "expand_as", "squeeze", "unsqueeze", "chunk", "split", "unbind", "narrow", "select", "detach", "to"),
    *("float", "type_as", "_assert", "must_stay", "unflatten", "swapaxes"),
}
# Of torch's functions, those that draw: by a part of their names.
_DRAWING = ("rand", "dropout", "bernoulli", "normal", "multinomial", "poisson", "uniform", "exponential", "rrelu")


def must_stay(found: Any, as_read: Any, question: str) -> None:
    """Raise PartitionError unless the answer to what a forward asks about a length is ``found`` ``as_read``."""
    if found != as_read:
        raise PartitionError(
            f"the model's forward branches on a length: '{question}' was {as_read} for all samples at the start, where "
            f"the forward was read once and for all, and is {found} now: hide the function that asks by torch.fx.wrap, "
            "use partition.granularity=block if it lies in a block, or pad to one length"
        )


def is_check(node: fx.Node) -> bool:
    """Return whether ``node`` only looks whether something holds, and so has its place."""
    return node.target is torch._assert or node.target is must_stay


def function_name(node: fx.Node) -> str:
    """Return the name of the function or method that ``node`` calls."""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def is_light(node: fx.Node) -> bool:
    """Return whether ``node`` computes too little to be worth a unit of its own."""
    if node.op == "call_module":
        return False
    return node.op == "get_attr" or function_name(node) in _LIGHT or isinstance(node.target, type)


def is_of_python(node: fx.Node) -> bool:
    """Return whether it calls a method, or a function of Python's own: what it makes of numbers is a number."""
    of_python = getattr(node.target, "__module__", None) in ("_operator", "builtins", "math")
    return node.op == "call_method" or (node.op == "call_function" and of_python)


def is_of_library(node: fx.Node) -> bool:
    """Return whether it calls a function of Python's own or of torch, which remembers nothing; a method is one."""
    return node.op == "call_method" or str(getattr(node.target, "__module__", "torch")).split(".")[0] in _LIBRARIES


def asks_for_shape(node: fx.Node) -> bool:
    """Return whether ``node`` asks a tensor for its shape, dtype or device."""
    if node.op == "call_method":
        asks = node.target != "type" or len(node.args) + len(node.kwargs) == 1  # with a dtype, it converts
        return asks and node.target in _SHAPE_METHODS and len(node.all_input_nodes) == 1
    return node.op == "call_function" and node.target is getattr and node.args[1] in _SHAPE_ATTRIBUTES


def asks_about_tensor(node: fx.Node) -> bool:
    """Return whether what ``node`` returns, if it is a number, does not depend on what is in a tensor."""
    name = node.args[1] if node.target is getattr else function_name(node)
    return name in ABOUT_TENSORS and node.op in ("call_method", "call_function")


def writes(node: fx.Node) -> bool:
    """Return whether ``node`` writes to an existing tensor, and so has its place."""
    if node.op not in ("call_function", "call_method"):
        return False
    name = function_name(node)
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name in (*IN_PLACE, "setitem") or bool(node.kwargs.get("inplace")) or "out" in node.kwargs


def may_repeat(node: fx.Node) -> bool:
    """Return whether a function, called twice with the same arguments, does the same twice: it only computes."""
    is_drawing = any(part in function_name(node) for part in _DRAWING)
    return is_of_library(node) and not (writes(node) or is_drawing or is_check(node))


def is_part(node: fx.Node, whole: fx.Node) -> bool:
    """Return whether ``node`` takes one element out of the container ``whole``, by a number or a name."""
    takes: Any = node.target in (operator.getitem, getattr) and node.args[0] is whole
    return takes and type(node.args[1]) in (int, str)
