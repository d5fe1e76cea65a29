"""``adl-dist schedule``: who does what when, as a table, as JSON or as a picture, and what it would take."""

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from adl_dist.cli.arguments import Parser
from adl_dist.cli.config.compose import compose_run
from adl_dist.errors import ConfigError
from adl_dist.schedule import Costs, Pipeline, actions_of_all, describe, figures, method, simulate, speed
from adl_dist.schedule.capped import Prefer, simulate_dataflow, simulate_synchronous
from adl_dist.schedule.table import tick_words
from adl_dist.schedule.timing import Speed, at_full_speed, makespan, stragglers

EXAMPLE = "--costs '{forward: 1, backward: 2, update: 0.1, link: 0.2}'"
COST_KEYS = ("forward", "backward", "update", "link")
LONGEST = 100_000  # micro-batches; a table of more is a slip of the keyboard

# Table 3 of the ADL paper: measured speed-ups of RN-101 on ImageNet, V100, M = 4, for K = 2, 3, 4.
MEASURED: dict[str, tuple[float | None, ...]] = {
    "bp": (1, 1, 1),
    "ddg": (1.32, 1.57, 1.68),
    "fr": (1.19, 1.29, 1.45),
    "dgl": (1.82, 2.61, 3.39),
    "dsp": (None, None, 2.70),
    "gpipe": (1.41, 1.87, 2.23),
    "adl": (1.92, 2.69, 3.32),
}
HOPS = (0, 0.1, 0.25, 0.5, 1)
PAPER_K, PAPER_N = 4, 600
DELAYS = {"K-k": [3, 2, 1, 0], "K-k+1": [4, 3, 2, 0], "2(K-k)": [6, 4, 2, 0], "4(K-k)": [12, 8, 4, 0]}


def schedule(words: list[str]) -> None:
    """Read the flags and do as they say."""
    flags = _flags(words)
    if flags.paper:
        if flags.overrides or flags.costs or flags.json or flags.out or flags.micro_batches is not None:
            raise ConfigError(
                "adl-dist schedule --paper prints fixed tables and takes nothing else; leave the rest away"
            )
        _say(paper())
        return
    config, _ = compose_run(flags.overrides)
    pipeline = config.pipeline
    num = flags.micro_batches
    if num is None:  # enough to show warm-up, one steady group and the drain
        num = 2 * pipeline.num_stages + 2 * pipeline.micro_batches_per_update
    elif not 1 <= num <= LONGEST:
        raise ConfigError(f"--micro-batches {num} must be from 1 to {LONGEST}; for example --micro-batches 12")
    costs = None if flags.costs is None else read_costs(flags.costs, num_stages=pipeline.num_stages)
    predicted = None if costs is None else speed(pipeline.method, costs)
    if flags.out is not None:
        from adl_dist.report import draw

        draw(pipeline, flags.out, num_micro_batches=num, costs=costs)
    if flags.json:
        _say(json.dumps(_facts(pipeline, num, costs, predicted)))
        return
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    _say(describe(pipeline, num_micro_batches=num, width=width))
    if predicted is not None:
        _say(_speed_lines(predicted))
    if flags.out is not None:
        _say(f"\npicture  {flags.out}")


def _flags(words: list[str]) -> argparse.Namespace:
    parser = Parser(
        prog="adl-dist schedule",
        description="Print who does what when, how stale it is, and what each stage holds.",
        epilog=f"example: adl-dist schedule method=fr partition.num_stages=3 {EXAMPLE} --out fr.svg",
        allow_abbrev=False,
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="KEY=VALUE",
        help="as of adl-dist train, like method=fr partition.num_stages=3 method.accumulation_steps=2",
    )
    parser.add_argument("--micro-batches", type=int, metavar="N", help="length of the segment; default: 2K + 2M")
    parser.add_argument(
        "--costs",
        metavar="SPEC",
        help="times of each stage (a number: of all), as YAML or the path of a YAML file; adds the predicted speed",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="draw it: FILE.svg, FILE.png or FILE.pdf")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    parser.add_argument("--paper", action="store_true", help="print the ADL paper's speed-ups beside our model's")
    return parser.parse_intermixed_args(words)


def read_costs(spec: str, *, num_stages: int) -> Costs:
    """Costs from the words of a command line.

    Args:
        spec: a YAML mapping, or the path of a file that holds one.
        num_stages: K; a number stands for all stages, or all links.

    Raises:
        ConfigError: anything but that.
    """
    text, source = spec, "--costs"
    if not spec.lstrip().startswith("{"):
        source = f"--costs {spec}"
        try:
            text = Path(spec).read_text()
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or "it is no text"
            raise ConfigError(f"{source} is neither a YAML mapping nor a file ({reason}); write {EXAMPLE}") from error
    try:
        node = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{source} is not YAML: {error}; write {EXAMPLE}") from error
    if not isinstance(node, dict):
        raise ConfigError(f"{source} holds {node!r}; expected a mapping: {EXAMPLE}")
    if unknown := [key for key in node if key not in COST_KEYS]:
        hint = " (YAML wants a space after a colon)" if ":" in str(unknown[0]) else ""
        known = ", ".join(COST_KEYS)
        raise ConfigError(f"{source}: there is no '{unknown[0]}'{hint}; expected {known}, as in {EXAMPLE}")
    if missing := [key for key in ("forward", "backward") if key not in node]:
        raise ConfigError(f"{source} lacks {missing[0]}; expected at least forward and backward, as in {EXAMPLE}")
    lists = {}
    for key, value in node.items():
        expected = num_stages - (key == "link")
        given = value if isinstance(value, list) else [value]
        lists[key] = given if isinstance(value, list) else given * expected
        if len(lists[key]) != expected:
            what = f"{expected} links between stages" if key == "link" else f"{expected} stages (partition.num_stages)"
            raise ConfigError(f"{source}: {key}={value} has {len(lists[key])} numbers, but there are {what}")
        if not all(type(v) in (int, float) and 0 <= v < float("inf") for v in given):
            raise ConfigError(f"{source}: {key}={value!r} must be a number of at least 0, or a list of such")
    return Costs(**lists)


