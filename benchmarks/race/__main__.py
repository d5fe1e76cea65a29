"""``python -m benchmarks.race``: measure the time to a target over shaped links, next to DDP, DiLoCo and torch."""

import argparse
import json
import math
import shlex
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adl_dist.checkpoint.run_dir import make_folder
from adl_dist.cli.bench.command import circumstances
from adl_dist.cli.bench.entries import ModelSurvey, check_fair
from adl_dist.cli.bench.runner import BenchConfig
from adl_dist.cli.config import instantiate
from adl_dist.cli.config.compose import Parser, compose_run, parse
from adl_dist.cli.config.schema import RunConfig
from adl_dist.cli.main import exit_code_of
from adl_dist.distributed.affinity import cores_here, num_cores
from adl_dist.distributed.world import launched_world_size
from adl_dist.errors import ConfigError, Exit
from adl_dist.report import say
from adl_dist.report.files import write_atomically
from adl_dist.report.runs import read_json
from benchmarks.race.contenders import NAMES, TORCHS_PIPELINES, Contender, contenders
from benchmarks.race.cut_and_delays import settled_cut, settled_delays
from benchmarks.race.devices import Device, devices
from benchmarks.race.link import Link, read_link
from benchmarks.race.namespaces import CONGESTION_CONTROL, why_not
from benchmarks.race.report import Row, draw, report, rows
from benchmarks.race.seconds import SECONDS, Measuring, Timings, key_of, measure
from benchmarks.race.updates import RaceConfig, Target, UpdatesToTarget, find_updates, read_target

FACTS, TABLE, FIGURE, UPDATES, LOGS = "race.json", "race.md", "race.svg", "updates", "logs"
DEFAULT_LINKS = ("100mbit", "1gbit")
FACTORS = (0.5, 1.0, 2.0)  # on the configured rate, if no others are given
LONGEST_RUN = 7200.0  # seconds that a measured run may take, at most


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The settings of a race."""

    flags: argparse.Namespace
    config: RunConfig
    words: Sequence[str]  # the user's settings
    links: Sequence[Link]
    target: Target
    rates: Sequence[float]
    seeds: Sequence[int]
    out: Path
    on: Sequence[Device]
    command: str

    @property
    def large_M(self) -> int:
        """M of torch's pipelines."""
        return int(self.flags.torch_micro_batches or 4 * self.config.partition.num_stages)


def race(argv: list[str]) -> None:
    """Read the flags; find updates and seconds, as far as they are not known yet; write and print the table."""
    setting = _setting(_flags(argv), shlex.join(["python", "-m", "benchmarks.race", *argv]))
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # no run may outlive this process
    make_folder(setting.out)
    _claim(setting)
    stages, M = setting.config.partition.num_stages, setting.config.method.micro_batches_per_update
    names = setting.flags.contenders.split(",")
    found_of = {"num_stages": stages, "M": M, "large_M": setting.large_M}
    able, left_out = contenders(names, setting.words, **found_of)
    if not able:
        raise ConfigError(f"no contender is left: {'; '.join(f'{name}: {why}' for name, why in left_out.items())}")
    cut, survey = settled_cut(setting.out, setting.words, able, setting.links, setting.on[0])
    words = [*setting.words, *cut]
    config, _ = compose_run(words)
    config.runtime.threads = setting.on[0].threads
    racing, predicted = settled_delays(setting.out, config, able, setting.links, setting.on[0])
    measures = setting.flags.only != "updates"
    timings, found, code = Timings(setting.out / SECONDS), dict[str, UpdatesToTarget](), 0
    try:
        if setting.flags.only != "seconds":
            found = _updates(setting, words, racing)
        if measures:
            _seconds(setting, config, survey, words, racing, timings)
    except KeyboardInterrupt:
        sys.stderr.write("\nadl-dist: interrupted; the same command continues\n")
        code = 130
    if setting.flags.only == "seconds":  # found by earlier calls
        found = _updates(setting, words, racing, start=False)
    table = rows(setting.links, racing, found, timings, survey, predicted)
    _write(setting, table, racing, timings, left_out, words)
    raise Exit(code or (1 if _unfinished(setting, table) else 0))


