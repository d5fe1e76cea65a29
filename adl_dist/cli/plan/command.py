"""``adl-dist plan``: measure the model, cut it, predict what each method would do with it, and recommend one."""

import argparse
import contextlib
import itertools
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from adl_dist.cli.config import instantiate
from adl_dist.cli.config.compose import Parser, compose_run, method_named, method_words
from adl_dist.cli.config.schema import Device, RunConfig
from adl_dist.cli.plan.link import GPU_LINK, link_figures
from adl_dist.cli.plan.profiler import Profiler
from adl_dist.distributed.affinity import default_threads, num_cores
from adl_dist.distributed.device import check_device
from adl_dist.errors import ConfigError, DataError, PartitionError
from adl_dist.partition import Machine, UnitCost, checked_sizes
from adl_dist.partition.chain import Chain
from adl_dist.partition.costs import Profile
from adl_dist.partition.predict import Alternative, Prediction, advise, alternative, predict
from adl_dist.report.files import check_out
from adl_dist.report.tables import text_table
from adl_dist.schedule import Method, Pipeline
from adl_dist.schedule.run_plan import micro_batch_size_of
from adl_dist.training.partitioned_model import device_memory

BYTES = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
DEFAULT_METHODS = "bp,gpipe,1f1b,ddg,fr,fdg,adl"
METHOD_HEAD = (
    *("method", "K", "M", "images/s", "speed-up", "bubble", "staleness mean", "factor"),
    *("memory per stage (MB)", "units per stage"),
)
UNIT_HEAD = ("unit", "forward ms", "backward ms", "parameters kB", "activations kB", "crosses kB")


