"""The live line of a run and the table at its end."""

import math
import re
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO, Any, cast

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Column

from adl_dist.report.tables import counted, text_table
from adl_dist.report.warning import tell
from adl_dist.wording import worded

REDRAW_SECONDS, LINE_SECONDS = 0.1, 60.0  # on a terminal, and elsewhere
TOKENS = "tokens"  # unit of speed if a sample has many loss terms


class Progress:
    """The live loss, metrics, speed and staleness; a line per epoch stays."""

    def __init__(
        self, *, num_stages: int, quiet: bool = False, out: IO[str] | None = None, unit: str = "images"
    ) -> None:
        """Write to ``out``, by default standard output."""
        self._unit = unit
        self._out, self._quiet = out or sys.stdout, quiet
        # Only a terminal can overwrite a line; a log file gets one line per epoch, or minute.
        self._bar: Bar | None = None
        with suppress(ValueError):  # it is closed
            if not quiet and self._out is not None and self._out.isatty():
                self._bar = _bar(self._out)
        self._num_stages, self._head = num_stages, ""
        self._update = self._total_updates = self._last_size = 0
        self._rate = self._shown_at = self._seconds = 0.0
        self._reset()

    def begin(self, epoch: int, epochs: int, total_updates: int, *, goes_on: bool = False) -> None:
        """Begin an epoch, counted from 0, or continue it after a checkpoint."""
        self._head = f"epoch {epoch + 1:>{len(str(epochs))}}/{epochs}"
        self._total_updates = total_updates
        if goes_on:
            self._seconds_before += self._seconds
        else:
            self._reset()
            self._shown_at = time.monotonic() if self._bar is None else 0.0
        self._seconds = 0.0  # since training began or resumed

    def update(self, record: Mapping[str, Any]) -> None:
        """Add one record of a stage."""
        match name := record["name"]:
            case "stage/staleness":
                self._add(f"{name}/{record['stage']}", record["value"], len(record["by_offset"]))
            case "train/loss":
                self._update, self._last_size = record["update"] + 1, record["num_samples"]
                self._samples += self._last_size
                # What the loss is the mean over.
                self._add(name, record["value"], record.get("num_terms", self._last_size))
                self._seconds = record["elapsed_seconds"]
                of_unit = self._sums[name][1] if self._unit == TOKENS else self._samples
                self._rate = of_unit / max(self._seconds_before + self._seconds, 1e-9)
            case "train/accuracy":
                # The targets are those of the loss before it, counted apart: a line may be drawn between the two.
                self._add(name, record["value"], record.get("num_targets", self._last_size))
            case "train/skipped_updates":
                self._update = record["update"] + 1
                self._num_skipped += 1
            case _ if record.get("is_metric"):
                self._add(name, record["value"], record["num_targets"])
        now = time.monotonic()
        if self._samples and now - self._shown_at > (LINE_SECONDS if self._bar is None else REDRAW_SECONDS):
            self._shown_at = now
            if self._bar is None:
                self.note(self._line())
            else:
                self._draw(self._bar)

    def end(self, loss: float | None, accuracy: float | None, metrics: Mapping[str, float] | None = None) -> None:
        """Write the line of the epoch, with figures of the validation if any."""
        self.close()
        if self._quiet or not self._head:
            return
        validation = "" if loss is None else f"  |  validation loss {loss:.4f}"
        validation += "" if accuracy is None else f"  acc {accuracy:7.2%}"
        others = {name: value for name, value in (metrics or {}).items() if name != "accuracy"}
        validation += "".join(f"  {name} {value:.4g}" for name, value in others.items())
        if self._bar is None:
            self.note(self._line() + validation)
        else:  # shorter, and what may be cut off comes last
            line = f"{self._head}  {self._figures()}{validation}  {self._rate:,.0f} {self._unit}/s"
            line = re.sub(r"\bacc +", "acc ", line.replace("  |  validation", " | val"))
            self._bar.console.print(line, markup=False, highlight=False, no_wrap=True, overflow="ellipsis")

    def note(self, text: str) -> None:
        """Write a line that stays."""
        if self._bar is not None:
            self._bar.console.print(worded(text), markup=False, highlight=False)
        elif not self._quiet:
            tell(self._out, worded(text) + "\n")

    def close(self) -> None:
        """Remove the live line."""
        if self._bar is not None:
            self._bar.stop()
            for task in self._bar.task_ids:
                self._bar.remove_task(task)

    @property
    def train_loss(self) -> float | None:
        """The mean loss of the epoch so far, or None before its first update."""
        return self._mean("train/loss")

    def _reset(self) -> None:
        """Set all counts of an epoch to zero."""
        self._sums: dict[str, tuple[float, float]] = {}  # sum and count, by the name of the record, and its stage
        self._samples, self._num_skipped, self._seconds_before = 0, 0, 0.0

    def _add(self, name: str, mean: float, count: float) -> None:
        total, before = self._sums.get(name, (0.0, 0.0))
        self._sums[name] = total + mean * count, before + count

    def _mean(self, name: str) -> float | None:
        total, count = self._sums.get(name, (0.0, 0.0))
        return total / count if count else None

    def _line(self) -> str:
        means = [self._mean(f"stage/staleness/{k}") for k in range(self._num_stages)]
        staleness = "/".join("-" if mean is None else f"{mean:.3g}" for mean in means)
        figures = f"{self._figures()}  {self._rate:7,.0f} {self._unit}/s  staleness {staleness}"
        return f"{self._head}  {self._place()}  {figures}"

    def _draw(self, bar: Bar) -> None:
        if not bar.task_ids:
            bar.add_task(self._head, total=self._total_updates, completed=self._update, figures="")
            bar.start()
        figures = f"{self._place()}  {self._figures()}  {self._rate:,.0f} {self._unit}/s"
        bar.update(bar.task_ids[0], completed=self._update, figures=figures)
        bar.refresh()

    def _place(self) -> str:
        return f"update {self._update:>{len(str(self._total_updates))}}/{self._total_updates}"

    def _figures(self) -> str:
        means = {name.removeprefix("train/"): self._mean(name) for name in self._sums if name.startswith("train/")}
        loss, accuracy = means.pop("loss", None), means.pop("accuracy", None)
        text = f"loss {math.nan if loss is None else loss:.4f}" + ("" if accuracy is None else f"  acc {accuracy:7.2%}")
        for name, value in means.items():
            if name == "perplexity":  # of the mean loss
                value = math.nan if loss is None else math.exp(min(loss, 700.0))
            text += f"  {name} {value:.4g}"
        return text + (f"  skipped {self._num_skipped}" if self._num_skipped else "")


