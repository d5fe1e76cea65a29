"""The contenders of a bench, and the survey of their model."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import TypeAlias

import torch
from torch import Tensor

from adl_dist.batch import tensors_of
from adl_dist.cli.config import instantiate
from adl_dist.cli.config.compose import method_named
from adl_dist.cli.config.schema import RunConfig, defaults
from adl_dist.cli.plan.command import described_links
from adl_dist.cli.plan.profiler import Profiler, link_figures
from adl_dist.distributed.affinity import num_cores
from adl_dist.errors import AdlError, ConfigError, PartitionError
from adl_dist.links import LINKS
from adl_dist.partition import Chain, Machine
from adl_dist.partition.cut import begins_of
from adl_dist.partition.predict import best_cut, predict
from adl_dist.report.runs import flatten
from adl_dist.schedule import METHODS, Method, Pipeline
from adl_dist.schedule.run_plan import micro_batch_size_of
from adl_dist.stage.loss import SumCountLoss
from adl_dist.training.trial.stage_run import recorded_crossings
from adl_dist.transport.spec import TensorSpec

# The program that runs it: "loop", "ours", one of REPLICAS, or one of torch's pipelines.
Kind: TypeAlias = str
REPLICAS: Sequence[Kind] = ("ddp", "diloco")  # each process has the whole model, and 1/K of each batch
BASELINE = ("torch-bp", "torch-bp-whole")  # every ratio is to the faster of the two
ON_ALL_CORES = ("torch-bp-cores", "torch-bp-cores-whole")
BY_DEFAULT: Mapping[str, Kind] = {
    **dict.fromkeys((*BASELINE, *ON_ALL_CORES), "loop"),
    **{"torch-ddp": "ddp", "torch-gpipe": "gpipe", "torch-1f1b": "1f1b"},
}
OF_TORCH: Mapping[str, Kind] = {
    **BY_DEFAULT,
    "torch-zb": "zb",
    **dict.fromkeys(("torch-diloco-50", "torch-diloco-500"), "diloco"),  # updates between two exchanges
}
MINIMAL = "-minimal"  # suffix of a method: with method.delay=minimal
OURS = ("bp", "gpipe", "1f1b", "ddg", "fr", "fdg", "dsp", "dgl", "adl", f"adl{MINIMAL}")
NAMES = (*OF_TORCH, *METHODS, f"adl{MINIMAL}")  # all that --contenders takes
LONGEST_CYCLE = 5  # as few as the updates of a measured run
DEFAULT = (*BY_DEFAULT, *OURS)
ONLY_OURS = (  # settings that a comparison leaves as they are by default
    *("runtime.autocast", "runtime.codec", "runtime.gradient_codec", "runtime.compile", "runtime.loggers"),
    *("train.clip_norm", "train.ema", "train.non_finite", "train.metrics", "data.samples_per_epoch", "callbacks"),
)


def cycle_of(inner_updates: int) -> int:
    """Return the inner updates between two exchanges of a measured DiLoCo."""
    return min(inner_updates, LONGEST_CYCLE)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One contender: a way to train, and its processes and stages."""

    name: str
    kind: Kind  # the program that runs it
    num_processes: int
    num_stages: int  # of all processes together; 1: the model is not cut
    threads: int  # of each process
    method: Method  # ours; for torch's, the one that computes the same
    samples: int  # of one update, all processes together
    warmup: int  # updates before the measured ones; enough to fill the pipeline
    settings: Sequence[str] = ()  # overrides for this entry only
    inner_updates: int | None = None  # H of DiLoCo, updates between two exchanges

    @property
    def is_cut(self) -> bool:
        """Whether each process trains a part of the model."""
        return self.num_stages > 1


def entries(names: Sequence[str], config: RunConfig, *, warmup: int) -> tuple[list[Entry], dict[str, str]]:
    """Return the entries that can run, and by name why the others cannot.

    Each makes at least ``warmup`` updates before the measured ones. Raise ConfigError if a name is unknown.
    """
    if unknown := [name for name in names if name not in NAMES]:
        raise ConfigError(f"--contenders: there is no '{unknown[0]}'; choose of {', '.join(NAMES)}")
    able, left_out = list[Entry](), dict[str, str]()
    for name in dict.fromkeys(names):
        try:
            if name in OF_TORCH:
                able.append(_torch_entry(name, config, warmup))
            else:
                method = method_named(name.removesuffix(MINIMAL), config, flag="--contenders")
                method = replace(method, delay="minimal") if name.endswith(MINIMAL) else method
                able.append(our_entry(name, method, config, warmup))
        except AdlError as error:
            left_out[name] = str(error)
    return able, left_out


