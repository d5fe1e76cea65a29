"""Measure the seconds of an update, with every rank in a network namespace behind the link."""

import json
import shlex
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from adl_dist.cli.bench.entries import Entry
from adl_dist.cli.bench.runner import BenchConfig, Measured, measure_once
from adl_dist.report import say
from adl_dist.report.files import write_atomically
from adl_dist.report.runs import read_json
from benchmarks.race.contenders import Contender
from benchmarks.race.devices import Device, quotas
from benchmarks.race.link import Link
from benchmarks.race.namespaces import INTERFACE, Namespaces, namespaces

SECONDS = "seconds.json"
FEWEST = 5  # measured updates of a run
NO_LINK = "no link"  # where those are measured who send nothing


@dataclass(frozen=True, kw_only=True)
class Measuring:
    """How long, and how often."""

    seconds: float  # training time of a run, about
    repetitions: int


class Timings:
    """The measurements, written to a file after each run, so that the same command continues."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[str, Any] = read_json(path)

    def seconds(self, key: str) -> list[float]:
        """Return the seconds per update of each run of ``key`` that did not fail."""
        return [run["seconds_per_update"] for run in self._known.get("runs", {}).get(key, []) if "error" not in run]

    def median(self, key: str) -> float | None:
        """Return the median of :meth:`seconds`, or None if there are none."""
        return statistics.median(known) if (known := self.seconds(key)) else None

    def add(self, key: str, run: Measured) -> None:
        """Keep the result of a run; a failure only until there is a success."""
        runs: list[Any] = self._known.setdefault("runs", {}).setdefault(key, [])
        runs[:] = [*(each for each in runs if "error" not in each), run.as_json()]
        self._write()

    def note(self, link: Link, measured: Link) -> None:
        """Keep the measured figures of ``link``."""
        self._known.setdefault("links", {})[link.name] = vars(measured)
        self._write()

    @property
    def links(self) -> Mapping[str, Mapping[str, float]]:
        """The measured figures of each link, by name."""
        return self._known.get("links", {})  # type: ignore[no-any-return]

    def failures(self, keys: Sequence[str]) -> dict[str, str]:
        """Return the last errors of those of ``keys`` of which no run has succeeded."""
        runs = self._known.get("runs", {})
        return {key: runs[key][-1]["error"] for key in keys if runs.get(key) and not self.seconds(key)}

    def _write(self) -> None:
        with write_atomically(self._path) as unfinished:
            unfinished.write_text(json.dumps(self._known, indent=1) + "\n")


def key_of(contender: Contender, link: Link | None) -> str:
    """Return under which name a contender's times over ``link`` are kept; its settings are part of it."""
    entry = contender.entry
    settings = json.dumps([entry.method.settings, list(entry.settings), entry.kind], sort_keys=True, default=list)
    return f"{link.name if link and contender.sends else NO_LINK} {contender.name} {settings}"


def measure(
    racing: Sequence[Contender], link: Link, bench: BenchConfig, on: Sequence[Device], how: Measuring, known: Timings
) -> None:
    """Measure the missing runs in turn, A B C A B C; a contender that failed takes no further turn."""
    missing = [c for c in racing if len(known.seconds(key_of(c, link))) < how.repetitions]
    if not missing:
        return
    with _placed(link, on) as (spaces, prefix):
        if link.name not in known.links:
            known.note(link, spaces.measured())
        bench = replace(bench, prefix=prefix, master_addr=spaces.master_addr, interface=INTERFACE)
        failed = set[str]()
        for number in range(how.repetitions):
            for contender in missing:
                key = key_of(contender, link)
                if contender.name in failed or len(known.seconds(key)) > number:
                    continue
                run = _run(contender.entry, bench, how, number, known.median(key))
                known.add(key, run)
                failed |= {contender.name} if run.error is not None else set()
                result = f"{run.seconds_per_update:.3f} s per update" if run.error is None else f"failed: {run.error}"
                where = link.name if contender.sends else NO_LINK
                say(f"{where}  {number + 1}/{how.repetitions}  {contender.name}: {result}")


def _run(entry: Entry, bench: BenchConfig, how: Measuring, number: int, pace: float | None) -> Measured:
    """Run as many updates as fit; if it is not known how many, a short run tells, and counts if it was long enough."""
    num_updates = FEWEST if pace is None else max(FEWEST, round(how.seconds / pace))
    run = measure_once(entry, bench, repetition=number, num_updates=entry.warmup + num_updates)
    if pace is None and run.error is None and run.seconds_per_update * FEWEST < how.seconds / 2:
        return _run(entry, bench, how, number, run.seconds_per_update)
    return run


@contextmanager
def _placed(link: Link, on: Sequence[Device]) -> Iterator[tuple[Namespaces, list[str]]]:
    """Inside the block there is a place for each rank; yield also the words that put a command there."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="adl-dist-race-")))
        groups = stack.enter_context(quotas(on))
        spaces = stack.enter_context(namespaces(len(on), link))
        lines = ["rank=$1", "shift", "case $rank in"]
        for rank, (device, group) in enumerate(zip(on, groups, strict=True)):
            joins = f"echo $$ > {shlex.quote(str(group))} && " if group else ""
            cores = ",".join(map(str, device.cores))
            lines.append(f'{rank}) {joins}exec taskset -c {cores} {shlex.join(spaces.command(rank))} "$@" ;;')
        script = folder / "enter.sh"
        script.write_text("\n".join([*lines, "esac", ""]))
        yield spaces, ["sh", str(script), "{rank}"]
