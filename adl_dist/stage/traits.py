"""The findings of the run at the start about one stage, so that training needs to look for nothing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from adl_dist.batch import Layout


@dataclass(frozen=True, kw_only=True)
class LossTraits:
    """Facts about the loss function.

    Attributes:
        writes_output: whether it writes to the output that it is given.
        moves: names of the entries of its ``state_dict()`` that a call changes.
        target: the layout of a target of several tensors; None if it is one.
    """

    writes_output: bool = False
    moves: Sequence[str] = ()
    target: Layout | None = None


@dataclass(frozen=True, kw_only=True)
class StageTraits:
    """Facts about one stage that are known before the first micro-batch.

    Attributes:
        lies_in_stage: in training and in evaluation, for each tensor that the module returns, whether it lies in memory
            that the stage keeps, which a later forward or an update may overwrite.
        needs_grad: in training, for each act whether it is part of a graph in the uncut model; if None, all that are
            floating-point or complex are.
        gets_grad: for each act whether its backward reaches it. A gradient goes upstream for these only; the others
            have none, as in the uncut model. If None, all that need one must get one.
        out_needs_grad: ``needs_grad`` of the next stage, about the tensors that go there.
        out_gets_grad: ``gets_grad`` of the next stage: those for which a gradient comes back.
        draws: those of the streams ``python`` and ``numpy`` that its forward, its backward or the loss draws from.
        layout: the layout of the model's inputs, if they are several and the stage is the model itself.
        loss: facts about the loss, the same for all stages.
    """

    lies_in_stage: tuple[Sequence[bool], Sequence[bool]] = ((), ())
    needs_grad: Sequence[bool] | None = None
    gets_grad: Sequence[bool] | None = None
    out_needs_grad: Sequence[bool] | None = None
    out_gets_grad: Sequence[bool] | None = None
    draws: frozenset[str] = frozenset()
    layout: Layout | None = None
    loss: LossTraits = LossTraits()


def joined(traits: Mapping[int, StageTraits]) -> dict[int, StageTraits]:
    """Return the traits of consecutive stages, each with those of the next one about the tensors between them."""
    nothing = StageTraits()
    behind = {k: traits.get(k + 1, nothing) for k in traits}
    return {
        k: replace(of_stage, out_needs_grad=behind[k].needs_grad, out_gets_grad=behind[k].gets_grad)
        for k, of_stage in traits.items()
    }
