"""``adl-dist schedule``: print or draw a schedule, and predict its time."""

import argparse
import json
import math
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from adl_dist.cli.config.compose import Parser, compose_run, number
from adl_dist.errors import ConfigError
from adl_dist.schedule import Costs, describe, figures, speed
from adl_dist.schedule.table import tick_words

EXAMPLE = "--costs '{forward: 1, backward: 2, update: 0.1, link: 0.2}'"
COST_KEYS = ("forward", "backward", "backward_weight", "update", "link")
LONGEST = 100_000  # micro-batches; a longer table is a slip of the keyboard


def schedule(arguments: list[str]) -> None:
    """Run ``adl-dist schedule``."""
    flags = _flags(arguments)
    config, _ = compose_run(flags.overrides)
    pipeline = config.pipeline
    if pipeline.method.awaits_delays:
        raise ConfigError(
            "method.delay=auto follows from measured stages; give a list, as adl-dist plan prints it, or a rule that "
            "needs no measurement: decoupled, minimal, third"
        )
    num = flags.micro_batches
    if num is None:  # enough to show warm-up, one steady group and the drain
        num = 2 * pipeline.num_stages + 2 * pipeline.micro_batches_per_update
    costs = None if flags.costs is None else read_costs(flags.costs, num_stages=pipeline.num_stages)
    predicted = None if costs is None else speed(pipeline.method, costs)
    if flags.out is not None:
        from adl_dist.report.picture import draw

        draw(pipeline, flags.out, num_micro_batches=num, costs=costs)
    if flags.json:
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
        text = json.dumps(facts)
    else:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        lines = [describe(pipeline, num_micro_batches=num, width=width)]
        if predicted is not None:
            lines += [
                "\nwith these costs, once the pipeline is full",
                f"time per update  {predicted.time_per_update:.6g}",
                f"bubble           {predicted.bubble:.1%}",
                f"speed-up         {predicted.speed_up:.3g} over backpropagation",
                "busy             " + "  ".join(f"stage {k} {share:.1%}" for k, share in enumerate(predicted.busy)),
            ]
        if flags.out is not None:
            lines.append(f"\npicture  {flags.out}")
        text = "\n".join(lines)
    sys.stdout.write(text + "\n")


def _flags(arguments: list[str]) -> argparse.Namespace:
    parser = Parser(
        prog="adl-dist schedule",
        description="Print what each stage does when, how stale it is, and what it holds.",
        epilog=f"example: adl-dist schedule method=fr partition.num_stages=3 {EXAMPLE} --out fr.svg",
        overrides="as for adl-dist train, like method=fr partition.num_stages=3 method.accumulation_steps=2",
    )
    add = parser.add_argument
    spec = "times of each stage (one number: the same for all), as YAML or a YAML file; adds the predicted speed"
    add("--micro-batches", type=number(int, 1, LONGEST), metavar="N", help="length of the segment; default: 2K + 2M")
    add("--costs", metavar="SPEC", help=spec)
    add("--out", type=Path, metavar="FILE", help="draw it: FILE.svg")
    add("--json", action="store_true", help="print one JSON object instead of the table")
    return parser.parse_intermixed_args(arguments)


def read_costs(spec: str, *, num_stages: int) -> Costs:
    """Return the costs in a YAML mapping, or in the YAML file ``spec``.

    A single number stands for all stages or links.
    """
    try:
        node = yaml.safe_load(spec if spec.lstrip().startswith("{") else Path(spec).read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(
            f"--costs {spec} is neither a YAML mapping nor a file of one: {error}; write {EXAMPLE}"
        ) from error
    if not isinstance(node, dict) or not {"forward", "backward"} <= node.keys() <= {*COST_KEYS}:
        raise ConfigError(
            f"--costs {spec}: expected forward and backward among {', '.join(COST_KEYS)}, as in {EXAMPLE}"
        )
    lists: dict[str, Any] = {}
    for key, value in node.items():
        expected = num_stages - (key == "link")
        lists[key] = value if isinstance(value, list) else [value] * expected
        if len(lists[key]) != expected or not all(type(v) in (int, float) and 0 <= v < math.inf for v in lists[key]):
            places = "links between stages" if key == "link" else "stages (partition.num_stages)"
            raise ConfigError(
                f"--costs: {key}={value!r}: expected a number of at least 0, or a list of them for {expected} {places}"
            )
    return Costs(**lists)
