"""Kinds of torch's functions, and the functions that write in place."""

from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor


class Kind(Enum):
    """The treatment of a function that is called with values of the batch."""

    COMPUTE = auto()  # returns or writes tensors
    ASK = auto()  # about shape, dtype, device or graph: any tensor answers
    LIKE = auto()  # takes a tensor for its shape, dtype and device only
    ELEMENTS = auto()  # asks for elements, as a number or an array
    HOOK = auto()  # registers a hook on a gradient


_ASK = {
    *("shape", "size", "ndim", "dim", "ndimension", "dtype", "device", "layout", "requires_grad", "is_leaf", "grad_fn"),
    *("is_cuda", "is_cpu", "is_meta", "is_xpu", "is_mps", "is_sparse", "is_quantized", "is_nested", "is_mkldnn"),
    *("numel", "nelement", "stride", "storage_offset", "element_size", "itemsize", "nbytes", "is_contiguous"),
    *("is_floating_point", "is_complex", "is_signed", "is_conj", "is_neg", "is_inference", "get_device", "output_nr"),
    *("__len__", "__hash__", "_version", "name", "names", "has_names", "dim_order", "is_same_size", "is_tensor"),
    *("is_shared", "is_pinned", "retains_grad", "_backward_hooks", "grad", "is_vulkan", "is_ipu", "is_xla", "is_mtia"),
    *("result_type", "can_cast", "promote_types", "_is_view", "__dir__", "is_coalesced", "is_sparse_csr", "is_maia"),
    *("__repr__", "__reduce_ex__", "_base", "_post_accumulate_grad_hooks", "__deepcopy__"),
}
ASK_DEVICE = {"device", "is_cuda", "is_cpu", "is_meta", "get_device"}  # of which an absent tensor has another
_LIKE = {
    *("zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "randint_like"),
    *("new_zeros", "new_ones", "new_full", "new_empty", "new_tensor", "new_empty_strided"),
}
LIKE_SECOND = {"to", "type_as", "expand_as", "view_as", "reshape_as"}  # take their second argument like that
_ELEMENTS = {
    *("__bool__", "__int__", "__float__", "__index__", "__complex__", "__contains__", "item", "tolist", "numpy"),
    *("__array__", "equal", "allclose", "is_nonzero", "data_ptr", "__dlpack__", "untyped_storage", "storage"),
    *("_assert_async", "__format__"),
}
_HOOK = {"register_hook", "register_post_accumulate_grad_hook", "retain_grad"}
_IN_PLACE = {
    *("__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__", "__ipow__", "__imatmul__"),
    *("__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__", "__setitem__"),
}
# Views and bookkeeping: too little work for a unit of their own.
LIGHT = {
    *("__getitem__", "getattr", "flatten", "reshape", "view", "view_as", "permute", "transpose", "movedim", "T", "mT"),
    *("contiguous", "expand", "expand_as", "squeeze", "unsqueeze", "chunk", "split", "unbind", "narrow", "select"),
    *("detach", "to", "float", "type_as", "_assert", "unflatten", "swapaxes", "__iter__", "t", "data", "double"),
    *("requires_grad_", "split_with_sizes", "tensor_split", "half", "bfloat16", "type", "requires_grad.set"),
}


def writes_to(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Return the tensor that the function ``name`` writes to, or None."""
    if isinstance(kwargs.get("out"), Tensor):
        return kwargs["out"]  # type: ignore[no-any-return]
    in_place = (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE or name.endswith(".set")
    if (in_place or kwargs.get("inplace")) and args and isinstance(args[0], Tensor):
        return args[0]
    return None


def answer_of_device(name: str, device: torch.device) -> Any:
    """Return the answer of a tensor on ``device`` to ``name`` of ASK_DEVICE."""
    answers = {"device": device, "get_device": -1 if device.index is None else device.index}
    return answers.get(name, name == f"is_{device.type}")


_KNOWN: dict[Any, tuple[str, Kind]] = {}


def kind_of(func: Any) -> tuple[str, Kind]:
    """Return the name and kind of a function from ``__torch_function__``."""
    known = _KNOWN.get(func)
    if known is None:
        name = _name_of(func)
        kind = Kind.COMPUTE
        for names, of_these in ((_ASK, Kind.ASK), (_LIKE, Kind.LIKE), (_ELEMENTS, Kind.ELEMENTS), (_HOOK, Kind.HOOK)):
            if name in names:
                kind = of_these
        if func in (torch.autograd.grad, torch.autograd.backward, Tensor.backward):  # of a graph that lies on stages
            kind = Kind.ELEMENTS
        known = _KNOWN[func] = name, kind
    return known


def _name_of(func: Any) -> str:
    name = getattr(func, "__name__", "") or type(func).__name__
    if name in ("__get__", "__set__", "__delete__"):
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        return attribute if name == "__get__" else f"{attribute}.set"
    return str(name)
