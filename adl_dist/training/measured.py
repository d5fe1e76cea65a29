"""The links and delays with which a run was begun, kept in its folder."""

import json
from collections import ChainMap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from adl_dist.distributed.world import World
from adl_dist.errors import ConfigError
from adl_dist.links import LINKS, Links, parse_links
from adl_dist.report.files import write_atomically
from adl_dist.training.startup_sync import Agreement
from adl_dist.transport.link_speed import measure_links

LINKS_FILE, DELAYS_FILE = "links.json", "delays.json"
FREE = 1e15, 0.0  # bytes per second and seconds of one way within a process

T = TypeVar("T")


def links_between(links: str | None, world: World, agreement: Agreement, folder: Path | None) -> Links | None:
    """Return the links for the cut and delays, or None.

    They are described by ``links``, or measured now if that is ``auto``, or were when the run in ``folder`` began with
    as many stages in as many processes.
    """
    K = world.num_stages
    if links is None or K == 1:
        return None
    if links != "auto":
        return parse_links(links, LINKS).for_stages(K, LINKS)
    if not world.is_distributed:
        return None
    after = ChainMap(*agreement.all(measure_links(world.edges, world.rank, world.device)))
    if world.rank != 0:
        return None
    key = f"{K} stages in {world.size} processes"
    kept = (None if folder is None else _read(folder / LINKS_FILE, _rates_by_key)) or {}
    if key not in kept:
        kept[key] = [after.get(str(k), FREE) for k in range(K - 1)]  # within one process there is nothing to measure
        if folder is not None:
            _write(folder / LINKS_FILE, kept)
    return Links(*(tuple(column) for column in zip(*kept[key], strict=True)))


def read_delays(folder: Path, num_stages: int) -> list[int] | None:
    """Return the delays recorded for ``num_stages``, or None."""
    delays = _read(folder / DELAYS_FILE, lambda content: [int(delay) for delay in content])
    return delays if delays is not None and len(delays) == num_stages else None


def record_delays(folder: Path, delays: Sequence[int]) -> None:
    """Record the delays of the run in ``folder``.

    Raises:
        ConfigError: If the run has begun with other delays, which this trainer did not know.
    """
    recorded = read_delays(folder, len(delays))
    if recorded is None:
        _write(folder / DELAYS_FILE, list(delays))
    elif recorded != list(delays):
        raise ConfigError(
            f"run_dir={folder} has the delays {recorded}, but this trainer has settled on {list(delays)} before; make "
            "a new Trainer for it"
        )


def _rates_by_key(content: Any) -> dict[str, list[tuple[float, float]]]:
    """Return the measured (bytes per second, seconds) of links."""
    return {key: [(float(rate), float(wait)) for rate, wait in links] for key, links in content.items()}


def _read(path: Path, convert: Callable[[Any], T]) -> T | None:
    """Return the content of ``path``, or None; ConfigError if it is damaged."""
    if not path.is_file():
        return None
    try:
        return convert(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; remove it to measure again") from error


def _write(path: Path, content: object) -> None:
    with write_atomically(path) as unfinished:
        unfinished.write_text(json.dumps(content, indent=1) + "\n")
