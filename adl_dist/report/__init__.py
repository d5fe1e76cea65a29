"""What a run tells: metrics.jsonl, TensorBoard, the live line and the final table. Knows no rank."""

from adl_dist.report.progress import Progress, final_table
from adl_dist.report.recorder import Recorder

__all__ = ["Progress", "Recorder", "final_table"]
