"""The command line of ``adl-dist plan``, read and checked."""

import argparse
import contextlib
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from adl_dist.cli.config import instantiate
from adl_dist.cli.config.compose import Parser, compose_run, method_named
from adl_dist.cli.config.schema import RunConfig
from adl_dist.cli.plan.link import link_figures
from adl_dist.codecs import PLAIN
from adl_dist.distributed.affinity import default_threads, num_cores
from adl_dist.distributed.device import check_device
from adl_dist.errors import ChannelError, ConfigError
from adl_dist.links import LINKS, Links, parse_links, text_of_links
from adl_dist.partition import Machine
from adl_dist.report.warning import warn
from adl_dist.schedule import Method
from adl_dist.schedule.run_plan import micro_batch_size_of
from adl_dist.settings import WAS_REMOVED
from adl_dist.training.measured import device_memory
from adl_dist.transport.coding_speed import coding_costs

BYTES = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
DEFAULT_METHODS = "bp,gpipe,1f1b,ddg,fr,fdg,adl"


@dataclass(frozen=True, kw_only=True)
class Question:
    """The checked command line of ``adl-dist plan``."""

    flags: argparse.Namespace
    config: RunConfig
    methods: list[Method]  # to be predicted
    stages: list[int]  # each K
    num_devices: int
    links: Links | None  # as they are described; None: they are not

    @property
    def threads(self) -> int:
        """The threads of a stage."""
        return self.config.runtime.threads or default_threads(max(self.stages))

    @property
    def sizes(self) -> dict[int, int]:
        """The micro-batch size for each predicted M, checked against the batch."""
        steps = {method.micro_batches_per_update for method in (*self.methods, self.config.method)}
        return {M: micro_batch_size_of(self.config.train.batch_size, M) for M in sorted(steps)}


def asked(words: list[str]) -> Question:
    """Read and check the command line, or raise ConfigError."""
    flags = _flags(words)
    config, _ = compose_run(flags.overrides)
    instantiate.check_targets(config)
    check_device(config.runtime.device)
    _check(flags)
    is_gpu = config.runtime.device == "cuda"
    num_devices = flags.devices or (torch.cuda.device_count() if is_gpu else num_cores())
    powers = [2**i for i in range(1, 8) if 2**i <= num_devices]
    stages = list(dict.fromkeys(flags.stages or sorted({*powers, config.partition.num_stages} - {1}) or [2]))
    names = flags.methods.split(",") if flags.methods else [*DEFAULT_METHODS.split(","), config.method.name]
    question = Question(
        flags=flags,
        config=config,
        methods=[method_named(name, config, flag="--methods") for name in dict.fromkeys(names)],
        stages=stages,
        num_devices=num_devices,
        links=flags.links or described(text_of_links(config.partition.links)),
    )
    if question.links is not None:
        for K in stages:
            question.links.for_stages(K, "--links")
    _ = question.sizes  # refuses too small a batch
    return question


def _flags(words: list[str]) -> argparse.Namespace:
    parser = Parser(
        prog="adl-dist plan",
        description="Measure the model on this machine, cut it, predict what each method would do, and recommend one.",
        epilog="example: adl-dist plan model=resnet56 data=cifar10 --stages 2,4,8 --devices 8 --input 3,32,32",
        allow_abbrev=False,
    )
    add = parser.add_argument
    overrides = "as for adl-dist train: model, data, batch size, M, optimizer"
    add("overrides", nargs="*", metavar="KEY=VALUE", help=overrides)
    stages = "numbers of stages, above 1: one device is in every table; default: 2, 4, 8 .. up to that of devices"
    add("--stages", type=partial(_numbers, 2), metavar="K,K", help=stages)
    add("--methods", metavar="NAME,NAME", help=f"default: {DEFAULT_METHODS} and the configured one")
    add("--devices", type=int, metavar="N", help="number of devices; default: the GPUs, or cores, of this machine")
    memory = "memory of each device, like 80GiB; default: the GPU's, no limit on the CPU"
    add("--memory", type=_bytes, metavar="SIZE", help=memory)
    links = (
        "the link of each process to all others, like 100mbit,50ms: rate and round trip; or, with / between, K - 1 "
        "links between neighbours; default: measured between processes of this machine on CPUs, 96gbit,20us for GPUs"
    )
    add("--links", type=_links, metavar="RATE[,ROUND_TRIP]", help=links)
    add("--input", type=partial(_numbers, 1), metavar="C,H,W", help="shape of a sample, instead of looking at the data")
    add("--profile", type=Path, metavar="FILE", help="keep the measurement in FILE, and use it the next time")
    neighbours = "also measure while N more processes compute; default: K - 1 on CPUs"
    add("--neighbours", type=int, metavar="N", help=neighbours)
    add("--units", action="store_true", help="also print each unit")
    add("--json", action="store_true", help="print one JSON object instead of tables")
    if "--out" in {word.partition("=")[0] for word in words}:
        raise ConfigError(f"--out {WAS_REMOVED}; --units prints the cost of each unit")
    if removed := {word.partition("=")[0] for word in words} & {"--max-staleness", "--steps"}:
        raise ConfigError(
            f"{min(removed)} {WAS_REMOVED}; method.delay=auto method.max_staleness=0.5 bounds the staleness for one M"
        )
    return parser.parse_intermixed_args(words)


def _numbers(least: int, text: str) -> list[int]:
    with contextlib.suppress(ValueError):
        numbers = [int(word) for word in text.split(",")]
        if min(numbers) >= least:
            return numbers
    raise argparse.ArgumentTypeError(f"expected whole numbers of at least {least}, separated by commas, got {text}")


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


def _check(flags: argparse.Namespace) -> None:
    """Refuse bad flags before the time-consuming measurement."""
    for name, least in (("devices", 1), ("neighbours", 0)):
        number = getattr(flags, name)
        if number is not None and number < least:
            raise ConfigError(f"--{name} {number} must be at least {least}")
    if flags.profile is not None and (flags.profile.is_dir() or not flags.profile.parent.is_dir()):
        raise ConfigError(f"--profile {flags.profile}: expected the name of a file in an existing folder")
    flags.profile = flags.profile and flags.profile.absolute()  # the user's code may change the working directory


def described(links: str | None) -> Links | None:
    """Return the configured links, or None if they are absent or ``auto``."""
    return None if links is None or links == "auto" else parse_links(links, LINKS)


def machine_of(question: Question) -> Machine:
    """Return the devices and links, as described or, between CPUs, measured."""
    flags, device, described = question.flags, question.config.runtime.device, question.links
    link: dict[str, Any] = {}
    try:
        link = link_figures(device)  # also of described links: only a measurement can tell the host's time of a message
    except ChannelError as error:
        if described is None:
            raise
        warn(f"what a message costs its sender and receiver is not counted: {error}")
    link = {**link, **({} if described is None else described.figures)}
    memory = device_memory(torch.device(device)) if flags.memory is None else flags.memory
    codecs = instantiate.precision(question.config).codecs
    are_coded = described is not None or codecs != PLAIN
    coding = coding_costs(torch.device(device), threads=question.threads) if are_coded else {}
    return Machine(memory_bytes=memory, codecs=codecs, coding=coding, **link)
