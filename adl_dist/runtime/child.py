"""What a rank owes to its launcher, ours or torchrun. No torch: it has to hold while torch is still being loaded."""

import ctypes
import os
import signal
import sys

# Set by the launcher: a folder for a store that listens on no port at all, its process id, and how often it has
# started its ranks again.
RENDEZVOUS_FOLDER = "ADL_DIST_RENDEZVOUS"
LAUNCHER = "ADL_DIST_LAUNCHER"
RESTARTS = "ADL_DIST_RESTARTS"

PR_SET_PDEATHSIG = 1


def end_with_launcher() -> None:
    """Die at Ctrl-C without a word, since the launcher has one, and (on Linux) if the launcher is killed."""
    if LAUNCHER not in os.environ:
        return
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
    if "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ and sys.platform == "linux":
        _end_with_parent()


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def is_restarted() -> bool:
    """Whether this rank takes the place of one that died, started by adl_dist's launcher or by torchrun."""
    return any(int(os.environ.get(name, 0)) > 0 for name in (RESTARTS, "TORCHELASTIC_RESTART_COUNT"))
