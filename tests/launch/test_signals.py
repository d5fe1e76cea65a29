"""Signals that ask a process to stop, and those that end it."""

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from adl_dist.launch import signals
from adl_dist.launch.local import StopHandler
from adl_dist.launch.signals import SignalEscalation, signal_handler

# The main thread is busy in C for a while and runs no Python, as when it waits for a message of a peer.
STUCK = """
import hashlib, sys, threading
from adl_dist.launch.signals import signal_handler

def ask(name):
    print(name, flush=True)
    return len(sys.argv) < 2

with signal_handler(ask):
    threading.Thread(target=lambda: print("ready", flush=True)).start()
    hashlib.pbkdf2_hmac("sha256", b"", b"", 1 << 30)
"""


def stuck(*arguments):
    environment = {k: v for k, v in os.environ.items() if k != "RANK"}
    return subprocess.Popen(
        [sys.executable, "-c", STUCK, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def test_a_process_in_c_stops_at_one_signal_and_ends_at_two():
    """A process that waits in C asks at the first signal and ends at the second."""
    process = stuck()
    try:
        assert process.stdout.readline() == "ready\n"
        for number in (signal.SIGUSR1, signal.SIGUSR1, signal.SIGINT):
            process.send_signal(number)
            assert process.stdout.readline() == f"{number.name}\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=10)
    finally:
        process.kill()
    assert process.returncode == 130
    assert err.strip() == "adl-dist: ended by SIGINT; the same command resumes from the last checkpoint"


def test_a_process_whose_peer_is_gone_ends_at_the_first_signal():
    process = stuck("alone")
    try:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=10)
    finally:
        process.kill()
    assert process.returncode == 128 + signal.SIGTERM
    assert "a process of the run is gone; ended by SIGTERM" in err


def test_handlers_and_the_wakeup_pipe_are_restored():
    before = [signal.getsignal(number) for number in signals.STOPPING]
    threads, asked = threading.active_count(), []
    with signal_handler(lambda name: not asked.append(name)):
        os.kill(os.getpid(), signal.SIGTERM)
        deadline = time.monotonic() + 5
        while not asked and time.monotonic() < deadline:
            time.sleep(0.01)
    assert asked == ["SIGTERM"]
    assert [signal.getsignal(number) for number in signals.STOPPING] == before
    assert signal.set_wakeup_fd(-1) == -1
    assert threading.active_count() == threads


def test_no_room_for_temporary_files_keeps_no_stop_from_rank_0(tmp_path, monkeypatch):
    def full(path, text):
        path.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before, asked = signal.getsignal(signal.SIGUSR1), []
    monkeypatch.setenv("ADL_DIST_RENDEZVOUS", str(tmp_path))
    stopping = StopHandler(passes_on=True)  # of the launcher
    stopping.folder = tmp_path
    with signal_handler(lambda name: not asked.append(name)):
        monkeypatch.setattr(Path, "write_text", full)
        stopping.handle(signal.SIGTERM, None)
        deadline = time.monotonic() + 5
        while not asked and time.monotonic() < deadline:
            time.sleep(0.01)
    with signal_handler(lambda name: True):  # which cannot say so to the launcher
        pass
    assert asked == ["SIGUSR1"]
    assert signal.getsignal(signal.SIGUSR1) is before


def test_a_handler_that_is_not_pythons_stays(monkeypatch):
    known = signal.getsignal
    monkeypatch.setattr(signal, "getsignal", lambda number: None if number == signal.SIGUSR1 else known(number))
    before = known(signal.SIGUSR1)
    with signal_handler(lambda name: True):
        assert known(signal.SIGUSR1) is before
        assert known(signal.SIGTERM) is signals._do_nothing


def test_outside_of_the_main_thread_nothing_is_done():
    found = []

    def look():
        with signal_handler(lambda name: True):
            found.append(signal.getsignal(signal.SIGUSR1))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [signal.getsignal(signal.SIGUSR1)]


@pytest.mark.parametrize(
    ("sent", "ends"),
    [
        ([(signal.SIGTERM, 0.0), (signal.SIGTERM, 0.2)], False),  # the echo of a launcher
        ([(signal.SIGTERM, 0.0), (signal.SIGTERM, 2.0)], True),
        ([(signal.SIGTERM, 0.0), (signal.SIGINT, 0.2)], True),
        ([(signal.SIGINT, 0.0), (signal.SIGINT, 0.2)], True),
        ([(signal.SIGUSR1, 0.0), (signal.SIGINT, 2.0)], False),
        ([(signal.SIGINT, 0.0), (signal.SIGUSR1, 2.0)], False),
    ],
    ids=str,
)
def test_the_second_sigterm_or_sigint_ends_but_no_echo_does(sent, ends, monkeypatch):
    patience = SignalEscalation()
    answers = []
    for number, when in sent:
        monkeypatch.setattr(signals.time, "monotonic", lambda when=when: when)
        answers.append(patience.ends_with(number))
    assert answers == [False, ends]
