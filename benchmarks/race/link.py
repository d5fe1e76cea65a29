"""A link as a user names it: ``100mbit,20ms``."""

from dataclasses import dataclass

from adl_dist.links import parse_links

FLAG = "--link"
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}  # of names
# Headers of Ethernet, IP and TCP, and a slow beginning, take a part of the rate.
LEAST_SHARE, MOST_SHARE = 0.8, 1.02
MOST_ADDED = 0.003  # seconds that a busy machine may add to a round trip


@dataclass(frozen=True, kw_only=True)
class Link:
    """The link by which one rank is joined to all others; both directions work at the same time.

    Attributes:
        bits_per_second: the rate of each direction.
        round_trip_seconds: what the network adds to the time of a message and its answer between two ranks.
    """

    bits_per_second: float
    round_trip_seconds: float = 0.0

    @property
    def name(self) -> str:
        """The link as a user names it."""
        unit = next((u for u in ("gbit", "mbit") if self.bits_per_second >= UNITS[u]), "kbit")
        return f"{self.bits_per_second / UNITS[unit]:g}{unit},{self.round_trip_seconds * 1e3:g}ms"

    def is_met_by(self, measured: "Link") -> bool:
        """Whether a plain socket gets nearly all of the rate, and the round trip with little besides."""
        share = measured.bits_per_second / self.bits_per_second
        added = measured.round_trip_seconds - self.round_trip_seconds
        return LEAST_SHARE <= share <= MOST_SHARE and -MOST_ADDED / 2 <= added <= MOST_ADDED


def read_link(text: str) -> Link:
    """Return the link that ``text`` names as :func:`~adl_dist.links.parse_links` reads it, like ``1gbit,20ms``.

    Raises:
        ConfigError: If it names no link, or several.
    """
    (bandwidth, *_), (latency, *_) = parse_links(text, FLAG).for_stages(2, FLAG)
    return Link(bits_per_second=8 * bandwidth, round_trip_seconds=2 * latency)
