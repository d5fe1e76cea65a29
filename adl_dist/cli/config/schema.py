"""The configuration of a run: groups of settings, checked at the start."""

from collections.abc import Mapping, Sequence
from dataclasses import Field, dataclass, field, fields, replace
from types import SimpleNamespace
from typing import Any, Literal, TypeVar

from adl_dist.checkpoint.policy import CheckpointPolicy
from adl_dist.distributed.affinity import default_threads
from adl_dist.errors import ConfigError
from adl_dist.monitor.timeouts import WatchdogTimeouts
from adl_dist.schedule import Method, Pipeline
from adl_dist.schedule.run_plan import micro_batch_size_of
from adl_dist.settings import as_typed, check_choice, check_settings, made_from, setting, settings_of
from adl_dist.stage_options import GradientPolicy, PrecisionSettings
from adl_dist.training.options import Monitoring, PartitionSpec, ProcessOptions

LARGEST_SEED = 2**63 - 1  # the largest that torch takes

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Stages:
    """The number of stages, a separate argument of a Trainer."""

    num_stages: int = setting(2, "K, the number of stages", least=1)


@dataclass(frozen=True, kw_only=True)
class Training:
    """Length, batch size and metrics of a training."""

    batch_size: int = setting(64, "samples of one update; a micro-batch holds floor(batch_size / M)", least=1)
    epochs: int = setting(20, "passes over the training data", least=1)
    max_updates: int | None = setting(None, "stop after so many updates, if that comes first", least=1)
    eval_every_updates: int | None = setting(
        None, "also evaluate after so many updates of an epoch, with an empty pipeline; docs/recipes.md", least=1
    )
    metrics: Sequence[str] = setting(
        (), "besides loss and accuracy: top5, perplexity, or a callable my.module.name of (output, target)"
    )
    ema: float | None = setting(None, "decay of a moving average of the weights, like 0.999; docs/runs.md")


@dataclass(frozen=True, kw_only=True)
class CommandOptions:
    """Settings of the command line only."""

    meta_init: bool = setting(
        False, "each process makes or reads the weights of its own stages only; docs/huggingface.md"
    )
    max_restarts: int = setting(2, "how often a run of which a process was killed is started again by itself", least=0)


# The dataclasses that declare the keys of each group.
GROUPS: dict[str, tuple[type, ...]] = {
    "method": (Method,),
    "partition": (Stages, PartitionSpec),
    "train": (Training, GradientPolicy),
    "runtime": (ProcessOptions, CommandOptions, PrecisionSettings, WatchdogTimeouts, CheckpointPolicy, Monitoring),
}
# Nodes that name a callable by _target_ and hold its arguments, checked against its signature.
OPEN_NODES = ("model", "data", "optimizer", "lr_schedule", "loss")


