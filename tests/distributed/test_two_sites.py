"""Two sites over the internet, by the commands of docs/network.md: WireGuard between two network namespaces."""

import contextlib
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.race.link import read_link
from benchmarks.race.namespaces import INTERFACE, address, namespaces, why_not
from tests.docs.blocks import NAMED, environment
from tests.support.commands import in_process
from tests.support.kill import HELD_RUN, HOLD, RunEnd, records
from tests.support.ports import open_ports

TOOLS = ("wg-quick", "wireguard-go", "nft", "tcpdump", "nsenter", "unshare")
MISSING = [tool for tool in TOOLS if shutil.which(tool) is None]
LACKS = why_not() or (f"there is no {MISSING[0]} here" if MISSING else None)
pytestmark = [pytest.mark.ranks, pytest.mark.skipif(LACKS is not None, reason=str(LACKS))]

LINK = "100mbit,20ms"
PORT = 51820
STRANGER = "10.83.0.99"  # another host of the network outside the tunnel, played by the other site
MORE = (f"{STRANGER}/24", "dev", INTERFACE)
RUN = (*HELD_RUN, "train.epochs=3")
TRAINING, RUN_DIR = "site-training", "runs/sites"  # of the page
ROUNDS = 3
# A small network and large images, so that messages weigh much.
BUSY_LINK = (
    *("model=resnet8", "data=synthetic", "data.image_size=32", "data.num_samples=512", "data.num_validation=8"),
    *("train.batch_size=32", "train.epochs=2", "runtime.threads=1", "runtime.tensorboard=false"),
)
# What leaves a site besides the tunnel's packets. ARP and neighbor discovery are the network's own.
OTHERS = f"not (udp port {PORT} or arp or ip6 multicast or host {STRANGER})"
KNOCK = f"""
import socket, sys, time
interface, *targets = sys.argv[1:]
knocks = [(socket.socket(), (host, int(number))) for host, _, number in (one.partition(":") for one in targets)]
for knock, target in knocks:
    knock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, interface.encode())
    if interface == "{INTERFACE}":
        knock.bind(("{STRANGER}", 0))
    knock.setblocking(False)
    knock.connect_ex(target)
time.sleep(1)
print(*("%s:%s" % target for knock, target in knocks if knock.connect_ex(target) == 0))
"""


