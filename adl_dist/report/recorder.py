"""Writes every record once to metrics.jsonl and once to TensorBoard. One writer per run."""

import json
import os
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

METRICS = "metrics.jsonl"


class Recorder:
    """Takes records ``{"name", "value", "unit"?, "stage"?, "update", "epoch", ...}``.

    What belongs to a whole epoch carries the index of its last update.
    """

    def __init__(self, folder: Path | None, *, tensorboard: bool = True) -> None:
        """Write into ``folder``, or nowhere if it is None."""
        self._folder, self._wants_tensorboard = folder, tensorboard
        self._file: IO[str] | None = None
        self._board: SummaryWriter | None = None

    def start(self, *, from_update: int) -> None:
        """Open the files, dropping records of updates from ``from_update`` on, which are now made again."""
        if self._folder is None:
            return
        path = self._folder / METRICS
        kept = [line for line in _lines(path) if json.loads(line)["update"] < from_update]
        unfinished = path.with_name(f".{METRICS}.saving")
        unfinished.write_text("".join(kept))
        os.replace(unfinished, path)
        self._file = path.open("a")
        if self._wants_tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # imported late: it costs a second

            self._board = SummaryWriter(str(self._folder / "tensorboard"), purge_step=from_update)

    def write(self, record: dict[str, Any]) -> None:
        """Write one record."""
        if self._file is not None:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()
        if self._board is not None:
            per_stage = record["name"].startswith("stage/")
            tag = f"{record['name']}/{record['stage']}" if per_stage else record["name"]
            self._board.add_scalar(tag, record["value"], record["update"])

    def flush(self) -> None:
        """Hand everything written so far to the operating system."""
        if self._board is not None:
            self._board.flush()

    def close(self) -> None:
        """Close the files."""
        if self._file is not None:
            self._file.close()
        if self._board is not None:
            self._board.close()


def _lines(path: Path) -> list[str]:
    if not path.is_file():
        return []
    lines = path.read_text().splitlines(keepends=True)
    # A process that was killed may have left half a line.
    return [line for line in lines if line.endswith("\n")]
