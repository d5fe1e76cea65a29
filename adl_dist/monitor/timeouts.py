"""The times after which a job that makes no progress is reported, and ended. No torch."""

from dataclasses import dataclass

from adl_dist.errors import ConfigError

ABORT_SECONDS = 600.0  # the default with several processes


@dataclass(frozen=True, kw_only=True)
class WatchdogTimeouts:
    """Seconds since any stage made progress.

    Attributes:
        stall_seconds: after which all that is known about it is printed.
        abort_seconds: after which the job is ended; None: never.
    """

    stall_seconds: float
    abort_seconds: float | None

    @classmethod
    def of(cls, stall_seconds: float, abort_seconds: float | str | None, *, distributed: bool) -> "WatchdogTimeouts":
        """Build from Trainer arguments. ``auto`` never aborts a single-process run.

        Raises:
            ConfigError: see :meth:`check`.
        """
        if isinstance(abort_seconds, str):
            if abort_seconds != "auto":
                raise ConfigError(f"abort_seconds must be a number, None (never) or 'auto', got '{abort_seconds}'")
            abort_seconds = max(ABORT_SECONDS, 2 * stall_seconds) if distributed else None
        timeouts = cls(stall_seconds=stall_seconds, abort_seconds=abort_seconds)
        timeouts.check()
        return timeouts

    def check(self) -> None:
        """Refuse impossible values.

        Raises:
            ConfigError: a time that is out of range, or an abort that is not after the stall.
        """
        if not self.stall_seconds > 0:
            raise ConfigError(f"runtime.stall_seconds must be above 0, got {self.stall_seconds}")
        if self.abort_seconds is not None and not self.abort_seconds > self.stall_seconds:
            raise ConfigError(
                f"runtime.abort_seconds must be above runtime.stall_seconds={self.stall_seconds}, or null for never, "
                f"got {self.abort_seconds}"
            )
