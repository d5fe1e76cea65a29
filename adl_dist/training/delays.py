"""A record of the delays of a run with ``method.delay=auto``."""

import json
from collections.abc import Sequence
from pathlib import Path

from adl_dist.errors import ConfigError
from adl_dist.report.files import write_atomically

DELAYS = "delays.json"


def read_delays(folder: Path, num_stages: int) -> list[int] | None:
    """Return the delays recorded for ``num_stages``, or None.

    Raises:
        ConfigError: If the file has other contents.
    """
    path = folder / DELAYS
    if not path.is_file():
        return None
    try:
        delays = json.loads(path.read_text())
        if not isinstance(delays, list) or not all(type(delay) is int for delay in delays):
            raise ValueError(f"expected a list of whole numbers, got {delays}")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; remove it to measure the delays again") from error
    return delays if len(delays) == num_stages else None


def record_delays(folder: Path, delays: Sequence[int]) -> None:
    """Record the delays of the run in ``folder``.

    Raises:
        ConfigError: If the run has begun with other delays, which this trainer did not know.
    """
    recorded = read_delays(folder, len(delays))
    if recorded is None:
        with write_atomically(folder / DELAYS) as unfinished:
            unfinished.write_text(json.dumps(list(delays)) + "\n")
    elif recorded != list(delays):
        raise ConfigError(
            f"run_dir={folder} has the delays {recorded}, but this trainer has settled on {list(delays)} before; make "
            "a new Trainer for it"
        )
