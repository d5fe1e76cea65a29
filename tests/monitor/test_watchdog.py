"""The watchdog with all stages in one process, where something fails it too, and heartbeat monitors of the others."""

import contextlib
import logging
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from adl_dist.checkpoint import ownership, storage
from adl_dist.control.run_socket import LiveControl
from adl_dist.distributed.procfs import machine, start_time
from adl_dist.monitor import watchdog
from adl_dist.monitor.status import ProcessStatus
from adl_dist.monitor.timeouts import WatchdogTimeouts
from adl_dist.monitor.watchdog import Heartbeat, HeartbeatMonitor, print_bounded
from adl_dist.report import Progress, tell, warn
from tests.support.commands import OF_RANKS
from tests.support.ranks import RanksFailed, run_ranks
from tests.support.stalls import ASLEEP_SECONDS, NUM_SAMPLES, STALL_SECONDS, At, train
from tests.support.toys import FixedImages

needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="looks at processes in /proc")

DEBUGGED = (
    "import pathlib, sys, time; from tests.support.stalls import *\n"
    "stage_1 = At(5, breakpoint)\n"
    "stage_0 = At(9, lambda: time.sleep(STALL_SECONDS / 2))  # lets the watchdog see that something moves again\n"
    "train(pathlib.Path(sys.argv[1]), [(5, stage_1), (2, stage_0)], K=2, abort_seconds=1.6)\n"
    "print('trained to its end')"
)


class StuckInWorker(FixedImages):
    """Its twentieth sample takes long; served by a worker process."""

    def __getitem__(self, index):
        if index == 19:
            time.sleep(ASLEEP_SECONDS)
        return super().__getitem__(index)


class Raises:
    """A stream whose reader has gone."""

    def write(self, text):
        raise BrokenPipeError(32, "Broken pipe")

    flush = isatty = lambda self: False


def wait_until(there, seconds=10):
    deadline = time.monotonic() + seconds
    while not there() and time.monotonic() < deadline:
        time.sleep(0.01)


