"""The ties of a process to its launcher, ours or torchrun. No torch: they hold while torch is still being loaded."""

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path

# Set by the launcher: a folder for a store that listens on no port at all, its process id, and a name for this launch,
# which a script that starts torchrun may give, too.
RENDEZVOUS_FOLDER = "ADL_DIST_RENDEZVOUS"
LAUNCHER = "ADL_DIST_LAUNCHER"
LAUNCH_ID = "ADL_DIST_LAUNCH_ID"
# Set by a script that starts torchrun, whose exit code does not show it: a file that a rank makes if its run has
# stopped.
STOPPED_FILE = "ADL_DIST_STOPPED_FILE"
# Set by a process for itself: its id, if another command of ours has started it.
PART_OF_COMMAND = "ADL_DIST_PART_OF_COMMAND"

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
# Exit code of a run that was asked to stop and has saved; EX_TEMPFAIL of sysexits.h: the same command resumes it.
STOPPED_CODE = 75
# Files in the launcher's folder: the process id of rank 0 while it can be asked to stop (by SIGUSR1), the name of the
# signal that the launcher got, and that the run has stopped.
LISTENS, ASKED, STOPPED = "listens", "asked", "stopped"


def end_with_launcher() -> None:
    """Die silently at Ctrl-C, which the launcher reports, and (on Linux) if the launcher is killed."""
    if LAUNCHER not in os.environ:
        return
    if "RANK" in os.environ:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # asks to stop, which means nothing but while training
    else:
        os.environ[PART_OF_COMMAND] = str(os.getpid())
    # Python's own handler would wait for a message that never comes, and print a traceback. A shell that starts a job
    # in the background has its signals ignored, and that stands.
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.platform == "linux":
        _end_with_parent()
        if os.getppid() != int(os.environ[LAUNCHER]):  # it died before we asked
            os.kill(os.getpid(), signal.SIGKILL)
    del os.environ[LAUNCHER]  # not meant for processes that this one starts


def end_with_torchrun() -> None:
    """Die (on Linux) if the torchrun that started this rank is killed.

    Nothing else would end it: it needs its peers and no torchrun, and while it trains on alone, the same command finds
    the run folder taken. (A torchrun that died before this was asked leaves a rank that finds no store and gives up.)
    """
    if {"TORCHELASTIC_RUN_ID", "RANK"} <= os.environ.keys() and sys.platform == "linux":
        _end_with_parent()


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def is_part_of_more() -> bool:
    """Return whether another command of ours, like a sweep, has started this one and decides how to continue."""
    return os.environ.get(PART_OF_COMMAND) == str(os.getpid())


def set_flag(name: str, text: str | None = "") -> None:
    """Set a flag for our own launcher, if there is one, or remove it (None); only rank 0 does."""
    folder = os.environ.get(RENDEZVOUS_FOLDER)
    if not folder or os.environ.get("RANK", "0") != "0":
        return
    if text is None:
        Path(folder, name).unlink(missing_ok=True)
    else:
        write_flag(Path(folder), name, text)


def flag_stopped() -> None:
    """Let the launcher of this rank know that the run has stopped and is not complete."""
    set_flag(STOPPED)
    if path := os.environ.get(STOPPED_FILE):
        with contextlib.suppress(OSError):  # the run has stopped and is saved all the same
            Path(path).touch()


def read_flag(name: str, folder: Path | None = None) -> str | None:
    """Return the text of a flag in ``folder``, by default the environment's; None: it is not set."""
    place = folder or os.environ.get(RENDEZVOUS_FOLDER)
    with contextlib.suppress(FileNotFoundError):
        return (Path(place) / name).read_text() if place else None
    return None


def write_flag(folder: Path, name: str, text: str) -> None:
    """Write a flag whole or not at all; a run does not end because it cannot be written."""
    unfinished = folder / f".{name}"
    with contextlib.suppress(OSError):  # the launcher is gone, and its folder with it; the disk is full
        unfinished.write_text(text)
        unfinished.rename(folder / name)
