"""Synthetic gradients: a head that predicts its output's gradient (DNI).

The stage back-propagates the prediction at once (Jaderberg et al., ICML 2017, section 2). When the gradient comes back,
which the next stage has computed from a prediction of its own, and the last stage from the loss, the head learns from
it, and nothing else does. It computes the same output once more for that, with its present weights, so that its own
gradient is never stale.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from adl_dist.batch import Tensors
from adl_dist.stage.nonfinite import NonFiniteCheck
from adl_dist.stage.optimizer import Learner
from adl_dist.stage.spec import TrainSpec
from adl_dist.stage.stats import StepStats, norm_of


class GradientHead(Learner):
    """A network that predicts gradients, with an optimizer of its own.

    It needs its own, because its group is complete only some micro-batches after the stage's own update. The
    optimizer follows the same learning rates, by the index of the update.

    Attributes:
        network: from an output [B, ...] and targets [B], or None, to the gradient of each sample's own loss, [B, ...].
        predictions: for each gradient received since this was emptied, two sums over samples, [2]: mean squared error
            of the prediction, and mean square of the gradient.
    """

    def __init__(
        self, network: nn.Module, stage: int, spec: TrainSpec, device: torch.device, faults: NonFiniteCheck
    ) -> None:
        """Build a head from ``network``, which is on ``device``.

        ``faults`` is the check of its stage.

        Raises:
            ConfigError: If the optimizer cannot train the head.
        """
        factor = spec.pipeline.lr_factor(stage) * spec.pipeline.method.head_lr_factor
        super().__init__(spec, device, where=f"the head of stage {stage}", key=f"head{stage}", lr_factor=factor)
        self.network, self.prefix = network.train(), f"head{stage}:"
        self.make_optimizer(spec.optimizer)
        self.predictions: list[Tensor] = []
        self._faults = faults
        self._within, self._dtype = spec.precision.autocasting(device), spec.precision.dtype
        # By micro-batch that awaits the gradient of its output: the output, the target, and the weight in its group.
        self._awaited: dict[int, tuple[Tensor, Tensor | None, float]] = {}
        self._epoch = 0

    def named_parameters(self, *, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield (name, parameter), each name with ``prefix``."""
        named = self.network.named_parameters(remove_duplicate=remove_duplicate)
        yield from ((f"{self.prefix}{name}", parameter) for name, parameter in named)

    def begin(self, epoch: int) -> None:
        """Begin a segment of ``epoch``."""
        self._epoch = epoch
        self._awaited.clear()
        self.predictions = []
        self.network.zero_grad()

    @torch.no_grad()
    def predict(self, micro_batch: int, outs: Tensors, target: Tensor | None, *, weight: float) -> Tensors:
        """Return the predicted gradient of the stage's output, [B, ...].

        The output is kept until its gradient comes.

        ``target`` [B] is for a network that sees it; ``weight`` is that of the micro-batch in its group.
        """
        (out,) = outs
        if target is not None:
            target = target.to(out.device, non_blocking=True)
        self._awaited[micro_batch] = out, target, weight
        with self._within():
            predicted = self.network(out, target)
        # A sample's own loss is averaged over the micro-batch and then weighted.
        return ((predicted * (weight / len(out))).to(out.dtype),)

    def learn(self, micro_batch: int, grads: Tensors) -> None:
        """Learn from the gradient that has come back for a micro-batch."""
        out, target, weight = self._awaited.pop(micro_batch)
        (grad,) = grads
        with self._within():
            predicted = self.network(out, target)
        wanted = grad.to(self._dtype) * (len(out) / weight)
        error = F.mse_loss(predicted.to(self._dtype), wanted)
        (error * weight).backward()
        self.predictions.append(torch.stack([error.detach(), wanted.square().mean()]) * len(out))

    def update(self) -> None:
        """Apply the gradients of the group.

        Raises:
            DivergedError: If the gradient is not finite, as :meth:`adl_dist.stage.stage.Stage.finish_group` finds it.
        """
        parameters = [p for p in self.network.parameters() if p.grad is not None]
        norm = norm_of([p.grad for p in parameters if p.grad is not None])
        figures = StepStats(gradient_norm=norm, gradient_of="the gradient of its head")
        self._faults.judge(figures, (), update=self.version, epoch=self._epoch)
        self.clip(parameters, norm)
        if self.optimizer is not None:
            with self.stepping():
                self.optimizer.step()
            self.optimizer.zero_grad()
        self.advance()
