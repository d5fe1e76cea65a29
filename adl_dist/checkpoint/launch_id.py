"""Which launch a process belongs to: one command, with all that its launcher or scheduler starts again for it.

Whoever starts ranks again gives them the words of the first attempt. Were ``resume=never`` or ``resume=PATH`` among
these, each restart would be refused, or go back. A run folder therefore tells which launch claimed it last, and that
launch goes on from what it has saved there. (How often torchrun has started its ranks tells less: it also starts again
what was refused; and a requeued job, or an agent in the place of a lost one, counts from 0.)
"""

import os
from pathlib import Path

from adl_dist.distributed.parent_process import LAUNCH_ID
from adl_dist.distributed.procfs import machine, start_time

FILE = "launch"
UNNAMED = "none"  # torchrun's --rdzv-id where none is given: the same in all commands


def launch_id() -> str | None:
    """The same in all attempts of one launch, and in no other launch; None: nobody starts this process again."""
    if LAUNCH_ID in os.environ:
        return os.environ[LAUNCH_ID]
    told = os.environ.get("TORCHELASTIC_RUN_ID")
    if told != UNNAMED:
        return told
    agent = os.getppid()  # it stays where it starts its ranks again; on several nodes each has one of its own
    return f"torchrun {machine()} {agent} {start_time(agent)}"


def write_launch_id(folder: Path) -> None:
    """Write down that this launch goes on in ``folder``.

    Raises:
        OSError: it cannot be written.
    """
    launch = launch_id()
    if launch is None:
        (folder / FILE).unlink(missing_ok=True)
    else:
        (folder / FILE).write_text(launch)


def is_this_launch(folder: Path) -> bool:
    """Whether it was this launch that wrote there last."""
    try:
        return (folder / FILE).read_text() == launch_id()
    except OSError:
        return False
