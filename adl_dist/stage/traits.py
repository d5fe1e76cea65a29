"""What the trial run at the start has found out about one stage, so that training needs to look for nothing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from adl_dist.batch import Layout, Tensors
from adl_dist.errors import PartitionError


@dataclass(frozen=True)
class Structure:
    """How the tensors that cross a cut stand in tuples, lists and dictionaries, between what is no tensor.

    Attributes:
        tree: the containers; a leaf is a tensor, or one of ``constants``.
        constants: by place among the leaves, what is no tensor and the same for every micro-batch.
    """

    tree: TreeSpec
    constants: dict[int, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, value: Any) -> "Structure":
        """Return the structure of ``value``: a tensor, or containers of tensors."""
        leaves, tree = tree_flatten(value)
        return cls(tree, {place: leaf for place, leaf in enumerate(leaves) if not isinstance(leaf, Tensor)})

    def build(self, tensors: Tensors) -> Any:
        """Return the value that :meth:`take_apart` took ``tensors`` from."""
        if not self.constants:
            return tree_unflatten(tensors, self.tree)
        left = iter(tensors)
        leaves = [self.constants[n] if n in self.constants else next(left) for n in range(self.tree.num_leaves)]
        return tree_unflatten(leaves, self.tree)

    def take_apart(self, value: Any, where: str) -> Tensors:
        """Return the tensors of ``value``; raise a PartitionError, which begins with ``where``, if it is unlike."""
        leaves, tree = tree_flatten(value)
        found = Structure(tree, {place: leaf for place, leaf in enumerate(leaves) if not isinstance(leaf, Tensor)})
        if found != self:
            raise PartitionError(
                f"{where} returned {found}, but {self} in the trial at the start; what crosses a cut must have the "
                "same containers and, but for tensors, the same in them for every micro-batch: cut elsewhere"
            )
        return tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))

    def __str__(self) -> str:
        shown = [repr(self.constants[n]) if n in self.constants else "tensor" for n in range(self.tree.num_leaves)]
        return repr(tree_unflatten([_Shown(text) for text in shown], self.tree))


Takes = Structure | Layout  # a layout: that of the model's input


class _Shown(str):
    """A text that stands for itself in the ``repr`` of a container."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


@dataclass(frozen=True, kw_only=True)
class LossTraits:
    """What is known of the loss function.

    Attributes:
        writes_output: whether it writes to the output that it is given.
        writes_target: whether it writes to the target, or might, where it is called once more with the same.
        moves: what it keeps and changes in each call, by name, like a counter.
        target: how the several tensors of a target stand together; None: it is one.
        varies: whether lengths in output and target change from one micro-batch to another.
    """

    writes_output: bool = False
    writes_target: bool = False
    moves: Sequence[str] = ()
    target: Layout | None = None
    varies: bool = False


@dataclass(frozen=True, kw_only=True)
class StageTraits:
    """What is known of one stage before the first micro-batch. An empty sequence: nothing, or for none of its acts.

    Attributes:
        overwrites: in training and in evaluation, for each act whether the module writes to it.
        takes: in training and in evaluation, the structure of the module's argument; None: a tensor, or a tuple of
            several.
        returns: likewise of what it returns, where that goes downstream; None: whatever containers hold its tensors.
        lies_in_stage: likewise, for each tensor that the module returns, whether it lies in memory of its own, which a
            later forward or an update may overwrite.
        needs_grad: in training, for each act whether it is part of a graph in the uncut model; None: all that are
            floating-point or complex are.
        gets_grad: for each act whether its backward reaches it; a gradient goes upstream for these only, and the
            others have none, as in the uncut model. None: not looked for; all that need one must get one.
        out_needs_grad: what ``needs_grad`` of the next stage says of the tensors that go there.
        out_gets_grad: what ``gets_grad`` of the next stage says of them: those for which a gradient comes back.
        recomputes: whether its backward computes with its parameters again, as activation checkpointing does, so that
            they have to be those of the forward then.
        draws: those of the streams ``python`` and ``numpy`` that its forward, its backward or the loss draws from.
        moves: what its forward in training moves that is not in its ``state_dict``, by name: non-persistent buffers,
            plain tensors, generators, numbers in Python.
        writes: the trainable parameters that its forward in training writes to, by name.
        replaces: the parameters to which it gives other memory, as ``p.data = ...`` does, by name.
        loss: what is known of the loss, the same for all stages.
        moves_more: whether its forward in training, or the loss, moves more than buffers, like counters, generators and
            frozen weights, so that a replay has to meet it again.
        asks_for_graph: whether its forward, or the loss, does something else where no gradients are wanted, so that the
            first of two forwards has to have a graph, too.
    """

    overwrites: tuple[Sequence[bool], Sequence[bool]] = ((), ())
    takes: tuple[Takes | None, Takes | None] = (None, None)
    returns: tuple[Structure | None, Structure | None] = (None, None)
    lies_in_stage: tuple[Sequence[bool], Sequence[bool]] = ((), ())
    needs_grad: Sequence[bool] | None = None
    gets_grad: Sequence[bool] | None = None
    out_needs_grad: Sequence[bool] | None = None
    out_gets_grad: Sequence[bool] | None = None
    recomputes: bool = False
    draws: frozenset[str] = frozenset()
    moves: Sequence[str] = ()
    writes: Sequence[str] = ()
    replaces: Sequence[str] = ()
    loss: LossTraits = LossTraits()
    moves_more: bool = False
    asks_for_graph: bool = False


def joined(traits: Mapping[int, StageTraits]) -> dict[int, StageTraits]:
    """Return the traits of consecutive stages, each with what the next one says of the tensors between them."""
    nothing = StageTraits()
    behind = {k: traits.get(k + 1, nothing) for k in traits}
    return {
        k: replace(of_stage, out_needs_grad=behind[k].needs_grad, out_gets_grad=behind[k].gets_grad)
        for k, of_stage in traits.items()
    }