class _Terminal:
    """A stream that hides errors of a lost terminal or missing characters."""

    def __init__(self, out: IO[str]) -> None:
        self._out = out

    def __getattr__(self, name: str) -> Any:
        return getattr(self._out, name)

    def write(self, text: str) -> int:
        """Write and flush ``text``."""
        tell(self._out, text)
        return len(text)

    def flush(self) -> None:
        """Do nothing, because :meth:`write` flushes."""


def _bar(out: IO[str]) -> Bar:
    """Build a progress bar on ``out`` that leaves the cursor visible."""
    console = Console(file=cast(IO[str], _Terminal(out)))
    console.show_cursor = lambda show=True: False  # type: ignore[method-assign] # a killed process could not show it again
    figures = TextColumn("{task.fields[figures]}", table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1))
    left = TimeRemainingColumn(table_column=Column(no_wrap=True))
    columns = TextColumn("{task.description}"), BarColumn(10), figures, left
    return Bar(*columns, console=console, auto_refresh=False, transient=True, expand=True)


# Peaks of memory in summary.json, and their heads in a table. On a GPU the first is memory handed out by the allocator.
PEAKS = {"peak_memory_bytes": "peak memory", "peak_active_bytes": "active", "peak_reserved_bytes": "reserved"}


def holders(summary: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return the entries of ``summary.json`` that have peaks of memory."""
    found: Sequence[Mapping[str, Any]] = summary.get("processes", summary.get("stages", ()))
    return found


def _mebibytes(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f} MiB"


def final_table(summary: Mapping[str, Any]) -> str:
    """Return the summary of a run as a short table."""
    head = [f"\n{counted(summary['epochs'], 'epoch')}, {counted(summary['updates'], 'update')}"]
    forms = {"validation_accuracy": ".2%", "validation_loss": ".4f", "validation_perplexity": ".2f"}
    metrics = [n for n in dict.fromkeys([*forms, *summary]) if n.startswith("validation_") and n in summary]
    head += [f"{name.replace('_', ' ')} {summary[name]:{forms.get(name, '.4g')}}" for name in metrics]
    if "samples_per_second" in summary:
        unit, speed = summary.get("unit", "images"), summary.get("tokens_per_second", summary["samples_per_second"])
        mfu = f" ({summary['mfu']:.1%} of the devices' peak)" if "mfu" in summary else ""
        head.append(f"{speed:,.0f} {unit}/s{mfu}, {summary['train_seconds']:.1f} s of training")
    lines = [", ".join(head)]
    if summary["skipped_updates"]:
        lines.append(f"{summary['skipped_updates']} updates skipped: their loss or gradient was not finite")
    if summary["stages"]:
        measured = "peak_tensor_bytes" in summary["stages"][0]
        peaks = [name for name in PEAKS if name in holders(summary)[0]]
        is_alone = "processes" not in summary
        head = [PEAKS[name] for name in peaks] if is_alone else []
        rows = [["stage", "staleness mean", "max", "busy", *head, *["of it tensors"] * measured]]
        for s in summary["stages"]:
            row = [s["stage"], f"{s['staleness_mean']:.3f}", s["staleness_max"], f"{s['busy_share']:.0%}"]
            tensors = [f"{s['peak_tensor_bytes'] / 2**20:,.1f} MiB"] if measured else []
            rows.append([*row, *(_mebibytes(s[name]) for name in peaks if is_alone), *tensors])
        lines += ["", *text_table(rows)]
        for process in summary.get("processes", ()):
            held = ", ".join(f"{PEAKS[name]} {_mebibytes(process[name])}" for name in peaks)
            lines.append(f"process {process['rank']}, with {len(process['stages'])} stage(s): {held}")
        if tied := [(s["stage"], copy) for s in summary["stages"] for copy in s.get("tied", ())]:
            rows = [["tied weights", "stage", "staleness mean", "max"]]
            for stage, copy in tied:
                rows.append([copy["name"], stage, f"{copy['staleness_mean']:.3f}", copy["staleness_max"]])
            lines += ["", *text_table(rows)]
        if coded := coded_rows(summary):
            lines += ["", *text_table(coded)]
    return "\n".join(lines)


def coded_rows(summary: Mapping[str, Any]) -> list[list[object]]:
    """Return a header and one row per coded edge; [] if nothing is coded."""
    rows: list[list[object]] = [["coded edge", "what", "codec", "relative error", "MB sent", "of its bytes"]]
    for stage, edge in ((s["stage"], edge) for s in summary.get("stages", ()) for edge in s.get("coded", ())):
        to, error = stage + (1 if edge["what"] == "act" else -1), edge.get("error")
        share, sent = edge["bytes"] / max(1, edge["plain_bytes"]), edge["bytes"] / 1e6
        shown = "" if error is None else f"{error:.3%}"
        rows.append([f"{stage} -> {to}", edge["what"], edge["codec"], shown, f"{sent:,.1f}", f"{share:.1%}"])
    return rows if len(rows) > 1 else []
