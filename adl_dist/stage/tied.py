"""Tied weights: copies in several stages, with the same updates.

Every stage of a tie sends its part of a group's gradient to the first stage, which adds up. Each stage applies the sum
when it is due (:meth:`adl_dist.schedule.Pipeline.tie_delay`). A separate optimizer steps each copy, with the same
settings and state on every stage, so the copies stay equal to the bit.
"""

import math
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from adl_dist.batch import Tensors
from adl_dist.errors import DivergedError, PartitionError
from adl_dist.schedule.actions import Tie
from adl_dist.stage.average import WeightAverage
from adl_dist.stage.mitigation import mitigation_of
from adl_dist.stage.nonfinite import NonFiniteCheck
from adl_dist.stage.optimizer import Learner
from adl_dist.stage.spec import TrainSpec
from adl_dist.stage.stats import StepStats, norm_of


class TiedWeights(Learner):
    """One stage's copies of tied weights, with their optimizer.

    Attributes:
        tie: the stages that share the weights; the first one adds up their gradients.
        name: the first names of its parameters in the uncut model, joined by commas.
        staleness: for each backward of the segment, the updates of these weights between its forward and the update
            with its gradient.
        is_first: whether this stage adds up, and saves the state of the optimizer.
    """

    def __init__(
        self, tie: Tie, parameters: Mapping[str, nn.Parameter], stage: int, spec: TrainSpec, faults: NonFiniteCheck
    ) -> None:
        """Register ``parameters`` by their first names in the uncut model.

        Raises:
            ConfigError: If the optimizer cannot train them.
        """
        self._names = " and ".join(f"'{name}'" for name in parameters)
        device, where = next(iter(parameters.values())).device, f"stage {stage}, tied {self._names}"
        super().__init__(spec, device, where=where, key=f"tied {min(parameters)}")
        self.tie, self.is_first = tie, stage == tie.stages[0]
        self._parameters, self._stage, self._faults = dict(parameters), stage, faults
        self.name = ", ".join(parameters)
        optimizer = self.make_optimizer(spec.optimizer)
        assert optimizer is not None, "what is not trained needs no tie"
        self.mitigation = mitigation_of(spec.pipeline, stage, optimizer, tie=tie)
        self.average = None if spec.ema is None else WeightAverage(self._parameters.items(), spec.ema)
        self.staleness: list[int] = []
        self._skips = spec.gradients.skips
        self._own: list[Tensor] = []  # the part of this stage, of the group that is complete
        self._sums: deque[list[Tensor]] = deque()  # not applied yet, oldest first
        self._skipped: set[int] = set()  # updates to come that are not made
        self._seen: dict[int, int] = {}  # by version of the stage, the version that its forwards see
        self._epoch = 0

    def named_parameters(self, *, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield (name, parameter): each once, by a name that it has in every cut."""
        yield from self._parameters.items()

    def begin(self, epoch: int, version: int) -> None:
        """Prepare for a segment of ``epoch``, begun with ``version`` of the stage."""
        self._epoch, self._seen = epoch, {version: self.version}
        self._own, self.staleness = [], []
        self._sums.clear()
        self._skipped.clear()
        if self.mitigation is not None:
            self.mitigation.begin(epoch)

    def note(self, version: int, *, oldest: int) -> None:
        """Note that forwards of the stage's ``version`` see the present weights.

        Versions before ``oldest`` are forgotten.
        """
        self._seen[version] = self.version
        for gone in [known for known in self._seen if known < oldest]:
            del self._seen[gone]

    def count(self, version: int, forward_version: int) -> None:
        """Count the staleness of a gradient.

        Its forward saw ``forward_version`` of the stage, which has ``version`` now.
        """
        # The group whose update is the stage's next has the same number among the updates of tied weights.
        self.staleness.append(version - self._seen[forward_version])

    def gather(self, version: int) -> list[Tensor]:
        """Take and return the gradients of the group of update ``version``.

        Raises:
            PartitionError: If a parameter has no gradient on this stage.
        """
        self._own = []
        for name, parameter in self._parameters.items():
            if parameter.grad is None:
                raise PartitionError(
                    f"{self.where}: '{name}' got no gradient here for update {version}, but each stage that uses a "
                    "shared weight must get one in every group; choose a cut with all its uses on one stage, or "
                    "partition.tied=untie if it has several names; freeze it if it never gets one, by "
                    "requires_grad_(False); for an average of the weights, as of a teacher, there is train.ema"
                )
            grad = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
            self._own.append(grad.contiguous())  # in one layout everywhere, or sums over it could round differently
            parameter.grad = None
        return self._own

    def skip(self, version: int) -> None:
        """Leave the weights as they are in update ``version``."""
        self._skipped.add(version)

    def part(self) -> Tensors:
        """Return the gradients of this stage, each [1, ...], for the first one."""
        own, self._own = self._own, []
        return tuple([grad.unsqueeze(0) for grad in own])

    def add(self, part: Tensors) -> None:
        """Add the gradients of a different stage to those of this one."""
        torch._foreach_add_(self._own, [grad.squeeze(0) for grad in part])

    def total(self) -> Tensors:
        """Return the summed gradients, each [1, ...], and keep them for update."""
        if self._own:
            self._sums.append(self._own)
            self._own = []
        return tuple([grad.unsqueeze(0) for grad in self._sums[-1]])

    def take(self, total: Tensors) -> None:
        """Store the summed gradients from the first stage."""
        self._sums.append([grad.squeeze(0) for grad in total])

    def update(self, in_place: AbstractContextManager[None], model_norm: Tensor | None = None) -> None:
        """Apply the oldest sum ``in_place``, unless its group was skipped.

        The sum is clipped by ``model_norm``, the norm of the whole model's gradient, or by its own norm if None.

        Raises:
            DivergedError: If the sum is not finite.
        """
        total, skip = self._sums.popleft(), self.version in self._skipped
        self._skipped.discard(self.version)
        parameters, norm = [*self._parameters.values()], norm_of(total)
        if not skip:
            for parameter, grad in zip(parameters, total, strict=True):
                parameter.grad = grad.clone()  # the same tensor may have gone to another stage of this process
            self._judge(norm)
        self.apply(parameters, norm if model_norm is None else model_norm, in_place=in_place, skipped=skip)

    def _judge(self, norm: Tensor) -> None:
        figures = StepStats(gradient_norm=norm, gradient_of=f"the summed gradient of tied {self._names}")
        if not self._skips:
            self._faults.judge(figures, (), update=self.version, epoch=self._epoch)
        elif not math.isfinite(float(norm)):
            fault = f"the norm of {figures.gradient_of} is {float(norm)}, though each stage's part is finite"
            raise DivergedError(fault, stage=self._stage, update=self.version, epoch=self._epoch)