def _updates(
    setting: Setting, words: Sequence[str], racing: dict[str, list[Contender]], *, start: bool = True
) -> dict[str, UpdatesToTarget]:
    values = {c.values.name: c.values for over in racing.values() for c in over}
    how = RaceConfig(
        words=words,
        only_values=setting.flags.values or [],
        folder=setting.out / UPDATES,
        rates=setting.rates,
        seeds=setting.seeds,
        target=setting.target,
        side_by_side=setting.flags.jobs,
        command=setting.command,
    )
    return find_updates(list(values.values()), how, start=start)


def _seconds(
    setting: Setting,
    config: RunConfig,
    survey: ModelSurvey,
    words: Sequence[str],
    racing: dict[str, list[Contender]],
    timings: Timings,
) -> None:
    if (reason := why_not()) is not None:
        raise ConfigError(f"seconds per update are measured in network namespaces, but {reason}; try --only updates")
    bench = BenchConfig(
        config=config,
        overrides=words,
        survey=survey,
        log_folder=setting.out / LOGS,
        timeout_seconds=LONGEST_RUN,
        pinned=False,  # each rank is placed on its device from outside
    )
    how = Measuring(seconds=setting.flags.seconds, repetitions=setting.flags.repetitions)
    for link in setting.links:
        measure(racing[link.name], link, bench, setting.on, how, timings)


def _write(
    setting: Setting,
    table: list[Row],
    racing: dict[str, list[Contender]],
    timings: Timings,
    left_out: dict[str, str],
    words: Sequence[str],
) -> None:
    keys = {key_of(c, link): f"{c.name} over {link.name}" for link in setting.links for c in racing[link.name]}
    failures = {keys[key]: why for key, why in timings.failures(list(keys)).items()}
    facts = {
        "command": setting.command,
        "settings": list(words),
        "target": vars(setting.target),
        "seeds": setting.seeds,
        "rates": setting.rates,
        "devices": [vars(device) for device in setting.on],
        "links": {link.name: {**vars(link), "measured": timings.links.get(link.name)} for link in setting.links},
        "congestion_control": CONGESTION_CONTROL,
        **circumstances(has_gpus=False),
        "left_out": left_out,
        "failed": failures,
        "table": table,
    }
    with write_atomically(setting.out / FACTS) as unfinished:
        unfinished.write_text(json.dumps(facts, indent=1, default=str) + "\n")
    model, K = setting.config.model["_target_"].rpartition(".")[2], setting.config.partition.num_stages
    text = "\n\n".join([report(table, setting.links, str(setting.target), len(setting.seeds)), *_notes(setting, facts)])
    with write_atomically(setting.out / TABLE) as unfinished:
        unfinished.write_text(text + "\n")
    drawn = draw(setting.out / FIGURE, table, setting.links, title=f"{model}, K = {K}, {setting.target}")
    written = [FACTS, TABLE, *([FIGURE] if drawn else [])]
    say(f"\n{text}\n\nwritten: {', '.join(str(setting.out / name) for name in written)}")


