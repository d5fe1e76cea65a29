"""``adl-dist plan``: measure, cut, predict all methods, recommend one."""

import argparse
import itertools
import json
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from adl_dist.cli.config import instantiate
from adl_dist.cli.config.compose import (
    Parser,
    balance_word,
    compose_run,
    method_named,
    method_words,
    number,
    without_method_and_cut,
)
from adl_dist.cli.config.schema import RunConfig
from adl_dist.cli.plan.output import Plan, facts_of, lines_of
from adl_dist.cli.plan.profiler import Profiler, link_figures
from adl_dist.codecs import CODECS, PLAIN, Codecs
from adl_dist.distributed.affinity import default_threads, num_cores
from adl_dist.distributed.device import check_device
from adl_dist.errors import ChannelError, ConfigError, DataError, PartitionError
from adl_dist.links import LINKS, Links, parse_links, text_of_links
from adl_dist.partition import Chain, Machine, checked_sizes
from adl_dist.partition.costs import Profile
from adl_dist.partition.cut import begins_of, check_places
from adl_dist.partition.predict import Prediction, advise, alternative, predict
from adl_dist.report.warning import warn
from adl_dist.schedule import Method, Pipeline
from adl_dist.schedule.run_plan import micro_batch_size_of
from adl_dist.settings import WAS_REMOVED
from adl_dist.training.measured import device_memory
from adl_dist.transport.coding_speed import coding_costs

BYTES = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
DEFAULT_METHODS = "bp,gpipe,1f1b,ddg,fr,fdg,adl"
REMOVED = {
    "--out": "--units prints the cost of each unit",
    "--profile": "each plan measures the model again",
    **dict.fromkeys(
        ("--max-staleness", "--steps"), "method.delay=auto method.max_staleness=0.5 bounds the staleness for one M"
    ),
}
CODEC_KEYS = ("runtime.codec=", "runtime.gradient_codec=")
Cuts = Mapping[int, tuple[Machine, list[int] | None]]  # by K: the devices, and the units of each stage if given


def plan(words: list[str]) -> None:
    """Run ``adl-dist plan`` with these command-line words."""
    flags = _flags(words)
    found = _answer(flags)
    text = json.dumps(facts_of(found)) if flags.json else "\n".join(lines_of(found, with_units=flags.units))
    sys.stdout.write(f"{text}\n")


def _flags(words: list[str]) -> argparse.Namespace:
    parser = Parser(
        prog="adl-dist plan",
        description="Measure the model on this machine, cut it, predict what each method would do, and recommend one.",
        epilog="example: adl-dist plan model=resnet56 data=cifar10 --stages 2,4,8 --devices 8 --input 3,32,32",
        overrides="as for adl-dist train: model, data, batch size, M, optimizer",
    )
    add = parser.add_argument
    stages = "numbers of stages, above 1: one device is in every table; default: 2, 4, 8 .. up to that of devices"
    add("--stages", type=partial(_numbers, 2), metavar="K,K", help=stages)
    names = f"default: {DEFAULT_METHODS} and the configured one; with method=NAME no other than that is recommended"
    add("--methods", metavar="NAME,NAME", help=names)
    devices = "number of devices; default: the GPUs, or cores, of this machine"
    add("--devices", type=number(int, 1), metavar="N", help=devices)
    memory = "memory of each device, like 80GiB; default: the GPU's, no limit on the CPU"
    add("--memory", type=_bytes, metavar="SIZE", help=memory)
    links = (
        "the link of each process to all others, like 100mbit,50ms: rate and round trip; or, with / between, K - 1 "
        "links between neighbours; default: measured between processes of this machine on CPUs, 96gbit,20us for GPUs"
    )
    add("--links", type=_links, metavar="RATE[,ROUND_TRIP]", help=links)
    add("--input", type=partial(_numbers, 1), metavar="C,H,W", help="shape of a sample, instead of looking at the data")
    neighbours = "also measure while N more processes compute; default: K - 1 on CPUs"
    add("--neighbours", type=number(int, 0), metavar="N", help=neighbours)
    add("--units", action="store_true", help="also print each unit")
    add("--json", action="store_true", help="print one JSON object instead of tables")
    if removed := {word.partition("=")[0] for word in words} & REMOVED.keys():
        raise ConfigError(f"{min(removed)} {WAS_REMOVED}; {REMOVED[min(removed)]}")
    return parser.parse_intermixed_args(words)


