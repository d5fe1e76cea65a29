"""Network namespaces behind shaped links: one for each rank, as if it were a node of its own. Needs root on Linux.

Each rank has an interface ``wire``, the end of a virtual cable to a switch. The kernel's token bucket (``tbf``) limits
both ends of the cable to the link's rate: what the rank sends, and what it gets from all others together. Without a
round trip the switch is a bridge of the kernel's, with one it is :mod:`benchmarks.race.relay`, which passes each
frame on half a round trip later.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adl_dist.errors import ConfigError
from benchmarks.race.link import Link

INTERFACE = "wire"
NAME = re.compile(r"adl(\d+)(r\d+|s)")  # of a namespace, with the process that has made it
NETWORK = "10.83.0"
LEAST_BURST, BURST_SECONDS = 16 << 10, 0.002  # bytes that may pass at once; time in which the rate holds
# A packet as the kernel hands it on, of up to 64 KiB, must be no larger than the burst: tbf would cut a larger one into
# frames of 1,500 bytes and set a timer for each, which takes most of a core from the ranks at 250 Mbit/s.
MOST_OF_BURST, LARGEST_PACKET = 0.9, 64 << 10  # headers of each frame count besides
QUEUE_SECONDS = 0.1  # how long a full queue takes to empty; what comes on top is lost, and TCP sends it again
CONGESTION_CONTROL = "cubic"  # what most systems have, also where this one has another
SECONDS_TO_BEGIN = 20.0


@dataclass(frozen=True, kw_only=True)
class Namespaces:
    """The namespaces of K ranks, by rank, and of the switch between them."""

    of_ranks: Sequence[str]
    switch: str
    link: Link

    @property
    def master_addr(self) -> str:
        """The address of rank 0."""
        return address(0)

    def command(self, rank: int) -> list[str]:
        """Return the words before a command that run it as ``rank``."""
        return ["ip", "netns", "exec", self.of_ranks[rank]]

    def set_link(self, rank: int, *, is_up: bool) -> None:
        """Take the link of ``rank`` down, or up again; its processes are not told."""
        _run("ip", "-n", self.switch, "link", "set", _port(rank), "up" if is_up else "down")

    def measured(self) -> Link:
        """Measure rate and round trip of a plain socket from rank 0 to rank 1, in about four seconds.

        Raises:
            ConfigError: If the two do not reach each other.
        """
        probe = [sys.executable, "-m", "benchmarks.race.probe"]
        size = str(int(self.link.bits_per_second / 8 * 4))
        with subprocess.Popen([*self.command(0), *probe, "answer", address(0)], stdout=subprocess.PIPE) as answering:
            try:
                assert answering.stdout is not None
                answering.stdout.readline()  # it listens
                asked = subprocess.run(
                    [*self.command(1), *probe, "ask", address(0), size], capture_output=True, text=True, timeout=120
                )
            except subprocess.TimeoutExpired:
                raise ConfigError(f"{self.link.name}: rank 1 does not reach rank 0 over its shaped link") from None
            finally:
                answering.kill()
        if asked.returncode:
            last = asked.stderr.strip().splitlines()[-1:]
            raise ConfigError(f"{self.link.name}: rank 1 does not reach rank 0 over its shaped link: {' '.join(last)}")
        return Link(**json.loads(asked.stdout))


def address(rank: int) -> str:
    """Return the address of ``rank``, which is the same in all namespaces."""
    return f"{NETWORK}.{rank + 1}"


def why_not() -> str | None:
    """Return the reason why this machine cannot shape links, or None if it can."""
    if sys.platform != "linux":
        return "network namespaces need Linux"
    if os.geteuid() != 0:
        return "network namespaces need root"
    tools = {"ip": "iproute2", "tc": "iproute2", "taskset": "util-linux"}
    missing = [tool for tool in tools if shutil.which(tool) is None]
    return f"there is no {missing[0]} here; it comes with {tools[missing[0]]}" if missing else None


@contextlib.contextmanager
def namespaces(num_ranks: int, link: Link) -> Iterator[Namespaces]:
    """Create namespaces for ``num_ranks``, each behind ``link``, for the time of the block.

    Raises:
        ConfigError: If this machine cannot create them.
    """
    if (reason := why_not()) is not None:
        raise ConfigError(f"each rank gets a network namespace behind a shaped link, but {reason}")
    _remove_remains()
    names = [f"adl{os.getpid()}r{rank}" for rank in range(num_ranks)]
    spaces = Namespaces(of_ranks=names, switch=f"adl{os.getpid()}s", link=link)
    with contextlib.ExitStack() as stack:
        for name in (*names, spaces.switch):
            _run("ip", "netns", "add", name)
            stack.callback(_run, "ip", "netns", "del", name, check=False)
            _run("ip", "-n", name, "link", "set", "lo", "up")
        for rank, name in enumerate(names):
            _lay_cable(rank, name, spaces)
        ports = [_port(rank) for rank in range(num_ranks)]
        if link.round_trip_seconds:
            stack.callback(_end, _start_relay(spaces.switch, ports, link.round_trip_seconds / 2))
        else:
            _run("ip", "-n", spaces.switch, "link", "add", "bridge", "type", "bridge")
            _run("ip", "-n", spaces.switch, "link", "set", "bridge", "up")
            for port in ports:
                _run("ip", "-n", spaces.switch, "link", "set", port, "master", "bridge")
        yield spaces


def _remove_remains() -> None:
    """Remove namespaces of processes that are gone: those of a race that was killed."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, timeout=SECONDS_TO_BEGIN).stdout
    for name in (line.split()[0] for line in listed.splitlines() if line):
        made_by = NAME.fullmatch(name)
        if made_by is not None and not Path("/proc", made_by[1]).exists():
            left = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout.split()
            for pid in left:  # of ranks, and of the relay
                with contextlib.suppress(OSError):
                    os.kill(int(pid), signal.SIGKILL)
            _run("ip", "netns", "del", name, check=False)


