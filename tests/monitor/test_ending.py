"""The doctor where something fails it too: a log that hangs, streams that raise, an error of its own, a debugger."""

import logging
import subprocess
import sys
import time

import pytest

from adl_dist.checkpoint import layout
from adl_dist.errors import ConfigError
from adl_dist.monitor import heartbeat
from adl_dist.monitor.activity import ActivityLog
from adl_dist.monitor.status import CoordinatorStatus
from adl_dist.monitor.timeouts import WatchdogTimeouts
from adl_dist.monitor.watchdog import Watchdog
from adl_dist.report import Progress, tell, warn
from tests.support.stalls import STALL_SECONDS, asleep_then_slow, fit, trainer_of

RUN = (
    "import logging, pathlib, sys, time; from tests.support.stalls import *\n"
    "{before}\n"
    "stage_1 = At(5, lambda: {act})\n"
    "stage_0 = At(9, lambda: time.sleep(STALL_SECONDS / 2))  # lets the doctor see that something moves again\n"
    "fit(trainer_of([(5, stage_1), (2, stage_0)], num_stages=2, abort_seconds=1.6), pathlib.Path(sys.argv[1]))\n"
    "print('trained to its end')"
)


class Raises:
    """A stream whose reader has gone."""

    def write(self, text):
        raise BrokenPipeError(32, "Broken pipe")

    flush = isatty = lambda self: False


def test_a_log_that_hangs_does_not_keep_the_job_from_ending(tmp_path):
    """A log that hangs keeps the watchdog neither from speaking nor from ending the job."""
    before = (
        "class Hangs(logging.Handler):\n"
        "    def emit(self, record):\n"
        "        if 'no progress' in record.getMessage(): time.sleep(1000)\n"
        "logging.getLogger('adl_dist').addHandler(Hangs())\n"
        "from adl_dist.control.run_socket import LiveControl\n"
        "LiveControl.close = lambda self: time.sleep(1000)"
    )
    script = RUN.format(before=before, act="time.sleep(60)")
    ran = subprocess.run([sys.executable, "-c", script, tmp_path], capture_output=True, text=True, timeout=50)
    assert ran.returncode == 1
    assert "likely cause: stage 1 (" in ran.stderr
    assert ran.stderr.splitlines()[-1].startswith("adl-dist: error: no progress in ")


def test_a_process_in_which_a_debugger_stands_is_not_ended(tmp_path):
    script = RUN.format(before="", act="breakpoint()")
    command = [sys.executable, "-c", script, tmp_path]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as run:
        said = ""
        while not said.endswith("(Pdb) "):
            said += run.stdout.read(1) or pytest.fail(f"it ended: {said}")
        time.sleep(3.5)
        out, err = run.communicate("continue\n", timeout=50)
    assert "in a debugger, so the job is not ended" in err
    assert "continuing after" in err
    assert out.endswith("trained to its end\n")


@pytest.mark.parametrize("stream", [Raises(), None, "closed"])
def test_a_stream_that_cannot_be_written_ends_no_run(tmp_path, monkeypatch, stream):
    if stream == "closed":
        stream = (tmp_path / "stream").open("w")
        stream.close()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(sys, "stdout", stream)
    tell(stream, "said")
    warn("said")
    progress = Progress(num_stages=1)
    progress.begin(0, 1, 1)
    progress.note("said")
    progress.end(0.5, None)


