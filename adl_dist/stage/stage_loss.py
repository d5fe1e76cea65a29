"""The loss of a stage, the model's or one of its own, with what is measured and counted besides it."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from adl_dist.batch import Batch, detached
from adl_dist.stage.calls import takes_gradient, unpacked
from adl_dist.stage.loss_check import MeanGuard
from adl_dist.stage.loss_terms import class_loss
from adl_dist.stage.metrics import measured, metrics_of
from adl_dist.stage.own_loss import MeanOf
from adl_dist.stage.spec import TrainSpec
from adl_dist.stage.stats import StepStats
from adl_dist.stage.traits import LossTraits


class StageLoss:
    """What a stage computes of its output and the target.

    Attributes:
        metrics: what is measured besides the loss; only where it is the model's.
        looks: whether :meth:`look` does anything.
    """

    def __init__(
        self,
        spec: TrainSpec,
        traits: LossTraits,
        *,
        head: nn.Module | None,
        within: Callable[[], AbstractContextManager[Any]],
        where: str,
    ) -> None:
        """Compute ``spec``'s loss ``within`` a context.

        ``head`` is (output, target, loss_fn) to a loss of the stage's own; None: the output is the model's.
        ``traits`` is what is known of the loss, and ``where`` begins an error.
        """
        self._loss_fn, self._head, self._within, self._traits = spec.loss_fn, head, within, traits
        self._class_loss = class_loss(spec.loss_fn)
        self.metrics = [] if head is not None else metrics_of(spec.metrics, self._class_loss)
        # It puts two micro-batches in a row together, which is not possible if they are of two lengths.
        is_watched = head is None and spec.pipeline.micro_batches_per_update > 1
        is_watched = is_watched and not (traits.moves or traits.varies or traits.target)
        self._guard = MeanGuard.of(spec.loss_fn, within, where) if is_watched else None
        self.looks = bool(self.metrics) or self._guard is not None

    def wanted(self, given: tuple[Tensor | None, ...]) -> tuple[Batch | None, Tensor | None]:
        """Return the target and, if the loss counts its terms, the counts, of what came to a forward."""
        if self._traits.target is not None and given[0] is not None:
            return self._traits.target.split(given)  # type: ignore[arg-type]
        return given[0], given[1] if len(given) > 1 else None

    def __call__(self, out: Any, target: Batch | None, num_terms: float | None = None) -> Tensor:
        """Return the loss of what the module has returned, a scalar; ``num_terms``: those it averages over, if told."""
        assert target is not None
        if num_terms == 0:
            # The mean over nothing is NaN. In the mean over the whole group such a micro-batch counts for nothing: its
            # samples get a gradient, of zeros.
            outs = [tensor for tensor in unpacked(out) if takes_gradient(tensor)]
            if torch.is_grad_enabled() and len(outs) > 1:  # those that the loss does not use get none
                outs = [tensor for tensor in outs if tensor.requires_grad]
                with_none = torch.autograd.grad(self(out, target), outs, allow_unused=True)
                outs = [tensor for tensor, grad in zip(outs, with_none, strict=True) if grad is not None]
            return torch.stack([(tensor.real * 0).sum() for tensor in outs]).sum()
        if self._traits.writes_target:  # it may be wanted again, and hits are those of the data
            target = target.clone()
        if self._traits.writes_output and self._head is None:
            out = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, out)
        with self._within():
            if self._head is None:
                told = () if num_terms is None or not isinstance(self._loss_fn, MeanOf) else (num_terms,)
                return self._loss_fn(out, target, *told)
            return self._head(out, target, self._loss_fn)  # type: ignore[no-any-return]

    def look(self, out: Any, target: Batch | None) -> Sequence[Tensor]:
        """Measure the output of a forward in training, and see now and then whether its loss is the mean it should be.

        Return (sum, count) of each metric that is measured.
        """
        found = measured(self.metrics, detached(out), target) if self.metrics else ()
        if self._guard is not None and target is not None:
            self._guard.look(out, target)
        return found

    def count(
        self, tally: StepStats, out: Tensor | None, target: Batch, loss: Tensor, num_terms: float | None = None
    ) -> None:
        """Add the loss of one micro-batch, and how many of its targets were hit, to ``tally``."""
        if num_terms is None:
            tally.score(out, target, loss)
        else:
            tally.score_counted(out, target, loss, num_terms, self._class_loss)

    def evaluate(self, tally: StepStats, out: Any, first: Tensor, wanted: tuple[Tensor | None, ...]) -> None:
        """Score the model's output in evaluation; ``first`` is the first of its tensors, ``wanted`` as in a forward."""
        target, counts = self.wanted(wanted)
        assert target is not None
        target = target.to(first.device, non_blocking=True)
        if self.metrics:
            tally.measured.append(measured(self.metrics, out, target))
        num_terms = None if counts is None else counts[0].tolist()[1]
        self.count(tally, first, target, self(out, target, num_terms), num_terms)
