"""What a run has come to, summed over its segments: the figures of ``summary.json``."""

from collections.abc import Mapping, Sequence
from typing import Any

from adl_dist.control.rpc import Result
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
        self._of_stages: dict[int, dict[str, float]] = {}
        self._spent: dict[int, dict[str, float]] = {}

    def add(self, segment: Segment, results: Sequence[Result], seconds: float) -> None:
        """Take what all stages reported of ``segment``."""
        self.seconds += seconds
        self.num_samples += segment.num_samples
        self.num_skipped += results[-1]["num_skipped"]
        for result in results:
            self._add(result)

    def _add(self, result: Mapping[str, Any]) -> None:
        totals = self._of_stages.setdefault(result["stage"], {})
        for name in ("seconds", "busy_seconds", "staleness_sum", "num_backwards"):
            totals[name] = totals.get(name, 0) + result[name]
        for name in ("staleness_max", "peak_memory_bytes", "peak_tensor_bytes"):
            if name in result:
                totals[name] = max(totals.get(name, 0), result[name])
        for name, seconds in result.get("spent", {}).items():
            spent = self._spent.setdefault(result["stage"], {})
            spent[name] = spent.get(name, 0.0) + seconds

    def summary(self) -> Result:
        """By the names of ``summary.json``."""
        told: Result = {
            "skipped_updates": self.num_skipped,
            "train_seconds": self.seconds,
            "num_samples": self.num_samples,
        }
        if self.seconds:
            told["samples_per_second"] = self.num_samples / self.seconds
        told["stages"] = [
            {
                "stage": k,
                "staleness_mean": t["staleness_sum"] / t["num_backwards"],
                "staleness_max": int(t["staleness_max"]),
                "busy_share": t["busy_seconds"] / t["seconds"],
                "peak_memory_bytes": int(t["peak_memory_bytes"]),
                **({"peak_tensor_bytes": int(t["peak_tensor_bytes"])} if "peak_tensor_bytes" in t else {}),
                **({"shares": self._shares(k, t["seconds"])} if k in self._spent else {}),
            }
            for k, t in sorted(self._of_stages.items())
        ]
        return told

    def _shares(self, stage: int, seconds: float) -> dict[str, float]:
        return {name: spent / seconds for name, spent in self._spent[stage].items()}
