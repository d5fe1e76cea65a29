"""Saves while training continues: each process writes its part, and rank 0 makes a checkpoint of all parts.

A part is copied at once, where the pipeline is empty, and written by a thread of its own. What rank 0 needs to know of
it travels as a :class:`PartReport`, by a callable that the control plane hands in; no thread but the main one issues
data-plane communication. A save that fails is reported and leaves nothing behind: training and the older checkpoints
are worth more than it.
"""

import logging
import queue
import shutil
import threading
import uuid
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from adl_dist.checkpoint import layout, storage
from adl_dist.checkpoint.storage import Shard
from adl_dist.errors import StageFailed
from adl_dist.report import warn

logger = logging.getLogger("adl_dist")

# The names of the threads that save: one writes the part of its process, one on rank 0 makes a checkpoint of all parts.
SAVING, COMMITTING = "saving", "committing"
LAST_SAVE_SECONDS = 60.0  # how long a run that ends with an error waits for the save that is under way


@dataclass(frozen=True, kw_only=True)
class PartReport:
    """The end of one process's part of a save.

    Attributes:
        rank: the process.
        token: the save; "" for a process that is gone.
        files: names of the files written, with their sizes and checksums.
        failure: why the part could not be written; "" if it was.
        is_gone: whether the process has died, so that its part of any save will not come; ``failure`` names it.
    """

    rank: int
    token: str = ""
    files: dict[str, Any] = field(default_factory=dict)
    failure: str = ""
    is_gone: bool = False


class PartWriter:
    """The writer of this process's part of a checkpoint; it reports to rank 0 when the part is written."""

    def __init__(self, rank: int, report: Callable[[PartReport], None]) -> None:
        """Write as ``rank``; ``report`` is called once per part, from any thread, and must not raise."""
        self._rank, self._report = rank, report

    def write(self, path: Path, shards: Mapping[str, Shard], *, token: str, background: bool) -> None:
        """Write ``shards``; if in the background, copy them and return.

        Args:
            path: the unfinished checkpoint.
            shards: the state of this process's stages by name of the file; the tensors are the stages' own.
            token: names this save.
            background: whether tensors may change as soon as this returns.
        """
        if not background:
            self._write(path, shards, token)
            return
        try:
            copy = _copied(shards)
        except Exception as error:  # no memory, for which torch raises errors of its own
            self._report_failure(path, token, error)
            return
        threading.Thread(target=self._write, args=(path, copy, token), name=SAVING, daemon=True).start()

    def _write(self, path: Path, shards: Mapping[str, Shard], token: str) -> None:
        try:
            files = storage.write(path, shards)
        except Exception as error:
            self._report_failure(path, token, error)
        else:
            self._report(PartReport(rank=self._rank, token=token, files=files))

    def _report_failure(self, path: Path, token: str, error: Exception) -> None:
        logger.error("%s could not be written", path, exc_info=error)
        self._report(PartReport(rank=self._rank, token=token, failure=f"rank {self._rank}: {_reason(error)}"))


class WriteParts(Protocol):
    """Has every process write its part into ``path``; see :meth:`PartWriter.write`."""

    def __call__(self, path: Path, *, token: str, background: bool) -> Collection[int]:
        """Return the ranks that write; their reports reach :meth:`Saver.take_part`."""
        ...


