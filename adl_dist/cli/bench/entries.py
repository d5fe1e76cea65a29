"""The contenders of a bench: torch's own ways to train and our methods; and what all of them have in common."""

import contextlib
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from adl_dist.cli.config.compose import method_named
from adl_dist.cli.config.schema import Device, RunConfig
from adl_dist.cli.plan.link import link_figures
from adl_dist.cli.plan.profiler import Profiler
from adl_dist.distributed.affinity import num_cores
from adl_dist.errors import AdlError, ConfigError, PartitionError
from adl_dist.partition import Machine, checked_sizes, even_sizes
from adl_dist.partition.predict import best_cut, predict
from adl_dist.schedule import METHODS, Method, Pipeline
from adl_dist.schedule.run_plan import micro_batch_size_of
from adl_dist.training.trial import Trial
from adl_dist.transport.spec import TensorSpec

Kind = Literal["loop", "ddp", "gpipe", "1f1b", "ours"]

BASELINE = ("torch-bp", "torch-bp-whole")  # every ratio is to the faster of the two
ON_ALL_CORES = ("torch-bp-cores", "torch-bp-cores-whole")
PLAIN = "-plain"  # suffix of torch's pipelines: not in channels_last, which they refuse to send over gloo
PROCESSES: Mapping[str, Kind] = {"torch-ddp": "ddp", "torch-gpipe": "gpipe", "torch-1f1b": "1f1b"}
OF_TORCH = (*BASELINE, *ON_ALL_CORES, *PROCESSES, f"torch-gpipe{PLAIN}", f"torch-1f1b{PLAIN}")
MINIMAL = "-minimal"  # suffix of a method: with method.delay=minimal
OURS = ("bp", "gpipe", "1f1b", "ddg", "fr", "fdg", "dsp", "dgl", "adl", f"adl{MINIMAL}")
NAMES = (*OF_TORCH, *METHODS, f"adl{MINIMAL}")  # all that --contenders takes
DEFAULT = (*(name for name in OF_TORCH if not name.endswith(PLAIN)), *OURS)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One way to train."""

    name: str
    kind: Kind  # the program that runs it
    num_processes: int
    threads: int  # of each process
    method: Method  # ours; for torch's, the one that computes the same
    samples: int  # of one update, all processes together
    warmup: int  # updates before the measured ones; enough to fill the pipeline
    settings: Sequence[str] = ()  # overrides for this entry alone

    @property
    def is_cut(self) -> bool:
        """Whether each process trains one stage of several."""
        return self.num_processes > 1 and self.kind != "ddp"


def entries(names: Sequence[str], config: RunConfig, *, warmup: int) -> tuple[list[Entry], dict[str, str]]:
    """Return the entries of ``names`` that can run as configured, and the reason for each that cannot.

    Each makes at least ``warmup`` updates before the measured ones.

    Raises:
        ConfigError: an unknown name.
    """
    if unknown := [name for name in names if name not in NAMES]:
        raise ConfigError(f"--contenders: there is no '{unknown[0]}'; choose of {', '.join(NAMES)}")
    able, left_out = list[Entry](), dict[str, str]()
    for name in dict.fromkeys(names):
        try:
            able.append((_torch_entry if name in OF_TORCH else _our_entry)(name, config, warmup))
        except AdlError as error:
            left_out[name] = str(error)
    return able, left_out


def _torch_entry(name: str, config: RunConfig, warmup: int) -> Entry:
    K, M = config.partition.num_stages, config.method.chosen().micro_batches_per_update
    base = name.removesuffix(PLAIN)
    kind = PROCESSES.get(base, "loop")
    samples = config.train.batch_size // M * M
    is_gpu, is_plain, on_all_cores = config.runtime.device is Device.cuda, name.endswith(PLAIN), name in ON_ALL_CORES
    num_gpus, needs_gpus = torch.cuda.device_count(), is_gpu and kind in ("gpipe", "1f1b")
    for is_wrong, why in (
        (on_all_cores and is_gpu, "the cores of the host do not make a GPU faster"),
        (kind != "loop" and K == 1, "needs several processes, but partition.num_stages is 1"),
        (
            is_plain and config.runtime.channels_last is False,
            f"runtime.channels_last=false, so it would be {base} again",
        ),
        (kind == "ddp" and samples % K, f"the {samples} samples of an update cannot be shared evenly by {K} replicas"),
        (kind == "1f1b" and M < K, f"torch's 1F1B needs at least as many micro-batches (M = {M}) as stages (K = {K})"),
        (needs_gpus and num_gpus < K, f"needs a GPU for each of {K} stages, and there are {num_gpus}"),
    ):
        if is_wrong:
            raise ConfigError(why)
    M = 1 if kind == "ddp" or name.endswith("-whole") else M
    return Entry(
        name=name,
        kind=kind,
        num_processes=1 if kind == "loop" else K,
        threads=num_cores() if on_all_cores else config.threads,
        method=Method(name=kind if kind in METHODS else "bp", accumulation_steps=M),
        samples=samples,
        warmup=warmup,
        settings=("runtime.channels_last=false",) if is_plain else (),
    )


def _our_entry(name: str, config: RunConfig, warmup: int) -> Entry:
    method = method_named(name.removesuffix(MINIMAL), config, flag="--contenders")
    if name.endswith(MINIMAL):
        method = replace(method, delay="minimal")
    pipeline = Pipeline(method, 1 if name == "bp" else config.partition.num_stages)
    M = method.micro_batches_per_update
    return Entry(
        name=name,
        kind="ours",
        num_processes=pipeline.num_stages,
        threads=config.threads,
        method=method,
        samples=micro_batch_size_of(config.train.batch_size, M) * M,
        warmup=max(warmup, pipeline.updates_to_fill),
    )


@dataclass(frozen=True, kw_only=True)
class ModelSurvey:
    """The model, data and cut that all entries share, what crosses the cuts, and what is expected of each entry."""

    sizes: list[int]  # units of each stage
    granularity: str
    channels_last: bool  # whether images are computed in that memory format
    overwrites: list[list[bool]]  # for each stage, for each tensor that arrives, whether the stage writes to it
    target: TensorSpec
    act_bytes: int  # per sample, downstream, over all cuts
    grad_bytes: int  # per sample, upstream, over all cuts
    parameter_bytes: int  # of the whole model
    predicted: dict[str, float]  # images per second by the name of an entry, where it can be predicted

    def bytes_per_image(self, entry: Entry) -> float:
        """Return the bytes that all processes of ``entry`` together send for one sample, by the shapes of tensors.

        DDP's ring moves 2 (K-1)/K of the gradients' bytes from each of K processes, once per update.
        """
        K, spec, target_bytes = entry.num_processes, entry.method.spec, sample_bytes(self.target)
        if K == 1:
            return 0.0
        if entry.kind == "ddp":
            return 2 * (K - 1) * self.parameter_bytes / entry.samples
        if spec.local_losses:  # no gradient comes back, and labels go along from stage to stage
            return float(self.act_bytes + (K - 1) * target_bytes)
        lock_bytes = (K - 1) * spec.forward_lock  # a byte per sample says that a micro-batch has passed
        targets = K - 1 if entry.method.passes_targets else 1  # how often each travels
        return float(self.act_bytes + self.grad_bytes + targets * target_bytes + lock_bytes)


def survey(config: RunConfig, able: Sequence[Entry]) -> ModelSurvey:
    """Find the cut, predict the speed of each entry, and try out each stage once.

    Raises:
        ConfigError, DataError, PartitionError: the model cannot be trained or cut like that.
    """
    K, balance = config.partition.num_stages, config.partition.balance
    profiler = Profiler(config, granularity=config.partition.chosen().units, threads=config.threads)
    sizes: list[int] | None = [1]
    if K > 1:
        sizes = even_sizes(profiler.chain, K)  # also where another cut is asked for: there must be enough units
        if balance != "even":
            sizes = None if balance == "auto" else checked_sizes(profiler.chain, K, balance)
    sizes, predicted = predict_speeds(config, able, profiler, sizes)
    stages = profiler.chain.pieces(sizes) if K > 1 else [profiler.model]
    agreed = Trial(profiler.model, profiler.spec, profiler.samples, profiler.device).run(stages)
    crossing = [agreed.acts[k] for k in range(1, len(stages))]
    return ModelSurvey(
        sizes=sizes,
        granularity=profiler.granularity,
        channels_last=bool(profiler.spec.precision.channels_last),
        overwrites=[list(agreed.traits[k].overwrites[0]) for k in range(len(stages))],
        target=agreed.target,
        act_bytes=sum(sample_bytes(spec) for specs in crossing for spec in specs.training),
        grad_bytes=sum(sample_bytes(spec) for specs in crossing for spec in specs.of_gradients().training),
        parameter_bytes=sum(p.numel() * p.element_size() for p in profiler.model.parameters()),
        predicted=predicted,
    )


def predict_speeds(
    config: RunConfig, able: Sequence[Entry], profiler: Profiler, sizes: list[int] | None
) -> tuple[list[int], dict[str, float]]:
    """Measure the model as ``adl-dist plan`` does; ``sizes`` None: the best cut of the configured method."""
    method, K, batch = config.method.chosen(), config.partition.num_stages, config.train.batch_size
    M, profile = method.micro_batches_per_update, functools.cache(lambda M: profiler.profile(batch // M))
    machine = Machine(speeds=config.partition.speeds, **(link_figures(config.runtime.device) if K > 1 else {}))
    predicted: dict[str, float] = {}
    with profiler.with_load(profiler.num_others(K), batch // M):
        if sizes is None:
            sizes = list(best_cut(profile(M), Pipeline(method, K), machine=machine).sizes)
        for entry in able:
            if entry.kind in ("loop", "ddp") or entry.settings:
                continue
            # Heads of local losses are not measured; one stage may also be what is not a chain of units.
            with contextlib.suppress(ConfigError, PartitionError):
                cut = sizes if entry.is_cut else [len(profiler.chain.units)]
                pipeline = Pipeline(entry.method, entry.num_processes)
                prediction = predict(profile(pipeline.micro_batches_per_update), pipeline, machine=machine, sizes=cut)
                predicted[entry.name] = prediction.images_per_second
    return sizes, predicted


def sample_bytes(spec: TensorSpec) -> int:
    """Return the bytes of one sample."""
    return spec.empty(1, torch.device("meta")).nbytes
