"""One HTML page about a run, or about several: it needs no other file and opens from disk."""

from adl_dist.report.page.write import write_page

__all__ = ["write_page"]
