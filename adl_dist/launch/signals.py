"""Signals: the first asks a process to stop, the second ends it.

Python runs a handler only in the main thread and only between two of its own instructions, not while it waits for a
message of a peer. So the handlers here do nothing; a separate thread reads the bytes that Python's C code writes to the
wakeup pipe at once.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

from adl_dist.distributed import parent_process
from adl_dist.report import tell

STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)  # SLURM is usually configured to send SIGUSR1
# Of a signal that reaches a process twice: a scheduler sends SIGTERM to every process, and a launcher among them passes
# it on; timeout passes on the SIGINT of a terminal, which has sent it to the whole group.
ECHO_SECONDS = {signal.SIGTERM: 1.0, signal.SIGINT: 0.3}
CAUSE_SECONDS = 2.0  # for the main thread to report the process that is gone, and end


class SignalEscalation:
    """The rule by which a signal asks a process to stop or ends it at once.

    The second SIGTERM or SIGINT ends it, except for an echo of the first. SIGUSR1 always asks; launchers pass on every
    signal as SIGUSR1.
    """

    def __init__(self) -> None:
        self._first: tuple[int, float] | None = None

    def ends_with(self, number: int) -> bool:
        """Record a signal, and return whether it ends the process."""
        now = time.monotonic()
        if number == signal.SIGUSR1:
            return False
        if self._first is None:
            self._first = number, now
            return False
        return number != self._first[0] or now - self._first[1] >= ECHO_SECONDS[signal.Signals(number)]


@contextlib.contextmanager
def signal_handler(ask: Callable[[str], bool]) -> Iterator[None]:
    """Pass the first signal to ``ask``, and end the process at the second.

    A separate thread calls ``ask`` with the signal's name; if it returns False, a process of the run is gone, and this
    process ends. Outside of the main thread, where Python has no signals, this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    # A shell ignores SIGINT for a background job, and that stays so. The ranks of our own launcher ignore SIGUSR1 until
    # now.
    found = {number: signal.getsignal(number) for number in STOPPING}
    before = {n: h for n, h in found.items() if h is not signal.SIG_IGN or n is signal.SIGUSR1}
    wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in before:
        signal.signal(number, _do_nothing)
    watcher = threading.Thread(target=_watch, args=(reader, set(before), ask), name="signals", daemon=True)
    watcher.start()
    try:
        parent_process.set_flag(parent_process.LISTENS, str(os.getpid()))
        yield
    finally:
        parent_process.set_flag(parent_process.LISTENS, None)
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(wakeup)
        os.close(writer)
        watcher.join()
        os.close(reader)


def signal_name(number: int) -> str:
    """Return the name of a signal."""
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def _do_nothing(number: int, frame: object) -> None:
    pass


def _watch(reader: int, numbers: set[int], ask: Callable[[str], bool]) -> None:
    escalation = SignalEscalation()
    while received := os.read(reader, 1):  # empty once the other end is closed
        (number,) = received
        if number not in numbers:
            continue
        if escalation.ends_with(number):
            _end(number, "ended")
        passed_on = parent_process.read_flag(parent_process.ASKED) if number == signal.SIGUSR1 else None
        if not ask(passed_on or signal.Signals(number).name):
            # A launcher may send this signal before rank 0 has found and reported the process that is gone.
            time.sleep(CAUSE_SECONDS)
            _end(number, "a process of the run is gone; ended")


def _end(number: int, how: str) -> None:
    if "RANK" not in os.environ:  # the launcher of several ranks prints it
        why = f"{how} by {signal.Signals(number).name}"
        tell(sys.stderr, f"\nadl-dist: {why}; the same command resumes from the last checkpoint\n")
    for stream in (sys.stdout, sys.stderr):
        tell(stream, "")
    os._exit(128 + number)  # the main thread may wait for a message that will never come
