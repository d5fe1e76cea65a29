"""Links between ranks as a race has them: their names, their rate and their round trip, and an outage."""

import subprocess
import sys

import pytest

from benchmarks.race.link import Link, read_link
from benchmarks.race.namespaces import namespaces, why_not

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
