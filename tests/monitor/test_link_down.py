"""A link that goes down under a run, and comes up again: two ranks, each in a network namespace of its own."""

import contextlib
import os
import re
import subprocess
import sys
import time

import pytest

from benchmarks.race.link import read_link
from benchmarks.race.namespaces import INTERFACE, namespaces, why_not
from tests.support.commands import ROOT, assert_same, in_process, left_behind, shows, weights_of, words

STALL_SECONDS = 2
LONG = ("train.epochs=60", f"runtime.watchdog_warn_seconds={STALL_SECONDS}", "runtime.timeout_seconds=60")

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.slow,
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]


@contextlib.contextmanager
def two_ranks(spaces, folder, train):
    """Yield the processes of both ranks, started as a cluster without torchrun would; they are ended at the end."""
    given = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": spaces.master_addr}
    given |= {"MASTER_PORT": "29511", "GLOO_SOCKET_IFNAME": INTERFACE, "PYTHONPATH": str(ROOT)}
    command, ranks = [sys.executable, "-m", "adl_dist", *words(folder / "run", *train, processes=True)], []
    try:
        for rank in range(2):
            environment = {**os.environ, **given, "RANK": str(rank)}
            with (folder / f"rank{rank}.txt").open("wb") as said:
                in_space = [*spaces.command(rank), *command]
                ranks.append(subprocess.Popen(in_space, stdout=said, stderr=said, env=environment, cwd=ROOT))
        yield ranks
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def wait_for(what, there, ranks, seconds=60.0):
    began = time.monotonic()
    while not there():
        assert all(process.poll() is None for process in ranks), f"{what}: a rank ended"
        assert time.monotonic() - began < seconds, f"{what}: not within {seconds} s"
        time.sleep(0.02)


def test_a_link_that_is_down_is_the_cause_and_costs_no_bit(tmp_path):
    metrics, log = tmp_path / "run" / "metrics.jsonl", tmp_path / "run" / "logs" / "rank0.log"
    with namespaces(2, read_link("1gbit")) as spaces, two_ranks(spaces, tmp_path, LONG) as ranks:
        wait_for("an update", lambda: metrics.is_file() and metrics.stat().st_size, ranks)
        spaces.set_link(1, is_up=False)
        down = time.monotonic()
        wait_for("a cause", lambda: "likely cause: " in log.read_text(), ranks, seconds=30)
        seconds = time.monotonic() - down
        spaces.set_link(1, is_up=True)
        for process in ranks:
            assert process.wait(60) == 0, (tmp_path / "rank0.txt").read_text()
    assert seconds <= STALL_SECONDS + 2
    (cause,) = set(re.findall(r"likely cause: (.*)", log.read_text()))
    shows(cause, ["stage 1 (", "the process runs but does not answer", "or the link is down"])
    assert left_behind(tmp_path) == []
    (plain := tmp_path / "plain").mkdir()
    assert in_process(*words(plain / "run", *LONG)).code == 0
    assert_same(weights_of(tmp_path), weights_of(plain))


MINUTE = 60.0
USERS = ("model._target_=tests.support.user_code.good", "data._target_=tests.support.user_code.images")
LONGER = (*USERS, "train.epochs=300", "runtime.checkpoint_every_epochs=300", "runtime.timeout_seconds=300")


@pytest.mark.timeout(400)
def test_a_minute_without_a_link_costs_no_restart_and_no_bit(tmp_path):
    """With the settings of docs/network.md TCP tries again every two seconds, so training soon continues."""
    metrics = tmp_path / "run" / "metrics.jsonl"
    with namespaces(2, read_link("20mbit,20ms")) as spaces:
        for rank in range(2):
            settings = "net.ipv4.tcp_rto_max_ms=2000", "net.ipv4.tcp_retries2=255"
            subprocess.run([*spaces.command(rank), "sysctl", "-qw", *settings], check=True)
        with two_ranks(spaces, tmp_path, LONGER) as ranks:
            wait_for("an update", lambda: metrics.is_file() and metrics.stat().st_size, ranks, seconds=100)
            spaces.set_link(1, is_up=False)
            time.sleep(MINUTE)
            size = metrics.stat().st_size
            spaces.set_link(1, is_up=True)
            up = time.monotonic()
            wait_for("the next update", lambda: metrics.stat().st_size > size, ranks)
            assert time.monotonic() - up < 10
            for process in ranks:
                assert process.wait(150) == 0, (tmp_path / "rank0.txt").read_text()
    (plain := tmp_path / "plain").mkdir()
    assert in_process(*words(plain / "run", *LONGER)).code == 0
    assert_same(weights_of(tmp_path), weights_of(plain))
