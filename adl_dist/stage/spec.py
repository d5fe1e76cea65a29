"""What is trained and how, made once and handed on whole."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from adl_dist.schedule import Pipeline
from adl_dist.stage.nonfinite import GradientPolicy
from adl_dist.stage.precision import Precision

LossFn = Callable[[Any, Tensor], Tensor]
OptimizerFactory = Callable[[Iterable[nn.Parameter]], Optimizer]


@dataclass(frozen=True, kw_only=True)
class TrainSpec:
    """Everything about a training that is the same in all stages and on all ranks, but for the model and its cut.

    Attributes:
        pipeline: the method and K.
        loss_fn: (output, target) to the mean loss over the samples.
        optimizer: makes the optimizer of one stage from its parameters.
        precision: how stages compute.
        gradients: what is done to gradients before they are applied.
        seed: seeds data order, augmentation and dropout.

    Raises:
        ConfigError: a value is out of range, or does not fit the method.
    """

    pipeline: Pipeline
    loss_fn: LossFn
    optimizer: OptimizerFactory
    precision: Precision = field(default_factory=Precision)
    gradients: GradientPolicy = field(default_factory=GradientPolicy)
    seed: int = 0

    def __post_init__(self) -> None:
        self.precision.check(self.pipeline.method)
        self.gradients.check(self.pipeline)

    @property
    def settings(self) -> dict[str, Any]:
        """The plain values that two ranks, or a run and its continuation, must have in common."""
        return {
            "method": self.pipeline.method.settings,
            "num_stages": self.pipeline.num_stages,
            "seed": self.seed,
            **self.precision.settings,
            **self.gradients.settings,
        }
