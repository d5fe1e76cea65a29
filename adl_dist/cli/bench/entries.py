"""Who takes part in a bench: torch's own ways to train and our methods, and who cannot, and why."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from adl_dist.cli.config.methods import method_named
from adl_dist.cli.config.schema import Device, RunConfig
from adl_dist.errors import AdlError, ConfigError
from adl_dist.schedule import METHODS, Method, Pipeline

Kind = Literal["loop", "ddp", "gpipe", "1f1b", "ours"]

BASELINE = ("torch-bp", "torch-bp-whole")  # the faster of the two is what all others are compared with
ON_ALL_CORES = ("torch-bp-cores", "torch-bp-cores-whole")
PIPELINES = ("torch-gpipe", "torch-1f1b")
PLAIN = "-plain"  # behind the name of a pipeline of torch's: not in channels_last, which it refuses to send over gloo
PLAIN_PIPELINES = tuple(f"{name}{PLAIN}" for name in PIPELINES)
OF_TORCH = (*BASELINE, *ON_ALL_CORES, "torch-ddp", *PIPELINES, *PLAIN_PIPELINES)
MINIMAL = "-minimal"  # behind the name of a method: with method.delay=minimal
OURS = ("bp", "gpipe", "1f1b", "ddg", "fr", "fdg", "dsp", "dgl", "adl", f"adl{MINIMAL}")
DEFAULT = (*(name for name in OF_TORCH if name not in PLAIN_PIPELINES), *OURS)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One way to train.

    Attributes:
        name: of its row.
        kind: how it is run.
        num_processes: of one run.
        threads: of each process.
        micro_batches: M, of one update.
        samples: of one update, all processes together.
        warmup: updates before the measured ones; enough to fill the pipeline.
        method: of our own.
        settings: overrides that it gets and no other does.
    """

    name: str
    kind: Kind
    num_processes: int
    threads: int
    micro_batches: int
    samples: int
    warmup: int
    method: Method | None = None
    settings: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Host:
    """What decides who can take part.

    Attributes:
        threads: of a stage.
        num_cores: of the machine.
        num_gpus: of the machine.
        warmup: updates before the measured ones, at least.
    """

    threads: int
    num_cores: int
    num_gpus: int
    warmup: int


def known_names() -> list[str]:
    """Every contender that a user can name."""
    return [*OF_TORCH, *METHODS, f"adl{MINIMAL}"]


def entries(names: Sequence[str], config: RunConfig, place: Host) -> tuple[list[Entry], dict[str, str]]:
    """Those of ``names`` that can run as configured, and why the others cannot.

    Raises:
        ConfigError: a name that nobody has.
    """
    if unknown := [name for name in names if name not in known_names()]:
        raise ConfigError(f"--contenders: there is no '{unknown[0]}'; choose of {', '.join(known_names())}")
    fit: list[Entry] = []
    left_out: dict[str, str] = {}
    for name in dict.fromkeys(names):
        try:
            fit.append(_of_torch(name, config, place) if name in OF_TORCH else _ours(name, config, place))
        except AdlError as error:
            left_out[name] = str(error)
    return fit, left_out


def _of_torch(name: str, config: RunConfig, place: Host) -> Entry:
    K, M = config.partition.num_stages, config.method.chosen().micro_batches_per_update
    samples = config.train.batch_size // M * M
    if name in (*BASELINE, *ON_ALL_CORES):
        if name in ON_ALL_CORES and config.runtime.device is Device.cuda:
            raise ConfigError("the cores of the host do not make a GPU faster")
        return Entry(
            name=name,
            kind="loop",
            num_processes=1,
            threads=place.num_cores if name in ON_ALL_CORES else place.threads,
            micro_batches=1 if name.endswith("-whole") else M,
            samples=samples,
            warmup=place.warmup,
        )
    if K == 1:
        raise ConfigError("needs several processes, but partition.num_stages is 1")
    is_plain = name in PLAIN_PIPELINES
    kinds: dict[str, Kind] = {"torch-ddp": "ddp", "torch-gpipe": "gpipe", "torch-1f1b": "1f1b"}
    kind = kinds[name.removesuffix(PLAIN)]
    if is_plain and not config.runtime.channels_last:
        raise ConfigError(f"runtime.channels_last=false, so it would be {name.removesuffix(PLAIN)} again")
    if kind == "ddp" and samples % K:
        raise ConfigError(f"the {samples} samples of an update cannot be shared evenly by {K} replicas")
    if kind == "1f1b" and M < K:
        raise ConfigError(f"torch's 1F1B needs at least as many micro-batches (M = {M}) as stages (K = {K})")
    if kind != "ddp" and config.runtime.device is Device.cuda and place.num_gpus < K:
        raise ConfigError(f"torch's pipelining needs a GPU for each of {K} stages, and there are {place.num_gpus}")
    return Entry(
        name=name,
        kind=kind,
        num_processes=K,
        threads=place.threads,
        micro_batches=1 if kind == "ddp" else M,
        samples=samples,
        warmup=place.warmup,
        settings=("runtime.channels_last=false",) if is_plain else (),
    )


def _ours(name: str, config: RunConfig, place: Host) -> Entry:
    method = method_named(name.removesuffix(MINIMAL), config, flag="--contenders")
    if name.endswith(MINIMAL):
        method = replace(method, delay="minimal")
    pipeline = Pipeline(method, 1 if name == "bp" else config.partition.num_stages)
    M = method.micro_batches_per_update
    if config.train.batch_size < M:
        raise ConfigError(f"train.batch_size={config.train.batch_size} leaves no sample for each of {M} micro-batches")
    return Entry(
        name=name,
        kind="ours",
        num_processes=pipeline.num_stages,
        threads=place.threads,
        micro_batches=M,
        samples=config.train.batch_size // M * M,
        warmup=max(place.warmup, pipeline.updates_to_fill),
        method=method,
    )


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What training sends, from the shapes of tensors.

    Attributes:
        act_bytes: of one sample, downstream, at each cut.
        grad_bytes: of one sample, upstream, at each cut.
        target_bytes: of one sample.
        parameter_bytes: of the whole model.
    """

    act_bytes: Sequence[int]
    grad_bytes: Sequence[int]
    target_bytes: int
    parameter_bytes: int

    def per_image(self, contender: Entry) -> float:
        """Bytes that all processes of ``contender`` together send for one sample.

        DDP's ring moves 2 (K-1)/K of the gradients' bytes from each of K processes, once per update.
        """
        K = contender.num_processes
        if K == 1:
            return 0.0
        if contender.kind == "ddp":
            return 2 * (K - 1) * self.parameter_bytes / contender.samples
        row = contender.method.spec if contender.method is not None else None
        if row is not None and row.local_losses:  # no gradient comes back, and labels go along from stage to stage
            return float(sum(self.act_bytes) + (K - 1) * self.target_bytes)
        sent = sum(self.act_bytes) + sum(self.grad_bytes) + self.target_bytes
        if row is not None and row.forward_lock:
            sent += K - 1  # the word that a micro-batch has passed, a byte per sample
        return float(sent)
