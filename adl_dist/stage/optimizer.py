"""The optimizer of one stage, from the user's factory."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.optim import Optimizer

from adl_dist.errors import AdlError, ConfigError
from adl_dist.stage.spec import OptimizerFactory


def stage_optimizer(factory: OptimizerFactory, parameters: Sequence[nn.Parameter], where: str) -> Optimizer | None:
    """Make the optimizer of a stage from all its ``parameters``; None: it has nothing to train, and gets none.

    Raises:
        ConfigError: the factory fails on them, or makes something that cannot train this stage by itself. The text
            begins with ``where``.
    """
    if not any(p.requires_grad for p in parameters):
        return None
    try:
        made = factory(parameters)
    except AdlError:
        raise
    except Exception as error:  # the user's own factory can raise anything
        raise ConfigError(
            f"{where}: the optimizer cannot be made from its parameters: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(made, Optimizer):
        raise ConfigError(
            f"{where}: the optimizer's factory returned a {type(made).__name__}; expected a torch.optim.Optimizer"
        )
    if isinstance(made, torch.optim.LBFGS):
        raise ConfigError("optimizer: LBFGS evaluates the loss itself, which no pipeline can do; choose another")
    own = set(map(id, parameters))
    if any(id(p) not in own for group in made.param_groups for p in group["params"]):
        raise ConfigError(
            f"{where}: the optimizer holds parameters that are not of this stage; build it from the parameters that "
            "the factory is given: every stage has an optimizer of its own"
        )
    return made


@contextmanager
def scaled_learning_rates(optimizer: Optimizer, factor: float) -> Iterator[None]:
    """Have the optimizer step with ``factor`` times its learning rates inside."""
    # Around the step, not once and for all: some schedules set the learning rate, whatever it was.
    groups = optimizer.param_groups if factor != 1.0 else []
    before = [group["lr"] for group in groups]
    for group in groups:
        group["lr"] = group["lr"] * factor
    yield
    for group, rate in zip(groups, before, strict=True):
        group["lr"] = rate
