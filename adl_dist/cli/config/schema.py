"""What a run's configuration may hold: names, types, ranges. Checked once, here, before anything starts."""

import enum
from dataclasses import dataclass, field, replace
from typing import Any

from adl_dist.checkpoint.policy import CheckpointPolicy
from adl_dist.distributed.affinity import default_threads
from adl_dist.errors import ConfigError
from adl_dist.links import text_of_links
from adl_dist.monitor.timeouts import WatchdogTimeouts
from adl_dist.schedule import Method, Pipeline
from adl_dist.schedule.run_plan import check_lengths, micro_batch_size_of
from adl_dist.training.options import Monitoring, PartitionSpec, ProcessOptions

MOST_THREADS = 1024  # per process; torch ends without a message if there are very many
LARGEST_SEED = 2**63 - 1  # the largest that torch takes

# Choices, by which OmegaConf refuses all others. What each means is in conf/.
Device = enum.Enum("Device", {"cpu": "cpu", "cuda": "cuda"})
Dtype = enum.Enum("Dtype", {"float32": "float32", "float64": "float64"})
NarrowDtype = enum.Enum("NarrowDtype", {"bfloat16": "bfloat16"})  # keeps float32's range, so no loss scale is needed
Codec = enum.Enum("Codec", {"none": "none", "bf16": "bf16", "int8": "int8", "int4": "int4"})
NonFinite = enum.Enum("NonFinite", {"stop": "stop", "skip": "skip"})
Granularity = enum.Enum("Granularity", {"layer": "layer", "block": "block"})


# Not frozen: OmegaConf makes a nested frozen dataclass read-only, and Hydra cannot compose a group over it.


@dataclass(kw_only=True)
class MethodConfig:
    """``method.*``; see :class:`adl_dist.schedule.Method`. None: what the method's row says."""

    name: str = "adl"
    accumulation_steps: int | None = None
    weights: str | None = None
    delay: Any = None
    max_staleness: float | None = None
    split_backward: bool = False
    max_deferred: int = 2
    stages_per_process: int = 2
    gradient_shrink: float = 1.0
    order: str = "forward_first"
    reduction: str = "mean"
    lr_index: str = "update"
    lr_factors: list[float] | None = None
    recompute: str = "never"
    activation_queue: Any = 1
    gradient_queue: Any = 1
    head: str = "mlp_sr"
    head_layers: int = 0
    head_width: int | None = None
    head_sees_target: bool = False
    head_delay: int = 2
    head_lr_factor: float = 1.0
    mitigation: Any = None
    flush_epochs: int = 0
    discount_power: float = 0.5
    discount_updates: int | None = None
    predict_horizon: str = "linear"
    predict_from: str = "displacement"
    nesterov_gamma: float = 0.99
    error_feedback_coefficient: float = 1.0
    error_feedback_lag: int | None = None
    delay_compensation_lambda: float = 0.04

    def chosen(self) -> Method:
        """Return the method itself, checked."""
        return Method(**vars(self))


@dataclass(kw_only=True)
class PartitionConfig:
    """``partition.*``."""

    num_stages: int = 2
    balance: Any = "flops"
    granularity: Granularity = Granularity.layer
    speeds: list[float] | None = None
    links: Any = None  # a command line has [100mbit,50ms] or a list of such, because commas there make a sweep
    verify: bool = True
    tied: str = "share"

    def chosen(self) -> PartitionSpec:
        """Return the value that the trainer takes, checked."""
        return PartitionSpec(
            balance=self.balance,
            granularity=self.granularity.value,
            speeds=self.speeds,
            links=text_of_links(self.links),
            verify=self.verify,
            tied=self.tied,
        )


@dataclass(kw_only=True)
class TrainConfig:
    """``train.*``."""

    batch_size: int = 128
    epochs: int = 10
    max_updates: int | None = None
    clip_norm: float | None = None
    non_finite: NonFinite = NonFinite.stop
    max_skipped: int = 10
    metrics: list[str] = field(default_factory=list)
    ema: float | None = None

    def __post_init__(self) -> None:
        _at_least("train.batch_size", self.batch_size, 1)
        check_lengths(epochs=self.epochs, max_updates=self.max_updates)


