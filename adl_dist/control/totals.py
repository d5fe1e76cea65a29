"""The totals of a run over its segments: the figures of ``summary.json``."""

from collections.abc import Sequence
from typing import Any

from adl_dist.control.messages import Summary, TrainResult
from adl_dist.schedule import Segment


class RunTotals:
    """Sums and peaks of what the stages reported of each segment of training.

    Attributes:
        num_samples: trained on.
        seconds: spent on it.
        num_skipped: updates that were skipped.
    """

    def __init__(self) -> None:
        self.num_samples, self.seconds, self.num_skipped = 0, 0.0, 0
        self._of_stages: dict[int, list[TrainResult]] = {}

    def add(self, segment: Segment, results: Sequence[TrainResult], seconds: float) -> None:
        """Add the results of all stages for ``segment``, which took ``seconds``."""
        self.seconds += seconds
        self.num_samples += segment.num_samples
        self.num_skipped += results[-1].num_skipped
        for result in results:
            self._of_stages.setdefault(result.stage, []).append(result)

    def summary(self) -> Summary:
        """Return them by the names of ``summary.json``."""
        summary: Summary = {
            "skipped_updates": self.num_skipped,
            "train_seconds": self.seconds,
            "num_samples": self.num_samples,
        }
        if self.seconds:
            summary["samples_per_second"] = self.num_samples / self.seconds
        summary["stages"] = [_of_stage(k, results) for k, results in sorted(self._of_stages.items())]
        return summary


def _of_stage(stage: int, results: Sequence[TrainResult]) -> dict[str, Any]:
    seconds = sum(result.seconds for result in results)
    tensor_bytes = [result.peak_tensor_bytes for result in results if result.peak_tensor_bytes is not None]
    row: dict[str, Any] = {
        "stage": stage,
        "staleness_mean": sum(r.staleness_sum for r in results) / sum(r.num_backwards for r in results),
        "staleness_max": max(result.staleness_max for result in results),
        "busy_share": sum(result.busy_seconds for result in results) / seconds,
        "peak_memory_bytes": max(result.peak_memory_bytes for result in results),
    }
    if tensor_bytes:
        row["peak_tensor_bytes"] = max(tensor_bytes)
    if any(result.spent for result in results):
        names = dict.fromkeys(name for result in results for name in result.spent)
        row["shares"] = {name: sum(r.spent.get(name, 0.0) for r in results) / seconds for name in names}
    return row
