"""Optimizers with a rule for matrices, and torch's AdamW or SGD otherwise."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from adl_dist.errors import ConfigError
from adl_dist.optimizers.roles import split_by_role

# By name: the class, and options that differ from torch's defaults.
REST: dict[str, tuple[Callable[..., Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 3e-3, "betas": (0.9, 0.95), "weight_decay": 0.0}),
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
}


class ByRole(Optimizer):
    """Base of optimizers with groups of matrices and of the rest.

    See :func:`split_by_role`. Every stage has both groups, even if one is empty, so that a schedule with a rate for
    each group fits every stage. A schedule multiplies the rates of both. All state is per parameter.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        of_matrices: Mapping[str, Any],
        *,
        rest: str = "adamw",
        rest_lr: float | None = None,
        rest_options: Mapping[str, Any] | None = None,
        rest_names: Sequence[str] = (),
    ) -> None:
        """Divide ``params`` into matrices, with options, and the rest.

        ``of_matrices`` are the options of the first group; the other arguments are as in
        :class:`~adl_dist.optimizers.Muon`.

        Raises:
            ConfigError: If an option is unknown or out of range, or ``params`` are groups or have no role.
        """
        name = type(self).__name__
        if rest not in REST:
            raise ConfigError(f"optimizer.rest: there is no '{rest}'; choose one of {', '.join(REST)}")
        kind, options = REST[rest]
        options = {**options, **({} if rest_lr is None else {"lr": rest_lr}), **(rest_options or {})}
        of_rest = checked_options(kind, options, "optimizer.rest_options")
        params = list(params)
        if wrong := [p for p in params if not isinstance(p, torch.Tensor)]:
            raise ConfigError(
                f"optimizer: {name} takes the parameters themselves and makes its groups from what they are for, got a "
                f"{type(wrong[0]).__name__} among them; give model.parameters(), and rest_names for more of the rest"
            )
        matrices, others = split_by_role(params, name, rest_names)
        groups = [{**of_matrices, "params": matrices}, {**of_rest, "rule": rest, "params": others}]
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient, and only these."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        rest = [group for group in self.param_groups if "rule" in group]  # ``optimizer.rules`` may have divided it
        for group in self.param_groups:
            if "rule" not in group and (trained := [p for p in group["params"] if p.grad is not None]):
                self.step_matrices(trained, group)
        # Built in each step, in microseconds, so that a copy or a checkpoint misses nothing.
        inner = REST[rest[0]["rule"]][0]([{"params": []}])
        inner.param_groups, inner.state = rest, self.state
        inner.step()
        return loss

    def check_group(self, group: Mapping[str, Any], where: str) -> None:
        """Raise ConfigError if a value in ``group`` is out of range."""
        if "rule" in group:
            check_values(REST[group["rule"]][0], group, where)
        else:
            self.check_matrices(group, where)

    def check_matrices(self, group: Mapping[str, Any], where: str) -> None:
        """Raise ConfigError if a value for matrices is out of range."""

    def step_matrices(self, params: Sequence[nn.Parameter], group: Mapping[str, Any]) -> None:
        """Update ``params``, which have gradients, by the options of ``group``."""
        raise NotImplementedError


def checked_options(kind: Callable[..., Optimizer], options: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return all options of a group of ``kind``, or raise ConfigError.

    They are ``options``, the defaults of the others, and ``params``, which is empty.
    """
    try:
        (group,) = kind([{"params": []}], **options).param_groups
    except (TypeError, ValueError, RuntimeError) as error:
        known = ", ".join(name for name in inspect.signature(kind).parameters if name != "params")
        raise ConfigError(
            f"{where}: torch's {kind.__name__} refuses {dict(options)}: {error}; its options are {known}: correct what "
            "it names, or omit that for the default"
        ) from error
    return group


def check_values(kind: Callable[..., Optimizer], group: Mapping[str, Any], where: str) -> None:
    """Raise ConfigError if torch's ``kind`` refuses a value in ``group``."""
    known = inspect.signature(kind).parameters
    checked_options(kind, {key: value for key, value in group.items() if key in known and key != "params"}, where)
