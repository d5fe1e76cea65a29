"""One row per method: a method is a schedule plus a weight policy."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from adl_dist.errors import ConfigError

Weights = Literal["stash", "latest"]


def decoupled_delay(stage: int, num_stages: int) -> int:
    """One hop per tick each way: d = 2(K - 1 - k) (paper, section 4.1)."""
    return 2 * (num_stages - 1 - stage)


@dataclass(frozen=True)
class Row:
    """What makes a method that method."""

    summary: str
    delay: Callable[[int, int], int]  # (stage, num_stages) -> ticks


METHODS = {
    "adl": Row("Accumulated Decoupled Learning (ICML 2021)", delay=decoupled_delay),
}


@dataclass(frozen=True, kw_only=True)
class Method:
    """A method and its hyper-parameters.

    Attributes:
        name: a row of ``METHODS``.
        accumulation_steps: M, micro-batches per update.
        weights: which weights the delayed backward uses. ``stash``: those of its forward (Eq. 15);
            ``latest``: the present ones over old activations, as the authors' code did.

    Raises:
        ConfigError: a value that the method cannot run with.
    """

    name: str = "adl"
    accumulation_steps: int = 4
    weights: Weights = "stash"

    def __post_init__(self) -> None:
        if self.name not in METHODS:
            raise ConfigError(f"method: there is no '{self.name}'; choose one of {', '.join(METHODS)}")
        if self.accumulation_steps < 1:
            raise ConfigError(f"method.accumulation_steps (M) must be at least 1, got {self.accumulation_steps}")
        if self.weights not in get_args(Weights):
            raise ConfigError(
                f"method.weights: there is no '{self.weights}'; choose one of {', '.join(get_args(Weights))}"
            )

    def delay(self, stage: int, *, num_stages: int) -> int:
        """Ticks between a micro-batch's forward and its backward on ``stage``."""
        return METHODS[self.name].delay(stage, num_stages)


def method(name: str, **options: Any) -> Method:
    """Choose a method by name, for example ``method("adl", accumulation_steps=4)``.

    Raises:
        ConfigError: no such method, no such option, or a value out of range.
    """
    try:
        return Method(name=name, **options)
    except TypeError:
        known = [f for f in Method.__dataclass_fields__ if f != "name"]
        unknown = ", ".join(sorted(set(options) - set(known)))
        raise ConfigError(f"method: unknown option {unknown}; {name} takes {', '.join(known)}") from None
