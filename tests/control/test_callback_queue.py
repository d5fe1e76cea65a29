"""Calls of the user's code wait while stages train, are made by one thread at a time, and hide no other error."""

import threading

import pytest

from adl_dist.control.callback_queue import CallbackQueue


def test_no_two_threads_make_calls_at_a_time():
    """As when a process fails while rank 0 is in a slow callback: that thread makes what waits behind it, in order."""
    code, made, entered, leave = CallbackQueue(), [], threading.Event(), threading.Event()

    def slow():
        entered.set()
        made.append(("slow", threading.get_ident(), leave.wait(20)))

    def train():
        with code.while_training():
            code.put(slow)
            code.put(lambda: made.append(("behind", threading.get_ident(), True)))
            trainer.start()
            assert entered.wait(20)
            raise OSError("a process has failed")

    trainer = threading.Thread(target=code.run_waiting)
    with pytest.raises(OSError, match="a process has failed"):
        train()
    assert made == [], "the coordinator waits for no callback"
    leave.set()
    trainer.join(20)
    assert made == [("slow", trainer.ident, True), ("behind", trainer.ident, True)]


def test_after_a_call_that_fails_there_are_no_others():
    code, made = CallbackQueue(), []
    with pytest.raises(ZeroDivisionError):
        code.put(lambda: 1 / 0)
    code.put(lambda: made.append(1))
    with code.while_training():
        code.put(lambda: made.append(2))
    assert made == []
