"""The optimizer of one stage, made by the user's factory, and its steps."""

import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from adl_dist.batch import map_tensors
from adl_dist.errors import AdlError, ConfigError, in_one_line
from adl_dist.stage.average import WeightAverage
from adl_dist.stage.mitigation import Mitigation
from adl_dist.stage.random_streams import seed_update
from adl_dist.stage.spec import OptimizerFactory, TrainSpec

ANYWHERE: AbstractContextManager[None] = nullcontext()


def stage_optimizer(
    factory: OptimizerFactory, parameters: Mapping[str, nn.Parameter], *, where: str
) -> Optimizer | None:
    """Make the optimizer of a stage, or None if nothing is trained.

    ``parameters`` are all parameters of the stage, by name.

    Raises:
        ConfigError: If the factory refuses them, or makes something that cannot train this stage by itself. The text
            begins with ``where``.
    """
    if not any(p.requires_grad for p in parameters.values()):
        return None
    expected = "expected a function of a stage's parameters, like lambda p: torch.optim.SGD(p, lr=0.1)"
    try:
        made = factory([*parameters.values()])
    except Exception as error:  # the user's own code: say whose it is and what it said
        said = str(error) if isinstance(error, AdlError) else f"the optimizer fails: {in_one_line(error)}"
        raise ConfigError(f"{where}: {said}") from error
    if not isinstance(made, Optimizer):
        raise ConfigError(
            f"{where}: optimizer must return a torch.optim.Optimizer, got {type(made).__name__}; {expected}"
        )
    if any(
        p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD for p in signature(made.step).parameters.values()
    ):
        raise ConfigError(
            f"optimizer: {type(made).__name__}.step needs a closure, which evaluates the loss itself, and no pipeline "
            "can do that; choose another"
        )
    own = set(map(id, parameters.values()))
    if any(id(p) not in own for group in made.param_groups for p in group["params"]):
        raise ConfigError(
            f"{where}: the optimizer holds parameters that are not of this stage; build it from the parameters that "
            "the factory is given: every stage has an optimizer of its own"
        )
    for group in made.param_groups:  # a rate that the user has made once would be changed by each stage's schedule
        if isinstance(rate := group.get("lr"), Tensor):
            group["lr"] = rate.detach().clone()
    return made


class Learner:
    """A part with its own optimizer: a stage, its tied weights, or its head.

    Attributes:
        where: its name in errors.
        key: its name in checkpoints, by which its random stream is seeded.
        version: updates applied so far, over the whole run.
        optimizer: its optimizer; None if it has nothing to train.
        mitigation: the mitigation of its staleness; None if there is none.
        average: the moving average of its weights; None if there is none.
        lr_schedule: the schedule of its learning rates; None if they are constant.
        lr_updates: the length of the schedule in updates; None if it has no end.
        scheduled: the keys of the optimizer's groups that the schedule sets.
        initial_groups: the values of these groups when the optimizer was made.
    """

    def __init__(self, spec: TrainSpec, device: torch.device, *, where: str, key: str, lr_factor: float = 1.0) -> None:
        """Begin without an optimizer; ``lr_factor`` scales its learning rates."""
        self.where, self.key, self.version = where, key, 0
        self.optimizer: Optimizer | None = None
        self.mitigation: Mitigation | None = None
        self.average: WeightAverage | None = None
        self.lr_schedule: LRScheduler | None = None
        self.lr_updates: int | None = None
        self.scheduled: Collection[str] = ()
        self.initial_groups: list[dict[str, Any]] = []
        self._device, self._seed, self._clip_norm = device, spec.seed, spec.gradients.clip_norm
        self._lr_factor = lr_factor

    def named_parameters(self, *, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield (name, parameter) of all parameters that it may train."""
        raise NotImplementedError

    def make_optimizer(self, factory: OptimizerFactory) -> Optimizer | None:
        """Make, keep and return the optimizer; see :func:`stage_optimizer`."""
        self.optimizer = stage_optimizer(factory, dict(self.named_parameters()), where=self.where)
        groups = self.optimizer.param_groups if self.optimizer is not None else []
        values = ({key: value for key, value in group.items() if key != "params"} for group in groups)
        self.initial_groups = [map_tensors(lambda tensor: tensor.detach().clone(), group) for group in values]
        return self.optimizer

    @property
    def rate_factor(self) -> float:
        """The factor on the learning rates of the next update."""
        return self._lr_factor if self.mitigation is None else self.mitigation.rate(self.version)

    def apply(
        self,
        parameters: list[nn.Parameter],
        norm: Tensor | None,
        *,
        in_place: AbstractContextManager[None] = ANYWHERE,
        skipped: bool = False,
    ) -> None:
        """Step the optimizer once, and count the update.

        Args:
            parameters: the parameters with gradients, which are scaled down to ``clip_norm`` if that is set.
            norm: the 2-norm by which gradients are scaled; None without gradients.
            in_place: the context of the step.
            skipped: whether the gradients are dropped instead; version and learning rate advance all the same.

        Raises:
            ConfigError: If the step, or the schedule of the learning rate, fails; the text names the learner.
        """
        if self.optimizer is not None:
            if not skipped:
                if self._clip_norm is not None and norm is not None:
                    clip_grads_with_norm_(parameters, self._clip_norm, norm)
                with self._stepping(self.optimizer), in_place:
                    self.optimizer.step() if self.mitigation is None else self.mitigation.step()
            self.optimizer.zero_grad()
            if self.average is not None and not skipped:
                self.average.update()
        self._advance(skipped=skipped)

    @contextmanager
    def _stepping(self, optimizer: Optimizer) -> Iterator[None]:
        factor = self.rate_factor
        # Around the step, not for good: some schedules set the learning rate from its last value.
        groups = optimizer.param_groups if factor != 1.0 else []
        before = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] = group["lr"] * factor
        seed_update(self._seed, self.key, self.version, self._device)
        try:
            yield
        except (TypeError, ValueError, AttributeError) as error:  # the user's own code
            raise ConfigError(
                f"{self.where}: optimizer: {type(optimizer).__name__} fails in update {self.version}: "
                f"{in_one_line(error)}; expected step() to need no argument"
            ) from error
        finally:
            for group, rate in zip(groups, before, strict=True):
                group["lr"] = rate

    def _advance(self, *, skipped: bool) -> None:
        """Count an update, and step the learning rate until its schedule's end."""
        self.version += 1
        if self.lr_schedule is None or (self.lr_updates is not None and self.version > self.lr_updates):
            return
        try:
            # True, and meant, where the very first update is skipped: that torch's optimizer has not stepped yet.
            with warnings.catch_warnings() if skipped else nullcontext():
                if skipped:
                    warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
                self.lr_schedule.step()
        except Exception as error:  # the user's own code
            raise ConfigError(
                f"{self.where}: lr_schedule: {type(self.lr_schedule).__name__} fails after update {self.version}: "
                f"{in_one_line(error)}; make it as long as the run"
            ) from error
