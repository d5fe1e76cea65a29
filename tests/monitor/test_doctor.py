"""The doctor with all stages in one process, and the deputies of the other processes."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest

from adl_dist.distributed.procfs import machine, start_time
from adl_dist.errors import ConfigError
from adl_dist.monitor import heartbeat
from adl_dist.monitor.activity import ActivityLog
from adl_dist.monitor.heartbeat import Heartbeat, HeartbeatMonitor
from adl_dist.monitor.status import ProcessStatus
from adl_dist.monitor.timeouts import WatchdogTimeouts
from tests.support.stalls import ASLEEP_SECONDS, NUM_SAMPLES, asleep_then_slow, fit, trainer_of
from tests.support.toys import FixedImages

needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="looks at processes in /proc")


class StuckInWorker(FixedImages):
    """Its twentieth sample takes long; served by a worker process."""

    def __getitem__(self, index):
        if index == 19:
            time.sleep(ASLEEP_SECONDS)
        return super().__getitem__(index)


def test_a_stage_that_sleeps_is_reported_and_that_it_continues(tmp_path, capfd):
    fit(trainer_of(asleep_then_slow(), num_stages=2), tmp_path)
    err = capfd.readouterr().err
    assert "likely cause: stage 1 (" in err
    assert re.search(r"still at work: forward \d since 1 s, at support/stalls.py:\d+ in <lambda>", err)
    assert "wait for its turn" in err
    assert "adl-dist: continuing after" in err
    assert "likely cause: stage 1" in (tmp_path / "logs" / "rank0.log").read_text()


@needs_proc
def test_a_stuck_worker_process_is_reported_with_its_id(tmp_path, capfd):
    """A worker process that loads data and is stuck is reported with its process id."""
    fit(trainer_of([], num_stages=2), tmp_path, StuckInWorker(NUM_SAMPLES), num_workers=1)
    causes = [line for line in capfd.readouterr().err.splitlines() if line.startswith("likely cause: ")]
    assert any(
        "the data loader is stuck: it loads micro-batch" in c and "1 worker processes (pid " in c for c in causes
    )


def test_a_standstill_ends_with_exit_code_1_and_the_cause_last(tmp_path):
    """A run in which nothing moves for abort seconds ends with exit code 1 and the cause last."""
    script = (
        "import time, sys, pathlib; from tests.support.stalls import *\n"
        "stage_1 = At(5, lambda: time.sleep(60))\n"
        "fit(trainer_of([(5, stage_1)], num_stages=2, abort_seconds=1.6), pathlib.Path(sys.argv[1]))"
    )
    ran = subprocess.run([sys.executable, "-c", script, tmp_path], capture_output=True, text=True, timeout=50)
    assert ran.returncode == 1
    last = ran.stderr.splitlines()[-1]
    assert last.startswith("adl-dist: error: no progress in ")
    assert "(runtime.abort_seconds=1.6): stage 1 (" in last
    assert not (tmp_path / "control.sock").exists()


@pytest.mark.parametrize(
    ("stall", "abort", "said"),
    [
        (0.0, None, "runtime.stall_seconds must be above 0, got 0.0"),
        (float("nan"), None, "runtime.stall_seconds must be above 0, got nan"),
        (5.0, 5.0, "runtime.abort_seconds must be above runtime.stall_seconds=5.0, or null for never, got 5.0"),
    ],
)
def test_limits_that_cannot_be_are_refused(stall, abort, said):
    with pytest.raises(ConfigError) as refused:
        WatchdogTimeouts(stall_seconds=stall, abort_seconds=abort)
    assert str(refused.value) == said


@needs_proc
@pytest.mark.parametrize(("number", "said"), [(signal.SIGSTOP, "is stopped (SIGSTOP)"), (signal.SIGKILL, "is gone")])
def test_a_heartbeat_monitor_ends_rank_0_that_asks_no_more(number, said, monkeypatch):
    """A heartbeat monitor reports that rank 0 asks no more and why and then ends both processes."""
    lines, ends = [], []
    monkeypatch.setattr(heartbeat, "print_bounded", lambda text, level=0: lines.append(text))
    monkeypatch.setattr(heartbeat, "end", lambda: ends.append(time.monotonic()))
    answers = Heartbeat()
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as rank_0:
        try:
            asker = ProcessStatus(host="node", pid=rank_0.pid, machine=machine(), start_time=start_time(rank_0.pid))
            monitor = HeartbeatMonitor(answers, 1, WatchdogTimeouts(stall_seconds=0.4, abort_seconds=0.8))
            monitor.start()
            for _ in range(10):
                answers.answer(asker, closely=False)
                time.sleep(0.1)
            assert lines == []
            os.kill(rank_0.pid, number)
            began = time.monotonic()
            while not ends and time.monotonic() - began < 10:
                time.sleep(0.05)
            monitor.stop()
            assert rank_0.wait(timeout=5) == -signal.SIGKILL
        finally:
            rank_0.kill()
    assert "rank 0, which looks after the job, has not asked for" in lines[0]
    assert f"stage 0 (node, pid {rank_0.pid}): the process {said}" in lines[0]
    assert lines[1].startswith("adl-dist: error: rank 1 ends itself: rank 0, which looks after the job")
    assert ends[0] - began < 0.8 + 2


@needs_proc
def test_a_rank_0_that_is_gone_is_known_to_those_it_asked():
    answers = Heartbeat()
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as rank_0:
        asker = ProcessStatus(host="node", pid=rank_0.pid, machine=machine(), start_time=start_time(rank_0.pid))
        answers.answer(asker, closely=False)
        answers.activate(ActivityLog(1))  # rank 0 may begin to ask before this process is there to be asked
        assert answers.rank0_status() is None
        rank_0.kill()
    assert answers.rank0_status() == f"stage 0 (node, pid {rank_0.pid}): the process is gone: killed, or it crashed"
