"""A link that goes down under a run, and comes up again: two ranks, each in a network namespace of its own."""

import contextlib
import os
import re
import shutil
import subprocess
import sys
import time

import pytest

from benchmarks.race.link import read_link
from benchmarks.race.namespaces import INTERFACE, namespaces
from tests.support.commands import ROOT, assert_same, in_process, left_behind, shows, weights_of, words

STALL_SECONDS = 2
LONG = ("train.epochs=60", f"runtime.watchdog_warn_seconds={STALL_SECONDS}", "runtime.timeout_seconds=60")

has_ip = hasattr(os, "geteuid") and os.geteuid() == 0 and shutil.which("ip")
pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.skipif(not has_ip, reason="needs root and ip")]


def ip(*words, check=True):
    subprocess.run(["ip", *words], check=check, capture_output=True)


@pytest.fixture
def spaces():
    """Two network namespaces, joined by one link."""
    names = [f"adl{os.getpid()}n{rank}" for rank in range(2)]
    try:
        for name in names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("link", "add", "eth0", "netns", names[0], "type", "veth", "peer", "name", "eth0", "netns", names[1])
        for rank, name in enumerate(names):
            ip("-n", name, "addr", "add", f"10.78.0.{rank + 1}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
        yield names
    finally:
        for name in names:
            ip("netns", "del", name, check=False)


def rank(number, spaces, folder, *, train=LONG, master_addr="10.78.0.1", **more):
    """Start it, as a cluster without torchrun would."""
    variables = {
        "RANK": str(number),
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_PORT": "29511",
    }
    environment = {**os.environ, **variables, **more, "MASTER_ADDR": master_addr, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "adl_dist", *words(folder / "run", *train, processes=True)]
    command = ["ip", "netns", "exec", spaces[number], *command]
    with (folder / f"rank{number}.txt").open("wb") as said:
        return subprocess.Popen(command, stdout=said, stderr=said, env=environment, cwd=ROOT)


@contextlib.contextmanager
def two_ranks(spaces, folder, **more):
    """Yield the processes of both ranks, which are ended at the end."""
    ranks = [rank(number, spaces, folder, **more) for number in range(2)]
    try:
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


def test_a_link_that_is_down_is_the_cause_and_costs_no_bit(spaces, tmp_path):
    metrics, log = tmp_path / "run" / "metrics.jsonl", tmp_path / "run" / "logs" / "rank0.log"
    with two_ranks(spaces, tmp_path) as ranks:
        wait_for("an update", lambda: metrics.is_file() and metrics.stat().st_size, ranks)
        ip("-n", spaces[1], "link", "set", "eth0", "down")
        down = time.monotonic()
        wait_for("a cause", lambda: "likely cause: " in log.read_text(), ranks, seconds=30)
        seconds = time.monotonic() - down
        ip("-n", spaces[1], "link", "set", "eth0", "up")
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
        for name in spaces.of_ranks:
            ip("netns", "exec", name, "sysctl", "-qw", "net.ipv4.tcp_rto_max_ms=2000", "net.ipv4.tcp_retries2=255")
        more = {"train": LONGER, "master_addr": spaces.master_addr, "GLOO_SOCKET_IFNAME": INTERFACE}
        with two_ranks(spaces.of_ranks, tmp_path, **more) as ranks:
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
