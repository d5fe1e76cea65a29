"""``adl-dist launch slurm``: checks that the run can be started, fills in ``launch/slurm.sbatch``, and submits it."""

import argparse
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from adl_dist.checkpoint.run_dir import RunFolder
from adl_dist.cli.arguments import Parser
from adl_dist.cli.config import instantiate
from adl_dist.cli.config.compose import compose_run, config_folder, parse
from adl_dist.cli.sweep.request import STAGES, requested, values_of
from adl_dist.errors import ConfigError

TEMPLATE = "slurm.sbatch"
DIRECTIVE = "#SBATCH --"
SETTINGS = "# Here `adl-dist launch slurm` writes the settings that it was given.\n"


def launch(words: list[str]) -> None:
    """Read the flags, check the runs, and submit or print the script."""
    if not words or words[0] not in ("slurm", "-h", "--help"):
        raise ConfigError("adl-dist launch needs the kind of cluster, which is slurm: adl-dist launch slurm --nodes 2")
    flags = _flags(words[1:] if words[0] == "slurm" else words)
    nodes, per_node = _shape(flags)
    overrides = list(flags.overrides)
    if flags.gpus_per_node and not any(parse(word).key_or_group == "runtime.device" for word in overrides):
        overrides.append("runtime.device=cuda")
    choices = values_of(parse(flags.array, several=True)) if flags.array else []
    _check_runs([f"{STAGES}={nodes * per_node}", *overrides], choices)
    cpus = flags.cpus_per_process or (None if flags.gpus_per_node else 1)  # with GPUs the cluster knows how many
    options = {
        "nodes": nodes,
        "cpus-per-task": cpus and cpus * per_node,
        "gpus-per-node": flags.gpus_per_node,
        "time": flags.time,
        "partition": flags.partition,
        "account": flags.account,
        **({"array": f"0-{len(choices) - 1}", "output": "%x-%A_%a.out"} if choices else {}),
        **dict(flags.sbatch),
    }
    variables = {"PROCESSES_PER_NODE": per_node, "INTERFACE": flags.interface, "PYTHON": sys.executable}
    script = filled_in(
        template().read_text(),
        options={name: str(value) for name, value in options.items() if value is not None},
        variables={name: str(value) for name, value in variables.items() if value is not None},
        choices=choices,
        words=overrides,
    )
    if flags.dry_run:
        sys.stdout.write(script)
        return
    sys.stdout.write(f"submitted job {_submit(script)}: {per_node} stages on each of {nodes} nodes\n")


def template() -> Path:
    """``launch/slurm.sbatch``: inside the package in a wheel, beside it in a checkout."""
    inside = config_folder() / TEMPLATE
    return inside if inside.is_file() else config_folder().parent / "launch" / TEMPLATE


def filled_in(
    text: str,
    *,
    options: Mapping[str, str],
    variables: Mapping[str, str],
    choices: Sequence[str],
    words: Sequence[str],
) -> str:
    """A script that needs neither environment nor arguments.

    Args:
        text: of the template.
        options: of sbatch, by their long names, "" for one that takes no value; they replace those of the template.
        variables: that the script reads.
        choices: the word of each task of a job array; empty: it is none.
        words: of ``adl-dist train``.
    """
    lines = [line for line in text.splitlines(keepends=True) if _option_of(line) not in options]
    last = max(i for i, line in enumerate(lines) if _option_of(line))
    lines[last + 1 : last + 1] = [f"{DIRECTIVE}{_directive(*option)}\n" for option in options.items()]
    settings = [f"{name}={shlex.quote(value)}\n" for name, value in variables.items()]
    if choices:
        settings.append(f"ARRAY_CHOICES=({shlex.join(choices)})\n")
    settings.append(f"set -- {shlex.join(words)}\n")
    where = lines.index(SETTINGS)
    return "".join([*lines[:where], *settings, *lines[where + 1 :]])


def _directive(name: str, value: str) -> str:
    return f"{name}={shlex.quote(value)}" if value else name  # sbatch reads quotes as a shell does


def _option_of(line: str) -> str | None:
    return line.removeprefix(DIRECTIVE).partition("=")[0].strip() if line.startswith(DIRECTIVE) else None


