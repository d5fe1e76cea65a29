"""``adl-dist plan``: measure the model, cut it, predict what each method would do with it, and recommend one."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from adl_dist.cli.arguments import Parser
from adl_dist.cli.config import instantiate
from adl_dist.cli.config.compose import compose_run
from adl_dist.cli.config.methods import method_named
from adl_dist.cli.config.schema import Device, RunConfig
from adl_dist.cli.plan.link import measure_link
from adl_dist.cli.plan.profiler import BackgroundLoad, Profiler
from adl_dist.cli.plan.report import facts_of, line_to_paste, report
from adl_dist.distributed.affinity import default_threads, num_cores
from adl_dist.distributed.device import check_device
from adl_dist.errors import ConfigError, PartitionError
from adl_dist.partition import Machine, checked_sizes
from adl_dist.partition.chain import Chain
from adl_dist.partition.costs import Profile
from adl_dist.partition.predict import Prediction, advise, alternative, predict
from adl_dist.report.costs import check_suffix, draw_costs
from adl_dist.schedule import Method, Pipeline
from adl_dist.schedule.run_plan import micro_batch_size_of
from adl_dist.training.partitioned_model import device_memory

PAIR_LINK = {"bandwidth": 12e9, "latency": 1e-5}  # between two GPUs by default: a cautious PCIe 4
BYTES = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
DEFAULT_METHODS = "bp,gpipe,1f1b,ddg,fr,fdg,adl"


def plan(words: list[str]) -> None:
    """Run the command with these command-line words."""
    flags = _flags(words)
    config, _ = compose_run(flags.overrides)
    instantiate.check_targets(config)
    check_device(config.runtime.device.value)
    _check(flags)
    methods = [method_named(name, config, flag="--methods") for name in dict.fromkeys(flags.methods.split(","))]
    batch = config.train.batch_size
    for each in (*methods, config.method.chosen()):
        micro_batch_size_of(batch, each.micro_batches_per_update)  # refuses too small a batch
    num_devices = flags.devices or _devices(config)
    stages = _stages(flags.stages, config, num_devices)
    granularity = config.partition.granularity.value if config.partition.granularity else "layer"
    machine = _machine(flags, torch.device(config.runtime.device.value))
    settings: dict[str, Any] = {
        "shape": None if flags.input is None else _numbers("--input", flags.input),
        "granularity": granularity,
        "threads": config.runtime.threads or default_threads(max(stages)),
    }
    chosen = config.method.chosen()
    num = flags.neighbours
    if num is None:
        num = _num_neighbours(config, num_devices, max(stages), settings["threads"])
    size = batch // chosen.micro_batches_per_update
    with BackgroundLoad.started(num, flags.overrides, settings, size) as load:
        profiler = Profiler(config, **settings, kept_in=flags.profile, quiet=flags.json, load=load)
        _plan(flags, config, profiler, machine, methods, stages, num_devices)


def _plan(
    flags: argparse.Namespace,
    config: RunConfig,
    profiler: Profiler,
    machine: Machine,
    methods: Sequence[Method],
    stages: Sequence[int],
    num_devices: int,
) -> None:
    chosen, batch, granularity = config.method.chosen(), config.train.batch_size, profiler.granularity
    steps = sorted({m.micro_batches_per_update for m in (*methods, chosen)})
    profiles = {M: profiler.profile(batch // M) for M in steps}
    profile = profiles[chosen.micro_batches_per_update]
    whole, share = profiler.pace(batch), profiler.pace_of_each(max(1, batch // num_devices))
    other = alternative(profile, machine, num_devices=num_devices, whole=whole, share=share)
    predictions, refused = [], []
    for num_stages in stages:
        for each in methods:
            try:
                of_stages = replace(machine, speeds=_speeds(config, num_stages))
                sizes = _sizes(config, profiler.chain, num_stages)
                profile_of_m = profiles[each.micro_batches_per_update]
                predictions.append(predict(profile_of_m, Pipeline(each, num_stages), machine=of_stages, sizes=sizes))
            except (PartitionError, ConfigError) as error:
                refused.append(f"{each.name}, K = {num_stages}: {error}")
    advice = advise(predictions, other)
    line = None if advice.choice is None else line_to_paste(advice.choice, granularity, flags.overrides)
    if flags.out is not None:
        _draw(flags.out, profile, advice.choice, config)
    if flags.json:
        facts = {
            "profile": asdict(profile),
            "machine": asdict(machine),
            "predictions": [facts_of(prediction) for prediction in predictions],
            "refused": refused,
            "alternative": asdict(other),
            "recommended": line,
            "reason": advice.reason,
        }
        _say(json.dumps(facts))
        return
    _say(report(profile, machine, predictions, refused, other, with_units=flags.units))
    _say(f"\nrecommended  {advice.reason}")
    if line is not None:
        _say(f"             {line}")
    if flags.out is not None:
        _say(f"picture      {flags.out}")


def _flags(words: list[str]) -> argparse.Namespace:
    parser = Parser(
        prog="adl-dist plan",
        description="Measure the model on this machine, cut it, predict what each method would do, and recommend one.",
        epilog="example: adl-dist plan model=resnet56 data=cifar10 --stages 2,4,8 --devices 8 --input 3,32,32",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "overrides", nargs="*", metavar="KEY=VALUE", help="as for adl-dist train: model, data, batch size, M, optimizer"
    )
    add("--stages", metavar="K,K", help="numbers of stages; default: 2, 4, 8 .. up to the number of devices")
    add("--methods", default=DEFAULT_METHODS, metavar="NAME,NAME", help=f"default: {DEFAULT_METHODS}")
    add("--devices", type=int, metavar="N", help="number of devices; default: the GPUs, or cores, of this machine")
    add("--memory", metavar="SIZE", help="memory of each device, like 80GiB; default: the GPU's, no limit on the CPU")
    add("--bandwidth", type=float, metavar="BYTES/S", help="of each link; default: measured on CPUs, 12e9 between GPUs")
    add("--latency", type=float, metavar="S", help="of each message; default: measured on CPUs, 1e-5 between GPUs")
    add("--input", metavar="C,H,W", help="shape of a sample, instead of looking at the data")
    add("--profile", type=Path, metavar="FILE", help="keep the measurement in FILE, and use it the next time")
    add(
        "--neighbours",
        type=int,
        metavar="N",
        help="also measure while N more processes compute; default: K - 1 on CPUs",
    )
    add("--units", action="store_true", help="also print each unit")
    add("--out", type=Path, metavar="FILE", help="draw the cost of each unit: FILE.svg, FILE.png or FILE.pdf")
    add("--json", action="store_true", help="print one JSON object instead of tables")
    return parser.parse_intermixed_args(words)


def _check(flags: argparse.Namespace) -> None:
    """Refuse now what would otherwise be found only after measuring."""
    if flags.out is not None:
        check_suffix(flags.out)
    for name, least in (("devices", 1), ("neighbours", 0)):
        number = getattr(flags, name)
        if number is not None and number < least:
            raise ConfigError(f"--{name} {number} must be at least {least}")
    if flags.profile is not None and (flags.profile.is_dir() or not flags.profile.parent.is_dir()):
        raise ConfigError(f"--profile {flags.profile}: expected the name of a file in an existing folder")


def _machine(flags: argparse.Namespace, device: torch.device) -> Machine:
    memory = _bytes(flags.memory) if flags.memory else device_memory(device)
    if flags.bandwidth is not None or flags.latency is not None or device.type == "cuda":
        bandwidth = PAIR_LINK["bandwidth"] if flags.bandwidth is None else flags.bandwidth
        latency = PAIR_LINK["latency"] if flags.latency is None else flags.latency
        return Machine(memory_bytes=memory, bandwidth=bandwidth, latency=latency)
    return Machine(memory_bytes=memory, **measure_link()._asdict())


def _sizes(config: RunConfig, chain: Chain, num_stages: int) -> Sequence[int] | None:
    """Return the cut that the user asks for; None: the best one."""
    balance = config.partition.balance
    if balance == "even":
        return None  # the default of training; here the question is which cut is best
    if isinstance(balance, list) and num_stages == config.partition.num_stages:
        return checked_sizes(chain, num_stages, balance)
    return None


def _draw(path: Path, profile: Profile, choice: Prediction | None, config: RunConfig) -> None:
    units = profile.costs(1)
    sizes = choice.balance.sizes if choice is not None else []
    draw_costs(
        path,
        names=[unit.name for unit in units],
        forward=[unit.forward for unit in units],
        backward=[unit.backward for unit in units],
        activation_bytes=[unit.activation_bytes for unit in units],
        crossing_bytes=[unit.act_bytes for unit in units],
        cuts=[sum(sizes[: k + 1]) - 1 for k in range(len(sizes) - 1)],
        title=f"{config.model['_target_']}, micro-batches of {profile.of['micro_batch_size']}, {profile.of['device']}",
    )


def _devices(config: RunConfig) -> int:
    return torch.cuda.device_count() if config.runtime.device is Device.cuda else num_cores()


def _num_neighbours(config: RunConfig, num_devices: int, most_stages: int, threads: int) -> int:
    """Return how many other processes share caches and memory with each one: K - 1 on the CPUs of this machine."""
    if config.runtime.device is Device.cuda or num_devices > num_cores():
        return 0
    return max(0, min(most_stages, num_cores() // threads) - 1)


def _stages(text: str | None, config: RunConfig, num_devices: int) -> list[int]:
    if text is None:
        powers = [2**i for i in range(1, 8) if 2**i <= num_devices]
        return sorted({*powers, config.partition.num_stages} - {1}) or [2]
    stages = list(dict.fromkeys(_numbers("--stages", text)))
    if min(stages) < 2:
        raise ConfigError(f"--stages {text}: expected numbers of at least 2; one device is in every table already")
    return stages


def _speeds(config: RunConfig, num_stages: int) -> list[float] | None:
    speeds = config.partition.speeds
    if speeds is not None and len(speeds) != num_stages:
        raise ConfigError(f"partition.speeds={speeds} has {len(speeds)} numbers")
    return speeds


def _numbers(flag: str, text: str) -> list[int]:
    try:
        numbers = [int(word) for word in text.split(",")]
    except ValueError:
        raise ConfigError(f"{flag} {text}: expected whole numbers, separated by commas") from None
    if min(numbers) < 1:
        raise ConfigError(f"{flag} {text}: expected numbers of at least 1")
    return numbers


def _bytes(text: str) -> int:
    for unit, factor in BYTES.items():
        if text.endswith(unit):
            try:
                return int(float(text.removesuffix(unit)) * factor)
            except (ValueError, OverflowError):
                break
    raise ConfigError(f"--memory {text}: expected a number and a unit, like 80GiB (units: {', '.join(BYTES)})")


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
