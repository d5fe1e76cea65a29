"""Planted stalls and deaths in jobs of several processes: rank 0 names the planted one, in time."""

import datetime
import os
import re
import signal
import threading
import time

import pytest

from adl_dist.control.run_socket import SOCKET, ask_run
from adl_dist.errors import ConfigError
from tests.support.ranks import RanksFailed, run_ranks
from tests.support.stalls import PLANTED, STALL_SECONDS, all_stalls, killed_in_save, save_asleep, signalled

pytestmark = pytest.mark.ranks

STAGE_1 = r"stage 1 \(\S+, pid \d+\)"

# Name of each planted stall: the pattern of its cause.
CAUSES = {
    "forward of stage 1": rf"{STAGE_1}: still at work: forward \d+ .* in sleep",
    "backward of stage 2": r"stage 2 \(\S+, pid \d+\): still at work: backward \d+ .*",
    "update of stage 1": rf"{STAGE_1}: still at work: update \d+ .* in sleep",
    "load of stage 0": r"stage 0 \(\S+, pid \d+\): the data loader is stuck: it loads micro-batch \d+ .* in sleep",
    "save of stage 2": r"stage 2 \(\S+, pid \d+\): takes long to save its part of a checkpoint, .* in sleep",
    "summary of the coordinator": r"the coordinator on rank 0 \(\S+, pid \d+\): at work after '\w+' .* in sleep",
}


def planted(run_dir):
    lines = (run_dir / PLANTED).read_text().splitlines()
    return {name: float(at) for at, _, name in (line.partition(" ") for line in lines)}


def logged_causes(run_dir):
    """When each picture was logged, and the cause in it."""
    causes, at = [], 0.0
    for line in (run_dir / "logs" / "rank0.log").read_text().splitlines():
        if stamp := re.match(r"(\d+-\d+-\d+ \d+:\d+:\d+),(\d+) ", line):
            at = datetime.datetime.strptime(stamp[1], "%Y-%m-%d %H:%M:%S").timestamp() + int(stamp[2]) / 1000
        if line.startswith("likely cause: "):
            causes.append((at, line.removeprefix("likely cause: ")))
    return causes


def test_each_of_six_planted_stalls_is_named_in_time(tmp_path):
    run_dir, over, seconds, rows = tmp_path / "run", threading.Event(), [], []

    def poll():
        while not over.wait(0.1):
            asked = time.monotonic()
            try:
                rows.extend(ask_run(run_dir, "status")["stages"])
            except ConfigError:
                continue  # not there yet, or already over
            seconds.append(time.monotonic() - asked)

    poller = threading.Thread(target=poll)
    poller.start()
    try:
        run_ranks(3, all_stalls, run_dir, timeout_seconds=90)
    finally:
        over.set()
        poller.join()
    began, causes = planted(run_dir), logged_causes(run_dir)
    assert began.keys() == CAUSES.keys()
    for name, pattern in CAUSES.items():
        in_time = [text for at, text in causes if STALL_SECONDS - 0.3 <= at - began[name] <= STALL_SECONDS + 2]
        assert any(re.fullmatch(pattern, text) for text in in_time), f"{name}: {causes}"
    assert len(seconds) > 20, "it was asked too rarely to say anything"
    assert sorted(seconds)[-2] < 1
    assert {row["stage"] for row in rows} == {0, 1, 2}
    assert {"forward", "backward", "wait"} <= {row["doing"].partition(" ")[0] for row in rows}
    assert not (run_dir / SOCKET).exists()


def test_a_slow_save_next_to_training_is_reported_by_its_rank(tmp_path):
    run_ranks(3, save_asleep, tmp_path / "run")
    causes = [cause for _, cause in logged_causes(tmp_path / "run")]
    slow = rf"{STAGE_1}: takes long to write its part of a checkpoint, alongside training, at .* in slowly"
    assert any(re.fullmatch(slow, cause) for cause in causes), causes
    assert not any(cause.startswith("the link") for cause in causes)


def test_survivors_of_a_kill_in_a_save_name_the_killed(tmp_path):
    with pytest.raises(RanksFailed) as failed:
        run_ranks(3, killed_in_save, tmp_path / "run", timeout_seconds=60)
    said = [line for line in str(failed.value).splitlines() if re.match(r"adl_dist\.\S+(Failed|Error): ", line)]
    assert len(said) == 2, failed.value
    assert all("stage 2 (" in line and "the process is gone" in line for line in said), said


def test_a_stopped_peer_is_named_and_the_job_ends_with_it(tmp_path):
    log = log_of_a_signalled_peer(tmp_path, signal.SIGSTOP, "rank 0: exit code 1\nrank 1: exit code -9")
    at, cause = logged_causes(tmp_path)[-1]
    assert re.match(r"stage 1 \(\S+, pid \d+\): the process is stopped \(SIGSTOP\); kill -CONT \d+", cause)
    assert at - planted(tmp_path)["signal"] < STALL_SECONDS + 2
    ended = r"ERROR adl-dist: error: no progress in .* stage 1 \(\S+, pid \d+\): the process is stopped"
    assert re.search(ended, log.read_text())


def test_a_dead_peer_is_named_within_two_seconds(tmp_path):
    log = log_of_a_signalled_peer(tmp_path, signal.SIGKILL, r"stage 1 \(\S+, pid \d+\): the process is gone")
    assert re.search(r"rank 1 failed:\nstage 1 \(\S+, pid \d+\): the process is gone", log.read_text())
    assert os.stat(log).st_mtime - planted(tmp_path)["signal"] < 2


def log_of_a_signalled_peer(run_dir, number, how):
    with pytest.raises(RanksFailed, match=how) as failed:
        run_ranks(2, signalled, run_dir, number, timeout_seconds=60)
    assert "still ran" not in str(failed.value)
    assert not (run_dir / SOCKET).exists()
    return run_dir / "logs" / "rank0.log"