def _flags(words: list[str]) -> argparse.Namespace:
    parser = Parser(
        prog="adl-dist launch slurm",
        description="Check a run and submit it to SLURM, one stage per process.",
        epilog="example: adl-dist launch slurm --nodes 2 --gpus-per-node 4 --time 12:00:00 model=resnet56 data=cifar10",
        allow_abbrev=False,
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="as of adl-dist train")
    parser.add_argument("--nodes", type=_positive, help="default: as many as the stages need")
    parser.add_argument("--processes-per-node", type=_positive, help="default: one per GPU, or K shared out evenly")
    parser.add_argument("--gpus-per-node", type=_positive, help="also sets runtime.device=cuda")
    parser.add_argument("--cpus-per-process", type=_positive, help="default: 1, with GPUs what the cluster gives")
    parser.add_argument("--time", help="limit, like 12:00:00")
    parser.add_argument("--partition")
    parser.add_argument("--account")
    parser.add_argument("--interface", help="of the network between the nodes, like ib0; default: that of the route")
    parser.add_argument("--array", metavar="KEY=A,B", help="one run for each value, as a job array: seed=0,1,2,3")
    parser.add_argument(
        "--sbatch",
        action="append",
        default=[],
        type=_option,
        metavar="OPTION[=VALUE]",
        help="any other, like qos=high or exclusive",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the script instead of submitting it")
    return parser.parse_intermixed_args(words)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is no whole number above 0")
    return int(text)


def _option(text: str) -> tuple[str, str]:
    found = re.fullmatch(r"([a-z][a-z-]*)(?:=([^\n]+))?", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"'{text}' is neither OPTION=VALUE, like qos=high, nor OPTION, like exclusive")
    return found[1], found[2] or ""


def _shape(flags: argparse.Namespace) -> tuple[int, int]:
    """Nodes and processes on each, whose product is K.

    Raises:
        ConfigError: they do not fit.
    """
    for word in flags.overrides:
        if parse(word, several=True).is_sweep_override():
            raise ConfigError(f"{word} gives several values; --array '{word}' runs each as a task of a job array")
    if flags.array and not parse(flags.array, several=True).is_sweep_override():
        raise ConfigError(f"--array {flags.array} gives one value; give several, like --array seed=0,1,2,3")
    if flags.array and parse(flags.array, several=True).key_or_group == STAGES:
        raise ConfigError(
            f"--array {flags.array}: all tasks of a job array have the same nodes; submit each K by itself"
        )
    nodes, per_node = flags.nodes, flags.processes_per_node or flags.gpus_per_node
    is_given = any(parse(word).key_or_group == STAGES for word in flags.overrides)
    if nodes and per_node and not is_given:
        return nodes, per_node
    num_stages = compose_run(flags.overrides)[0].partition.num_stages
    if nodes and per_node:
        if nodes * per_node != num_stages:
            raise ConfigError(
                f"{STAGES}={num_stages} does not fit {nodes} nodes x {per_node} processes; leave one of the three away"
            )
        return nodes, per_node
    given = per_node or nodes or 1
    if num_stages % given:
        what = f"--processes-per-node {per_node}" if per_node else f"--nodes {nodes}"
        raise ConfigError(
            f"{STAGES}={num_stages} cannot be shared out evenly with {what}; give a multiple of {given}, or both "
            "--nodes and --processes-per-node"
        )
    return (num_stages // per_node, per_node) if per_node else (given, num_stages // given)


def _check_runs(words: Sequence[str], choices: Sequence[str]) -> None:
    """Refuse here, and not when the job starts, what cannot be run. (Whether there are GPUs only the nodes know.)"""
    if requested(words) is not None:
        raise ConfigError(
            "several runs are several jobs: adl-dist train --multirun hydra/launcher=submitit_slurm submits a sweep, "
            "hydra.mode=RUN makes one run of an experiment"
        )
    folders: dict[str, str] = {}
    for choice in choices or [""]:
        config, plain = compose_run([*words, *filter(None, [choice])])
        if not config.runtime.processes:
            raise ConfigError("runtime.processes=false needs no nodes; start adl-dist train, or leave it away")
        assert config.run_dir is not None
        if config.run_dir in folders:
            key = choice.partition("=")[0].lstrip("+")
            raise ConfigError(
                f"{folders[config.run_dir]} and {choice} would share run_dir={config.run_dir}; name it by the key: "
                f"'run_dir=runs/NAME-${{{key}}}'"
            )
        folders[config.run_dir] = choice
        instantiate.check_targets(config)
        RunFolder(Path(config.run_dir)).check(plain, resume=config.resume)
    instantiate.check_cut(config)  # shows that the model can be built and cut


def _submit(script: str) -> str:
    if shutil.which("sbatch") is None:
        raise ConfigError("there is no sbatch here; submit from a node of the cluster, or print the script: --dry-run")
    done = subprocess.run(["sbatch", "--parsable"], input=script, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigError(f"sbatch refused the job: {' '.join(done.stderr.split())}")
    return done.stdout.strip().partition(";")[0]
