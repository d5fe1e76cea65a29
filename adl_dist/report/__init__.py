"""Reports of runs: records, loggers, tables, pictures and the page."""

from adl_dist.report.progress import Progress, final_table
from adl_dist.report.recorder import MetricsWriter
from adl_dist.report.warning import announced, say, tell, warn

__all__ = ["MetricsWriter", "Progress", "announced", "final_table", "say", "tell", "warn"]