def plan(words: list[str]) -> None:
    """Run the command with these command-line words."""
    flags = _flags(words)
    config, _ = compose_run(flags.overrides)
    instantiate.check_targets(config)
    check_device(config.runtime.device.value)
    _check(flags)
    chosen, batch = config.method.chosen(), config.train.batch_size
    methods = [method_named(name, config, flag="--methods") for name in dict.fromkeys(flags.methods.split(","))]
    steps = {method.micro_batches_per_update for method in (*methods, chosen)}
    sizes = {M: micro_batch_size_of(batch, M) for M in sorted(steps)}  # refuses too small a batch
    is_gpu = config.runtime.device is Device.cuda
    num_devices = flags.devices or (torch.cuda.device_count() if is_gpu else num_cores())
    powers = [2**i for i in range(1, 8) if 2**i <= num_devices]
    stages = list(dict.fromkeys(flags.stages or sorted({*powers, config.partition.num_stages} - {1}) or [2]))
    granularity = config.partition.granularity.value if config.partition.granularity else "layer"
    machine = _machine(flags, config)
    how: dict[str, Any] = {"granularity": granularity}
    how["threads"] = config.runtime.threads or default_threads(max(stages))
    try:
        profiler = Profiler(config, **how, shape=flags.input, kept_in=flags.profile, quiet=flags.json)
    except DataError as error:
        raise DataError(f"{error}; or describe a sample: --input 3,224,224") from error
    num_others = flags.neighbours
    if num_others is None:
        num_others = profiler.num_others(max(stages)) if num_devices <= num_cores() else 0
    with profiler.with_load(num_others, sizes[chosen.micro_batches_per_update]):
        profiles = {M: profiler.profile(size) for M, size in sizes.items()}
        whole = profiler.pace(batch)
        with profiler.under_load():
            share = profiler.pace(max(1, batch // num_devices))
    profile = profiles[chosen.micro_batches_per_update]
    other = alternative(profile, machine, num_devices=num_devices, whole=whole, share=share)
    predictions, refused = _predict_all(methods, stages, config, profiler.chain, profiles, machine)
    choice, reason = advise(predictions, other)
    line = None if choice is None else line_to_paste(choice, granularity, flags.overrides)
    if flags.out is not None:
        from adl_dist.cli.plan.figure import draw_costs  # imported late: matplotlib takes a second

        per_stage = [] if choice is None else choice.balance.sizes
        draw_costs(flags.out, profile, sizes=per_stage, model=config.model["_target_"])
    if flags.json:
        facts = {
            "profile": asdict(profile),
            "machine": asdict(machine),
            "predictions": list(map(facts_of, predictions)),
            "refused": refused,
            "alternative": asdict(other),
            "recommended": line,
            "reason": reason,
        }
        sys.stdout.write(f"{json.dumps(facts)}\n")
        return
    lines = [*report(profile, machine, predictions, refused, other, with_units=flags.units), ""]
    lines += [f"recommended  {reason}", *([] if line is None else [f"             {line}"])]
    lines += [] if flags.out is None else [f"picture      {flags.out}"]
    sys.stdout.write("\n".join(lines) + "\n")


def _predict_all(
    methods: Sequence[Method],
    stages: Sequence[int],
    config: RunConfig,
    chain: Chain,
    profiles: Mapping[int, Profile],
    machine: Machine,
) -> tuple[list[Prediction], list[str]]:
    """Return the predictions for all that is possible, by the profile for each M, and why the others are not."""
    balance, speeds = config.partition.balance, config.partition.speeds
    predictions, refused = [], []
    for K, method in itertools.product(stages, methods):
        sizes = None
        try:
            if speeds is not None and len(speeds) != K:
                raise ConfigError(f"partition.speeds={speeds} has {len(speeds)} numbers")
            if isinstance(balance, list) and config.partition.num_stages == K:  # else the question is which is best
                sizes = checked_sizes(chain, K, balance)
            pipeline, profile = Pipeline(method, K), profiles[method.micro_batches_per_update]
            predictions.append(predict(profile, pipeline, machine=replace(machine, speeds=speeds), sizes=sizes))
        except (PartitionError, ConfigError) as error:
            refused.append(f"{method.name}, K = {K}: {error}")
    return predictions, refused


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
    add("--methods", default=DEFAULT_METHODS, metavar="NAME,NAME", help=f"default: {DEFAULT_METHODS}")
    add("--devices", type=int, metavar="N", help="number of devices; default: the GPUs, or cores, of this machine")
    memory = "memory of each device, like 80GiB; default: the GPU's, no limit on the CPU"
    add("--memory", type=_bytes, metavar="SIZE", help=memory)
    add("--bandwidth", type=float, metavar="BYTES/S", help="of each link; default: measured on CPUs, 12e9 between GPUs")
    add("--latency", type=float, metavar="S", help="of each message; default: measured on CPUs, 1e-5 between GPUs")
    add("--input", type=partial(_numbers, 1), metavar="C,H,W", help="shape of a sample, instead of looking at the data")
    add("--profile", type=Path, metavar="FILE", help="keep the measurement in FILE, and use it the next time")
    neighbours = "also measure while N more processes compute; default: K - 1 on CPUs"
    add("--neighbours", type=int, metavar="N", help=neighbours)
    add("--units", action="store_true", help="also print each unit")
    add("--out", type=Path, metavar="FILE", help="draw the cost of each unit: FILE.svg, FILE.png or FILE.pdf")
    add("--json", action="store_true", help="print one JSON object instead of tables")
    return parser.parse_intermixed_args(words)


def _numbers(least: int, text: str) -> list[int]:
    with contextlib.suppress(ValueError):
        numbers = [int(word) for word in text.split(",")]
        if min(numbers) >= least:
            return numbers
    raise argparse.ArgumentTypeError(f"expected whole numbers of at least {least}, separated by commas, got {text}")


def _bytes(text: str) -> int:
    unit = next((unit for unit in BYTES if text.endswith(unit)), "")
    try:
        return int(float(text.removesuffix(unit)) * BYTES[unit])
    except (KeyError, ValueError, OverflowError):
        units = ", ".join(BYTES)
        raise argparse.ArgumentTypeError(f"expected a number and a unit, like 80GiB ({units}), got {text}") from None


def _check(flags: argparse.Namespace) -> None:
    """Refuse now what would otherwise be found only after measuring."""
    if flags.out is not None:
        check_out(flags.out)
    for name, least in (("devices", 1), ("neighbours", 0)):
        number = getattr(flags, name)
        if number is not None and number < least:
            raise ConfigError(f"--{name} {number} must be at least {least}")
    if flags.profile is not None and (flags.profile.is_dir() or not flags.profile.parent.is_dir()):
        raise ConfigError(f"--profile {flags.profile}: expected the name of a file in an existing folder")


def _machine(flags: argparse.Namespace, config: RunConfig) -> Machine:
    device = config.runtime.device
    given = {name: getattr(flags, name) for name in GPU_LINK if getattr(flags, name) is not None}
    link = {**GPU_LINK, **given} if given else link_figures(device)
    memory = device_memory(torch.device(device.value)) if flags.memory is None else flags.memory
    return Machine(memory_bytes=memory, **link)


def report(
    profile: Profile,
    machine: Machine,
    predictions: Sequence[Prediction],
    refused: Sequence[str],
    other: Alternative,
    *,
    with_units: bool,
) -> list[str]:
    """Return the lines about the measurement, each method's prediction, and the devices without a pipeline."""
    spec = profile.of
    lines = [
        f"{spec['units']} units ({spec['granularity']}), {spec['parameters']:,} parameters, "
        f"input {spec['input']}, micro-batches of {spec['micro_batch_size']}, {spec['dtype']}, {spec['device']}, "
        f"{spec['threads']} thread(s), torch {spec['torch']}",
        f"one micro-batch: forward {1000 * profile.forward:.1f} ms, backward {1000 * profile.backward:.1f} ms; one "
        f"update {1000 * sum(u.update for u in profile.units):.2f} ms",
        f"method.split_backward can put off {profile.share_put_off:.0%} of the backward: gradients of the weights of "
        "linear layers and convolutions",
        f"link: {machine.bandwidth / 1e9:.2f} GB/s, latency {1e6 * machine.latency:.0f} us",
    ]
    if with_units:
        lines += ["", *text_table([UNIT_HEAD, *map(_unit_row, profile.units)])]
    lines += ["", *text_table([METHOD_HEAD, *(_method_row(p, other) for p in predictions)])]
    lines += [
        "",
        f"without a pipeline: one device {other.single:,.0f} images/s, {other.bytes / 1e6:,.0f} MB"
        + ("" if other.fits else " (does not fit)")
        + f"; DDP on {other.num_devices}: {other.ddp:,.0f} images/s (estimated)",
        "speed-up: over BP of the whole batch on one device. factor: (1 + sum of mean staleness / M) / M, Theorem 1.",
    ]
    return lines + [f"not possible: {reason}" for reason in refused]


def _method_row(p: Prediction, other: Alternative) -> list[object]:
    return [
        *(p.pipeline.method.name, p.pipeline.num_stages, p.pipeline.micro_batches_per_update),
        f"{p.images_per_second:,.0f}",
        f"{p.images_per_second / other.single:.2f}",
        f"{p.bubble:.1%}",
        "/".join(f"{s:.3g}" for s in p.staleness_mean),
        f"{p.convergence_factor:.3g}",
        " ".join(f"{b / 1e6:.0f}" for b in p.balance.stage_bytes),
        " ".join(map(str, p.balance.sizes)),
    ]


def _unit_row(unit: UnitCost) -> list[str]:
    return [
        unit.name[:41],
        f"{1000 * unit.forward:.3f}",
        f"{1000 * unit.backward:.3f}",
        f"{unit.parameter_bytes / 1e3:,.0f}",
        f"{unit.activation_bytes / 1e3:,.0f}",
        f"{unit.act_bytes / 1e3:,.0f} ({unit.num_tensors})" if unit.may_cut else "no cut",
    ]


def facts_of(p: Prediction) -> dict[str, Any]:
    """Return a prediction as plain values."""
    facts = {**asdict(p), "convergence_factor": p.convergence_factor}
    del facts["pipeline"]
    return {"method": p.pipeline.method.settings, "num_stages": p.pipeline.num_stages, **facts}


def line_to_paste(choice: Prediction, granularity: str, overrides: Sequence[str]) -> str:
    """Return the command that trains as predicted."""
    words = [word for word in overrides if not word.lstrip("+~").startswith(("method", "partition"))]
    words += method_words(choice.pipeline.method)
    words += [f"partition.num_stages={choice.pipeline.num_stages}", f"partition.granularity={granularity}"]
    words += [f"partition.balance=[{','.join(map(str, choice.balance.sizes))}]"]
    return f"adl-dist train {shlex.join(words)}"
