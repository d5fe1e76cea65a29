"""Facts about each stage from the trial, for use in training."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from adl_dist.batch import Structure


@dataclass(frozen=True, kw_only=True)
class StageInfo:
    """Facts about one stage that are known before the first micro-batch.

    Attributes:
        keeps_memory: in training and in evaluation, for each tensor that the module returns, whether it lies in the
            memory of a parameter or buffer, which a later forward or an update may overwrite.
        needs_grad: in training, for each act whether it is part of a graph in the uncut model; if None, all that are
            floating-point or complex are.
        gets_grad: for each act whether its backward reaches it. A gradient goes upstream for these only; the others
            have none, as in the uncut model. If None, all that need one must get one.
        out_needs_grad: ``needs_grad`` of the next stage, about the tensors that go there.
        out_gets_grad: ``gets_grad`` of the next stage: those for which a gradient comes back.
        draws: those of the streams ``python`` and ``numpy`` that its forward, its backward or the loss draws from.
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
    """Add to the facts of each stage those of the next about its output."""
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
