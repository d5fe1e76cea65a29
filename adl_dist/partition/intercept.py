"""Interception of module calls, and the running line of the user's code."""

import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from adl_dist.errors import HERE

CALL = "_compiled_call_impl"  # which nn.Module.__call__ calls first; copies of a module do not have it
OF_TORCH = {"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", CALL}  # in vars() of each module
OWN = {*os.listdir(HERE)} - {"models"}  # of which the lines are as good as the user's
NOT_THE_USERS = (  # beginnings of the names of files
    *(f"{HERE}{part}" for part in OWN),
    f"{os.path.dirname(torch.__file__)}{os.sep}",
    "<frozen",
    "<string",
)


def is_openable(module: nn.Module) -> bool:
    """Return whether calls inside the forward of ``module`` can be followed."""
    if isinstance(module, torch.jit.ScriptModule) or module._backward_hooks or module._backward_pre_hooks:
        return False
    return module._compiled_call_impl is None and not type(module).__module__.startswith("torch._dynamo")


def place_of_call(module: nn.Module, has_hooks: bool) -> tuple[str, Callable[..., Any]]:
    """Return (name of the attribute to intercept, its present value).

    With forward hooks the attribute is ``forward``, so that the hooks run on each stage.
    """
    if has_hooks and is_openable(module):
        return "forward", module.forward
    return CALL, vars(module).get(CALL) or module._call_impl


def users_line() -> str:
    """Return the file and line of the user's code that is running."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(NOT_THE_USERS):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return "the forward"


def users_line_of(error: Exception) -> str:
    """Return the file and line of the user's code that raised ``error``."""
    found, trace = "the forward", error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if not file.startswith(NOT_THE_USERS):
            found = f"{file}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found