def test_a_doctor_that_nobody_hears_writes_its_log_and_looks_on(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stderr", Raises())
    fit(trainer_of(asleep_then_slow(), num_stages=2), tmp_path)
    log = (tmp_path / "logs" / "rank0.log").read_text()
    assert "likely cause: stage 1 (" in log
    assert "continuing after" in log
    assert "could not look" not in log


class Alone:
    """The other processes of a job that has none."""

    def statuses(self, limits, asker, *, closely):
        assert not limits
        return {}


def test_a_doctor_that_an_error_befalls_says_so_once_and_goes_on(caplog):
    looks = []

    def coordination(*, closely=False):
        looks.append(time.monotonic())
        if len(looks) < 4:
            raise RuntimeError("planted")
        return CoordinatorStatus()

    nothing = dict.fromkeys(("on_gone", "on_end"), lambda *_: None)
    timeouts = WatchdogTimeouts(stall_seconds=0.1, abort_seconds=None)
    doctor = Watchdog(1, Alone(), ActivityLog(1), coordination, timeouts, **nothing)
    doctor.start()
    began = time.monotonic()
    while len(looks) < 6 and time.monotonic() - began < 10:
        time.sleep(0.01)
    doctor.stop()
    doctor.join()
    assert len(looks) >= 6
    assert [r.levelno for r in caplog.records if "could not look" in r.getMessage()] == [logging.ERROR]


def test_a_deputy_that_rank_0_never_asked_ends_its_process(monkeypatch):
    told, ends = [], []
    monkeypatch.setattr(heartbeat, "print_bounded", lambda text, level=0: told.append(text))
    monkeypatch.setattr(heartbeat, "end", lambda: ends.append(time.monotonic()))
    timeouts = WatchdogTimeouts(stall_seconds=0.2, abort_seconds=0.5)
    watching = heartbeat.HeartbeatMonitor(heartbeat.Heartbeat(), 1, timeouts)
    watching.start()
    began = time.monotonic()
    while not ends and time.monotonic() - began < 10:
        time.sleep(0.05)
    watching.stop()
    assert "has not asked once in" in told[0]
    assert told[1].startswith("adl-dist: error: rank 1 ends itself: rank 0")
    assert 0.5 <= ends[0] - began < 4


def test_a_shared_process_is_ended_only_if_asked_for():
    assert WatchdogTimeouts().settled(distributed=False).abort_seconds is None
    assert WatchdogTimeouts().settled(distributed=True).abort_seconds == 600
    assert WatchdogTimeouts(abort_seconds=None).settled(distributed=True).abort_seconds is None
    assert WatchdogTimeouts(abort_seconds=90.0).settled(distributed=False).abort_seconds == 90
    with pytest.raises(ConfigError, match="must be a number, None"):
        WatchdogTimeouts(abort_seconds="never")


def test_a_background_save_that_is_slow_is_no_standstill(tmp_path, monkeypatch, capfd):
    write, left = layout.write_piece, [STALL_SECONDS / 4] * 12

    def slowly(file, data):
        if left:
            time.sleep(left.pop())
        return write(file, data)

    monkeypatch.setattr(layout, "write_piece", slowly)
    fit(trainer_of([], num_stages=1), tmp_path)
    assert not left
    assert "no progress" not in capfd.readouterr().err


def test_large_data_are_counted_and_synced_piece_by_piece(tmp_path, monkeypatch):
    monkeypatch.setattr("adl_dist.checkpoint.layout.PIECE_BYTES", 4)
    counted, data, file = [], bytes(range(10)), tmp_path / "file"
    monkeypatch.setattr("adl_dist.checkpoint.layout.progress.count", lambda: counted.append(1))

    def content():
        yield data
        assert file.read_bytes() == data[:8]
        assert len(counted) == 3 + 2
        yield b""

    assert layout.write_hashed(file, content())["bytes"] == 10
    assert file.read_bytes() == data


COMMAND = """
import atexit, sys, threading, time
import importlib
command = importlib.import_module("adl_dist.cli.main")

class Module:
    def __del__(self):
        print("taken apart")

def run(words):
    atexit.register(print, "registered by somebody")
    threading.Thread(target=lambda: (time.sleep(0.2), print("of a thread"))).start()
    return 3

kept, command._run = Module(), run
command.main()
"""


def test_a_command_ends_with_its_code_after_exit_handlers():
    """A command ends with its code after threads and exit handlers and takes nothing apart."""
    done = subprocess.run([sys.executable, "-c", COMMAND], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (3, "of a thread\nregistered by somebody\n", "")
