"""The ties of a process to its launcher. No torch."""

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path

# Set by the launcher: a folder for a store without a port, its process id, and a name for this launch, which a script
# that starts torchrun may also set.
RENDEZVOUS_FOLDER = "ADL_DIST_RENDEZVOUS"
LAUNCHER = "ADL_DIST_LAUNCHER"
LAUNCH_ID = "ADL_DIST_LAUNCH_ID"
# Set by a script that starts torchrun: a file that a rank creates if its run has stopped, because torchrun's exit code
# does not show it.
STOPPED_FILE = "ADL_DIST_STOPPED_FILE"
# Set by adl_dist's rendezvous of torchrun: a file for the text of a user's error that ends a rank.
USER_ERROR_FILE = "ADL_DIST_USER_ERROR_FILE"
# Set by a process for itself: its id, if another adl-dist command has started it.
PART_OF_COMMAND = "ADL_DIST_PART_OF_COMMAND"
# Limit for rank 0 to print the error of a job; torchrun, and our own launcher, then end the other ranks.
RANK_0_SECONDS = 5.0

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
# Exit code of a run that was stopped and has saved; EX_TEMPFAIL of sysexits.h: the same command resumes it.
STOPPED_CODE = 75
# Files in the launcher's folder: the process id of rank 0 while SIGUSR1 can stop it, the name of the signal that the
# launcher received, and a mark that the run has stopped.
LISTENS, ASKED, STOPPED = "listens", "asked", "stopped"


def end_with_launcher() -> None:
    """Die silently at Ctrl-C, and (on Linux) if the launcher is killed."""
    if LAUNCHER not in os.environ:
        return
    if "RANK" in os.environ:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # asks to stop, which has a meaning only while training
    else:
        os.environ[PART_OF_COMMAND] = str(os.getpid())
    # Python's own handler would wait for a message that never comes, and print a traceback. A shell ignores the signals
    # of a background job, and that stays so.
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.platform == "linux":
        _end_with_parent()
        if os.getppid() != int(os.environ[LAUNCHER]):  # it has died already
            os.kill(os.getpid(), signal.SIGKILL)
    del os.environ[LAUNCHER]  # not for the children of this process


def end_with_torchrun() -> None:
    """Die (on Linux) if the torchrun that started this rank is killed.

    Nothing else would end the rank, which needs only its peers. As long as it trains, the same command finds the run
    folder taken. (A rank whose torchrun died earlier finds no store and gives up.)
    """
    if {"TORCHELASTIC_RUN_ID", "RANK"} <= os.environ.keys() and sys.platform == "linux":
        _end_with_parent()


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def is_part_of_more() -> bool:
    """Return whether another adl-dist command has started this one."""
    return os.environ.get(PART_OF_COMMAND) == str(os.getpid())


def set_flag(name: str, text: str | None = "") -> None:
    """Set rank 0's flag for our launcher, or remove it if ``text`` is None."""
    folder = os.environ.get(RENDEZVOUS_FOLDER)
    if not folder or os.environ.get("RANK", "0") != "0":
        return
    if text is None:
        Path(folder, name).unlink(missing_ok=True)
    else:
        write_flag(Path(folder), name, text)


def flag_stopped() -> None:
    """Tell the launcher that the run has stopped and is not complete."""
    set_flag(STOPPED)
    if path := os.environ.get(STOPPED_FILE):
        with contextlib.suppress(OSError):  # the run has stopped and is saved in any case
            Path(path).touch()


def flag_user_error(text: str) -> None:
    """Pass an error that no restart cures to torchrun, which ends all nodes."""
    if path := os.environ.get(USER_ERROR_FILE):
        with contextlib.suppress(OSError):
            Path(path).write_text(f"rank {os.environ.get('RANK', '0')}: {text}")


def read_flag(name: str, folder: Path | None = None) -> str | None:
    """Return the text of a flag, or None if it is not set."""
    place = folder or os.environ.get(RENDEZVOUS_FOLDER)
    with contextlib.suppress(FileNotFoundError):
        return (Path(place) / name).read_text() if place else None
    return None


def write_flag(folder: Path, name: str, text: str) -> None:
    """Write a flag atomically, and ignore errors."""
    unfinished = folder / f".{name}"
    with contextlib.suppress(OSError):  # the launcher is gone, and its folder with it; the disk is full
        unfinished.write_text(text)
        unfinished.rename(folder / name)
