"""Saves during training: one part per process, completed by rank 0.

A part is copied at once, where the pipeline is empty, and written by a background thread. A save that fails is only
reported, and its files are removed: training and the older checkpoints are worth more.
"""

import contextlib
import logging
import queue
import threading
import uuid
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Any

import torch
from torch import Tensor

from adl_dist.checkpoint import layout, tensor_files
from adl_dist.checkpoint.policy import CheckpointPolicy
from adl_dist.checkpoint.tensor_files import Shard
from adl_dist.errors import AdlError, CheckpointError, StageFailed, TakenOverError, in_one_line, text_of
from adl_dist.report import warn

logger = logging.getLogger("adl_dist")

SAVING, COMMITTING = "saving", "committing"  # the threads that write a part and, on rank 0, complete the checkpoint
LAST_SAVE_SECONDS = 60.0  # how long a run that ends with an error waits for the save that is under way

# Has every process write its part, given path, token and background; returns the ranks that do.
WriteParts = Callable[[PurePath, str, bool], Collection[int]]


@dataclass(frozen=True, kw_only=True)
class PartReport:
    """The result of one process's part of a save."""

    rank: int
    token: str = ""  # the save that it belongs to; "" for a process that is gone
    files: dict[str, Any] = field(default_factory=dict)  # size and checksum of each file written, by name
    failure: str = ""  # why the part could not be written; "" if it was
    is_gone: bool = False  # whether the process has died, so that its part of any save will not come


@dataclass(frozen=True)
class PartWriter:
    """The writer of one process's part, which reports once, from any thread."""

    rank: int
    report: Callable[[PartReport], None]

    def write(self, path: PurePath, shards: Mapping[str, Shard], *, token: str, background: bool) -> None:
        """Write tensors to files in ``path``, from copies if in the background."""
        try:
            arguments = path, _copied(shards) if background else shards, token
        except Exception as error:  # no memory, for which torch raises errors of its own
            self._report_failure(path, token, error)
        else:
            if background:
                threading.Thread(target=self._write, args=arguments, name=SAVING, daemon=True).start()
            else:
                self._write(*arguments)

    def _write(self, path: PurePath, shards: Mapping[str, Shard], token: str) -> None:
        try:
            if not layout.has_begun(path, token):
                raise FileNotFoundError(f"{path}, which rank 0 has made, is not there")
            files = tensor_files.write(path, shards)
        except Exception as error:
            self._report_failure(path, token, error)
        else:
            self.report(PartReport(rank=self.rank, token=token, files=files))

    def _report_failure(self, path: PurePath, token: str, error: Exception) -> None:
        logger.error("%s could not be written", path, exc_info=error)
        self.report(PartReport(rank=self.rank, token=token, failure=f"rank {self.rank}: {in_one_line(error)}"))


