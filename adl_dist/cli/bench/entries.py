"""The contenders of a bench: torch's own ways to train and our methods; and what all of them have in common."""

import contextlib
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.data import Dataset

from adl_dist.cli.config import instantiate
from adl_dist.cli.config.methods import method_named
from adl_dist.cli.config.schema import Device, RunConfig
from adl_dist.cli.plan.link import measure_link
from adl_dist.cli.plan.profiler import BackgroundLoad, Profiler
from adl_dist.data import check_dataset
from adl_dist.distributed.affinity import num_cores
from adl_dist.errors import AdlError, ConfigError, PartitionError
from adl_dist.partition import Machine, checked_sizes, even_sizes, linearise
from adl_dist.partition.predict import best_cut, predict
from adl_dist.schedule import METHODS, Method, Pipeline
from adl_dist.schedule.run_plan import micro_batch_size_of
from adl_dist.stage import to_channels_last
from adl_dist.training.input import DeviceLoader, common_sample, make_loader
from adl_dist.training.shape_inference import dry_run
from adl_dist.transport import Specs, TensorSpec

Kind = Literal["loop", "ddp", "gpipe", "1f1b", "ours"]

BASELINE = ("torch-bp", "torch-bp-whole")  # every ratio is to the faster of the two
ON_ALL_CORES = ("torch-bp-cores", "torch-bp-cores-whole")
PLAIN = "-plain"  # suffix of torch's pipelines: not in channels_last, which they refuse to send over gloo
PROCESSES: Mapping[str, Kind] = {"torch-ddp": "ddp", "torch-gpipe": "gpipe", "torch-1f1b": "1f1b"}
OF_TORCH = (*BASELINE, *ON_ALL_CORES, *PROCESSES, f"torch-gpipe{PLAIN}", f"torch-1f1b{PLAIN}")
MINIMAL = "-minimal"  # suffix of a method: with method.delay=minimal
OURS = ("bp", "gpipe", "1f1b", "ddg", "fr", "fdg", "dsp", "dgl", "adl", f"adl{MINIMAL}")
DEFAULT = (*(name for name in OF_TORCH if not name.endswith(PLAIN)), *OURS)
GPU_LINK = {"bandwidth": 12e9, "latency": 1e-5}  # PCIe 4, cautiously; a link between GPUs is not measured


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One way to train.

    Attributes:
        name: the label of its row.
        kind: the program that runs it.
        num_processes: processes of one run.
        threads: threads of each process.
        method: our method; for torch's, the one that computes the same.
        samples: samples of one update, all processes together.
        warmup: updates before the measured ones; enough to fill the pipeline.
        settings: overrides for this entry alone.
    """

    name: str
    kind: Kind
    num_processes: int
    threads: int
    method: Method
    samples: int
    warmup: int
    settings: Sequence[str] = ()

    @property
    def micro_batches(self) -> int:
        """M, micro-batches per update."""
        return self.method.micro_batches_per_update

    @property
    def is_cut(self) -> bool:
        """Whether each process trains one stage of several."""
        return self.num_processes > 1 and self.kind != "ddp"


@dataclass(frozen=True, kw_only=True)
class Host:
    """What decides which entries can run.

    Attributes:
        threads: threads of a stage.
        num_cores: cores that this process may use.
        num_gpus: GPUs that may be used; 0 on a CPU.
        warmup: the least number of updates before the measured ones.
    """

    threads: int
    num_cores: int
    num_gpus: int
    warmup: int


def known_names() -> list[str]:
    """Return every name that `--contenders` takes."""
    return [*OF_TORCH, *METHODS, f"adl{MINIMAL}"]


def entries(names: Sequence[str], config: RunConfig, host: Host) -> tuple[list[Entry], dict[str, str]]:
    """Return the entries of ``names`` that can run as configured, and the reason for each that cannot.

    Raises:
        ConfigError: an unknown name.
    """
    if unknown := [name for name in names if name not in known_names()]:
        raise ConfigError(f"--contenders: there is no '{unknown[0]}'; choose of {', '.join(known_names())}")
    able: list[Entry] = []
    left_out: dict[str, str] = {}
    for name in dict.fromkeys(names):
        try:
            able.append((_torch_entry if name in OF_TORCH else _our_entry)(name, config, host))
        except AdlError as error:
            left_out[name] = str(error)
    return able, left_out


def _torch_entry(name: str, config: RunConfig, host: Host) -> Entry:
    K, M = config.partition.num_stages, config.method.chosen().micro_batches_per_update
    kind = PROCESSES.get(name.removesuffix(PLAIN), "loop")
    samples = config.train.batch_size // M * M
    is_gpu, is_plain, on_all_cores = config.runtime.device is Device.cuda, name.endswith(PLAIN), name in ON_ALL_CORES
    if on_all_cores and is_gpu:
        raise ConfigError("the cores of the host do not make a GPU faster")
    if kind != "loop" and K == 1:
        raise ConfigError("needs several processes, but partition.num_stages is 1")
    if is_plain and not config.runtime.channels_last:
        raise ConfigError(f"runtime.channels_last=false, so it would be {name.removesuffix(PLAIN)} again")
    if kind == "ddp" and samples % K:
        raise ConfigError(f"the {samples} samples of an update cannot be shared evenly by {K} replicas")
    if kind == "1f1b" and M < K:
        raise ConfigError(f"torch's 1F1B needs at least as many micro-batches (M = {M}) as stages (K = {K})")
    if kind in ("gpipe", "1f1b") and is_gpu and host.num_gpus < K:
        raise ConfigError(f"torch's pipelining needs a GPU for each of {K} stages, and there are {host.num_gpus}")
    if kind == "ddp" or name.endswith("-whole"):
        M = 1
    return Entry(
        name=name,
        kind=kind,
        num_processes=1 if kind == "loop" else K,
        threads=host.num_cores if on_all_cores else host.threads,
        method=Method(name=kind if kind in METHODS else "bp", accumulation_steps=M),
        samples=samples,
        warmup=host.warmup,
        settings=("runtime.channels_last=false",) if is_plain else (),
    )


def _our_entry(name: str, config: RunConfig, host: Host) -> Entry:
    method = method_named(name.removesuffix(MINIMAL), config, flag="--contenders")
    if name.endswith(MINIMAL):
        method = replace(method, delay="minimal")
    pipeline = Pipeline(method, 1 if name == "bp" else config.partition.num_stages)
    M = method.micro_batches_per_update
    return Entry(
        name=name,
        kind="ours",
        num_processes=pipeline.num_stages,
        threads=host.threads,
        method=method,
        samples=micro_batch_size_of(config.train.batch_size, M) * M,
        warmup=max(host.warmup, pipeline.updates_to_fill),
    )


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes that training sends, from the shapes of tensors.

    Attributes:
        act_bytes: per sample, downstream, at each cut.
        grad_bytes: per sample, upstream, at each cut.
        target_bytes: per sample.
        parameter_bytes: all parameters of the model.
    """

    act_bytes: Sequence[int]
    grad_bytes: Sequence[int]
    target_bytes: int
    parameter_bytes: int

    def per_image(self, entry: Entry) -> float:
        """Return the bytes that all processes of ``entry`` together send for one sample.

        DDP's ring moves 2 (K-1)/K of the gradients' bytes from each of K processes, once per update.
        """
        K, spec = entry.num_processes, entry.method.spec
        if K == 1:
            return 0.0
        if entry.kind == "ddp":
            return 2 * (K - 1) * self.parameter_bytes / entry.samples
        if spec.local_losses:  # no gradient comes back, and labels go along from stage to stage
            return float(sum(self.act_bytes) + (K - 1) * self.target_bytes)
        lock_bytes = (K - 1) * spec.forward_lock  # a byte per sample says that a micro-batch has passed
        return float(sum(self.act_bytes) + sum(self.grad_bytes) + self.target_bytes + lock_bytes)


