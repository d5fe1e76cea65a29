"""The user's description of links between stages: bandwidth and latency."""

import math
import re
from typing import Any, NamedTuple

from adl_dist.errors import ConfigError

RATES = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "kB/s": 8e3, "MB/s": 8e6, "GB/s": 8e9}  # in bits per second
TIMES = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
LINKS = "partition.links"  # the key
NUMBER = r"(\d+(?:\.\d*)?(?:e[+-]?\d+)?)"


class Links(NamedTuple):
    """The links after stages 0, 1, ..., or one link that all stages share."""

    bandwidth: tuple[float, ...]  # bytes per second, in each direction for itself
    latency: tuple[float, ...]  # seconds of a message on its way, half a round trip, without those of its bytes

    def __str__(self) -> str:
        return ", ".join(f"{b / 1e6:,.4g} MB/s {2e3 * s:.3g} ms" for b, s in zip(*self, strict=True))  # as in a text

    @property
    def figures(self) -> dict[str, Any]:
        """The keyword arguments of a ``Machine`` with these links."""
        if len(self.bandwidth) == 1:
            return {"bandwidth": self.bandwidth[0], "latency": self.latency[0], "shares_link": True}
        return {"bandwidth": self.bandwidth, "latency": self.latency, "shares_link": False}

    def for_stages(self, num_stages: int, key: str) -> "Links":
        """Return these links; raise ConfigError unless they fit ``num_stages``.

        One link fits any number of stages; otherwise there must be ``num_stages`` - 1. ``key`` is the setting named in
        the error.
        """
        count = len(self.bandwidth)
        if count not in (1, num_stages - 1):
            raise ConfigError(
                f"{key} describes {count} links, but {num_stages} stages have {num_stages - 1}; give one, "
                f"that of each process to all others, or {num_stages - 1}, with / between them"
            )
        return self


def text_of_links(value: Any) -> str | None:
    """Return links as text, from text, ``[rate, time]`` or a list of these."""
    if not isinstance(value, list | tuple):
        return None if value is None else str(value)
    links = value if value and all(isinstance(one, list | tuple) for one in value) else [value]
    return "/".join(",".join(map(str, one)) for one in links)


def parse_links(text: str, key: str) -> Links:
    """Parse links like ``100mbit,50ms/1gbit,0.1ms``.

    The rate is in the units of tc (``mbit``, 1e6 bits) or in bytes (``MB/s``). The time is a round trip, as ping shows
    it; without a time it is 0.

    Raises:
        ConfigError: If a link has another form; the text names the setting ``key``.
    """
    rates, times = "|".join(RATES), "|".join(TIMES)
    links = []
    for one in re.split(r"/(?!s)", text):
        found = re.fullmatch(rf"{NUMBER}({rates})(?:,{NUMBER}({times}))?", one)
        bandwidth = float(found[1]) * RATES[found[2]] / 8 if found else 0.0
        round_trip = float(found[3]) * TIMES[found[4]] if found and found[3] else 0.0
        if not bandwidth > 0 or round_trip == math.inf:
            raise ConfigError(
                f"{key}: '{one}' is not a link; expected a rate above 0 and a round trip, like 100mbit or 100mbit,50ms "
                f"(rates: {', '.join(RATES)}; times: {', '.join(TIMES)}), and / between several links"
            )
        links.append((bandwidth, round_trip / 2))
    return Links(*(tuple(column) for column in zip(*links, strict=True)))