@dataclass(kw_only=True)
class RuntimeConfig:
    """``runtime.*``. The trainer takes the properties' values, which check these."""

    processes: bool = True
    device: Device = Device.cpu
    threads: int | None = None
    bind_cores: bool = True
    lazy: bool = False
    channels_last: bool | None = None
    autocast: NarrowDtype | None = None
    codec: Codec = Codec.none
    gradient_codec: Codec | None = None
    compile: bool = False
    tf32: bool = False
    cudnn_benchmark: bool = False
    deterministic: bool = False
    timeout_seconds: float = 300.0
    stall_seconds: float = 60.0
    abort_seconds: int | float | str | None = "auto"
    max_restarts: int = 0
    checkpoint_every_epochs: int = 1
    checkpoint_every_updates: int | None = None
    keep_checkpoints: int = 2
    keep_best: bool = False
    best_metric: str | None = None
    best_is: str | None = None
    async_save: bool = True
    tensorboard: bool = True
    loggers: list[Any] = field(default_factory=list)
    trace: bool = False
    report: bool = True
    memory: bool = False
    stage_records_every: int = 10
    peak_tflops: float | None = None

    def __post_init__(self) -> None:
        if self.threads is not None:
            _at_least("runtime.threads", self.threads, 1)
            if self.threads > MOST_THREADS:
                raise ConfigError(f"runtime.threads must be at most {MOST_THREADS}, got {self.threads}")
        _at_least("runtime.max_restarts", self.max_restarts, 0)
        _ = self.timeouts, self.checkpoints, self.process_options, self.monitoring

    @property
    def monitoring(self) -> Monitoring:
        """What is recorded; loggers of the user's own are yet to be made."""
        return Monitoring(
            tensorboard=self.tensorboard,
            loggers=[one for one in self.loggers if isinstance(one, str) and "." not in one],
            trace=self.trace,
            report=self.report,
            memory=self.memory,
            stage_records_every=self.stage_records_every,
            peak_tflops=self.peak_tflops,
        )

    @property
    def timeouts(self) -> WatchdogTimeouts:
        """How long the job may stand still."""
        # No process of a command is the user's own.
        chosen = WatchdogTimeouts(stall_seconds=self.stall_seconds, abort_seconds=self.abort_seconds)
        return replace(chosen, abort_seconds=chosen.abort_after(distributed=True))

    @property
    def checkpoints(self) -> CheckpointPolicy:
        """When to save, what to keep."""
        return CheckpointPolicy(
            every_epochs=self.checkpoint_every_epochs,
            every_updates=self.checkpoint_every_updates,
            keep=self.keep_checkpoints,
            keep_best=self.keep_best,
            best_metric=self.best_metric,
            best_is=self.best_is,
            background=self.async_save,
        )

    @property
    def process_options(self) -> ProcessOptions:
        """How the stages are run."""
        return ProcessOptions(
            one_per_stage=self.processes,
            device=self.device.value,
            threads=self.threads,
            bind_cores=self.bind_cores,
            timeout_seconds=self.timeout_seconds,
        )


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
    callbacks: list[Any] = field(default_factory=list)
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
            raise ConfigError("run_dir is empty; name a folder, like run_dir=runs/NAME, or omit it")
        shuffle, num_workers = self.data.get("shuffle", True), self.data.get("num_workers", 0)
        if type(shuffle) is not bool:
            raise ConfigError(f"data.shuffle must be true or false, got {shuffle!r}")
        if type(num_workers) is not int or num_workers < 0:
            raise ConfigError(f"data.num_workers must be a whole number of at least 0, got {num_workers!r}")
        per_epoch = self.data.get("samples_per_epoch")
        if per_epoch is not None and (type(per_epoch) is not int or per_epoch < 1):
            raise ConfigError(f"data.samples_per_epoch must be a whole number of at least 1, got {per_epoch!r}")
        self.partition.chosen()
        micro_batch_size_of(self.train.batch_size, self.pipeline.micro_batches_per_update)

    @property
    def pipeline(self) -> Pipeline:
        """The method and K."""
        return Pipeline(self.method.chosen(), self.partition.num_stages)

    @property
    def threads(self) -> int:
        """The threads of each process."""
        return self.runtime.threads or default_threads(self.pipeline.num_processes)


def _at_least(name: str, value: int, smallest: int) -> None:
    if value < smallest:
        raise ConfigError(f"{name} must be at least {smallest}, got {value}")
