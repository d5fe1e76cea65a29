"""The records of each update: loss, gradient norm, staleness."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from adl_dist.checkpoint.state import state_of
from adl_dist.control.messages import Record
from adl_dist.engine import StageContext
from adl_dist.monitor.memory import MemoryMeter
from adl_dist.schedule import Segment
from adl_dist.stage import Stage, StepStats
from adl_dist.stage.stats import value_of


@dataclass
class UpdateReports:
    """The reports of the updates of a segment, on a GPU some updates late."""

    contexts: Mapping[int, StageContext]  # the stages of this process
    segment: Segment
    emit: Callable[[Record], None]  # takes each record
    device: torch.device  # of the stages
    meter: MemoryMeter | None  # counts updates, if memory is measured
    saves: bool  # whether checkpoints are saved
    splits: bool  # whether backwards are split

    def __post_init__(self) -> None:
        self._start = time.perf_counter()
        self._begin: torch.cuda.Event | None = None  # the same on the clock of the GPU
        if self.device.type == "cuda":
            self._begin = torch.cuda.current_stream(self.device).record_event(torch.cuda.Event(enable_timing=True))
        self._pending: deque[tuple[Iterator[Record], Record]] = deque()
        # The figures of a GPU are read an update later: a read at once would wait for all launched work. The figures
        # of a split backward are not checked earlier.
        self._lag = len(self.contexts) if self.device.type == "cuda" or self.splits else 0
        # State that no checkpoint can hold is refused after the first update, before a whole epoch is lost.
        self._unchecked = {*self.contexts} if self.saves else set()

    def add(self, k: int, group: int) -> None:
        """Take the figures of stage ``k``'s update with ``group``."""
        if self.meter is not None:
            self.meter.count_update()
        stage, stats = self.contexts[k].stage, self.contexts[k].stage.tally
        if k in self._unchecked:
            self._unchecked.remove(k)
            state_of([stage], 1)  # as for a save, but without a copy
        stage.tally = StepStats()
        where = {"stage": k, "update": self.segment.first_update + group, "epoch": self.segment.epoch}
        seconds = time.perf_counter() - self._start
        self._pending.append((_records(stats, seconds, self._begin, stage), where))
        self.send(keep=self._lag)

    def send(self, *, keep: int) -> None:
        """Report all but the last ``keep`` updates."""
        while len(self._pending) > keep:
            records, where = self._pending.popleft()
            for record in records:  # the figures are read now, not when the update was made
                self.emit({**record, **where})


def _records(stats: StepStats, seconds: float, begin: torch.cuda.Event | None, stage: Stage) -> Iterator[Record]:
    """Yield the records of an update made ``seconds`` after the begin."""
    offsets, is_last = stats.staleness, stage.is_last
    mean = {"name": "stage/staleness", "value": sum(offsets) / len(offsets), "unit": "updates"}
    yield {**mean, "max": max(offsets), "by_offset": offsets}
    if stats.skipped is not None:
        if is_last:  # loss and hits of a skipped update are not figures of the run
            yield {"name": "train/skipped_updates", "value": 1, "unit": "updates", "why": stats.skipped}
        return
    numbers = stats.numbers()
    n = numbers["num_samples"]
    num_terms, num_classed = numbers.get("num_terms", n), numbers.get("num_classed", 0)
    if "gradient_norm" in numbers:
        yield {"name": "stage/gradient_norm", "value": numbers["gradient_norm"]}
    if "prediction_error" in numbers:
        yield {"name": "stage/prediction_error", "value": numbers["prediction_error"]}
    if "loss_sum" in numbers and not is_last:
        yield {"name": "stage/local_loss", "value": numbers["loss_sum"] / num_terms}
    elif "loss_sum" in numbers:
        sizes: Record = {name: numbers[name] for name in ("num_samples", "num_terms") if name in numbers}
        if begin is not None and (computed := stats.seconds_since(begin)) is not None:
            seconds = computed
        yield {"name": "train/loss", "value": numbers["loss_sum"] / num_terms, **sizes, "elapsed_seconds": seconds}
        if stats.model_norm is not None:  # a GPU is waited for, but has emptied the pipeline for it
            yield {"name": "train/gradient_norm", "value": float(stats.model_norm)}
        if stats.learning_rate is not None:
            yield {"name": "train/learning_rate", "value": stats.learning_rate}
        measured = stats.sums(stage.metrics) if stage.metrics else {}
        for name, pair in measured.items():
            yield {"name": f"train/{name}", "value": value_of(name, pair), "num_targets": pair[1], "is_metric": True}
        if num_classed and "accuracy" not in measured:
            more: Record = {"num_targets": num_classed} if num_classed != n else {}
            yield {"name": "train/accuracy", "value": numbers["num_correct"] / num_classed, **more}
