"""What two micro-batches give, and how the weights change between them, in the trial at the start."""

from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from adl_dist.stage.calls import takes_gradient
from adl_dist.stage.versions import Exchange

FIRST, SECOND, EVALUATION = "the first micro-batch", "the second micro-batch", "evaluation"
THIRD = "a third micro-batch"


@dataclass(frozen=True)
class Replacement:
    """How the weights change from the first micro-batch to the second.

    Attributes:
        parameters: all that are trained, by the uncut model's names.
        changed: the names of those that change; None: all.
        between: those that others take the place of between forward and backward of the first micro-batch, as in a
            delayed backward, where the second forward comes before it, too; the rest changes in place, after it.
        third: whether another micro-batch goes forward with the weights of the second, as in a group of several:
            before the backward of the second where that is ``delayed``, else after it.
        delayed: whether more than one micro-batch is in flight.
        recomputes: stages that get the weights of their forward back for their backward.
    """

    parameters: Mapping[str, nn.Parameter] = field(default_factory=dict)
    changed: Set[str] | None = None
    between: Set[str] = frozenset()
    third: bool = False
    delayed: bool = False
    recomputes: frozenset[int] = frozenset()

    def swapped_in(
        self, exchange: Exchange, older: Sequence[nn.Parameter]
    ) -> Callable[[int], AbstractContextManager[None]]:
        """Return what the backward of a stage runs in: with the weights of its forward, ``older``, if it recomputes."""
        return lambda k: exchange.swapped(older) if k in self.recomputes else nullcontext()


@dataclass
class Outcome:
    """What came of the trial, by (when, what, name): outputs, losses, gradients. None: no gradient."""

    values: dict[tuple[str, str, str], Tensor | None] = field(default_factory=dict)

    def add(self, when: str, what: str, values: Mapping[str, Tensor | None]) -> None:
        """Keep ``values`` by their names."""
        self.values |= {(when, what, name): value for name, value in values.items()}


def change_values(parameters: Sequence[nn.Parameter]) -> None:
    """Change the weights in place, unevenly and by a quarter at most, so that what still uses the old ones shows."""
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        for p in parameters:
            if takes_gradient(p) and p.numel():
                half = len(p) // 2 if p.ndim else 0
                if half:
                    p[:half].mul_(0.8)
                (p[half:] if p.ndim else p).mul_(1.25)
                if not p.any():
                    p.add_(0.01)
