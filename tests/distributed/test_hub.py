"""Ranks that have no network in common, and reach each other through a hub, as behind NAT over WireGuard."""

import os
import subprocess
import sys

import pytest

from benchmarks.race.namespaces import why_not
from tests.support.commands import ROOT, assert_same, in_process, weights_of, words

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.slow,
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]
MTU = 1420  # WireGuard's


def ip(*words, check=True):
    subprocess.run(["ip", *words], check=check, capture_output=True)


@pytest.fixture
def nodes():
    """Two namespaces, each with an interface ``wg0`` of one address, from which all goes through a third one."""
    hub, names = f"adl{os.getpid()}hub", [f"adl{os.getpid()}n{rank}" for rank in range(2)]
    try:
        ip("netns", "add", hub)
        ip("netns", "exec", hub, "sysctl", "-qw", "net.ipv4.ip_forward=1")
        for rank, name in enumerate(names):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
            ip("link", "add", "wg0", "netns", name, "type", "veth", "peer", "name", f"peer{rank}", "netns", hub)
            ip("-n", name, "addr", "add", f"10.99.0.{rank + 1}/32", "dev", "wg0")
            ip("-n", name, "link", "set", "wg0", "mtu", str(MTU), "up")
            ip("-n", name, "route", "add", "10.99.0.0/24", "dev", "wg0")
            ip("-n", hub, "link", "set", f"peer{rank}", "mtu", str(MTU), "up")
            ip("-n", hub, "addr", "add", "10.99.0.254/32", "dev", f"peer{rank}")
            ip("-n", hub, "route", "add", f"10.99.0.{rank + 1}/32", "dev", f"peer{rank}")
            ip("netns", "exec", hub, "sysctl", "-qw", f"net.ipv4.conf.peer{rank}.proxy_arp=1")
        yield names
    finally:
        for name in (hub, *names):
            ip("netns", "del", name, check=False)


def test_ranks_behind_a_hub_train_to_the_same_bits(nodes, tmp_path):
    """The recipe of docs/network.md. The second rank gets no interface, and finds the one that leads to the first."""
    ranks = []
    for number, name in enumerate(nodes):
        variables = {"RANK": str(number), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        variables |= {"MASTER_ADDR": "10.99.0.1", "MASTER_PORT": "29511", "PYTHONPATH": str(ROOT)}
        variables |= {"GLOO_SOCKET_IFNAME": "wg0"} if number == 0 else {}
        command = ["ip", "netns", "exec", name, sys.executable, "-m", "adl_dist"]
        train = words(tmp_path / "run", "runtime.timeout_seconds=60", processes=True)
        with (tmp_path / f"rank{number}.txt").open("wb") as said:
            ranks.append(
                subprocess.Popen(
                    [*command, *train], stdout=said, stderr=said, env={**os.environ, **variables}, cwd=ROOT
                )
            )
    try:
        for number, process in enumerate(ranks):
            assert process.wait(100) == 0, (tmp_path / f"rank{number}.txt").read_text()
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    (plain := tmp_path / "plain").mkdir()
    assert in_process(*words(plain / "run", "runtime.timeout_seconds=60")).code == 0
    assert_same(weights_of(tmp_path), weights_of(plain))