class Saver:
    """Rank 0's side of saves: at most one is under way, and how the last one ended is known.

    Attributes:
        failure: why the last save failed; None: it did not fail.
        lost: the process that has died without having written its part; None: none has.
    """

    def __init__(self, folder: Path, *, keep: int, keep_best: bool, background: bool) -> None:
        """Save into ``folder``.

        Args:
            folder: holds the checkpoints.
            keep: how many of the newest to keep.
            keep_best: keep the best one as well.
            background: return before a checkpoint is written.
        """
        self._folder, self._keep, self._keep_best, self._background = folder, keep, keep_best, background
        self._parts: queue.SimpleQueue[PartReport] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._saved: Path | None = None
        self.failure: str | None = None
        self.lost: StageFailed | None = None

    def take_part(self, part: PartReport) -> None:
        """Take the report of one process; called by any thread."""
        self._parts.put(part)

    def save(self, write_parts: WriteParts, manifest: Mapping[str, Any]) -> None:
        """Save what the stages hold now; wait for the save before."""
        self.wait()
        self._saved = self.failure = None
        try:
            path = layout.begin(self._folder, manifest["update"])
        except OSError as error:
            self._fail(manifest, _reason(error))
            return
        token = uuid.uuid4().hex
        ranks = write_parts(path, token=token, background=self._background)
        if self._background:
            arguments = (path, manifest, ranks, token)
            self._thread = threading.Thread(target=self._finish, args=arguments, name=COMMITTING, daemon=True)
            self._thread.start()
        else:
            self._finish(path, manifest, ranks, token)

    def wait(self, seconds: float | None = None) -> Path | None:
        """Wait until no save is under way, at most ``seconds``.

        Returns:
            The checkpoint that the last one made; None: it failed, or there was none, or it is not done.
        """
        if self._thread is not None:
            self._thread.join(seconds)
        return self._saved

    def _finish(self, path: Path, manifest: Mapping[str, Any], ranks: Collection[int], token: str) -> None:
        try:
            parts = self._collect(ranks, token)  # all, also if one failed: then no process writes there any more
        except StageFailed as error:
            # The others may still write there, so it stays until the next start. This run is over.
            self.lost = error
            self._fail(manifest, str(error))
            return
        try:
            if failures := [part.failure for part in parts if part.failure]:
                raise OSError("; ".join(failures))
            files = {name: digest for part in parts for name, digest in part.files.items()}
            layout.check_sizes(path, files)  # first, because it reports a folder that is not shared as that
            files |= storage.write_index(path, files)
            self._saved = layout.commit(path, manifest, files)
        except Exception as error:
            logger.exception("%s could not be completed", path)
            shutil.rmtree(path, ignore_errors=True)
            self._fail(manifest, _reason(error))
            return
        logger.info("saved %s", self._saved)
        try:
            layout.prune(self._folder, keep=self._keep, keep_best=self._keep_best)
        except OSError as error:
            warn(f"{self._folder}: an old checkpoint could not be removed: {_reason(error)}")

    def _collect(self, ranks: Collection[int], token: str) -> list[PartReport]:
        """Return the parts of all ``ranks``; raise StageFailed if one is gone before it has reported its own."""
        parts: dict[int, PartReport] = {}
        while len(parts) < len(ranks):
            part = self._parts.get()
            if part.is_gone:
                if part.rank in ranks and part.rank not in parts:
                    raise StageFailed(part.failure, exit_code=1, is_gone=True)
            elif part.token == token:  # else of a save that an error has cut off
                parts[part.rank] = part
        return [parts[rank] for rank in sorted(parts)]

    def _fail(self, manifest: Mapping[str, Any], reason: str) -> None:
        self.failure = f"update {manifest['update']} could not be saved in {self._folder}: {reason}"
        warn(f"{self.failure}; the checkpoints before it are untouched")


def _copied(shards: Mapping[str, Shard]) -> dict[str, Shard]:
    """Return copies on the CPU, complete when this returns."""
    devices: set[torch.device] = set()

    def copied(tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        if tensor.device.type == "cpu":
            return tensor.clone()
        devices.add(tensor.device)
        host = torch.empty_like(tensor, device="cpu", pin_memory=True)  # which the GPU fills at full speed
        return host.copy_(tensor, non_blocking=True)

    copies = {
        file: replace(shard, tensors={name: copied(tensor) for name, tensor in shard.tensors.items()})
        for file, shard in shards.items()
    }
    for device in devices:
        torch.cuda.current_stream(device).synchronize()
    return copies


def _reason(error: BaseException) -> str:
    """Return what the operating system said, if it is the cause; else the error itself."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    text = " ".join(str(cause or error).split())
    return text if cause else f"{type(error).__name__}: {text}"
