"""What a run's configuration may hold: names, types, ranges. Checked once, here, before anything starts."""

import enum
from dataclasses import dataclass, field
from typing import Any

from adl_dist.errors import ConfigError
from adl_dist.schedule import METHODS

LONGEST_TIMEOUT = 1_000_000  # seconds; torch counts milliseconds in 32 bits
MOST_THREADS = 1024  # per process; torch dies of very many without a word
LARGEST_SEED = 2**63 - 1  # that torch takes


class Weights(enum.Enum):
    """Weight policies."""

    stash = "stash"
    latest = "latest"


class Device(enum.Enum):
    """Where stages compute."""

    cpu = "cpu"
    cuda = "cuda"


class Dtype(enum.Enum):
    """Of parameters and inputs."""

    float32 = "float32"
    float64 = "float64"


# Not frozen: OmegaConf makes a nested frozen dataclass read-only, and Hydra cannot compose a group over it.


@dataclass(kw_only=True)
class MethodConfig:
    """``method.*``."""

    name: str = "adl"
    accumulation_steps: int = 4
    weights: Weights = Weights.stash

    def __post_init__(self) -> None:
        if self.name not in METHODS:
            raise ConfigError(f"method.name: there is no '{self.name}'; choose one of {', '.join(METHODS)}")
        _at_least("method.accumulation_steps", self.accumulation_steps, 1)


@dataclass(kw_only=True)
class PartitionConfig:
    """``partition.*``."""

    num_stages: int = 2
    balance: Any = "even"

    def __post_init__(self) -> None:
        _at_least("partition.num_stages", self.num_stages, 1)
        is_list = isinstance(self.balance, list) and all(type(n) is int for n in self.balance)
        if self.balance != "even" and not is_list:
            raise ConfigError(
                f"partition.balance={self.balance!r} is neither 'even' nor a list of units per stage, like [3,2]"
            )


@dataclass(kw_only=True)
class TrainConfig:
    """``train.*``."""

    batch_size: int = 128
    epochs: int = 10
    max_updates: int | None = None

    def __post_init__(self) -> None:
        _at_least("train.batch_size", self.batch_size, 1)
        _at_least("train.epochs", self.epochs, 1)
        if self.max_updates is not None:
            _at_least("train.max_updates", self.max_updates, 1)


@dataclass(kw_only=True)
class RuntimeConfig:
    """``runtime.*``."""

    processes: bool = True
    device: Device = Device.cpu
    threads: int | None = None
    channels_last: bool = True
    timeout_seconds: float = 300.0
    max_restarts: int = 0
    checkpoint_every_epochs: int = 1
    keep_checkpoints: int = 2
    tensorboard: bool = True

    def __post_init__(self) -> None:
        if self.threads is not None:
            _at_least("runtime.threads", self.threads, 1)
            if self.threads > MOST_THREADS:
                raise ConfigError(f"runtime.threads must be at most {MOST_THREADS}, got {self.threads}")
        if not 0 < self.timeout_seconds <= LONGEST_TIMEOUT:
            raise ConfigError(
                f"runtime.timeout_seconds must be above 0 and at most {LONGEST_TIMEOUT}, got {self.timeout_seconds}"
            )
        _at_least("runtime.max_restarts", self.max_restarts, 0)
        _at_least("runtime.checkpoint_every_epochs", self.checkpoint_every_epochs, 0)
        _at_least("runtime.keep_checkpoints", self.keep_checkpoints, 1)


@dataclass(kw_only=True)
class RunConfig:
    """One run. The open nodes name a callable (``_target_``) and its arguments, checked against its signature."""

    method: MethodConfig = field(default_factory=MethodConfig)
    partition: PartitionConfig = field(default_factory=PartitionConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    model: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    lr_schedule: dict[str, Any] = field(default_factory=dict)
    loss: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    dtype: Dtype = Dtype.float32
    init_from: str | None = None
    run_dir: str | None = None
    resume: str = "auto"

    def __post_init__(self) -> None:
        _at_least("seed", self.seed, 0)
        if self.seed > LARGEST_SEED:
            raise ConfigError(f"seed must be at most {LARGEST_SEED} (2**63 - 1), got {self.seed}")
        if self.run_dir == "":
            raise ConfigError("run_dir is empty; name a folder, like run_dir=runs/NAME, or leave it away")
        shuffle, num_workers = self.data.get("shuffle", True), self.data.get("num_workers", 0)
        if type(shuffle) is not bool:
            raise ConfigError(f"data.shuffle must be true or false, got {shuffle!r}")
        if type(num_workers) is not int or num_workers < 0:
            raise ConfigError(f"data.num_workers must be a whole number of at least 0, got {num_workers!r}")
        if self.train.batch_size < self.method.accumulation_steps:
            raise ConfigError(
                f"train.batch_size={self.train.batch_size} leaves no sample for each of "
                f"method.accumulation_steps={self.method.accumulation_steps} micro-batches; "
                f"use train.batch_size>={self.method.accumulation_steps}"
            )


def _at_least(name: str, value: int, smallest: int) -> None:
    if value < smallest:
        raise ConfigError(f"{name} must be at least {smallest}, got {value}")
