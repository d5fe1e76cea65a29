"""How long a job may stand still. No torch."""

from dataclasses import dataclass

from adl_dist.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Counted from the last thing that any stage did.

    Attributes:
        stall_seconds: until all that is known about it is printed.
        abort_seconds: until the job is ended; None: never.
    """

    stall_seconds: float
    abort_seconds: float | None

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
