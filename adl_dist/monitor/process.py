"""What a process can find out about itself and about its threads and children, for a status and a diagnosis."""

import multiprocessing
import os
import sys
import sysconfig
import threading
from contextlib import suppress
from pathlib import Path
from types import FrameType

import torch

from adl_dist.checkpoint.async_save import COMMITTING, SAVING
from adl_dist.distributed.procfs import state_of

# A process hangs at the line that called into these.
LIBRARIES = (str(Path(torch.__file__).parent) + os.sep, sysconfig.get_path("stdlib"))
OTHER_PACKAGES = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))


def loaders() -> list[tuple[int, str]]:
    """Return the process id and state of each child process, which load data."""
    children = [child.pid for child in multiprocessing.active_children() if child.pid is not None]
    return [(pid, state_of(pid)) for pid in sorted(children)]


def saver() -> threading.Thread | None:
    """Return the thread that saves during training: the one that writes, else the one that waits for all to write."""
    by_name = {thread.name: thread for thread in threading.enumerate()}
    return by_name.get(SAVING) or by_name.get(COMMITTING)


def is_debugged() -> bool:
    """Return whether a debugger follows any thread. ``sys.gettrace`` would tell only about the calling one."""
    monitoring = getattr(sys, "monitoring", None)  # new in Python 3.12, and debuggers begin to use it
    if monitoring is not None and monitoring.get_tool(monitoring.DEBUGGER_ID) is not None:
        return True
    for innermost in sys._current_frames().values():
        frame: FrameType | None = innermost
        while frame is not None:
            if frame.f_trace is not None:
                return True
            frame = frame.f_back
    return False


def memory_bytes(device: torch.device) -> int:
    """Return the bytes that this process holds now: on ``device`` if that is a GPU, else resident in memory."""
    if device.type == "cuda":  # by name, because the calling thread has a current device of its own
        return int(torch.cuda.memory_allocated(device))
    with suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def user_frame(thread: int | None) -> str:
    """Return where the thread with that identity is: its innermost line that is not in a library; "": no thread."""
    frame = innermost = sys._current_frames().get(thread) if thread is not None else None
    while frame is not None and _is_library(frame.f_code.co_filename):
        frame = frame.f_back
    frame = frame or innermost
    if frame is None:
        return ""
    return f"{'/'.join(Path(frame.f_code.co_filename).parts[-2:])}:{frame.f_lineno} in {frame.f_code.co_name}"


def _is_library(file: str) -> bool:
    # The packages lie inside of the standard library's folder.
    if file.startswith(LIBRARIES[0]) or file.startswith("<"):
        return True
    return file.startswith(LIBRARIES[1]) and not file.startswith(OTHER_PACKAGES)