def _notes(setting: Setting, facts: dict[str, Any]) -> list[str]:
    device, machine, versions = setting.on[0], facts["machine"], facts["versions"]
    share = f"{len(device.cores)} cores" if device.share == 1 else f"{device.share:.2g} of the time of a core"
    links = [
        f"{name}: {known['measured']['bits_per_second'] / 1e6:,.0f} Mbit/s, "
        f"{known['measured']['round_trip_seconds'] * 1e3:.1f} ms"
        for name, known in facts["links"].items()
        if known["measured"]
    ]
    off = [
        name
        for name, known in facts["links"].items()
        if known["measured"] and not read_link(name).is_met_by(Link(**known["measured"]))
    ]
    return [
        *([f"**Not as asked for: {', '.join(off)}**: the machine was busy, or is too slow for it."] if off else []),
        *([f"A plain socket gets over each link: {'; '.join(links)} ({CONGESTION_CONTROL})."] if links else []),
        *(
            ["Left out: " + "; ".join(f"{n}: {why}" for n, why in facts["left_out"].items())]
            if facts["left_out"]
            else []
        ),
        *(["Failed: " + "; ".join(f"{n}: {why}" for n, why in facts["failed"].items())] if facts["failed"] else []),
        f"Each of the {len(setting.on)} devices, and the one device alone: {share} of this machine: "
        f"{machine['processor']}, {machine['cores']} cores, {machine['system']}. Seeds "
        f"{', '.join(map(str, setting.seeds))}; rates {', '.join(f'{rate:g}' for rate in setting.rates)}. "
        f"Python {versions['python']}, torch {versions['torch']}, adl_dist {versions['adl_dist']}.",
        f"Command: `{setting.command}`",
    ]


def _unfinished(setting: Setting, table: Sequence[Row]) -> bool:
    cells = [cell for row in table for cell in row["links"].values()]
    needed = {"updates": ("rate",), "seconds": ("seconds_per_update",), None: ("rate", "seconds_per_update")}
    if any(cell.get(name) is None for cell in cells for name in needed[setting.flags.only]):
        return True
    return setting.flags.only != "seconds" and any(len(cell["updates"]) < len(setting.seeds) for cell in cells)


def _claim(setting: Setting) -> None:
    """Refuse a folder that holds a race with different settings."""
    asked = {"settings": sorted(setting.words), "large_M": setting.large_M, "values": setting.flags.values or []}
    path = setting.out / "settings.json"
    known = read_json(path)
    differing = [name for name in asked if known and known.get(name) != json.loads(json.dumps(asked[name]))]
    if differing:
        raise ConfigError(
            f"--out {setting.out} holds a race with other {differing[0]}: {known.get(differing[0])}, now "
            f"{asked[differing[0]]}; choose another folder"
        )
    with write_atomically(path) as unfinished:
        unfinished.write_text(json.dumps(asked, indent=1) + "\n")


def _setting(flags: argparse.Namespace, command: str) -> Setting:
    if launched_world_size() is not None:
        raise ConfigError("a race starts its own processes; start it without torchrun")
    for name in ("seeds", "repetitions", "seconds", "jobs", "torch_micro_batches"):
        number = getattr(flags, name)
        if number is not None and not 0 < number < math.inf:
            raise ConfigError(f"--{name.replace('_', '-')} {number} must be above 0")
    words = [*flags.overrides]
    for word in words:
        key = parse(word).key_or_group
        if key == "method" or (key.startswith("method.") and key != "method.accumulation_steps"):
            raise ConfigError(f"{word}: each contender has a method of its own; only M is yours to choose")
        if key in ("seed", "run_dir", "runtime.device", "resume"):
            raise ConfigError(f"{word}: a race sets it itself; see --seeds, --out and --values")
    config, _ = compose_run([*words, "hydra.mode=RUN"])
    instantiate.check_targets(config)
    check_fair(config, command="python -m benchmarks.race")
    if config.train.max_updates is not None:
        raise ConfigError(
            f"train.max_updates={config.train.max_updates}: replicas train whole epochs; give train.max_updates=null "
            "and train.epochs, a length that all contenders have"
        )
    if config.partition.num_stages < 2:
        raise ConfigError(f"partition.num_stages={config.partition.num_stages}: a race needs at least 2 processes")
    if config.runtime.device == "cuda":
        raise ConfigError("a race measures on CPUs; --values runtime.device=cuda finds the updates on a GPU")
    _check_sizes(config, flags)
    if not isinstance(rate := config.optimizer.get("lr"), int | float):
        raise ConfigError(f"optimizer.lr={rate}: a race tunes the rate of every contender, and this optimizer has none")
    rates = [factor * float(rate) for factor in FACTORS]
    if flags.rates:
        try:
            rates = [float(text) for text in flags.rates.split(",")]
        except ValueError:
            raise ConfigError(f"--rates {flags.rates}: write numbers, like 0.05,0.1,0.2") from None
        if not all(0 < rate < math.inf for rate in rates):
            raise ConfigError(f"--rates {flags.rates}: each must be above 0")
    return Setting(
        flags=flags,
        config=config,
        words=words,
        links=list({link.name: link for link in map(read_link, flags.links or DEFAULT_LINKS)}.values()),
        target=read_target(flags.target),
        rates=list(dict.fromkeys(rates)),
        seeds=list(range(flags.seeds)),
        out=flags.out,
        on=devices(config.partition.num_stages, cores_here() or list(range(num_cores()))),
        command=command,
    )


