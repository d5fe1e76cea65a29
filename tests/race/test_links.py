"""Links between ranks as a race has them: their names, their rate and their round trip, and an outage."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from adl_dist.errors import ConfigError
from benchmarks.race.link import Link, read_link
from benchmarks.race.namespaces import namespaces, why_not
from tests.support.commands import shows

needs_namespaces = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


@pytest.mark.parametrize(
    ("text", "bits_per_second", "round_trip_seconds", "name"),
    [
        ("100mbit", 1e8, 0.0, "100mbit,0ms"),
        ("1gbit,20ms", 1e9, 0.02, "1gbit,20ms"),
        ("0.5gbit", 5e8, 0.0, "500mbit,0ms"),
        ("56kbit,0.5ms", 56e3, 0.0005, "56kbit,0.5ms"),
    ],
)
def test_a_link_is_named_by_rate_and_round_trip(text, bits_per_second, round_trip_seconds, name):
    link = read_link(text)
    assert link == Link(bits_per_second=bits_per_second, round_trip_seconds=round_trip_seconds)
    assert link.name == name


@pytest.mark.parametrize("text", ["", "100", "100Mb", "0mbit", "100mbit,20", "-1mbit", "100mbit,20ms,3"])
def test_what_is_no_link_is_refused(text):
    with pytest.raises(ConfigError) as refusal:
        read_link(text)
    shows(str(refusal.value), [f"--link: '{text}' is not a link", "like 100mbit or 100mbit,50ms"])


@pytest.mark.parametrize(
    ("rate", "trip", "is_met"),
    [(95e6, 0.0205, True), (70e6, 0.0205, False), (110e6, 0.0205, False), (95e6, 0.03, False), (95e6, 0.01, False)],
)
def test_a_link_is_met_by_nearly_its_rate_and_round_trip(rate, trip, is_met):
    measured = Link(bits_per_second=rate, round_trip_seconds=trip)
    assert read_link("100mbit,20ms").is_met_by(measured) == is_met


@needs_namespaces
def test_what_a_killed_race_has_left_is_removed():
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    ours, others = f"adl{gone.pid}r0", f"other{gone.pid}"
    for name in (ours, others):
        subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        with namespaces(2, read_link("100mbit")):
            listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
        assert ours not in listed
        assert others in listed
    finally:
        subprocess.run(["ip", "netns", "del", others], check=False)


@pytest.mark.slow
@needs_namespaces
@pytest.mark.parametrize("text", ["20mbit", "200mbit", "20mbit,30ms", "200mbit,30ms"])
def test_a_plain_socket_gets_the_rate_and_round_trip(text):
    """The headers of Ethernet, IP and TCP take a part of the rate, and a busy core adds to the round trip."""
    link = read_link(text)
    with namespaces(3, link) as spaces:
        found = spaces.measured()
    assert 0.85 <= found.bits_per_second / link.bits_per_second <= 1.0
    assert 0 <= found.round_trip_seconds - link.round_trip_seconds < 0.01


@pytest.mark.slow
@needs_namespaces
def test_to_shape_a_link_takes_little_from_the_ranks():
    """Real network cards take no core for their rate; small packets would take most of one."""
    with namespaces(2, read_link("250mbit")) as spaces:
        before = _softirq_seconds()
        began = time.monotonic()
        spaces.measured()  # four seconds at the full rate
        share = (_softirq_seconds() - before) / (time.monotonic() - began)
    assert share < 0.1


def _softirq_seconds():
    """Return the time that all cores have spent on packets and timers since the start of the machine."""
    words = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    return (int(words[6]) + int(words[7])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.slow
@needs_namespaces
def test_a_broken_link_carries_nothing_until_it_is_restored():
    def is_reached():
        probe = "import socket,sys; socket.create_connection((sys.argv[1], 9), timeout=2)"
        asked = [*spaces.command(0), sys.executable, "-c", probe, "10.83.0.2"]
        return "refused" in subprocess.run(asked, capture_output=True, text=True, timeout=30).stderr

    with namespaces(2, read_link("100mbit,2ms")) as spaces:
        reached = [is_reached()]
        spaces.set_link(1, is_up=False)
        reached.append(is_reached())
        spaces.set_link(1, is_up=True)
        reached.append(is_reached())
    assert reached == [True, False, True]
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    assert not any(name in left for name in (*spaces.of_ranks, spaces.switch))
