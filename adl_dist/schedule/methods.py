"""A method as a user chooses it: a row and its hyper-parameters, checked."""

import math
from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field, replace
from typing import Any, Literal

from adl_dist.errors import ConfigError, did_you_mean
from adl_dist.schedule.method_table import ANYONES_DELAYS, METHODS, MethodSpec, Weights
from adl_dist.schedule.mitigations import MITIGATIONS, Horizon, PredictFrom, mitigation_options, why_not
from adl_dist.settings import (
    REMOVED_OPTIONS,
    WAS_REMOVED,
    check_settings,
    documented,
    from_old_name,
    setting,
    settings_of,
)

Recompute = Literal["never", "except_last", "always"]
Order = Literal["forward_first", "backward_first"]
Reduction = Literal["mean", "sum"]
LrClock = Literal["update", "global"]
Head = Literal["mlp_sr", "mlp", "cnn", "linear", "predsim"]
BEARABLE = 2  # updates of staleness that delay=auto takes by itself, where ADL's own delays are no longer
NO_DIFFERENCE = 1e-9


@documented("method", "method")
@dataclass(frozen=True, kw_only=True)
class Method:
    """A method and its hyper-parameters.

    None stands for the method's default in ``accumulation_steps``, ``weights`` and ``delay``. In other fields it turns
    the option off, or has the meaning that the field's help gives.

    Raises:
        ConfigError: If the method cannot run with a value, or ignores it.
    """

    name: str = setting("adl", "the method, chosen by method=NAME")
    accumulation_steps: int | None = setting(None, "M, micro-batches per update", least=1)
    weights: Weights | None = setting(
        None, "weights of a delayed backward: stash (those of its forward) | latest | recompute | 2bw"
    )
    delay: str | Sequence[int] | None = setting(
        None,
        "micro-batches between forward and backward: decoupled (2(K-1-k)) | minimal (K-1-k) | third (2(K-k)/3) | auto "
        "(the least at full speed) | none | one number for each stage",
        expected="a rule or a list of whole numbers, like [2,1,0]",
    )
    max_staleness: float | None = setting(
        None, "bound of delay=auto, in updates; null: that of delay=decoupled, or 2 if that is more", above=0
    )
    split_backward: bool = setting(False, "compute gradients of weights later, while a stage would wait; same values")
    max_deferred: int = setting(
        2, "micro-batches whose gradients of weights split_backward may defer at a time", least=1
    )
    stages_per_process: int = setting(2, "v of interleaved: stage s is in process s mod K/v", least=1)
    gradient_shrink: float = setting(1.0, "FDG's beta, a factor on the gradient that comes from downstream", above=0)
    order: Order = setting("forward_first", "forward_first | backward_first (the authors' code): delays one shorter")
    reduction: Reduction = setting("mean", "of the gradients of a group: mean | sum (the authors' code)")
    lr_clock: LrClock = setting(
        "update", "a stage's learning rate: update, by its own updates | global, by a common clock (the authors' code)"
    )
    lr_factors: Sequence[float] | None = setting(
        None, "factors on the stages' learning rates, like [2,1] in the authors' code of FR", above=0
    )
    recompute: Recompute = setting("never", "GPipe: keep only the input of micro-batches: never | except_last | always")
    activation_queue: int | Sequence[int] = setting(
        1,
        "DSP's p, of the queue between two stages: one number for all, or K-1",
        least=1,
        expected="a whole number or a list of some, like [1,2]",
    )
    gradient_queue: int | Sequence[int] = setting(
        1,
        "DSP's q; the delay of stage k is the sum of p + q from there on",
        least=1,
        expected="a whole number or a list of some, like [1,2]",
    )
    head: Head = setting("mlp_sr", "head of DGL's local losses: mlp_sr | mlp | cnn | linear | predsim")
    head_layers: int = setting(0, "DNI: hidden layers of a head; 0: it is linear, 2 in the paper", least=0)
    head_width: int | None = setting(
        None, "DNI: features or channels of a head; null: as many as the stage sends", least=1
    )
    head_sees_target: bool = setting(False, "DNI: the head also gets the class of each sample (cDNI)")
    head_delay: int = setting(2, "DNI: micro-batches between a forward and the update of its head", least=0)
    head_lr_factor: float = setting(
        1.0, "DNI: factor on the learning rate of a head, besides that of its stage", above=0
    )
    mitigation: Sequence[str] | None = setting(
        None,
        "mitigations of staleness, like [predict,spike]; docs/methods.md lists them and their options",
        expected="a list of names, like [predict,spike]",
    )
    flush_epochs: int = setting(0, "epochs at the start in which each update empties the pipeline", least=0)
    discount_power: float = setting(0.5, "p of discount: the rate is divided by max(staleness, 1) ** p", least=0)
    discount_updates: int | None = setting(None, "updates in which p falls to 0; null: it stays", least=1)
    predict_horizon: Horizon = setting("linear", "predicted steps: linear, all like the last | geometric, by momentum")
    predict_from: PredictFrom = setting(
        "displacement", "predict from displacement, the last move of the weights | momentum of SGD, Adam, AdamW"
    )
    nesterov_gamma: float = setting(0.99, "gamma of nesterov", above=0, below=1)
    error_feedback_coefficient: float = setting(1.0, "c of error_feedback", above=0)
    error_feedback_lag: int | None = setting(
        None, "updates back to the one that error_feedback compares with; null: the staleness", least=1
    )
    delay_compensation_lambda: float = setting(0.04, "lambda of delay_compensation", above=0)

    spec: MethodSpec = field(init=False, repr=False, compare=False)
    lr_index: InitVar[str | None] = None  # the name of lr_clock until 0.5.0

    def __post_init__(self, lr_index: str | None) -> None:
        if lr_index is not None:
            self._set("lr_clock", from_old_name("method.lr_index", lr_index, stacklevel=3))
        if not isinstance(self.name, str) or self.name not in METHODS:
            raise ConfigError(f"method.name: there is no '{self.name}'; choose one of {', '.join(METHODS)}")
        spec = METHODS[self.name]
        self._set("spec", spec)
        for name, option in settings_of(Method).items():
            value = getattr(self, name)
            if name not in ("name", *self.options) and value not in (None, option.default):
                raise ConfigError(self._means_nothing(name, value))
            if isinstance(value, list):
                self._set(name, tuple(value))  # so that a method can be hashed
        if self.delay not in (None, "queues") and (self.activation_queue, self.gradient_queue) != (1, 1):
            raise ConfigError("method.delay and the queues of dsp say the same in two ways; give one of them")
        for name in ("accumulation_steps", "weights", "delay"):
            if getattr(self, name) is None:
                self._set(name, getattr(spec, name))
        check_settings(self, "method")
        self._check_together()

    @property
    def options(self) -> list[str]:
        """The names of the fields in use by this method and its mitigation."""
        return [*self.spec.options, *mitigation_options(self.mitigation)]

    @property
    def settings(self) -> dict[str, Any]:
        """The hyper-parameters in use by this method, as plain values."""
        values = {"name": self.name, **{name: getattr(self, name) for name in self.options}}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    @property
    def micro_batches_per_update(self) -> int:
        """The number of micro-batches per update, M."""
        assert self.accumulation_steps is not None
        return self.accumulation_steps

    @property
    def splits(self) -> bool:
        """Whether the backward is done in two parts."""
        return self.split_backward or self.spec.splits

    @property
    def awaits_delays(self) -> bool:
        """Whether the delays are still to be found by measuring."""
        return self.delay == "auto"

    def longest_delay(self, num_stages: int) -> int:
        """Return the longest delay that ``auto`` may choose, in micro-batches."""
        M = self.micro_batches_per_update
        if self.max_staleness is None:
            longest = max(2 * (num_stages - 1), BEARABLE * M)
        else:
            longest = math.floor(self.max_staleness * M + NO_DIFFERENCE) + (self.order == "backward_first")
        return min(longest, M) if self.weights == "2bw" else longest  # whose forward asks for no older weights

    def with_delays(self, delays: Sequence[int]) -> "Method":
        """Return this method with the delays that ``auto`` has found."""
        return replace(self, delay=tuple(delays), max_staleness=None)

    @property
    def why_not_tied(self) -> str | None:
        """The reason why stages cannot share tied weights, or None if they can."""
        if self.spec.has_heads:
            return f"with method={self.name} each stage learns by itself, and no gradient of one is of use to another"
        if self.lr_clock == "global" or self.lr_factors is not None:
            name = "lr_factors" if self.lr_factors is not None else "lr_clock"
            return f"method.{name} gives each stage learning rates of its own"
        if rows := [row for row in self.mitigation or () if "gradient" in MITIGATIONS[row].hooks]:
            return f"method.mitigation={rows[0]} changes each stage's own gradients"
        return None

    @property
    def passes_targets(self) -> bool:
        """Whether the target travels from stage to stage, because heads need it."""
        return self.spec.local_losses or (self.spec.predicts_gradients and self.head_sees_target)

    def recomputes(self, place: int, group_size: int, delay: int) -> bool:
        """Return whether a stage replays the forward of a micro-batch.

        ``place`` is that of the micro-batch in a group of ``group_size``.
        """
        if self.weights == "recompute":
            return delay > 0  # without a delay the graph is used at once
        return self.recompute == "always" or (self.recompute == "except_last" and place < group_size - 1)

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _means_nothing(self, name: str, value: object) -> str:
        rows = [row for row, spec in MITIGATIONS.items() if name in spec.options]
        if rows and "mitigation" in self.spec.options:
            return f"method.{name}={value} means nothing without method.mitigation=[{rows[0]}]"
        takes = ", ".join(self.spec.options)
        return f"method.{name}={value} means nothing to method={self.name}, which takes {takes}"

    def _check_together(self) -> None:
        """Refuse options that contradict the method's row or each other."""
        rules = list(dict.fromkeys((*ANYONES_DELAYS, self.spec.delay)))
        if isinstance(self.delay, str) and self.delay not in rules:
            raise ConfigError(f"method.delay: there is no '{self.delay}'; choose one of {', '.join(rules)}, or a list")
        if self.max_staleness is not None and not self.awaits_delays:
            raise ConfigError(
                f"method.max_staleness bounds the delays that method.delay=auto finds, and method.delay={self.delay} "
                "leaves none to find; set method.delay=auto, or omit it"
            )
        if self.lr_clock == "global" and self.delay != self.spec.delay:
            raise ConfigError(
                f"method.lr_clock=global needs the clock of method.delay={self.spec.delay}; with method.delay="
                f"{self.delay} stages share none: omit one of them"
            )
        if self.lr_clock == "global" and self.flush_epochs:
            raise ConfigError("method.flush_epochs stops the clock of method.lr_clock=global; omit one of them")
        if not self.split_backward and self.max_deferred != type(self).max_deferred:
            raise ConfigError(
                "method.max_deferred needs a backward in two parts; set method.split_backward=true, or omit it"
            )
        assert self.weights is not None
        if reason := why_not(self.mitigation or (), self.weights):
            raise ConfigError(f"method.mitigation: {reason}")


def method(name: str, **options: Any) -> Method:
    """Choose a method by name, like ``method("adl", accumulation_steps=4)``.

    Raises:
        ConfigError: If there is no such method or option, or a value is out of range.
    """
    if "lr_index" in options:
        options["lr_clock"] = from_old_name("method.lr_index", options.pop("lr_index"), stacklevel=2)
    known = [option for option in settings_of(Method) if option != "name"]
    if unknown := sorted(options.keys() - known):
        if removed := [option for option in unknown if option in REMOVED_OPTIONS]:
            raise ConfigError(f"method.{removed[0]} {WAS_REMOVED}")
        takes = METHODS[name].options if name in METHODS else known
        meant = did_you_mean(unknown[0], takes)
        raise ConfigError(f"method: unknown option {', '.join(unknown)}{meant}; {name} takes {', '.join(takes)}")
    return Method(name=name, **options)
