"""The limits of a job without progress. No torch."""

from dataclasses import dataclass

from adl_dist.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class WatchdogTimeouts:
    """Limits on a standstill, counted from the last progress of any stage.

    Attributes:
        stall_seconds: until the state of all stages and the likely cause are printed.
        abort_seconds: until the process ends with exit code 1, unless it is in a debugger. If None, never. If ``auto``,
            600, or twice ``stall_seconds`` if that is more; never if all stages share the user's own process.
    """

    stall_seconds: float = 60.0
    abort_seconds: float | str | None = "auto"

    def __post_init__(self) -> None:
        if not self.stall_seconds > 0:
            raise ConfigError(f"runtime.stall_seconds must be above 0, got {self.stall_seconds}")
        if isinstance(self.abort_seconds, str):
            if self.abort_seconds != "auto":
                raise ConfigError(
                    f"runtime.abort_seconds must be a number, null (never) or 'auto', got '{self.abort_seconds}'"
                )
        elif self.abort_seconds is not None and not self.abort_seconds > self.stall_seconds:
            raise ConfigError(
                f"runtime.abort_seconds must be above runtime.stall_seconds={self.stall_seconds}, or null for never, "
                f"got {self.abort_seconds}"
            )

    def abort_after(self, *, distributed: bool) -> float | None:
        """Return the seconds until the process ends, or None if it never does."""
        if not isinstance(self.abort_seconds, str):
            return self.abort_seconds
        return max(600.0, 2 * self.stall_seconds) if distributed else None