def _check_sizes(config: RunConfig, flags: argparse.Namespace) -> None:
    """Refuse a batch of which some contenders would train on a part only."""
    M, K, batch = config.pipeline.micro_batches_per_update, config.partition.num_stages, config.train.batch_size
    parts = {"method.accumulation_steps": M}
    if any(name in TORCHS_PIPELINES for name in flags.contenders.split(",")):
        parts["--torch-micro-batches"] = flags.torch_micro_batches or 4 * K
    for key, number in parts.items():
        if batch % number:
            raise ConfigError(
                f"train.batch_size={batch} is no multiple of {key}={number}, so that some contenders would leave "
                "samples out of each update; choose another batch size"
            )


def _flags(argv: list[str]) -> argparse.Namespace:
    parser = Parser(
        prog="python -m benchmarks.race",
        description="Time to a target over slow links: updates to the target, times the seconds of an update with "
        "every rank in a network namespace of its own behind a shaped link. Needs Linux and root. What is known "
        "already is not done again: the same command continues.",
        epilog="example: python -m benchmarks.race data=digits train.epochs=8 --target accuracy=0.95 --out runs/race "
        "--link 100mbit --link 100mbit,20ms --contenders ddp,diloco-50,torch-1f1b,adl",
        overrides="as for adl-dist train: model, data, K, M, batch, epochs, cut",
    )
    add = parser.add_argument
    add("--target", required=True, metavar="METRIC=VALUE", help="of the validation, like accuracy=0.9 or loss=1.5")
    add("--out", required=True, type=Path, metavar="FOLDER", help="for race.md, race.json, race.svg and all runs")
    link = "of each rank, in both directions: rate, and round trip, like 100mbit,20ms; may be repeated; default: "
    add("--link", action="append", dest="links", metavar="RATE[,ROUND_TRIP]", help=link + ", ".join(DEFAULT_LINKS))
    add("--contenders", default=",".join(NAMES), metavar="NAME,NAME", help=f"among {', '.join(NAMES)}; default: all")
    add("--seeds", type=int, default=3, metavar="N", help="runs of each contender to the target; default: 3")
    add("--rates", metavar="R,R", help="that the first seed tries; default: half, once and twice optimizer.lr")
    add("--torch-micro-batches", type=int, metavar="M", help="of torch's pipelines; default: 4 K")
    add("--repetitions", type=int, default=3, metavar="N", help="measured runs over each link; default: 3")
    add("--seconds", type=float, default=20.0, metavar="S", help="training time of a measured run, about; default: 20")
    add("--values", action="append", metavar="KEY=VALUE", help="only for the runs to the target: runtime.device=cuda")
    add(
        "--jobs", type=int, metavar="N", help="runs to the target side by side; default: as many as there are cores for"
    )
    add("--only", choices=("updates", "seconds"), help="only one of the two, for example on another machine")
    return parser.parse_intermixed_args(argv)


if __name__ == "__main__":
    sys.exit(exit_code_of(lambda: race(sys.argv[1:])))