@dataclass(frozen=True, kw_only=True)
class ModelSurvey:
    """The model, data and cut that all entries share, and what is expected of each entry.

    Attributes:
        sizes: units of each stage.
        granularity: what a unit is.
        overwrites: for each stage, for each tensor that arrives, whether the stage writes to it.
        target: shape and dtype of the targets.
        traffic: what training sends.
        predicted: images per second by the name of an entry, where it can be predicted.
    """

    sizes: list[int]
    granularity: str
    overwrites: list[list[bool]]
    target: TensorSpec
    traffic: Traffic
    predicted: dict[str, float]


def survey(config: RunConfig, overrides: Sequence[str], able: Sequence[Entry], *, threads: int) -> ModelSurvey:
    """Find the cut, predict the speed of each entry, and run each stage once on the CPU.

    Args:
        config: the run's configuration.
        overrides: the arguments that it was composed from.
        able: the entries.
        threads: threads of a stage, to measure with.

    Raises:
        ConfigError, DataError, PartitionError: the model cannot be trained or cut like that.
    """
    train, _ = instantiate.build_data(config)
    check_dataset(train, name="training", min_samples=1)
    model = instantiate.build_model(config).to(getattr(torch, config.dtype.value))
    if config.runtime.channels_last:
        to_channels_last(model)
    K, balance = config.partition.num_stages, config.partition.balance
    granularity = config.partition.chosen().units
    stages: list[nn.Module] = [model]
    sizes: list[int] | None = [1]
    if K > 1:
        chain = linearise(model, granularity=granularity)
        sizes = even_sizes(chain, K)  # also where another cut is asked for: there must be enough units
        if balance != "even":
            sizes = None if balance == "auto" else checked_sizes(chain, K, balance)
    predicted: dict[str, float] = {}
    try:
        sizes, predicted = predict_speeds(config, overrides, able, sizes, granularity, threads)
    except PartitionError:
        if sizes is None or K > 1:
            raise  # a model that is not a chain of units trains, too, in a single stage
    if K > 1:
        stages = list(chain.pieces(sizes))
    overwrites, target, traffic = _dry_run_stages(stages, config, train)
    return ModelSurvey(
        sizes=sizes,
        granularity=granularity,
        overwrites=overwrites,
        target=target,
        traffic=traffic,
        predicted=predicted,
    )


