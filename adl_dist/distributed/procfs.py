"""Facts about the processes of this machine, from /proc. No torch."""

import os
import time
from pathlib import Path


def machine() -> str:
    """Return an identity of this machine's /proc, or "" if unknown."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def start_time(pid: int) -> int:
    """Return the start of process ``pid`` in kernel ticks, or 0."""
    fields = _stat(pid)
    return int(fields[19]) if fields else 0


def started_at(pid: int) -> float:
    """Return the start time of ``pid`` in Unix seconds, or the present time."""
    try:
        boot = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime "))
        return int(boot.split()[1]) + start_time(pid) / os.sysconf("SC_CLK_TCK")
    except (OSError, StopIteration):
        return time.time()


def state_of(pid: int) -> str:
    """Return the kernel's letter for the state of process ``pid``, or ""."""
    fields = _stat(pid)
    return fields[0] if fields else ""


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the name."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
