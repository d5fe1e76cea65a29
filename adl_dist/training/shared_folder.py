"""Rank 0's run folder on all ranks, with or without a shared file system."""

import contextlib
import os
import socket
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from adl_dist.checkpoint.layout import complete
from adl_dist.checkpoint.run_dir import RunFolder, make_folder
from adl_dist.distributed.network import is_one_node
from adl_dist.distributed.world import World
from adl_dist.errors import ConfigError
from adl_dist.report import say, warn
from adl_dist.training.startup_sync import Agreement


def share_folder(
    folder: RunFolder | None, of_rank_0: Mapping[str, Any], world: World, agreement: Agreement
) -> tuple[RunFolder | None, dict[str, Any]]:
    """Return this process's view of rank 0's run folder, and rank 0's values.

    Rank 0 leaves a file in its folder, and the others look for it. Ranks that do not see it send their parts of
    checkpoints to rank 0, and read them through it.

    ``folder`` is the run folder given to this process; only that of rank 0 counts. ``of_rank_0`` are the values to
    return from rank 0: ``place``, None without a run folder, and ``resume``.

    Raises:
        ConfigError: If the run's newest checkpoint is on another machine than rank 0, or its folder is in memory.
    """
    token = Path(f".{uuid.uuid4().hex}")
    is_local = folder is not None and isinstance(folder.place, Path)
    if world.rank == 0 and folder is not None and is_local and world.is_distributed:
        make_folder(folder.path)
        with contextlib.suppress(OSError):  # a full disk is reported by the first save
            (token := folder.path / token).touch()
    values = agreement.first({**of_rank_0, "token": token.name})
    folder = _counting(folder, values["place"], Path(values["token"]), world.rank)
    if folder is None:
        return None, values
    if world.is_distributed and str(folder.place).startswith("memory:"):
        raise ConfigError(
            f"run_dir={folder.place}: each process has a memory of its own; give a folder, s3:// or gs://"
        )
    if not world.is_distributed or not isinstance(folder.place, Path):
        return folder, values
    folder.is_shared = world.rank == 0 or (folder.path / values["token"]).exists()
    newest = [path.name for path in complete(folder.checkpoints)][-1:]
    has_begun = (folder.path / "logs" / f"rank{world.rank}.log").exists()
    mine = {"host": socket.gethostname(), "is_shared": folder.is_shared, "newest": "".join(newest), "begun": has_begun}
    ranks = agreement.all(mine)
    if world.rank == 0:
        token.unlink(missing_ok=True)
    apart = {rank: one for rank, one in enumerate(ranks) if not one["is_shared"]}
    for rank, one in apart.items() if values["resume"] == "auto" else ():
        if one["newest"] > ranks[0]["newest"]:
            raise ConfigError(
                f"run_dir={folder.place}: rank {rank} on {one['host']} has {one['newest']}, but rank 0 on "
                f"{ranks[0]['host']}, which keeps the checkpoints, has {ranks[0]['newest'] or 'none'}; start with "
                f"rank 0 on {one['host']}, or copy or remove the run folder there"
            )
    if apart and world.rank == 0:
        names = ", ".join(f"rank {rank} on {one['host']}" for rank, one in apart.items())
        say(f"note: no shared file system: {names} cannot see {folder.place}; checkpoints travel to rank 0 and back")
        if not newest and values["resume"] == "auto" and any(one["begun"] for one in apart.values()):
            warn(
                f"{names} took part in run_dir={folder.place} before, but rank 0 on {ranks[0]['host']} has none of "
                "its checkpoints, and starts from the beginning; if one was saved, copy the run folder to there"
            )
    return folder, values


def say_node(world: World, agreement: Agreement, *, quiet: bool) -> None:
    """On each of several nodes, print its ranks and the node with progress."""
    first = agreement.first(socket.gethostname())
    if quiet or is_one_node(world.size) or int(os.environ.get("LOCAL_RANK", 0)):
        return
    local_size = int(os.environ["LOCAL_WORLD_SIZE"])
    here = f"rank {world.rank}" + f" to {world.rank + local_size - 1}" * (local_size > 1)
    does = "reads the data, and keeps the checkpoints" if world.rank == 0 else f"progress is printed on {first}"
    say(f"{here} of {world.size} on {socket.gethostname()}; {does}")


def _counting(given: RunFolder | None, place: str | None, token: Path, rank: int) -> RunFolder | None:
    """Return rank 0's folder ``place``, or ``given`` if it is not seen here."""
    if given is not None and str(given.place) == place:
        return given
    counts = None if place is None else RunFolder(place)
    if given is not None:
        is_apart = counts is not None and isinstance(counts.place, Path) and not (counts.path / token).exists()
        if is_apart and isinstance(given.place, Path):
            return given
        say(f"note: rank {rank} was given run_dir={given.place}, but that of rank 0 counts: {place}")
    return counts
