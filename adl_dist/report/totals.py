"""The figures of a run: results of stages, their sums and peaks."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from adl_dist.report.progress import TOKENS
from adl_dist.report.timeline import Timeline


@dataclass(frozen=True, kw_only=True)
class TiedResult:
    """The figures of one stage's copy of tied weights over one segment."""

    name: str
    staleness_sum: int  # of the gradients that the stage has added, in updates of these weights
    staleness_max: int
    num_backwards: int


@dataclass(frozen=True, kw_only=True)
class CodedResult:
    """The figures of one stage's coded messages in one direction."""

    what: str  # "act" or "grad"
    codec: str
    num_bytes: int  # sent
    plain_bytes: int  # before coding
    error: float | None  # relative L2 error, or None if nothing finite was measured


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """The figures of one stage over one segment of training."""

    stage: int
    rank: int  # of its process
    seconds: float  # length of the segment
    busy_seconds: float  # the part of it spent in forward, backward and update
    staleness_sum: int  # of all gradients, in updates
    staleness_max: int
    num_backwards: int
    num_updates: int  # made or skipped
    num_skipped: int
    peak_memory: Mapping[str, int]  # peaks of the process with all its stages so far, in bytes, by name
    peak_tensor_bytes: int | None = None  # peak of the tensors, if measured
    spent: Mapping[str, float] = field(default_factory=dict)  # seconds by kind of action; empty without a trace
    tied: Sequence[TiedResult] = ()  # of each copy of tied weights
    coded: Sequence[CodedResult] = ()  # of each direction that is coded
    timeline: Timeline | None = None  # of a few updates, if wanted


class Totals:
    """The sums and peaks of all segments that this process has trained.

    Attributes:
        unit: name of a sample, or ``tokens`` if the loss counts tokens.
        trained: (samples, seconds, results of all stages) of each segment.
    """

    def __init__(self, unit: str = "images", flops: float | None = None) -> None:
        """Prepare the totals; ``flops``: FLOPs of a sample over the peak FLOP/s."""
        self.unit, self._flops = unit, flops
        self._tokens = [0.0]  # of each segment that has begun
        self.trained: list[tuple[int, float, list[TrainResult]]] = []

    def take(self, record: Mapping[str, Any]) -> None:
        """Count the tokens of an update's record."""
        if self.unit == TOKENS and record["name"] == "train/loss":
            self._tokens[-1] += float(record.get("num_terms", 0))

    def add(self, num_samples: int, seconds: float, results: list[TrainResult]) -> Iterator[dict[str, Any]]:
        """Add a segment; yield its records without update and epoch."""
        self.trained.append((num_samples, seconds, results))
        for result in results:
            yield {"name": "stage/busy_share", "value": result.busy_seconds / result.seconds, "stage": result.stage}
        for rank, of_process in _by_process(results).items():
            peak = of_process[0].peak_memory["peak_memory_bytes"]
            yield {"name": "process/peak_memory", "value": peak, "unit": "bytes", "rank": rank}
        for sender, coded in ((result, coded) for result in results for coded in result.coded):
            if coded.error is not None:
                yield {"name": f"stage/{coded.what}_coding_error", "value": coded.error, "stage": sender.stage}
            sent = {"value": coded.num_bytes, "unit": "bytes"}
            yield {"name": f"stage/{coded.what}_bytes", **sent, "stage": sender.stage}
        yield {"name": "train/samples_per_second", "value": num_samples / seconds, "unit": "samples/s"}
        if self._flops is not None:
            yield {"name": "train/mfu", "value": self._flops * num_samples / seconds}
        if self.unit == TOKENS:
            yield {"name": "train/tokens_per_second", "value": self._tokens[-1] / seconds, "unit": "tokens/s"}
        self._tokens.append(0.0)

    def summary(self) -> dict[str, Any]:
        """Return the figures for ``summary.json``."""
        num_samples, seconds = sum(n for n, _, _ in self.trained), sum((s for _, s, _ in self.trained), 0.0)
        tokens, segments = sum(self._tokens), [results for _, _, results in self.trained]
        stages = [_stage_totals(results) for results in zip(*segments, strict=True)]
        processes = []
        for rank, last in (_by_process(segments[-1]) if segments else {}).items():
            peaks = [result.peak_memory for results in segments for result in results if result.rank == rank]
            found = {name: max(peak[name] for peak in peaks) for name in peaks[0]}
            processes.append({"rank": rank, "stages": [result.stage for result in last], **found})
            if len(last) == 1:
                stages[last[0].stage] |= found
        figures: dict[str, Any] = {
            "skipped_updates": sum(results[-1].num_skipped for results in segments),
            "train_seconds": seconds,
            "num_samples": num_samples,
            "samples_per_second": num_samples / seconds if seconds else None,
            "stages": stages,
            # The peak of a process with several stages belongs to none of them.
            "processes": processes if len(processes) < len(stages) else None,
            "unit": self.unit if self.unit != "images" else None,
        }
        if seconds and self.unit == TOKENS:
            figures |= {"num_tokens": tokens, "tokens_per_second": tokens / seconds}
        if seconds and self._flops is not None:
            figures["mfu"] = self._flops * num_samples / seconds
        return {name: value for name, value in figures.items() if value is not None}


def _by_process(results: Iterable[TrainResult]) -> dict[int, list[TrainResult]]:
    """Return the results of each process's stages, by rank."""
    found: dict[int, list[TrainResult]] = {}
    for result in results:
        found.setdefault(result.rank, []).append(result)
    return found


def _stage_totals(results: Sequence[TrainResult]) -> dict[str, Any]:
    seconds = sum(result.seconds for result in results)
    row: dict[str, Any] = {
        "stage": results[0].stage,
        **_staleness(results),
        "busy_share": sum(result.busy_seconds for result in results) / seconds,
    }
    if results[0].tied:
        ties = zip(*(result.tied for result in results), strict=True)
        row["tied"] = [{"name": of_tie[0].name, **_staleness(of_tie)} for of_tie in ties]
    if results[0].coded:
        row["coded"] = [_coded(of_edge) for of_edge in zip(*(result.coded for result in results), strict=True)]
    if tensor_bytes := [result.peak_tensor_bytes for result in results if result.peak_tensor_bytes is not None]:
        row["peak_tensor_bytes"] = max(tensor_bytes)
    if names := dict.fromkeys(name for result in results for name in result.spent):
        row["shares"] = {name: sum(r.spent.get(name, 0.0) for r in results) / seconds for name in names}
    return row


def _staleness(results: Sequence[TrainResult] | Sequence[TiedResult]) -> dict[str, Any]:
    return {
        "staleness_mean": sum(r.staleness_sum for r in results) / sum(r.num_backwards for r in results),
        "staleness_max": max(result.staleness_max for result in results),
    }


def _coded(results: Sequence[CodedResult]) -> dict[str, Any]:
    errors = [result.error for result in results if result.error is not None]
    return {
        "what": results[0].what,
        "codec": results[0].codec,
        "bytes": sum(result.num_bytes for result in results),
        "plain_bytes": sum(result.plain_bytes for result in results),
        **({"error": sum(errors) / len(errors)} if errors else {}),
    }
