"""K devices out of this machine's cores, the same for every contender. Linux; a share of a core needs root and cgroups.

Where there are as many cores as ranks, each rank gets as many whole cores as the others. Else n ranks share a core, n
as small as can be, and each may use 1/n of its time, also while the others wait: the kernel's quota (``cpu.max``, or
``cpu.cfs_quota_us`` where cgroups are of version 1) sees to that in periods of 10 ms. So a rank that waits lends
nothing to another one, as on real devices; and one device alone is the same share of a core.
"""

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from adl_dist.errors import ConfigError

CGROUPS = Path("/sys/fs/cgroup")
PERIOD_US = 10_000


@dataclass(frozen=True, kw_only=True)
class Device:
    """The cores of one rank."""

    cores: Sequence[int]
    share: float  # of their time

    @property
    def threads(self) -> int:
        """How many threads compute."""
        return len(self.cores)


def devices(num: int, cores: Sequence[int]) -> list[Device]:
    """Return ``num`` equal devices made of ``cores``."""
    if len(cores) >= num:
        each = len(cores) // num
        return [Device(cores=list(cores[r * each : (r + 1) * each]), share=1.0) for r in range(num)]
    on_each = -(-num // len(cores))
    return [Device(cores=[cores[r // on_each]], share=1 / on_each) for r in range(num)]


@contextlib.contextmanager
def quotas(wanted: Sequence[Device], root: Path = CGROUPS) -> Iterator[list[Path | None]]:
    """Inside the block there is a file for each device, to which a process writes its id to become part of it.

    It is None for a device of whole cores, which needs no quota.

    Raises:
        ConfigError: If quotas are needed and cannot be set.
    """
    if all(device.share == 1 for device in wanted):
        yield [None] * len(wanted)
        return
    with contextlib.ExitStack() as stack:
        try:
            parent = _parent(root)
            stack.callback(_remove, parent)
            is_second = (root / "cgroup.controllers").is_file()
            if is_second:
                (parent / "cgroup.subtree_control").write_text("+cpu")
            groups = [parent / f"rank{rank}" for rank in range(len(wanted))]
            for device, group in zip(wanted, groups, strict=True):
                group.mkdir()
                stack.callback(_remove, group)
                quota = str(int(device.share * len(device.cores) * PERIOD_US))
                if is_second:
                    (group / "cpu.max").write_text(f"{quota} {PERIOD_US}")
                else:
                    (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
                    (group / "cpu.cfs_quota_us").write_text(quota)
        except OSError as error:
            raise ConfigError(
                f"{len(wanted)} ranks share {len({c for d in wanted for c in d.cores})} cores by quotas of cgroups, "
                f"which cannot be set here: {error}; use partition.num_stages of at most the number of cores"
            ) from None
        yield [group / "cgroup.procs" for group in groups]


def _parent(root: Path) -> Path:
    """Make a group with a name of its own: one that an earlier call could not remove must not block it."""
    folder = root if (root / "cgroup.controllers").is_file() else root / "cpu"
    return Path(tempfile.mkdtemp(prefix=f"adl-dist-{os.getpid()}-", dir=folder))


def _remove(group: Path) -> None:
    for _ in range(50):  # its last process may still be ending
        with contextlib.suppress(OSError):
            group.rmdir()
            return
        time.sleep(0.1)
