"""One piece of the network and everything it must remember between a forward and its backward."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from adl_dist.errors import DivergedError
from adl_dist.seeds import stream_seed
from adl_dist.stage.tally import Tally
from adl_dist.stage.weights import weight_policy

Tensors = tuple[Tensor, ...]


@dataclass
class InFlight:
    """A micro-batch between its forward and its backward."""

    acts: Tensors  # what came in; their .grad is sent upstream
    outs: Tensors  # what went out with the graph behind it; the scalar loss on the last stage
    version: int  # updates that the stage had made at the forward


class Stage:
    """Forward, delayed backward and update of one part of the model. Knows no rank, peer or schedule.

    Attributes:
        index: k in [0, K).
        module: the part of the model, on its device.
        version: updates applied so far, over the whole run.
        in_flight: micro-batches forwarded and not yet back-propagated, oldest first.
        tally: what the stage counts about itself; the owner takes it and puts a fresh one.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        index: int,
        is_last: bool,
        loss_fn: Callable[[Any, Tensor], Tensor],
        optimizer: Callable[[Iterable[nn.Parameter]], Optimizer],
        weights: str = "stash",
        seed: int = 0,
    ) -> None:
        """Take over ``module``.

        Args:
            module: called with the act of one micro-batch, [B, ...], or a tuple of several; returns the same.
            index: k.
            is_last: whether this stage computes the loss.
            loss_fn: mean over the samples of a micro-batch, from (output, target).
            optimizer: makes the optimizer of this stage's parameters.
            weights: the weight policy, ``stash`` or ``latest``.
            seed: the run's seed; dropout draws from (seed, epoch, stage, micro-batch).
        """
        self.index = index
        self.module = module
        self.version = 0
        self.in_flight: dict[int, InFlight] = {}
        self.tally = Tally()
        parameters = list(module.parameters())
        # A stage of nothing but pooling or activations has no parameters, and torch has no optimizer for it.
        self.optimizer = optimizer(parameters) if parameters else None
        self.lr_schedule: LRScheduler | None = None
        self._policy = weight_policy(weights, module, self.optimizer) if self.optimizer else None
        self._loss_fn = loss_fn if is_last else None
        self._seed = seed
        self._epoch = self._first_micro_batch = 0
        # An in-place operation on what came in would overwrite a leaf, and in one process also what the
        # upstream stage keeps for its backward.
        self._copies_input = index > 0 and may_start_in_place(module)

    @property
    def is_last(self) -> bool:
        """Whether this stage computes the loss."""
        return self._loss_fn is not None

    def begin(self, epoch: int, *, training: bool, first_micro_batch: int = 0) -> None:
        """Get ready for a segment that starts at ``first_micro_batch`` of ``epoch``."""
        self._epoch, self._first_micro_batch = epoch, first_micro_batch
        self.tally = Tally()
        self.module.train(training)
        if training:
            # What an interrupted segment, or the user before us, left there belongs to no group.
            self.in_flight.clear()
            self.module.zero_grad()

    def forward(self, micro_batch: int, acts: Tensors, target: Tensor | None) -> Tensors:
        """Forward one micro-batch and keep its graph.

        Args:
            micro_batch: its index within the segment.
            acts: tensors [B, ...] from upstream, or the input from the data.
            target: [B, ...] on the last stage, else None.

        Returns:
            What goes downstream, cut off from the graph; nothing on the last stage.
        """
        with self.tally.busy():
            leaves = acts
            if self.index > 0:
                leaves = tuple(a.detach().requires_grad_(a.is_floating_point()) for a in acts)
            of_epoch = self._first_micro_batch + micro_batch
            torch_seed(stream_seed(self._seed, "dropout", self._epoch, self.index, of_epoch), acts[0].device)
            outs = self._call(leaves)
            if self.is_last:
                outs = (self._score(outs, target),)
            self.in_flight[micro_batch] = InFlight(leaves, outs, self.version)
            return () if self.is_last else tuple(out.detach() for out in outs)

    def backward(self, micro_batch: int, grads: Tensors) -> Tensors:
        """Back-propagate one micro-batch, adding to the gradients of the group.

        Args:
            micro_batch: its index within the segment.
            grads: one for each floating-point tensor that went downstream; on the last stage the weight of
                this micro-batch in its group, which scales every gradient of the network.

        Returns:
            Gradients of the floating-point acts, for upstream; empty on stage 0.
        """
        with self.tally.busy():
            kept = self.in_flight.pop(micro_batch)
            outs = tuple(out for out in kept.outs if out.is_floating_point())
            paired = [(out, grad) for out, grad in zip(outs, grads, strict=True) if out.requires_grad]
            if paired:
                torch.autograd.backward([out for out, _ in paired], [grad for _, grad in paired])
            self.tally.staleness.append(self.version - kept.version)
            if self.index == 0:
                return ()
            return tuple(
                act.grad if act.grad is not None else torch.zeros_like(act)
                for act in kept.acts
                if act.is_floating_point()
            )

    def update(self) -> None:
        """Apply the gradients of the group and move on to the next weight version and learning rate.

        Raises:
            DivergedError: the loss of the group is not finite. The weights are left as they are.
        """
        if self.tally.loss_sum is not None and not bool(torch.isfinite(self.tally.loss_sum)):
            what = f"the loss is {float(self.tally.loss_sum)}"
            raise DivergedError(what, stage=self.index, update=self.version, epoch=self._epoch)
        with self.tally.busy():
            if self._policy is not None:
                self._policy.step(self.version, in_flight={kept.version for kept in self.in_flight.values()})
            self.version += 1
            if self.lr_schedule is not None:
                self.lr_schedule.step()

    @torch.no_grad()
    def predict(self, acts: Tensors, target: Tensor | None) -> Tensors:
        """Forward one micro-batch for evaluation; the last stage scores it and returns nothing."""
        with self.tally.busy():
            outs = self._call(acts)
            if not self.is_last:
                return outs
            self._score(outs, target)
            return ()

    def _call(self, acts: Tensors) -> Tensors:
        if self._copies_input:
            acts = tuple(act.clone() for act in acts)
        return unpacked(self.module(packed(acts)))

    def _score(self, outs: Tensors, target: Tensor | None) -> Tensor:
        assert self._loss_fn is not None
        assert target is not None
        target = target.to(outs[0].device, non_blocking=True)
        loss = self._loss_fn(packed(outs), target)
        self.tally.score(outs[0], target, loss)
        return loss


def packed(tensors: Tensors) -> Any:
    """What a unit of an ``nn.Sequential`` is called with: a tensor, or a tuple of several."""
    return tensors[0] if len(tensors) == 1 else tensors


def unpacked(out: Any) -> Tensors:
    """What a unit returned, as a tuple of tensors."""
    return (out,) if isinstance(out, Tensor) else tuple(out)


def torch_seed(seed: int, device: torch.device) -> None:
    """Seed the generator that random operations on ``device`` draw from, and no other."""
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


def may_start_in_place(module: nn.Module) -> bool:
    """Whether the first operation of ``module`` may overwrite what it is given."""
    first = next(module.children(), module) if isinstance(module, nn.Sequential) else module
    return any(getattr(part, "inplace", False) is True for part in first.modules())