class Site:
    """A host: a network namespace with a folder, and with /etc/wireguard and /run of its own."""

    def __init__(self, name, number, folder):
        self.name, self.number, self.folder = name, number, folder / f"site{number}"
        self.folder.mkdir()
        files = "mount -t tmpfs none /etc/wireguard && mount -t tmpfs none /run && exec sleep infinity"
        command = ["ip", "netns", "exec", name, "unshare", "--mount", "sh", "-c", files]
        self._host, self._started = subprocess.Popen(command), []
        while not Path(f"/proc/{self._host.pid}/cmdline").read_text().startswith("sleep"):
            assert self._host.poll() is None
            time.sleep(0.01)

    def start(self, *command, said, overrides=()):
        """Start a command there, which writes to ``said``."""
        enter = ["nsenter", f"--target={self._host.pid}", "--mount", "--net", "env", f"--chdir={self.folder}", *command]
        variables = environment(self.folder, overrides)
        with (self.folder / said).open("ab") as out:
            process = subprocess.Popen(enter, stdout=out, stderr=out, cwd=self.folder, env=variables)
        self._started.append(process)
        return process

    def start_block(self, name, *, overrides=(), **words):
        """Start a block of the page, with other ``words`` where a reader has to replace some."""
        text = NAMED[name].text
        for placeholder, value in words.items():
            assert placeholder in text
            text = text.replace(placeholder, value)
        return self.start("bash", "-euo", "pipefail", "-c", text, said="said.txt", overrides=overrides)

    def run_block(self, name, **words):
        """Run a block to its end."""
        assert self.start_block(name, **words).wait(30) == 0, self.said()

    def said(self, file="said.txt"):
        return (self.folder / file).read_text()

    def open_ports(self):
        pids = subprocess.check_output(["ip", "netns", "pids", self.name], text=True).split()
        return open_ports(int(pid) for pid in pids)

    def let_in(self, interface, targets):
        """Return those of ``targets`` that accept a connection from this site through ``interface``."""
        subprocess.run(["ip", "-n", self.name, "addr", "add", *MORE], check=True)
        knock = self.start(sys.executable, "-c", KNOCK, interface, *targets, said="let_in.txt")
        assert knock.wait(30) == 0, self.said("let_in.txt")
        subprocess.run(["ip", "-n", self.name, "addr", "del", *MORE], check=True)
        return self.said("let_in.txt").split()

    def kill(self):
        """Kill all that runs there; the tunnel first, so that no process can take leave."""
        pids = subprocess.check_output(["ip", "netns", "pids", self.name], text=True).split()
        for pid in sorted(int(pid) for pid in pids if int(pid) != self._host.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self._started:
            process.wait(30)

    def remove(self):
        self.kill()
        self._host.kill()
        self._host.wait(30)


@pytest.fixture
def sites(tmp_path):
    """Two sites, joined by the tunnel of the page."""
    with namespaces(2, read_link(LINK)) as spaces, contextlib.ExitStack() as stack:
        first, second = here = [Site(name, number, tmp_path) for number, name in enumerate(spaces.of_ranks)]
        for site in here:
            stack.callback(site.remove)
            site.run_block("site-keys")
        addresses, key = "HERE=10.99.0.1 THERE=10.99.0.2", "PUBLIC_KEY_OF_THE_OTHER_SITE"
        keys = [site.said().strip() for site in here]
        first.run_block("site-tunnel", **{key: keys[1]})
        second.run_block("site-tunnel", **{key: keys[0], addresses: "HERE=10.99.0.2 THERE=10.99.0.1"})
        second.run_block("site-endpoint", ADDRESS_OF_A=address(0))
        for site in here:
            site.run_block("site-up")
        yield here


def wait_for(what, condition, sites, processes=(), seconds=90.0):
    began = time.monotonic()
    while not condition():
        said = "".join(site.said() for site in sites)
        assert all(process.poll() in (None, 0) for process in processes), f"{what}: a site failed\n{said}"
        assert time.monotonic() - began < seconds, f"{what}: not within {seconds} s\n{said}"
        time.sleep(0.05)


def wait_for_the_end(train, sites):
    wait_for("the end", lambda: all(process.poll() == 0 for process in train), sites, train, seconds=250)


def trained_alone(folder):
    """What the same run leaves in one process."""
    run_dir = folder / "alone"
    assert in_process("train", *RUN, "runtime.processes=false", f"run_dir={run_dir}").code == 0
    return RunEnd(run_dir)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_only_the_tunnel_leaves_a_site_and_no_port_is_open(sites, tmp_path):
    run_dir = sites[0].folder / RUN_DIR
    for site in sites:
        site.start("tcpdump", "-lnQ", "out", "-i", INTERFACE, OTHERS, said="others.txt")
        (site.folder / HOLD).touch()
    wait_for("tcpdump", lambda: all("listening on" in site.said("others.txt") for site in sites), sites)
    train = [site.start_block(TRAINING, overrides=RUN) for site in sites]
    wait_for("an update", lambda: any(made["update"] > 3 for made in records(run_dir)), sites, train)

    for here, there in (sites, sites[::-1]):
        ports, tunnel = here.open_ports(), f"10.99.0.{here.number + 1}"
        assert {port.number for port in ports if port.protocol.startswith("udp")} == {PORT}
        ours = [port for port in ports if port.protocol.startswith("tcp")]
        assert ours
        assert {port.address for port in ours if not port.is_on_loopback} == {tunnel}
        places = (address(here.number), tunnel)
        assert there.let_in(INTERFACE, [f"{place}:{port.number}" for place in places for port in ours]) == []
    store = "10.99.0.1:29400"
    assert sites[1].let_in("wg0", [store]) == [store], "through the tunnel a port that is open is found"

    for site in sites:
        (site.folder / HOLD).unlink()
    wait_for_the_end(train, sites)
    for site in sites:  # one packet that is not the tunnel's
        site.start("bash", "-c", f"echo > /dev/udp/{address(1 - site.number)}/9", said="said.txt").wait(30)
        wait_for("the packet", lambda site=site: ".9: UDP" in site.said("others.txt"), [site])
        seen = [line for line in site.said("others.txt").splitlines() if " IP" in line]
        assert [line for line in seen if ".9: UDP" not in line and "udp port 9 unreachable" not in line] == []
    assert RunEnd(run_dir).differences(trained_alone(tmp_path)) == []


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("lost", [0, 1], ids=["first", "second"])
def test_a_site_that_was_lost_comes_back_by_the_same_commands(lost, sites, tmp_path):
    run_dir = sites[0].folder / RUN_DIR
    (sites[0].folder / HOLD).touch()
    train = [site.start_block(TRAINING, overrides=RUN) for site in sites]
    wait_for("the second epoch", lambda: any(made["update"] > 9 for made in records(run_dir)), sites, train)
    sites[lost].kill()
    sites[lost].run_block("site-up")
    train[lost] = sites[lost].start_block(TRAINING, overrides=RUN)
    if lost == 0:  # with the agents' store
        assert train[1].wait(90) == 1
        train[1] = sites[1].start_block(TRAINING, overrides=RUN)
    (sites[0].folder / HOLD).unlink()
    wait_for_the_end(train, sites)
    assert RunEnd(run_dir).differences(trained_alone(tmp_path), is_whole=False) == []


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_tunnel_costs_time_and_no_bit(sites, record_property):
    seconds = {"wg0": [], INTERFACE: []}
    for number in range(ROUNDS):
        for interface, times in seconds.items():
            run_dir = sites[0].folder / f"{interface}{number}"
            endpoint = f"{address(0) if interface == INTERFACE else '10.99.0.1'}:29400"
            words = {"wg0": interface, "10.99.0.1:29400": endpoint, RUN_DIR: run_dir.name}
            train = [site.start_block(TRAINING, overrides=BUSY_LINK, **words) for site in sites]
            wait_for_the_end(train, sites)
            speeds = [made["value"] for made in records(run_dir) if made["name"] == "train/samples_per_second"]
            times.append(32 / speeds[-1])
            assert RunEnd(run_dir).differences(RunEnd(sites[0].folder / "wg00")) == []
    tunnel, plain = (f"{statistics.median(times):.3f}" for times in seconds.values())
    ratios = " ".join(f"{one / other:.2f}" for one, other in zip(*seconds.values(), strict=True))
    said = f"s/update over {LINK}, medians: tunnel {tunnel}, without {plain}; times as long, by rounds: {ratios}"
    record_property("measured", said)