def test_a_stage_that_sleeps_is_reported_and_that_it_continues(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(ownership, "BEAT_SECONDS", STALL_SECONDS / 4)  # which is no progress
    asleep, slow_after_it = At(5, lambda: time.sleep(ASLEEP_SECONDS)), At(9, lambda: time.sleep(STALL_SECONDS / 2))
    train(tmp_path, [(5, asleep), (2, slow_after_it)], K=2)
    for said in ((tmp_path / "logs" / "rank0.log").read_text(), capfd.readouterr().err):
        assert "likely cause: stage 1 (" in said
        assert re.search(r"still at work: forward \d since 1 s, at monitor/test_watchdog.py:\d+ in <lambda>", said)
        assert "wait for its turn" in said
        assert "adl-dist: continuing after" in said
        assert "could not look" not in said


@needs_proc
def test_a_stuck_worker_process_is_reported_with_its_id(tmp_path, capfd):
    train(tmp_path, K=2, data=StuckInWorker(NUM_SAMPLES), num_workers=1)
    causes = [line for line in capfd.readouterr().err.splitlines() if line.startswith("likely cause: ")]
    stuck = r"the data loader is stuck: it loads micro-batch .* 1 worker processes \(pid \d"
    assert any(re.search(stuck, cause) for cause in causes), causes


class Hangs(logging.Handler):
    def emit(self, record):
        if "no progress" in record.getMessage():
            time.sleep(1000)


def stand_still(folder):
    """A process of its own, with its standard error in a file."""
    for name in OF_RANKS:
        os.environ.pop(name, None)
    os.dup2(os.open(folder / "err", os.O_WRONLY | os.O_CREAT), 2)
    logging.getLogger("adl_dist").addHandler(Hangs())
    LiveControl.close = lambda self: time.sleep(1000)
    train(folder, [(5, At(5, lambda: time.sleep(60)))], K=2, abort_seconds=1.6)


@pytest.mark.ranks
def test_a_standstill_ends_with_exit_code_1_and_the_cause_last(tmp_path):
    """A log and a socket that hang keep the watchdog neither from speaking nor from ending the job."""
    with pytest.raises(RanksFailed, match=r"^rank 0: exit code 1$"):
        run_ranks(1, stand_still, tmp_path, timeout_seconds=50)
    said = (tmp_path / "err").read_text()
    assert "likely cause: stage 1 (" in said
    ended = r"adl-dist: error: no progress in .*\(runtime\.watchdog_abort_seconds=1\.6\): stage 1 \("
    assert re.match(ended, said.splitlines()[-1])


def test_a_process_in_which_a_debugger_stands_is_not_ended(tmp_path):
    command, pipe = [sys.executable, "-c", DEBUGGED, tmp_path], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as run:
        said = ""
        while not said.endswith("(Pdb) "):
            said += run.stdout.read(1) or pytest.fail(f"it ended: {said}")
        time.sleep(2.6)
        out, err = run.communicate("continue\n", timeout=50)
    assert "in a debugger, so the job is not ended" in err
    assert "continuing after" in err
    assert out.endswith("trained to its end\n")


@pytest.mark.parametrize("stream", [Raises(), None, "closed"])
def test_a_stream_that_cannot_be_written_ends_no_run(tmp_path, monkeypatch, caplog, stream):
    if stream == "closed":
        stream = (tmp_path / "stream").open("w")
        stream.close()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(sys, "stdout", stream)
    tell(stream, "said")
    warn("said")
    print_bounded("no progress")  # as the watchdog says it
    assert [record.getMessage() for record in caplog.records] == ["said", "no progress"]
    progress = Progress(num_stages=1)
    progress.begin(0, 1, 1)
    progress.note("said")
    progress.end(0.5, None)


@contextlib.contextmanager
def another_process():
    """A process, and its status as rank 0."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        try:
            began = start_time(process.pid)
            yield process, ProcessStatus(host="node", pid=process.pid, machine=machine(), start_time=began)
        finally:
            process.kill()


@needs_proc
@pytest.mark.parametrize(
    ("number", "said"),
    [
        (signal.SIGSTOP, "has not asked for . s; stage 0 {where}: the process is stopped (SIGSTOP); kill -CONT {pid} "),
        (signal.SIGKILL, "has not asked for . s; stage 0 {where}: the process is gone: killed, or it crashed"),
        (None, "has not asked once in . s; it has ended or hangs between its meeting"),
    ],
)
def test_a_heartbeat_monitor_ends_rank_0_that_asks_no_more(number, said, monkeypatch):
    lines, ends, gone, answers = [], [], [], Heartbeat()
    monkeypatch.setattr(watchdog, "print_bounded", lambda text, level=0: lines.append(text))
    monkeypatch.setattr(watchdog, "end", lambda: ends.append(time.monotonic()))
    monitor = HeartbeatMonitor(answers, 1, WatchdogTimeouts(stall_seconds=0.4, abort_seconds=0.8), gone.append)
    with another_process() as (rank_0, asker):
        monitor.start()
        for _ in range(5 if number else 0):
            answers.answer(asker)
            time.sleep(0.1)
        assert lines == []
        began = time.monotonic()
        if number:
            os.kill(rank_0.pid, number)
        wait_until(lambda: ends)
        monitor.stop()
        monitor.join()
        assert not number or rank_0.wait(timeout=5) == -signal.SIGKILL
    assert number != signal.SIGKILL or len(gone) == 1, "reported once"
    why = re.escape(f"rank 0, which looks after the job, {said.format(where=asker.where, pid=asker.pid)}")
    assert re.match(f"adl-dist: {why}".replace(r"\.\ s", r"\d s"), lines[0]), lines
    assert re.match(f"adl-dist: error: rank 1 ends itself: {why}".replace(r"\.\ s", r"\d s"), lines[1]), lines
    assert 0.8 <= ends[0] - began < 0.8 + 2


def test_a_background_save_that_is_slow_is_no_standstill(tmp_path, monkeypatch, capfd):
    write, left = storage.write_piece, [STALL_SECONDS / 4] * 7

    def slowly(file, data):
        if left:
            time.sleep(left.pop())
        return write(file, data)

    monkeypatch.setattr(storage, "write_piece", slowly)
    train(tmp_path, K=1)
    assert not left
    assert "no progress" not in capfd.readouterr().err


COMMAND = """
import atexit, importlib, threading, time
command = importlib.import_module("adl_dist.cli.main")

class Module:
    def __del__(self):
        print("taken apart")

def run(words, **_):
    atexit.register(print, "registered by somebody")
    threading.Thread(target=lambda: (time.sleep(0.2), print("of a thread"))).start()
    return 3

kept, command._run = Module(), run
command.main()
"""


def test_a_command_ends_with_its_code_after_exit_handlers():
    done = subprocess.run([sys.executable, "-c", COMMAND], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (3, "of a thread\nregistered by somebody\n", "")
