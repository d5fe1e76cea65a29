"""``adl-dist train`` for the sake of its speed: the command line of such a run, and how long its updates took."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from adl_dist.checkpoint.run_dir import SUMMARY
from adl_dist.cli.bench.data import stretching
from adl_dist.cli.config.methods import method_words
from adl_dist.cli.config.schema import RunConfig
from adl_dist.cli.subprocesses import Child, ChildFailed
from adl_dist.report.recorder import METRICS
from adl_dist.schedule import Method

RUN, LOG = "run", "output.log"
# What is decided here; all other words of the user reach the run.
MANAGED_KEYS = (
    *("method", "partition", "run_dir", "resume", "train.epochs", "train.max_updates"),
    *("runtime.processes", "runtime.threads", "runtime.bind_cores", "runtime.trace", "runtime.memory"),
    "runtime.checkpoint_every_updates",
    "hydra.mode",
)


def words_to_measure(
    config: RunConfig,
    overrides: Sequence[str],
    *,
    method: Method,
    num_stages: int,
    cut: tuple[str, Sequence[int]] | None,
    num_updates: int,
    samples: int,
    threads: int,
    bind_cores: bool,
) -> list[str]:
    """Of a command line.

    Args:
        config: of the user.
        overrides: the words that it was made of.
        method: to train by.
        num_stages: K.
        cut: grain and units of each stage; None: one stage has all.
        num_updates: how long; they are one epoch, so that a pipeline is filled only once.
        samples: of an update.
        threads: of each process.
        bind_cores: whether each process keeps to cores of its own.
    """
    words = [w for w in overrides if not w.lstrip("+~").startswith(MANAGED_KEYS)]
    words += [*method_words(method), f"partition.num_stages={num_stages}", "hydra.mode=RUN"]
    if cut is not None:
        granularity, sizes = cut
        words += [f"partition.granularity={granularity}", f"partition.balance=[{','.join(map(str, sizes))}]"]
    words += [f"train.max_updates={num_updates}", "train.epochs=1", f"runtime.threads={threads}"]
    # Whatever slows ours alone is not what is compared.
    words += ["runtime.trace=false", "runtime.memory=false"]
    words.append(f"runtime.bind_cores={'true' if bind_cores else 'false'}")
    return words + stretching(config.data["_target_"], num_updates * samples)


def training(words: Sequence[str], folder: Path) -> Child:
    """``adl-dist train`` with a run folder inside of ``folder``, for measuring: nothing is saved on the way."""
    own = [f"run_dir='{_quoted(folder / RUN)}'", "runtime.tensorboard=false", "runtime.checkpoint_every_epochs=0"]
    return Child(command=[sys.executable, "-m", "adl_dist", "train", *words, *own], log=folder / LOG)


def summary_in(folder: Path) -> dict[str, Any]:
    """The summary of the run that :func:`training` made in ``folder``."""
    summary: dict[str, Any] = json.loads((folder / RUN / SUMMARY).read_text())
    return summary


def update_ends(folder: Path) -> list[float]:
    """When each update of that run ended, in seconds since its only epoch began."""
    records = [json.loads(line) for line in (folder / RUN / METRICS).read_text().splitlines()]
    return [record["elapsed_seconds"] for record in records if record["name"] == "train/loss"]


def seconds_per_update(ends: Sequence[float], *, warmup: int) -> float:
    """From when each update ended; the first ``warmup`` do not count.

    Raises:
        ChildFailed: the clock has not moved, or there are too few updates.
    """
    if len(ends) <= warmup or not ends[-1] > ends[warmup - 1]:
        raise ChildFailed(f"{len(ends)} updates, of which {warmup} do not count, are too few to be measured")
    return (ends[-1] - ends[warmup - 1]) / (len(ends) - warmup)


def _quoted(path: Path) -> str:
    return str(path).replace("'", "\\'")
