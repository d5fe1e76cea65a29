"""Writes every record once to metrics.jsonl and once to TensorBoard. One writer per run."""

import contextlib
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adl_dist.report.files import write_atomically
from adl_dist.report.warning import warn

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

METRICS = "metrics.jsonl"


class Recorder:
    """Takes records ``{"name", "value", "unit"?, "stage"?, "update", "epoch", ...}``.

    What belongs to a whole epoch carries the index of its last update. A disk that fails costs records, never the run.
    """

    def __init__(self, folder: Path | None, *, tensorboard: bool = True) -> None:
        """Write into ``folder``, or nowhere if it is None."""
        self._folder, self._wants_tensorboard = folder, tensorboard
        self._file: io.FileIO | None = None
        self._size = 0  # of the file, in whole lines
        self._is_failing = False
        self._board: SummaryWriter | None = None

    def start(self, *, from_update: int) -> None:
        """Open the files, dropping records of updates from ``from_update`` on, which are now made again."""
        if self._folder is None:
            return
        path = self._folder / METRICS
        lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
        # A process that was killed may have left half a line.
        kept = [line for line in lines if line.endswith(b"\n") and _update_of(line) < from_update]
        try:
            with write_atomically(path) as unfinished:
                unfinished.write_bytes(b"".join(kept))
            self._file = io.FileIO(path, "a")
            self._size = sum(len(line) for line in kept)
        except OSError as error:
            warn(f"{path} cannot be written ({error.strerror}); training continues without records")
            return
        if self._wants_tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # imported late: it costs a second

            with self._giving_up_board():
                self._board = SummaryWriter(str(self._folder / "tensorboard"), purge_step=from_update)

    def write(self, record: dict[str, Any]) -> None:
        """Write one record."""
        if self._file is not None:
            self._append(self._file, json.dumps(record).encode() + b"\n")
        if self._board is not None:
            per_stage = record["name"].startswith("stage/")
            tag = f"{record['name']}/{record['stage']}" if per_stage else record["name"]
            with self._giving_up_board():  # an error of the thread that writes is raised at the next call
                self._board.add_scalar(tag, record["value"], record["update"])

    def flush(self) -> None:
        """Have everything written so far on disk."""
        with contextlib.suppress(OSError):  # reported when it was written
            if self._file is not None:
                os.fsync(self._file.fileno())
        if self._board is not None:
            with self._giving_up_board():
                self._board.flush()

    def close(self) -> None:
        """Close the files."""
        for file in (self._file, self._board):
            with contextlib.suppress(OSError):
                if file is not None:
                    file.close()

    def _append(self, file: io.FileIO, line: bytes) -> None:
        """Append a line whole or not at all."""
        try:
            written = file.write(line)
            if written != len(line):
                raise OSError(0, "the disk is full")
            self._size += len(line)
            self._is_failing = False
        except OSError as error:
            with contextlib.suppress(OSError):
                file.truncate(self._size)
            if not self._is_failing:
                self._is_failing = True
                warn(f"{file.name!s} cannot be written ({error.strerror}); records are lost until it can")

    @contextlib.contextmanager
    def _giving_up_board(self) -> Iterator[None]:
        """Give TensorBoard up, with a warning, if it cannot write."""
        try:
            yield
        except OSError as error:
            warn(f"TensorBoard's file cannot be written ({error.strerror}); the run continues without it")
            board, self._board = self._board, None
            if board is not None:
                with contextlib.suppress(OSError):
                    board.close()


def _update_of(line: bytes) -> float:
    """Return a record's update; infinite if it cannot be read, as after a power failure."""
    try:
        return int(json.loads(line)["update"])
    except (ValueError, TypeError, KeyError):
        return float("inf")
