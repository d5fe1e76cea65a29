"""Time limits for a job that makes no progress. No torch."""

from dataclasses import dataclass
from typing import Literal

from adl_dist.errors import ConfigError
from adl_dist.settings import check_settings, documented, setting


@documented("runtime")
@dataclass(frozen=True, kw_only=True)
class WatchdogTimeouts:
    """Limits on a standstill, counted from the last action of any stage.

    After ``abort_seconds`` the process ends with exit code 1, unless it is in a debugger. With ``auto`` it never ends
    if all stages share the user's own process.
    """

    stall_seconds: float = setting(
        60.0,
        "without progress of any stage, until a report on each stage and the likely cause",
        key="watchdog_warn_seconds",
        above=0,
    )
    abort_seconds: float | Literal["auto"] | None = setting(
        "auto",
        "likewise, until the job ends with exit code 1; auto: 600, or twice watchdog_warn_seconds; null: never",
        key="watchdog_abort_seconds",
        expected="a number, null (never) or 'auto'",
    )

    def __post_init__(self) -> None:
        check_settings(self, "runtime")
        abort, warn = self.abort_seconds, self.stall_seconds
        if isinstance(abort, float) and not abort > warn:
            raise ConfigError(
                f"runtime.watchdog_abort_seconds={abort} must be above runtime.watchdog_warn_seconds={warn}, or null "
                "for never"
            )

    def abort_after(self, *, distributed: bool) -> float | None:
        """Return the seconds until the process ends, or None if it never does."""
        if not isinstance(self.abort_seconds, str):
            return self.abort_seconds
        return max(600.0, 2 * self.stall_seconds) if distributed else None