def predict_speeds(
    config: RunConfig,
    overrides: Sequence[str],
    able: Sequence[Entry],
    sizes: list[int] | None,
    granularity: str,
    threads: int,
) -> tuple[list[int], dict[str, float]]:
    """Measure the model as ``adl-dist plan`` does; ``sizes`` None: the best cut of the configured method."""
    method, K, batch = config.method.chosen(), config.partition.num_stages, config.train.batch_size
    is_cpu = config.runtime.device is Device.cpu
    link = GPU_LINK if not is_cpu else measure_link()._asdict() if K > 1 else {}
    machine = Machine(speeds=config.partition.speeds, **link)
    how: dict[str, Any] = {"shape": None, "granularity": granularity, "threads": threads}
    num_others = max(0, min(K, num_cores() // threads) - 1) if is_cpu else 0
    predicted: dict[str, float] = {}
    with BackgroundLoad.started(num_others, overrides, how, batch // method.micro_batches_per_update) as load:
        profiler = Profiler(config, **how, kept_in=None, quiet=False, load=load)
        profile = functools.cache(lambda M: profiler.profile(batch // M))
        if sizes is None:
            M = method.micro_batches_per_update
            sizes = list(best_cut(profile(M), Pipeline(method, K), machine=machine).sizes)
        for entry in able:
            if entry.kind in ("loop", "ddp") or entry.settings:
                continue
            with contextlib.suppress(ConfigError, PartitionError):  # heads of local losses are not measured
                cut = sizes if entry.is_cut else [len(profiler.chain.units)]
                pipeline = Pipeline(entry.method, entry.num_processes)
                prediction = predict(profile(entry.micro_batches), pipeline, machine=machine, sizes=cut)
                predicted[entry.name] = prediction.images_per_second
    return sizes, predicted


def _dry_run_stages(
    stages: Sequence[nn.Module], config: RunConfig, train: Dataset[Any]
) -> tuple[list[list[bool]], TensorSpec, Traffic]:
    """Return, for each stage, which of its inputs it writes to; the target's spec; and what crosses each cut."""
    cpu, last, loss_fn = torch.device("cpu"), len(stages) - 1, instantiate.build_loss(config)
    sample = common_sample(device_loader(train, config, cpu), None)
    assert sample is not None
    arriving, target = (TensorSpec.of(tensor) for tensor in sample)
    acts, shared = Specs.always([arriving]), None
    overwrites, act_bytes, grad_bytes = [], [], []
    for k, stage in enumerate(stages):
        result = dry_run(stage, k, acts, target if k == last else None, loss_fn, cpu, shared)
        overwrites.append(result.overwrites[0])
        acts, shared = result.outs, result.shared
        if k < last:
            act_bytes.append(sum(map(sample_bytes, acts.training)))
            grad_bytes.append(sum(map(sample_bytes, acts.of_gradients().training)))
    parameter_bytes = sum(p.numel() * p.element_size() for stage in stages for p in stage.parameters())
    traffic = Traffic(
        act_bytes=act_bytes, grad_bytes=grad_bytes, target_bytes=sample_bytes(target), parameter_bytes=parameter_bytes
    )
    return overwrites, target, traffic


def sample_bytes(spec: TensorSpec) -> int:
    """Return the bytes of one sample."""
    sample = spec.empty(1, torch.device("meta"))
    return sample.numel() * sample.element_size()


def device_loader(
    dataset: Dataset[Any], config: RunConfig, device: torch.device, *, shuffle: bool | None = None
) -> DeviceLoader:
    """Return micro-batches of ``dataset`` as our first stage gets them; ``shuffle`` None: as configured."""
    return make_loader(
        dataset,
        "training",
        seed=config.seed,
        shuffle=config.data.get("shuffle", True) if shuffle is None else shuffle,
        num_workers=config.data.get("num_workers", 0),
        device=device,
        precision=instantiate.precision(config),
    )