@dataclass
class Saver:
    """The saves of rank 0: at most one under way, and the result of the last.

    ``check_owner`` is called before anything is changed, and again when all parts are written, followed by
    ``before_commit``. If one of them raises OSError, the save fails; TakenOverError ends the run.
    """

    folder: PurePath
    policy: CheckpointPolicy
    check_owner: Callable[[], None] = lambda: None
    before_commit: Callable[[], None] = lambda: None
    failure: str | None = None  # of the last save
    lost: AdlError | None = None  # why the run is over: a process has died without its part, or the folder is another's

    def __post_init__(self) -> None:
        self._parts: queue.SimpleQueue[PartReport] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._saved: PurePath | None = None
        self._begun: tuple[PurePath, Collection[int], str] | None = None  # with its ranks and token

    def take_part(self, part: PartReport) -> None:
        """Take the report of one process; called by any thread."""
        self._parts.put(part)

    def begin(self, write_parts: WriteParts, update: int) -> None:
        """Wait for the previous save, then let all processes write their parts.

        If ``update`` has a complete checkpoint already, write nothing. An OSError is recorded in ``failure``.
        """
        self.wait()
        self._saved = self._begun = self.failure = None
        path, token = layout.place(self.folder, update), uuid.uuid4().hex
        try:
            self.check_owner()
            if not layout.begin(path, token):
                self._saved = path
                return
        except OSError as error:
            self._fail(update, error)
            return
        self._begun = path, write_parts(path, token, self.policy.background), token

    def complete(self, manifest: Mapping[str, Any]) -> None:
        """Complete the save that has begun, if any, by writing ``manifest``.

        A checkpoint that was complete already only gets the metrics that it lacks, because its evaluation had failed.
        """
        if self._begun is None:
            if self._saved is not None:
                try:
                    layout.add_metrics(self._saved, manifest)
                except (OSError, CheckpointError) as error:
                    warn(f"{self._saved}: the figures of its evaluation could not be added: {in_one_line(error)}")
            return
        arguments, self._begun = (manifest, *self._begun), None
        if self.policy.background:
            self._thread = threading.Thread(target=self._finish, args=arguments, name=COMMITTING, daemon=True)
            self._thread.start()
        else:
            self._finish(*arguments)

    def wait(self, seconds: float | None = None) -> PurePath | None:
        """Wait at most ``seconds`` for the save; return its checkpoint, or None."""
        if self._thread is not None:
            self._thread.join(seconds)
        return self._saved

    def _finish(self, manifest: Mapping[str, Any], path: PurePath, ranks: Collection[int], token: str) -> None:
        try:
            parts = self._collect(ranks, token)  # all, also if one failed: then no process writes there any more
            if failures := [part.failure for part in parts if part.failure]:
                raise OSError("; ".join(failures))
            files = {name: digest for part in parts for name, digest in part.files.items()}
            layout.check_sizes(path, files)
            files |= tensor_files.write_index(path, files)
            self.check_owner()
            self.before_commit()
            self._saved = layout.commit(path, manifest, files)
        except Exception as error:
            logger.exception("%s could not be completed", path)
            if isinstance(error, StageFailed | TakenOverError):
                self.lost = error
            if not isinstance(error, StageFailed):  # else others may still write there, until the next start
                with contextlib.suppress(OSError):
                    layout.undo(path, token)
            self._fail(manifest["update"], error)
            return
        logger.info("saved %s", self._saved)
        try:
            layout.prune(self.folder, keep=self.policy.keep, keep_best=self.policy.keep_best)
        except OSError as error:
            warn(f"{self.folder}: an old checkpoint could not be removed: {in_one_line(error)}")

    def _collect(self, ranks: Collection[int], token: str) -> list[PartReport]:
        """Return the reports of all ``ranks``; raise StageFailed if one has died."""
        parts: dict[int, PartReport] = {}
        while len(parts) < len(ranks):
            part = self._parts.get()
            if part.is_gone:
                if part.rank in ranks and part.rank not in parts:
                    raise StageFailed(part.failure, exit_code=1, is_gone=True)
            elif part.token == token:  # else of a save that an error has cut off
                parts[part.rank] = part
        return [parts[rank] for rank in sorted(parts)]

    def _fail(self, update: int, error: Exception) -> None:
        self.failure = f"update {update} could not be saved in {self.folder}: {text_of(error)}"
        warn(f"{self.failure}; the checkpoints before it are untouched")


def _copied(shards: Mapping[str, Shard]) -> dict[str, Shard]:
    """Copy the tensors of ``shards`` to the CPU, and wait for the copies."""

    def copied(tensor: Tensor) -> Tensor:
        if tensor.device.type == "cpu":
            return tensor.detach().clone()
        host = torch.empty_like(tensor, device="cpu", pin_memory=True)  # which the GPU fills at full speed
        return host.copy_(tensor.detach(), non_blocking=True)

    copies = {f: replace(s, tensors={n: copied(t) for n, t in s.tensors.items()}) for f, s in shards.items()}
    for device in {t.device for s in shards.values() for t in s.tensors.values() if t.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
    return copies
