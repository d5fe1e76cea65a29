"""What /proc tells of the processes of this machine. No torch."""

import os
from pathlib import Path


def machine() -> str:
    """The same for two processes only if each sees the other in /proc; "" where that cannot be told."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def start_time(pid: int) -> int:
    """When process ``pid`` of this machine began, in ticks of the kernel; 0: there is none, or no /proc."""
    fields = _stat(pid)
    return int(fields[19]) if fields else 0


def state_of(pid: int) -> str:
    """The kernel's letter for the state of process ``pid`` of this machine: R, S, D, T, t, Z; "": there is none."""
    fields = _stat(pid)
    return fields[0] if fields else ""


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat behind the name, which may hold blanks and brackets."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
