"""Identify the launch: one user command including every restart of it.

A launcher restarts ranks with the arguments of the first attempt. With ``resume=never`` or ``resume=PATH`` among them
each restart would be refused, or go back. A run folder therefore says which launch claimed it last, and that launch
continues from what it has saved there. (torchrun's count of restarts says less: it also counts attempts that were
refused; and a requeued job, or an agent in the place of a lost one, counts from 0.)
"""

import os
from pathlib import Path

from adl_dist.distributed.parent_process import LAUNCH_ID
from adl_dist.distributed.procfs import machine, start_time

FILE = "launch"
UNNAMED = "none"  # torchrun's --rdzv-id where none is given: the same in all commands


def launch_id() -> str | None:
    """Return an id shared by all attempts of one launch and no other; None: this process is never restarted."""
    if LAUNCH_ID in os.environ:
        return os.environ[LAUNCH_ID]
    run_id = os.environ.get("TORCHELASTIC_RUN_ID")
    if run_id != UNNAMED:
        return run_id
    agent = os.getppid()  # it stays when it restarts its ranks; on several nodes each has one of its own
    return f"torchrun {machine()} {agent} {start_time(agent)}"


def write_launch_id(folder: Path) -> None:
    """Write down that this launch continues the run in ``folder``.

    Raises:
        OSError: it cannot be written.
    """
    launch = launch_id()
    if launch is None:
        (folder / FILE).unlink(missing_ok=True)
    else:
        (folder / FILE).write_text(launch)


def is_this_launch(folder: Path) -> bool:
    """Return whether it was this launch that wrote there last."""
    try:
        return (folder / FILE).read_text() == launch_id()
    except OSError:
        return False