def _facts(pipeline: Pipeline, num: int, costs: Costs | None, predicted: Speed | None) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "method": {**pipeline.method.settings, "summary": pipeline.spec.summary},
        "num_stages": pipeline.num_stages,
        "accumulation_steps": pipeline.micro_batches_per_update,
        "num_micro_batches": num,
        "stages": [asdict(f) for f in figures(pipeline)],
        "ticks": tick_words(pipeline, num_micro_batches=num),
    }
    if costs is not None and predicted is not None:
        facts |= {"costs": asdict(costs), "speed": asdict(predicted)}
    return facts


def _speed_lines(predicted: Speed) -> str:
    busy = "  ".join(f"stage {k} {share:.1%}" for k, share in enumerate(predicted.busy))
    return (
        "\nwith these costs, once the pipeline is full\n"
        f"time per update  {predicted.time_per_update:.6g}\n"
        f"bubble           {predicted.bubble:.1%}\n"
        f"speed-up         {predicted.speed_up:.3g} over backpropagation\n"
        f"busy             {busy}"
    )


def paper() -> str:
    """What the ADL paper measured beside what the model says, and what delays and caps are good for."""
    models = [(name, method(name)) for name in ("bp", "ddg", "fr", "dgl", "dsp", "gpipe")]
    models += [("gpipe", method("gpipe", recompute=r)) for r in ("except_last", "always")]
    models += [(name, method(name)) for name in ("adl", "fdg", "1f1b", "pipedream", "2bw", "paci")]
    lines = [
        "Speed-up over backpropagation for K = 2, 3, 4 stages. Measured: Table 3 of the ADL paper (RN-101, ImageNet,",
        "M = 4). Model: the action lists of adl_dist with equal stages, backward = 2 forward, free links.",
        "",
        "method               measured          model",
    ]
    shown = set()
    for name, chosen in models:
        row = chosen.name + (f" ({chosen.recompute})" if chosen.recompute != "never" else "")
        found = MEASURED.get(name, (None,) * 3) if name not in shown else (None,) * 3
        shown.add(name)
        told = [speed(chosen, Costs.balanced(K)).speed_up for K in (2, 3, 4)]
        lines.append(f"{row:<21}{_row(found)}  {_row(told)}")
    lines += [
        "",
        f"Time per micro-batch (1: all stages busy) if a message takes c, in units of F + B. K = {PAPER_K}, k = 1..K,",
        f"{PAPER_N} micro-batches, stage K has delay 0. List: our processes, in the order of the tick table. Cap: a",
        "stage does what is ready, with up to delay + 1 in flight.",
        "",
        "delay         " + "".join(f"c = {c:<8}" for c in HOPS),
    ]
    for name, delays in DELAYS.items():
        for how, take in (("list", _listed), ("cap", _capped)):
            told = [take(delays, link=3 * c) for c in HOPS]
            lines.append(f"{name:<8}{how:<6}" + "".join(f"{time:<12.3f}" for time in told))
    lines += [
        "",
        "The same with free links if one action of four, at random, takes twice as long (mean work 1.25). Cap BF takes",
        "the backward if it could do either, cap FB the forward. Stages that meet after each slot, as in the authors'",
        f"code: {_met():.2f}.",
        "",
        "delay         list    cap BF  cap FB",
    ]
    for name, delays in DELAYS.items():
        told = [
            _listed(delays, seed=0),
            _capped(delays, seed=0, prefer="backward"),
            _capped(delays, seed=0, prefer="forward"),
        ]
        lines.append(f"{name:<14}" + "".join(f"{time:<8.2f}" for time in told))
    return "\n".join(line.rstrip() for line in lines)


def _row(numbers: Sequence[float | None]) -> str:
    return "  ".join(f"{'-' if n is None else f'{n:.2f}':<4}" for n in numbers)


def _listed(delays: Sequence[int], *, link: float = 0.0, seed: int | None = None) -> float:
    """Time per micro-batch of our processes, in units of one stage's work on it."""
    chosen = method("adl", accumulation_steps=1, delay=list(delays))
    lists = actions_of_all(Pipeline(chosen, len(delays)), num_micro_batches=PAPER_N)
    slowdown = at_full_speed if seed is None else stragglers(seed)
    return makespan(simulate(lists, Costs.balanced(len(delays), link=link), slowdown=slowdown)) / PAPER_N / 3


def _capped(delays: Sequence[int], *, link: float = 0.0, seed: int | None = None, prefer: Prefer = "backward") -> float:
    """The same of stages that do what is ready."""
    costs, slowdown = Costs.balanced(len(delays), link=link), at_full_speed if seed is None else stragglers(seed)
    caps = [d + 1 for d in delays]
    return (
        makespan(simulate_dataflow(costs, caps, num_micro_batches=PAPER_N, prefer=prefer, slowdown=slowdown))
        / PAPER_N
        / 3
    )


def _met() -> float:
    """The same of stages that wait for each other after each micro-batch."""
    return (
        simulate_synchronous(Costs.balanced(PAPER_K), num_micro_batches=PAPER_N, slowdown=stragglers(0)) / PAPER_N / 3
    )


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
