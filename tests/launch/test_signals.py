"""Signals that ask a process to stop, and those that end it."""

import functools
import os
import queue
import signal
import subprocess
import sys
import threading
import time

import pytest

from adl_dist.launch import signals
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


INT, TERM, USR1 = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1
PLAIN_INT = functools.partial(signal.signal, INT, signal.SIG_DFL)


@pytest.mark.parametrize(
    ("arguments", "asking", "last", "said"),
    [
        ([], [USR1, USR1, INT], INT, "ended by SIGINT; the same command resumes from the last checkpoint"),
        (["alone"], [], TERM, "a process of the run is gone; ended by SIGTERM; the same command resumes from "),
    ],
    ids=["asks at one and ends at two", "ends at one, as a peer is gone"],
)
def test_a_process_that_waits_in_c_gets_signals(arguments, asking, last, said):
    command, pipe = [sys.executable, "-c", STUCK, *arguments], subprocess.PIPE
    alone = {k: v for k, v in os.environ.items() if k != "RANK"}
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=alone, preexec_fn=PLAIN_INT) as process:
        try:
            assert process.stdout.readline() == "ready\n"
            for number in asking:
                process.send_signal(number)
                assert process.stdout.readline() == f"{number.name}\n"
            time.sleep(signals.ECHO_SECONDS[INT] if asking else 0.0)
            process.send_signal(last)
            assert process.wait(timeout=10) == 128 + last
            assert process.stderr.read().strip().startswith(f"adl-dist: {said}")
        finally:
            process.kill()


def test_handlers_and_the_wakeup_pipe_are_restored():
    before = [signal.getsignal(number) for number in signals.STOPPING]
    threads, asked = threading.active_count(), queue.SimpleQueue()
    with signal_handler(lambda name: asked.put(name) is None):
        os.kill(os.getpid(), signal.SIGTERM)
        assert asked.get(timeout=5) == "SIGTERM"
    assert asked.empty()
    assert [signal.getsignal(number) for number in signals.STOPPING] == before
    assert signal.set_wakeup_fd(-1) == -1
    assert threading.active_count() == threads


@pytest.mark.parametrize(
    ("sent", "ends"),
    [
        ([(TERM, 0.0), (TERM, 0.2)], False),  # the echo of a launcher
        ([(TERM, 0.0), (TERM, 2.0)], True),
        ([(TERM, 0.0), (INT, 0.2)], True),
        ([(INT, 0.0), (INT, 0.5)], True),
        ([(INT, 0.0), (INT, 0.2)], False),
        ([(USR1, 0.0), (INT, 2.0)], False),
        ([(INT, 0.0), (USR1, 2.0)], False),
    ],
    ids=str,
)
def test_the_second_sigterm_or_sigint_ends_but_no_echo_does(sent, ends, monkeypatch):
    escalation, answers = SignalEscalation(), []
    for number, when in sent:
        monkeypatch.setattr(signals.time, "monotonic", lambda when=when: when)
        answers.append(escalation.ends_with(number))
    assert answers == [False, ends]
