"""Calls of a module, also compiled, and facts from the trial."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import register_dataclass, tree_leaves, tree_unflatten

from adl_dist.batch import Structure, Tensors, arguments_of

# Not dynamic: a graph for any number of samples is slower, and would be used for the common one as well.
# Random numbers as without compilation, or dropout would draw others.
COMPILED: dict[str, Any] = {"dynamic": False, "options": {"fallback_random": True}}
# From the acts, buffers in the place of the module's own (None: its own) and a tape to be replayed, to the output.
Call = Callable[[Tensors, dict[str, Tensor] | None, Any], Any]


def is_part(module: nn.Module) -> bool:
    """Return whether ``module`` is a stage of a model that was cut."""
    return hasattr(module, "take_changes")


def call_of(module: nn.Module, structure: Structure | None, compiler: "Compiler | None") -> Call:
    """Return a ``Call`` of ``module``, from (acts, buffers, tape) to output.

    Args:
        module: the model, or a stage of it.
        structure: the structure of the model's inputs; None for one tensor, and for a stage.
        compiler: compiles the call, but not the module, which keeps the names of its state; None without compilation.
    """

    def call(acts: Tensors, buffers: dict[str, Tensor] | None, tape: Any) -> Any:
        args, kwargs = (acts, {}) if structure is None else arguments_of(tree_unflatten(acts, structure))
        if tape is not None:
            return module(*args, replay=tape, buffers=buffers)
        if buffers is None:
            return module(*args, **kwargs)
        return torch.func.functional_call(module, buffers, args, kwargs)

    return call if compiler is None else compiler(call, module)


class Compiler:
    """A compiler of functions; those with equal keys share their graphs.

    torch keeps at most 8 graphs with a code object, and then silently stops compiling. So every key gets its own copy
    of the code. It may need all 8: for training, evaluation, replay and a forward to be replayed, each with the common
    number of samples and with the number left over.
    """

    def __init__(self) -> None:
        self._codes: dict[Any, CodeType] = {}

    def __call__(self, function: Callable[..., Any], key: Any) -> Callable[..., Any]:
        """Return ``function``, compiled; ``key`` is hashable."""

        def call(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        code = self._codes.setdefault(key, call.__code__.replace(co_name=f"compiled_{len(self._codes)}"))
        return torch.compile(FunctionType(code, call.__globals__, closure=call.__closure__), **COMPILED)


def flatten_output(out: Any) -> Tensors:
    """Return the tensors in the output of a module.

    A dataclass that torch's pytrees do not know yet is registered with them.
    """
    if type(out) is tuple and all(isinstance(one, Tensor) for one in out):
        return out
    if isinstance(out, Tensor):
        return (out,)
    leaves = tree_leaves(out)
    unknown = {type(leaf) for leaf in leaves if is_dataclass(leaf) and not isinstance(leaf, type)}
    for kind in unknown:
        register_dataclass(kind)
    return flatten_output(out) if unknown else tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))


def takes_gradient(tensor: Tensor) -> bool:
    """Return whether ``tensor`` can have a gradient."""
    return tensor.is_floating_point() or tensor.is_complex()


ROWS = "; has the embedding, if it is one, a row for each id in the data?"  # after an IndexError


@dataclass(frozen=True, kw_only=True)
class StageInfo:
    """Facts about one stage that are known before the first micro-batch.

    Attributes:
        keeps_memory: in training and in evaluation, for each tensor that the module returns, whether it lies in the
            memory of a parameter or buffer, which a later forward or an update may overwrite.
        needs_grad: in training, for each act whether it is part of a graph in the uncut model; if None, all that are
            floating-point or complex are.
        gets_grad: for each act whether the stage's backward reaches it. Only these acts send a gradient upstream; the
            others have none, as in the uncut model. If None, all acts that need a gradient must get one.
        out_needs_grad: ``needs_grad`` of the next stage, about the tensors that go there.
        out_gets_grad: ``gets_grad`` of the next stage: for which of these tensors a gradient comes back.
        draws: which of the streams ``python`` and ``numpy`` its forward, its backward or the loss draws from.
        inputs: the structure of the model's inputs if the stage is the model itself, else None.
        target: the structure of a target; None stands for one tensor.
    """

    keeps_memory: tuple[Sequence[bool], Sequence[bool]] = ((), ())
    needs_grad: Sequence[bool] | None = None
    gets_grad: Sequence[bool] | None = None
    out_needs_grad: Sequence[bool] | None = None
    out_gets_grad: Sequence[bool] | None = None
    draws: frozenset[str] = frozenset()
    inputs: Structure | None = None
    target: Structure | None = None


def link_stages(infos: Mapping[int, StageInfo]) -> dict[int, StageInfo]:
    """Return ``infos`` with the ``out_`` facts, taken from the next stage."""
    unknown = StageInfo()
    after = {k: infos.get(k + 1, unknown) for k in infos}
    return {
        k: replace(info, out_needs_grad=after[k].needs_grad, out_gets_grad=after[k].gets_grad)
        for k, info in infos.items()
    }


def describe_units(module: nn.Module) -> str:
    """Return the names of the first and the last unit of a stage."""
    names = getattr(module, "units", None) or [name for name, _ in module.named_children()] or [type(module).__name__]
    return names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}"