def _numbers(least: int, text: str) -> list[int]:
    return [int(number(int, least)(word)) for word in text.split(",")]


def _links(text: str) -> Links:
    try:
        return parse_links(text, "--links")
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("--links: ")) from None


def _bytes(text: str) -> int:
    unit = next((unit for unit in BYTES if text.endswith(unit)), "")
    try:
        return int(float(text.removesuffix(unit)) * BYTES[unit])
    except (KeyError, ValueError, OverflowError):
        units = ", ".join(BYTES)
        raise argparse.ArgumentTypeError(f"expected a number and a unit, like 80GiB ({units}), got {text}") from None


def described_links(config: RunConfig) -> Links | None:
    """Return the configured links, or None if they are absent or ``auto``."""
    links = text_of_links(config.partition.links)
    return None if links is None or links == "auto" else parse_links(links, LINKS)


def _answer(flags: argparse.Namespace) -> Plan:
    """Measure the model, and predict each method by the profile."""
    config, _ = compose_run(flags.overrides)
    instantiate.check_targets(config)
    check_device(config.runtime.device)
    is_gpu, batch, M = config.runtime.device == "cuda", config.train.batch_size, config.method.micro_batches_per_update
    num_devices = flags.devices or (torch.cuda.device_count() if is_gpu else num_cores())
    powers = [2**i for i in range(1, 8) if 2**i <= num_devices]
    stages = list(dict.fromkeys(flags.stages or sorted({*powers, config.partition.num_stages} - {1}) or [2]))
    names = flags.methods.split(",") if flags.methods else [*DEFAULT_METHODS.split(","), config.method.name]
    methods = [method_named(name, config, flag="--methods") for name in dict.fromkeys(names)]
    sizes = {m: micro_batch_size_of(batch, m) for m in [M, *(one.micro_batches_per_update for one in methods)]}
    links, threads = flags.links or described_links(config), config.runtime.threads or default_threads(max(stages))
    if links is not None:
        for K in stages:
            links.for_stages(K, "--links")
    machine = _machine(config, links, memory=flags.memory, threads=threads)
    try:
        profiler = Profiler(config, threads=threads, shape=flags.input)
    except DataError as error:
        raise DataError(f"{error}; or describe a sample: --input 3,224,224") from error
    cuts, refused = _cuts(config, stages, machine, profiler.chain)
    num_others = flags.neighbours
    if num_others is None:
        num_others = profiler.num_others(max(cuts)) if num_devices <= num_cores() else 0
    whole = profiler.pace(batch)
    with profiler.profiles(sizes.values(), num_others) as measured:
        share = profiler.pace(max(1, batch // num_devices))
    profiles = {m: measured[size] for m, size in sizes.items()}
    other = alternative(profiles[M], machine, num_devices=num_devices, whole=whole, share=share)
    predictions, unfit = _predictions(cuts, [(method, machine.codecs) for method in methods], profiles, num_devices)
    codecs = [] if links is None else [(config.method, Codecs(codec, codec)) for codec in CODECS]
    coded = _predictions(cuts, codecs, profiles, num_devices)[0]
    wanted = coded if config.method.name in names else []
    found = [*predictions, *wanted]
    if not flags.methods and any(word.startswith("method=") for word in flags.overrides):
        found = [told for told in found if told.pipeline.method == config.method]
    choice, reason = advise(found, other, unit=profiles[M].of["unit"])
    begins = [] if choice is None else begins_of(profiler.chain, choice.balance.sizes)
    return Plan(
        machine=machine,
        profile=profiles[M],
        other=other,
        predictions=predictions,
        chain=profiler.chain,
        coded=coded,
        refused=[*refused, *unfit],
        line=None if choice is None else line_to_paste(choice, begins, flags.overrides),
        reason=reason,
    )


def _machine(config: RunConfig, links: Links | None, *, memory: int | None, threads: int) -> Machine:
    """Return the devices and links, as described or, between CPUs, measured."""
    device, codecs, link = torch.device(config.runtime.device), instantiate.precision(config).codecs, dict[str, Any]()
    try:
        link = link_figures(
            device.type
        )  # also of described links: only a measurement tells the host's time of a message
    except ChannelError as error:
        if links is None:
            raise
        warn(f"what a message costs its sender and receiver is not counted: {error}")
    return Machine(
        memory_bytes=device_memory(device) if memory is None else memory,
        codecs=codecs,
        coding={} if links is None and codecs == PLAIN else coding_costs(device, threads=threads),
        **(link if links is None else link | links.figures),
    )


def _cuts(config: RunConfig, stages: Iterable[int], machine: Machine, chain: Chain) -> tuple[Cuts, list[str]]:
    """Return (machine, given cut) of each possible K, and errors of others.

    Raises:
        PartitionError: If no K is possible.
    """
    partition = config.partition
    cuts, refused, speeds = dict[int, tuple[Machine, list[int] | None]](), dict[int, str](), partition.device_speeds
    for K in stages:
        is_given = (
            isinstance(partition.balance, list) and partition.num_stages == K
        )  # else the question is which is best
        try:
            of_devices = replace(machine, speeds=speeds)
            of_devices.speeds_of(K)  # refuses another number of them
            check_places(chain, K)
            cuts[K] = of_devices, checked_sizes(chain, K, partition.balance) if is_given else None
        except (PartitionError, ConfigError) as error:
            refused[K] = str(error).replace("partition.num_stages=", "--stages ")
    if not cuts:
        raise PartitionError(next(iter(refused.values())))
    return cuts, [f"K = {K}: {error}" for K, error in refused.items()]


def _predictions(
    cuts: Cuts, variants: Iterable[tuple[Method, Codecs]], profiles: Mapping[int, Profile], num_devices: int
) -> tuple[list[Prediction], list[str]]:
    """Return all possible predictions, and why others are impossible."""
    predictions, refused = [], []
    for (K, (machine, sizes)), (method, codecs) in itertools.product(cuts.items(), variants):
        try:
            pipeline = Pipeline(method, K)
            if (n := pipeline.num_processes) > num_devices:
                refused.append(f"K = {K}: it needs {n} devices, and there are {num_devices}; --devices {n} predicts it")
                continue
            profile = profiles[method.micro_batches_per_update]
            predictions.append(predict(profile, pipeline, machine=replace(machine, codecs=codecs), sizes=sizes))
        except (PartitionError, ConfigError) as error:
            refused.append(f"{method.name}, K = {K}: {error}")
    return predictions, [*dict.fromkeys(refused)]


def line_to_paste(choice: Prediction, begins: Sequence[str], overrides: Sequence[str]) -> str:
    """Return the command that trains as predicted.

    ``begins`` are the units where stages 1..K-1 begin.
    """
    act, grad = choice.codecs
    words = [word for word in without_method_and_cut(overrides) if not word.startswith(CODEC_KEYS)]
    words += [] if choice.codecs == PLAIN else [f"runtime.codec={act}"]
    words += [] if grad == act else [f"runtime.gradient_codec={grad}"]
    words += method_words(choice.pipeline.method)
    words += [f"partition.num_stages={choice.pipeline.num_stages}", *([balance_word(begins)] if begins else [])]
    return f"adl-dist train {shlex.join(words)}"
