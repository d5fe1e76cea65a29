"""How long a job may stand still. No torch."""

from dataclasses import dataclass

from adl_dist.errors import ConfigError

ABORT_SECONDS = 600.0  # where nothing else is said


@dataclass(frozen=True, kw_only=True)
class WatchdogTimeouts:
    """Counted from the last thing that any stage did.

    Attributes:
        stall_seconds: until all that is known about it is printed.
        abort_seconds: until the job is ended; None: never.
    """

    stall_seconds: float
    abort_seconds: float | None

    @classmethod
    def of(cls, stall_seconds: float, abort_seconds: float | str | None, *, distributed: bool) -> "WatchdogTimeouts":
        """As the Python API takes them; ``auto``: a process that is the user's own, as all stages in one are, is kept.

        Raises:
            ConfigError: see :meth:`check`.
        """
        if isinstance(abort_seconds, str):
            if abort_seconds != "auto":
                raise ConfigError(f"abort_seconds must be a number, None (never) or 'auto', got '{abort_seconds}'")
            abort_seconds = max(ABORT_SECONDS, 2 * stall_seconds) if distributed else None
        limits = cls(stall_seconds=stall_seconds, abort_seconds=abort_seconds)
        limits.check()
        return limits

    def check(self) -> None:
        """Refuse what cannot be.

        Raises:
            ConfigError: a limit that is out of range, or the second not after the first.
        """
        if not self.stall_seconds > 0:
            raise ConfigError(f"runtime.stall_seconds must be above 0, got {self.stall_seconds}")
        if self.abort_seconds is not None and not self.abort_seconds > self.stall_seconds:
            raise ConfigError(
                f"runtime.abort_seconds must be above runtime.stall_seconds={self.stall_seconds}, or null for never, "
                f"got {self.abort_seconds}"
            )