def _torch_entry(name: str, config: RunConfig, warmup: int) -> Entry:
    K, M = config.partition.num_stages, config.method.micro_batches_per_update
    kind = OF_TORCH[name]
    samples = config.train.batch_size // M * M
    uneven = f"the {samples} samples of an update cannot be shared evenly by {K} replicas"
    too_few = f"torch's schedule needs at least as many micro-batches (M = {M}) as stages (K = {K})"
    is_gpu, num_gpus = config.runtime.device == "cuda", torch.cuda.device_count()
    needs_gpus = is_gpu and kind not in ("loop", *REPLICAS)
    for is_wrong, why in (
        (is_gpu and name in ON_ALL_CORES, "the cores of the host do not make a GPU faster"),
        (needs_gpus and num_gpus < K, f"needs a GPU for each of {K} stages, and there are {num_gpus}"),
        (kind != "loop" and K == 1, "needs several processes, but partition.num_stages is 1"),
        (kind in REPLICAS and samples % K, uneven),
        (kind in ("1f1b", "zb") and M < K, too_few),
    ):
        if is_wrong:
            raise ConfigError(why)
    M = 1 if kind in REPLICAS or name.endswith("-whole") else M
    inner = int(name.rpartition("-")[2]) if kind == "diloco" else None
    return Entry(
        name=name,
        kind=kind,
        num_processes=1 if kind == "loop" else K,
        num_stages=1 if kind in ("loop", *REPLICAS) else K,
        threads=num_cores() if name in ON_ALL_CORES else config.threads,
        method=Method(name=kind if kind in METHODS else "bp", accumulation_steps=M),
        samples=samples,
        warmup=warmup if inner is None else -(-warmup // cycle_of(inner)) * cycle_of(inner),  # of DiLoCo: whole cycles
        inner_updates=inner,
    )


def our_entry(name: str, method: Method, config: RunConfig, warmup: int, *, settings: Sequence[str] = ()) -> Entry:
    """Return an entry of ``method`` with the configured batch and K (BP: 1)."""
    K = 1 if method.name == "bp" else config.partition.num_stages
    pipeline = Pipeline(method, K * Pipeline(method, K).stages_per_process)
    M = method.micro_batches_per_update
    return Entry(
        name=name,
        kind="ours",
        num_processes=pipeline.num_processes,
        num_stages=pipeline.num_stages,
        threads=config.threads,
        method=method,
        samples=micro_batch_size_of(config.train.batch_size, M) * M,
        warmup=max(warmup, pipeline.updates_to_fill),
        settings=settings,
    )


def check_fair(config: RunConfig, *, command: str) -> None:
    """Raise ConfigError if a setting would apply to our runs only."""
    given, usual = flatten(config.plain), flatten(defaults())
    if given.get("runtime.gradient_codec") == "none":
        given["runtime.gradient_codec"] = usual["runtime.gradient_codec"]
    if found := [key for key in ONLY_OURS if given.get(key) != usual.get(key)]:
        raise ConfigError(
            f"{' and '.join(found)} would apply to our methods alone; omit them, or where an experiment sets "
            f"them give null, [] or false: {command} compares all contenders in plain dtype, uncompiled, with "
            "plain messages and nothing besides training"
        )


@dataclass(frozen=True, kw_only=True)
class Cut:
    """A cut of the model into stages, and the bytes that cross it."""

    sizes: list[int]  # units of each stage
    begins: list[str]  # names of the units where stages 1..K-1 begin
    act_bytes: list[int]  # per sample, downstream, over each border between stages
    grad_bytes: list[int]  # per sample, upstream

    @classmethod
    def of(cls, chain: Chain, sizes: list[int]) -> "Cut":
        """Return a cut with ``sizes`` units per stage, or raise PartitionError."""
        mode = chain.plan(sizes).modes[True]
        crossing = [recorded_crossings(mode, edge)[0] for edge in range(len(sizes) - 1)]
        act_bytes = [[act.nbytes // one.size for act in one.acts] for one in crossing]
        grad_bytes = [sum(compress(acts, one.needs_grad)) for acts, one in zip(act_bytes, crossing, strict=True)]
        return cls(sizes=sizes, begins=begins_of(chain, sizes), act_bytes=[*map(sum, act_bytes)], grad_bytes=grad_bytes)


@dataclass(frozen=True, kw_only=True)
class ModelSurvey:
    """The model, data and cuts of all entries, with their predicted speeds."""

    cuts: Mapping[int, Cut]  # by the number of stages
    granularity: str
    channels_last: bool  # whether images are computed in that memory format
    target: TensorSpec
    exchanged_bytes: int  # of one average over replicas of the model
    predicted: dict[str, float]  # images per second by the name of an entry, where it can be predicted

    def bytes_per_image(self, entry: Entry) -> float:
        """Return the bytes that all processes send for one sample of ``entry``.

        In a ring each of K replicas sends 2 (K-1)/K of the averaged bytes, in DiLoCo only every H updates.
        """
        K, spec, target_bytes = entry.num_processes, entry.method.spec, _sample_bytes(self.target)
        if K == 1:
            return 0.0
        if entry.kind in REPLICAS:
            exchanged = self.exchanged_bytes / (entry.inner_updates or 1)
            return 2 * (K - 1) * exchanged / entry.samples
        cut = self.cuts[entry.num_stages]
        if spec.local_losses:  # no gradient comes back, and labels go along from stage to stage
            return float(sum(cut.act_bytes) + (K - 1) * target_bytes)
        lock_bytes = (K - 1) * spec.forward_lock  # a byte per sample says that a micro-batch has passed
        targets = K - 1 if entry.method.passes_targets else 1  # how often each travels
        return float(sum(cut.act_bytes) + sum(cut.grad_bytes) + targets * target_bytes + lock_bytes)


def survey(config: RunConfig, able: Sequence[Entry], *, predicts: bool = True) -> ModelSurvey:
    """Choose a cut for each number of stages; if asked, predict speeds.

    Raises:
        ConfigError, DataError, PartitionError: If the model cannot be trained or cut like that.
    """
    K, balance = config.partition.num_stages, config.partition.balance
    profiler = Profiler(config, threads=config.threads)
    one = profiler.samples.one
    for is_so, described in (
        (not all(isinstance(batch, Tensor) for batch in one), "inputs or targets of several tensors"),
        (profiler.samples.varies, "a collate_fn, by which lengths may change"),
        (profiler.loader is not None and profiler.loader.stream is not None, "an iterable dataset"),
        (isinstance(profiler.spec.loss_fn, SumCountLoss), "a loss that returns (sum, count)"),
    ):
        if is_so:
            raise ConfigError(
                "bench runs plain torch and torch's own pipelines, too, which take tensors of one shape, a dataset "
                f"with indices and a loss that is a mean; here is {described}: use adl-dist plan and adl-dist train"
            )
    sizes: dict[int, list[int] | None] = {}
    for num in {K, *(entry.num_stages for entry in able)} - {1}:
        # For a measured cut this only checks that the model has enough units.
        known = instantiate.chosen_sizes(profiler.chain, num, balance if num == K else "flops")
        sizes[num] = None if balance == "auto" else known
    found, predicted = {num: given for num, given in sizes.items() if given is not None}, dict[str, float]()
    if predicts or len(found) < len(sizes):  # else nothing has to be measured
        found, predicted = predict_speeds(config, able if predicts else [], profiler, sizes)
    whole = Cut(sizes=[1], begins=[], act_bytes=[], grad_bytes=[])
    return ModelSurvey(
        cuts={num: Cut.of(profiler.chain, of_cut) for num, of_cut in found.items()} or {1: whole},
        granularity=profiler.granularity,
        channels_last=bool(profiler.spec.precision.channels_last),
        target=TensorSpec.of(tensors_of(one[1])[0]),
        exchanged_bytes=sum(parameter.nbytes for parameter in profiler.model.parameters()),
        predicted=predicted,
    )


def predict_speeds(
    config: RunConfig, able: Sequence[Entry], profiler: Profiler, sizes: Mapping[int, list[int] | None]
) -> tuple[dict[int, list[int]], dict[str, float]]:
    """Measure the model, choose the cuts, and predict the entries' speeds.

    Return the units per stage by number of stages, and images/s by entry name. Where ``sizes`` has None, use the best
    cut of the configured method.
    """
    method, K, batch = config.method, config.partition.num_stages, config.train.batch_size
    steps = [method.micro_batches_per_update, *(entry.method.micro_batches_per_update for entry in able)]
    machine = Machine(speeds=config.partition.device_speeds, **(link_figures(config.runtime.device) if K > 1 else {}))
    links = described_links(config)  # the cut is for these, speeds are as measured
    over = machine if links is None else replace(machine, **links.for_stages(K, LINKS).figures)
    with profiler.profiles([batch // M for M in steps], profiler.num_others(K)) as profiles:
        pass
    found, predicted = dict[int, list[int]](), dict[str, float]()
    for num, given in sizes.items():
        pipeline = Pipeline(method, K)
        if num > K:
            M, v = method.micro_batches_per_update, num // K
            pipeline = Pipeline(Method(name="interleaved", accumulation_steps=M, stages_per_process=v), num)
        profile = profiles[batch // method.micro_batches_per_update]
        found[num] = given or list(best_cut(profile, pipeline, machine=_for_stages(over, K, num)).sizes)
    for entry in able:
        if entry.kind not in ("ours", *METHODS) or entry.settings:
            continue
        with contextlib.suppress(ConfigError, PartitionError):  # heads of local losses are not measured
            cut = found[entry.num_stages] if entry.is_cut else [len(profiler.chain.units)]
            profile = profiles[batch // entry.method.micro_batches_per_update]
            pipeline = Pipeline(entry.method, len(cut))
            prediction = predict(profile, pipeline, machine=_for_stages(machine, K, len(cut)), sizes=cut)
            predicted[entry.name] = prediction.images_per_second
    return found, predicted


def _for_stages(machine: Machine, K: int, num_stages: int) -> Machine:
    """Return ``machine`` for ``num_stages`` on K devices.

    If the numbers differ, all links are the slowest one, and speeds repeat. One stage alone is on the first device.
    """
    if num_stages == K or K == 1:
        return machine
    speeds = None if machine.speeds is None else ([*machine.speeds] * max(1, num_stages // K))[:num_stages]
    bandwidth, latency = machine.slowest_link
    return replace(machine, speeds=speeds, bandwidth=bandwidth, latency=latency)


def _sample_bytes(spec: TensorSpec) -> int:
    return spec.empty(1, torch.device("meta")).nbytes