def _lay_cable(rank: int, name: str, spaces: Namespaces) -> None:
    port = _port(rank)
    _run("ip", "link", "add", INTERFACE, "netns", name, "type", "veth", "peer", "name", port, "netns", spaces.switch)
    _run("ip", "-n", name, "addr", "add", f"{address(rank)}/24", "dev", INTERFACE)
    for space, interface in ((name, INTERFACE), (spaces.switch, port)):
        packet = str(min(LARGEST_PACKET, int(MOST_OF_BURST * _burst(spaces.link))))
        _run("ip", "-n", space, "link", "set", interface, "gso_max_size", packet, "up")
        _run("tc", "-n", space, "qdisc", "add", "dev", interface, "root", *_shaping(spaces.link))
    # Of the route, since a namespace may not choose its own default among all that the kernel has.
    route = [f"{NETWORK}.0/24", "dev", INTERFACE, "src", address(rank), "congctl", CONGESTION_CONTROL]
    _run("ip", "-n", name, "route", "replace", *route)


def _shaping(link: Link) -> list[str]:
    burst = _burst(link)
    limit = burst + int(link.bits_per_second / 8 * QUEUE_SECONDS)
    return ["tbf", "rate", f"{int(link.bits_per_second)}bit", "burst", str(burst), "limit", str(limit)]


def _burst(link: Link) -> int:
    return max(LEAST_BURST, int(link.bits_per_second / 8 * BURST_SECONDS))


def _port(rank: int) -> str:
    return f"port{rank}"


def _start_relay(switch: str, ports: Sequence[str], seconds: float) -> "subprocess.Popen[bytes]":
    words = [sys.executable, "-m", "benchmarks.race.relay", str(seconds), *ports]
    relay = subprocess.Popen(["ip", "netns", "exec", switch, *words], stdout=subprocess.PIPE, start_new_session=True)
    assert relay.stdout is not None
    if not relay.stdout.readline():
        raise ConfigError(f"the relay that delays messages between ranks has ended with exit code {relay.wait()}")
    return relay


def _end(process: "subprocess.Popen[Any]") -> None:
    process.kill()
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _run(*words: str, check: bool = True) -> None:
    try:
        subprocess.run(words, check=check, capture_output=True, text=True, timeout=SECONDS_TO_BEGIN)
    except subprocess.CalledProcessError as error:
        said = " ".join(error.stderr.split())
        raise ConfigError(f"network namespaces: `{' '.join(words)}` failed: {said}") from None
