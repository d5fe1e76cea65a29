"""A method as a user chooses it: a row and its hyper-parameters, checked."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, get_args

from adl_dist.errors import ConfigError
from adl_dist.schedule.method_table import ANYONES_DELAYS, METHODS, DelayRule, MethodSpec, Weights
from adl_dist.schedule.mitigations import MITIGATIONS, Horizon, PredictFrom, mitigation_options, why_not

Recompute = Literal["never", "except_last", "always"]
Order = Literal["forward_first", "backward_first"]
Reduction = Literal["mean", "sum"]
LrIndex = Literal["update", "slot"]
Head = Literal["mlp_sr", "mlp", "cnn", "linear", "predsim"]
CHOICES = {
    "weights": Weights,
    "order": Order,
    "reduction": Reduction,
    "lr_index": LrIndex,
    "recompute": Recompute,
    "head": Head,
    "predict_horizon": Horizon,
    "predict_from": PredictFrom,
}


def _whole(value: object) -> bool:
    return type(value) is int


def _number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]


def _list(value: object, of: Callable[[object], bool]) -> bool:
    return isinstance(value, tuple) and all(map(of, value))


WHOLE = ("a whole number", _whole)
WHOLE_OR_NONE = ("a whole number", lambda v: v is None or _whole(v))
NUMBER = ("a finite number", _number)
YES_OR_NO = ("true or false", lambda v: type(v) is bool)
NAMES = ("a list of names, like [predict,spike]", lambda v: v is None or _list(v, lambda one: isinstance(one, str)))
NUMBERS = ("a list of finite numbers, like [2,0.5]", lambda v: v is None or _list(v, _number))
QUEUE = ("a whole number or a list of some, like [1,2]", lambda v: _whole(v) or _list(v, _whole))
# What each option must be, and whether a value is that.
TYPES: dict[str, tuple[str, Callable[[object], bool]]] = {
    "accumulation_steps": WHOLE,
    "split_backward": YES_OR_NO,
    "max_deferred": WHOLE,
    "delay": ("a rule or a list of whole numbers, like [2,1,0]", lambda v: isinstance(v, str) or _list(v, _whole)),
    "stages_per_process": WHOLE,
    "gradient_shrink": NUMBER,
    "mitigation": NAMES,
    "max_staleness": ("a finite number", lambda v: v is None or _number(v)),
    "flush_epochs": WHOLE,
    "discount_power": NUMBER,
    "discount_updates": WHOLE_OR_NONE,
    "nesterov_gamma": NUMBER,
    "error_feedback_coefficient": NUMBER,
    "error_feedback_lag": WHOLE_OR_NONE,
    "delay_compensation_lambda": NUMBER,
    "lr_factors": NUMBERS,
    "activation_queue": QUEUE,
    "gradient_queue": QUEUE,
    "head_layers": WHOLE,
    "head_width": WHOLE_OR_NONE,
    "head_sees_target": YES_OR_NO,
    "head_delay": WHOLE,
    "head_lr_factor": NUMBER,
}
SMALLEST = {
    **{"accumulation_steps": 1, "max_deferred": 1, "stages_per_process": 1},
    **{"activation_queue": 1, "gradient_queue": 1},
    **{"flush_epochs": 0, "discount_power": 0, "discount_updates": 1, "error_feedback_lag": 1},
    **{"head_layers": 0, "head_width": 1, "head_delay": 0},
}
ABOVE_0 = (
    *("lr_factors", "gradient_shrink", "head_lr_factor"),
    *("nesterov_gamma", "error_feedback_coefficient", "delay_compensation_lambda", "max_staleness"),
)
# Options that were removed in 0.4.0, with their defaults; older run folders name them.
REMOVED_OPTIONS = {"buffer_size": 0, "buffer_reuse": None, "stage_speeds": None}
BEARABLE = 2  # updates of staleness that delay=auto takes by itself, where ADL's own delays are no longer
NO_DIFFERENCE = 1e-9
WAS_REMOVED = "was removed in 0.4.0; remove it, or use version 0.3.8"


@dataclass(frozen=True, kw_only=True)
class Method:
    """A method and its hyper-parameters; None: the value in the method's row.

    Attributes:
        name: a row of ``METHODS``.
        accumulation_steps: M, micro-batches per update.
        weights: which weights a delayed backward uses. ``stash``: those of its forward (Eq. 15); ``latest``: the
            present ones over old activations, as the authors' code did; ``recompute``: the forward is replayed
            with the present ones, so that only inputs are kept; ``2bw``: in every stage those from before the
            group before, which makes the staleness 1 everywhere.
        delay: ``decoupled`` (2(K-1-k)), ``minimal`` (K-1-k), ``third`` (floor(2(K-k)/3), for a split backward),
            ``auto`` (the least that keep full speed, by what is measured), ``none``, or one number for each stage.
        max_staleness: with ``auto``, how many updates old a stage's gradients may be on average; None: as old as with
            ``decoupled``, or 2 updates, whatever is more.
        split_backward: whether the backward is done in two parts: the gradient of what came in, which is sent at once,
            and the gradients of most weights, while the stage would otherwise wait. The values are the same.
        max_deferred: with ``split_backward``, micro-batches whose gradients of weights may be outstanding at a time.
        stages_per_process: v of ``interleaved``: stage s is in process s mod P, of P = ceil(K / v).
        gradient_shrink: FDG's beta; each stage but the last scales the gradient that comes in by it.
        order: ``backward_first`` (what the authors' code did) makes each delay above 0 one tick shorter, and the
            mean staleness 1/M of an update less.
        reduction: how a group's gradients are combined; ``sum`` (the authors' code) makes a step M times as long.
        lr_index: which learning rate a stage uses for its s-th update: the s-th of the schedule, or (``slot``, what
            the authors' code did) the one that a clock common to all stages shows at that moment.
        lr_factors: factors on each stage's learning rate; the FR authors' code used 2 on stage 0.
        recompute: GPipe's; which micro-batches of a group keep only their input: none, all but the last, all.
        activation_queue: DSP's p_k between stage k and k+1: one number for all, or K-1.
        gradient_queue: DSP's q_k; the delay of stage k is the sum of p + q from there on.
        head: the kind of head of local losses; see :mod:`adl_dist.stage.heads`.
        head_layers: hidden layers of a head that predicts gradients; 0: it is linear.
        head_width: their features or channels; None: as many as the stage sends on.
        head_sees_target: whether the head is also given the classes of its samples.
        head_delay: micro-batches that a stage forwards between the forward of a micro-batch and the moment its head
            learns from the gradient that has come back for it.
        head_lr_factor: the factor on the learning rate of the head, besides that of its stage.
        mitigation: rows of ``MITIGATIONS``: what is done about staleness in stages that have some, t updates; None:
            nothing. Those from ``discount_power`` on are options of one row each.
        flush_epochs: epochs at the start in which the pipeline is emptied after each group, so that nothing is stale.
        discount_power: p of ``discount``: the learning rate is divided by max(t, 1) ** p.
        discount_updates: updates over which p falls to 0; None: it stays.
        predict_horizon: ``linear``: a forward sees the weights t updates ahead, each like the last one;
            ``geometric``: each smaller by the optimizer's momentum, as without further gradients.
        predict_from: what the last update is read from: how far it moved the weights (``displacement``; any optimizer),
            or the state of SGD, Adam or AdamW (``momentum``).
        nesterov_gamma: gamma of ``nesterov``, in (0, 1).
        error_feedback_coefficient: c of ``error_feedback``.
        error_feedback_lag: with which earlier update it compares an update; None: that of ceil(t) updates ago.
        delay_compensation_lambda: lambda of ``delay_compensation``.

    Raises:
        ConfigError: a value that the method cannot run with, or one that means nothing to it.
    """

    name: str = "adl"
    accumulation_steps: int | None = None
    weights: Weights | None = None
    delay: DelayRule | Sequence[int] | None = None
    max_staleness: float | None = None
    split_backward: bool = False
    max_deferred: int = 2
    stages_per_process: int = 2
    gradient_shrink: float = 1.0
    order: Order = "forward_first"
    reduction: Reduction = "mean"
    lr_index: LrIndex = "update"
    lr_factors: Sequence[float] | None = None
    recompute: Recompute = "never"
    activation_queue: int | Sequence[int] = 1
    gradient_queue: int | Sequence[int] = 1
    head: Head = "mlp_sr"
    head_layers: int = 0
    head_width: int | None = None
    head_sees_target: bool = False
    head_delay: int = 2
    head_lr_factor: float = 1.0
    mitigation: Sequence[str] | None = None
    flush_epochs: int = 0
    discount_power: float = 0.5
    discount_updates: int | None = None
    predict_horizon: Horizon = "linear"
    predict_from: PredictFrom = "displacement"
    nesterov_gamma: float = 0.99
    error_feedback_coefficient: float = 1.0
    error_feedback_lag: int | None = None
    delay_compensation_lambda: float = 0.04

    spec: MethodSpec = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or self.name not in METHODS:
            raise ConfigError(f"method.name: there is no '{self.name}'; choose one of {', '.join(METHODS)}")
        spec = METHODS[self.name]
        self._set("spec", spec)
        for option in fields(self):
            value = getattr(self, option.name)
            if option.init and option.name not in ("name", *self.options) and value not in (None, option.default):
                raise ConfigError(self._means_nothing(option.name, value))
            if isinstance(value, list):
                self._set(option.name, tuple(value))  # so that a method can be hashed
        if self.delay not in (None, "queues") and (self.activation_queue, self.gradient_queue) != (1, 1):
            raise ConfigError("method.delay and the queues of dsp say the same in two ways; give one of them")
        for name in ("accumulation_steps", "weights", "delay"):
            if getattr(self, name) is None:
                self._set(name, getattr(spec, name))
        self._check_values()
        self._check_together()

    @property
    def options(self) -> list[str]:
        """The fields that mean something to this method and to the mitigation chosen."""
        return [*self.spec.options, *mitigation_options(self.mitigation)]

    @property
    def settings(self) -> dict[str, Any]:
        """All hyper-parameters that mean something to this method, as plain values."""
        values = {"name": self.name, **{name: getattr(self, name) for name in self.options}}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    @property
    def micro_batches_per_update(self) -> int:
        """M."""
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
        """Why stages cannot share tied weights; None: they can."""
        if self.spec.has_heads:
            return f"with method={self.name} each stage learns by itself, and no gradient of one is of use to another"
        if self.lr_index == "slot" or self.lr_factors is not None:
            name = "lr_factors" if self.lr_factors is not None else "lr_index"
            return f"method.{name} gives each stage learning rates of its own"
        places = {"forward_weights", "gradient"}
        if rows := [row for row in self.mitigation or () if not places.isdisjoint(MITIGATIONS[row].hooks)]:
            return f"method.mitigation={rows[0]} follows each stage's own gradients"
        return None

    @property
    def passes_targets(self) -> bool:
        """Whether the target travels from stage to stage, because heads need it."""
        return self.spec.local_losses or (self.spec.predicts_gradients and self.head_sees_target)

    @property
    def replays(self) -> bool:
        """Whether some forwards run twice."""
        return self.weights == "recompute" or self.recompute != "never"

    def recomputes(self, place: int, group_size: int, delay: int) -> bool:
        """Whether a stage of ``delay`` replays the forward of micro-batch ``place`` of a group of ``group_size``."""
        if self.weights == "recompute":
            return delay > 0  # without a delay the graph is used at once
        return self.recompute == "always" or (self.recompute == "except_last" and place < group_size - 1)

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _means_nothing(self, name: str, value: object) -> str:
        rows = [row for row, spec in MITIGATIONS.items() if name in spec.options]
        if rows and "mitigation" in self.spec.options:
            return f"method.{name}={value} means nothing without method.mitigation=[{rows[0]}]"
        takes = ", ".join(self.options)
        return f"method.{name}={value} means nothing to method={self.name}, which takes {takes}"

    def _check_values(self) -> None:
        """Refuse an option whose value no method takes."""
        for name, (what, fits) in TYPES.items():
            if not fits(value := getattr(self, name)):
                raise ConfigError(f"method.{name} must be {what}, got {value!r}")
        for name, literal in CHOICES.items():
            if (value := getattr(self, name)) not in (choices := get_args(literal)):
                raise ConfigError(f"method.{name}: there is no '{value}'; choose one of {', '.join(choices)}")
        for name, smallest in SMALLEST.items():
            for number in self._numbers(name):
                if number < smallest:
                    raise ConfigError(f"method.{name} must be at least {smallest}, got {number}")
        for name in ABOVE_0:
            if not all(number > 0 for number in self._numbers(name)):
                symbol = " (beta)" if name == "gradient_shrink" else ""
                raise ConfigError(f"method.{name}{symbol} must be above 0, got {self.settings[name]}")

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
        if self.lr_index == "slot" and self.delay != self.spec.delay:
            raise ConfigError(
                f"method.lr_index=slot needs the clock of method.delay={self.spec.delay}; with method.delay="
                f"{self.delay} stages share none: omit one of them"
            )
        if self.lr_index == "slot" and self.flush_epochs:
            raise ConfigError("method.flush_epochs stops the clock of method.lr_index=slot; omit one of them")
        if not self.split_backward and self.max_deferred != type(self).max_deferred:
            raise ConfigError(
                "method.max_deferred needs a backward in two parts; set method.split_backward=true, or omit it"
            )
        assert self.weights is not None
        if reason := why_not(self.mitigation or (), self.weights):
            raise ConfigError(f"method.mitigation: {reason}")
        if not self.nesterov_gamma < 1:
            raise ConfigError(f"method.nesterov_gamma must be below 1, got {self.nesterov_gamma}")

    def _numbers(self, name: str) -> Sequence[float]:
        value = getattr(self, name)
        return value if isinstance(value, tuple) else () if value is None else (value,)


def method(name: str, **options: Any) -> Method:
    """Choose a method by name, for example ``method("adl", accumulation_steps=4)``.

    Raises:
        ConfigError: no such method, no such option, or a value out of range.
    """
    known = [f.name for f in fields(Method) if f.init and f.name != "name"]
    if unknown := sorted(options.keys() - known):
        if removed := [option for option in unknown if option in REMOVED_OPTIONS]:
            raise ConfigError(f"method.{removed[0]} {WAS_REMOVED}")
        takes = METHODS[name].options if name in METHODS else known
        raise ConfigError(f"method: unknown option {', '.join(unknown)}; {name} takes {', '.join(takes)}")
    return Method(name=name, **options)
