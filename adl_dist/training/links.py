"""The links between stages by which the cut and the delays are chosen."""

import json
from collections import ChainMap
from pathlib import Path

from adl_dist.distributed.world import World
from adl_dist.errors import ConfigError
from adl_dist.links import LINKS, Links, parse_links
from adl_dist.report.files import write_atomically
from adl_dist.training.startup_sync import Agreement
from adl_dist.transport.link_speed import measure_links

KEPT = "links.json"
FREE = 1e15, 0.0  # bytes per second and seconds of one way within a process


def links_between(links: str | None, world: World, agreement: Agreement, folder: Path | None) -> Links | None:
    """Return the links for the cut and delays, or None.

    They are described by ``links``, or measured now if that is ``auto``, or were when the run in ``folder`` began with
    as many stages in as many processes.

    Raises:
        ConfigError: If their file in the folder has other contents.
        ChannelError, StageFailed: If another rank does not answer.
    """
    K = world.num_stages
    if links is None or K == 1:
        return None
    if links != "auto":
        return parse_links(links, LINKS).for_stages(K, LINKS)
    if not world.is_distributed:
        return None
    mine = measure_links(world.edges, world.rank, world.device)
    after = ChainMap(*agreement.all(mine))
    if world.rank != 0:
        return None
    key = f"{K} stages in {world.size} processes"
    kept = {} if folder is None else _kept(folder / KEPT)
    if key not in kept:
        kept[key] = [after.get(str(k), FREE) for k in range(K - 1)]  # within one process there is nothing to measure
        if folder is not None:
            with write_atomically(folder / KEPT) as unfinished:
                unfinished.write_text(json.dumps(kept, indent=1) + "\n")
    return Links(*(tuple(column) for column in zip(*kept[key], strict=True)))


def _kept(path: Path) -> dict[str, list[tuple[float, float]]]:
    """Return the measured (bytes per second, seconds) of links."""
    if not path.is_file():
        return {}
    try:
        kept = json.loads(path.read_text())
        return {key: [(float(rate), float(wait)) for rate, wait in links] for key, links in kept.items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; remove it to measure the links again") from error