@dataclass(kw_only=True)
class RunConfig:
    """The settings of one run; groups are namespaces of plain values."""

    method: Method
    partition: SimpleNamespace
    train: SimpleNamespace
    runtime: SimpleNamespace
    model: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    lr_schedule: dict[str, Any] = field(default_factory=dict)
    loss: dict[str, Any] = field(default_factory=dict)
    callbacks: Sequence[Any] = setting(
        (), "code of yours that a run calls, like [{_target_: adl_dist.EarlyStopping, patience: 3}]; docs/own.md"
    )
    seed: int = setting(0, "seed of weights, data order, augmentation and dropout", least=0, most=LARGEST_SEED)
    dtype: Literal["float32", "float64"] = setting("float32", "of parameters and inputs: float32 | float64")
    init_from: str | None = setting(
        None, "weights to start from: a state_dict (.pt), a .safetensors file or folder, or a checkpoint"
    )
    run_dir: str | None = setting(None, "folder of the run; null: runs/DATA-MODEL-METHOD-kK-mM-seedS")
    init_skip: Sequence[str] = setting(
        (), "patterns of tensors of model or file not to load, like [fc.*]: a new head on old weights; docs/recipes.md"
    )
    resume: str = setting("auto", "auto: continue run_dir's newest checkpoint | never | path of a checkpoint")

    def __post_init__(self) -> None:
        check_settings(self, "")
        if self.run_dir == "":
            raise ConfigError("run_dir is empty; name a folder, like run_dir=runs/NAME, or omit it")
        shuffle, num_workers = self.data.get("shuffle", True), self.data.get("num_workers", 0)
        if type(shuffle) is not bool:
            raise ConfigError(f"data.shuffle must be true or false, got {shuffle!r}")
        if type(num_workers) is not int or num_workers < 0:
            raise ConfigError(f"data.num_workers must be a whole number of at least 0, got {num_workers!r}")
        check_choice("runtime.device", self.runtime.device, ("cpu", "cuda"))
        check_choice("runtime.autocast", self.runtime.autocast, (None, "bfloat16"))
        for cls in (Stages, Training, PrecisionSettings, CommandOptions):  # all others check themselves
            check_settings(self.build(cls), next(group for group, classes in GROUPS.items() if cls in classes))
        self.build(GradientPolicy).check(self.pipeline)
        for checked in (PartitionSpec, CheckpointPolicy, ProcessOptions):
            self.build(checked)
        _ = self.timeouts
        loggers = self.runtime.loggers  # those of the user's own code are made later
        named = (
            [one for one in loggers if isinstance(one, str) and "." not in one]
            if isinstance(loggers, list)
            else loggers
        )
        self.build(Monitoring, loggers=named)
        micro_batch_size_of(self.train.batch_size, self.method.micro_batches_per_update)

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> "RunConfig":
        """Return the configuration with ``plain`` values, and otherwise defaults.

        Hydra has checked the keys.

        Raises:
            ConfigError: If a value has the wrong type or is out of range.
        """
        hints = {f.name: f.type for f in fields(cls)}
        values = {key: as_typed(hints[key], value) for key, value in plain.items()}
        values |= {name: _group(name, plain.get(name, {})) for name in GROUPS}
        for name in OPEN_NODES:
            if not isinstance(values.get(name, {}), dict):
                raise ConfigError(f"{name}={values[name]!r}: expected settings, like {name}._target_=my.module.make")
        return cls(**values | {"method": made_from(Method, vars(values["method"]))})

    def build(self, cls: type[T], **others: Any) -> T:
        """Build a ``cls`` from values of this configuration and from ``others``."""
        group = next(name for name, classes in GROUPS.items() if any(issubclass(cls, one) for one in classes))
        return made_from(cls, vars(getattr(self, group)), **others)

    @property
    def plain(self) -> dict[str, Any]:
        """The plain values for ``config.yaml``, without unused keys of the method."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        values |= {name: dict(vars(values[name])) for name in GROUPS if name != "method"}
        plain: dict[str, Any] = _lists(values | {"method": self.method.settings})
        return plain

    @property
    def pipeline(self) -> Pipeline:
        """The method and K."""
        return Pipeline(self.method, self.partition.num_stages)

    @property
    def threads(self) -> int:
        """The threads of each process."""
        return int(self.runtime.threads or default_threads(self.pipeline.num_processes))

    @property
    def timeouts(self) -> WatchdogTimeouts:
        """The watchdog's timeouts, with ``auto`` as for several processes."""
        chosen = self.build(WatchdogTimeouts)
        return replace(chosen, abort_seconds=chosen.abort_after(distributed=True))


def keys_of(group: str) -> dict[str, Field[Any]]:
    """Return the settings of a group, or of the top level, by their keys."""
    classes = GROUPS[group] if group else (RunConfig,)
    return {key: f for cls in classes for key, f in settings_of(cls).items()}


def defaults() -> dict[str, Any]:
    """Return the default of every key, as Hydra composes them."""
    plain: dict[str, Any] = {group: {key: f.default for key, f in keys_of(group).items()} for group in GROUPS}
    plain |= {node: {} for node in OPEN_NODES} | {key: f.default for key, f in keys_of("").items()}
    return {key: _lists(value) for key, value in plain.items()}


def _group(name: str, given: Any) -> SimpleNamespace:
    if not isinstance(given, Mapping):
        raise ConfigError(f"{name}={given!r}: expected settings, like {name}.{next(iter(keys_of(name)))}=VALUE")
    return SimpleNamespace(**{key: as_typed(f.type, given.get(key, f.default)) for key, f in keys_of(name).items()})


def _lists(value: Any) -> Any:
    """Return nested values with lists in place of tuples."""
    if isinstance(value, Mapping):
        return {key: _lists(one) for key, one in value.items()}
    return [_lists(one) for one in value] if isinstance(value, list | tuple) else value
