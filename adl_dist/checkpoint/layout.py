"""Checkpoints as files: complete or not there, and checked by content before anything goes on from them.

    checkpoints/update-00000042/     complete: it appears by one rename
        manifest.json                position, metrics, size and SHA-256 of every file, and a SHA-256 of itself
        .metadata  __0_0.distcp ...  what torch.distributed.checkpoint writes; one file of tensors for each process
    checkpoints/.saving-...          unfinished (.removing-...: half removed); gone at the next start
    checkpoints/rejected-update-...  damaged, and passed over for an older one; kept for whoever wants to look

What the tensors are is the matter of :mod:`adl_dist.checkpoint.state`.
"""

import hashlib
import io
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adl_dist.checkpoint.io_progress import PIECE_BYTES, checksum_of, progress
from adl_dist.errors import CheckpointError, UnusableError
from adl_dist.report import warn

if TYPE_CHECKING:
    from typing_extensions import Buffer  # of collections.abc from Python 3.12 on

FORMAT = 2
MANIFEST = "manifest.json"
# Where the run stood: updates made, whole epochs done, samples of the next epoch done; and its last metrics.
# "of" is what the position refers to: sizes of data and batches, length of the run, optimizer; and the cut.
FIELDS = {"update": int, "epochs": int, "sample": int, "metrics": dict, "of": dict, "files": dict}

Told = dict[str, Any]  # of one file: {"bytes", "sha256"}


class HashedFile(io.BufferedWriter):
    """A new file that knows what was written to it, and is on disk once it is closed."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "x"))
        self._hash, self._size, self._unsynced = hashlib.sha256(), 0, 0

    def write(self, data: "Buffer", /) -> int:
        """Write all of ``data``."""
        view = memoryview(data)
        if not view.nbytes:
            return 0
        view = view.cast("B")
        for start in range(0, view.nbytes, PIECE_BYTES):
            piece = view[start : start + PIECE_BYTES]
            super().write(piece)
            self._hash.update(piece)
            self._size += piece.nbytes
            self._unsynced += piece.nbytes
            progress.count()
            if self._unsynced >= PIECE_BYTES:
                self._sync()
        return view.nbytes

    def close(self) -> None:
        """Close it when its content has reached the disk."""
        if self.closed:
            return
        try:
            self._sync()
        finally:
            super().close()

    def _sync(self) -> None:
        self.flush()
        os.fsync(self.fileno())
        self._unsynced = 0
        progress.count()

    @property
    def told(self) -> Told:
        """Size and checksum of what was written."""
        return {"bytes": self._size, "sha256": self._hash.hexdigest()}


def place(folder: Path, update: int) -> Path:
    """Where the complete checkpoint of ``update`` is."""
    return folder / f"update-{update:08d}"


def begin(folder: Path, update: int) -> Path:
    """A fresh place for an unfinished checkpoint of ``update``."""
    path = folder / f".saving-{update:08d}"
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    return path


def check_sizes(path: Path, files: Mapping[str, Told]) -> None:
    """Look from here, on rank 0, at what all processes have written to ``path``.

    Raises:
        OSError: a file is not what the process that wrote it has told.
    """
    for name, told in files.items():
        if (there := _size(path / name)) != told["bytes"]:
            raise OSError(
                f"{path / name} should hold {told['bytes']} bytes, found {there}; run_dir must lie on a file system "
                "that all nodes share"
            )


def commit(path: Path, manifest: Mapping[str, Any], files: Mapping[str, Told]) -> Path:
    """Turn an unfinished checkpoint into a complete one by one rename.

    Args:
        path: from :func:`begin`, with all files in it; see :func:`check_sizes`.
        manifest: position and metrics.
        files: what the process that wrote a file knows of it.

    Raises:
        OSError: it could not be, and no complete checkpoint has changed.
    """
    text = {"format": FORMAT, **manifest, "files": dict(files)}
    with HashedFile(path / MANIFEST) as out:
        out.write(json.dumps({**text, "sha256": _checksum(text)}, indent=1).encode())
    _sync_folder(path)
    final = place(path.parent, manifest["update"])
    if final.exists():
        # Saved before, at the same place of the same run. A good one is never exchanged, since that takes two renames.
        try:
            verify(final)
            shutil.rmtree(path)
            return final
        except UnusableError:
            reject(final)
    path.rename(final)
    try:
        _sync_folder(final.parent)
    except OSError as error:  # whoever is told that it was not saved must not find it later
        warn(f"{final} is saved, but may not survive a power failure: its folder cannot be synced: {error.strerror}")
    return final


def complete(folder: Path) -> list[Path]:
    """All complete checkpoints in a ``checkpoints`` folder, oldest first."""
    return sorted(path for path in folder.glob("update-*") if path.is_dir())


def prune(folder: Path, *, keep: int, keep_best: bool) -> None:
    """Remove all complete checkpoints but the newest ``keep`` and, if asked to, the best one."""
    saved = complete(folder)
    best = best_of(saved) if keep_best else None
    for path in saved[:-keep]:
        if path != best:
            # Gone by one rename, as it came, so no reader finds half of it.
            going = path.with_name(f".removing-{path.name}")
            path.rename(going)
            shutil.rmtree(going)


def best_of(saved: Sequence[Path]) -> Path | None:
    """The one with the highest validation accuracy or, where there is none, the lowest loss; the newest of equals."""
    scores = {}
    for path in saved:
        try:
            metrics = read_manifest(path)["metrics"]
        except (CheckpointError, OSError):  # damaged, or gone meanwhile
            continue
        if "validation_loss" in metrics:
            scores[path] = metrics.get("validation_accuracy", 0.0), -metrics["validation_loss"]
    return max(scores, key=lambda path: (scores[path], path.name), default=None)


def reject(path: Path) -> Path:
    """Move a checkpoint out of the way, so that nothing takes it for a good one, and keep it."""
    aside = path.with_name(f"rejected-{path.name}")
    shutil.rmtree(aside, ignore_errors=True)
    path.rename(aside)
    return aside


def clean(folder: Path) -> None:
    """Remove what an interrupted save left behind."""
    for path in (*folder.glob(".saving-*"), *folder.glob(".removing-*")):
        shutil.rmtree(path, ignore_errors=True)


def read_manifest(path: Path) -> dict[str, Any]:
    """Read a checkpoint's manifest and compare it with itself and with the sizes of the files.

    Raises:
        UnusableError: damaged.
        CheckpointError: not a checkpoint, or one of another format.
    """
    try:
        text = (path / MANIFEST).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        if path in complete(path.parent):
            raise damaged(path, f"it has no {MANIFEST}") from None
        raise CheckpointError(
            f"{path} is not a checkpoint: it has no {MANIFEST}; expected a folder like "
            "runs/NAME/checkpoints/update-00000042"
        ) from None
    except OSError as error:
        raise damaged(path, f"its {MANIFEST} cannot be read ({error.strerror})") from error
    try:
        manifest = dict(json.loads(text))
    except (ValueError, TypeError, RecursionError) as error:
        raise damaged(path, f"its {MANIFEST} cannot be read ({error})") from None
    expected = manifest.pop("sha256", None)
    is_as_written = expected is None or _checksum(manifest) == expected  # that of format 1 has none
    if manifest.get("format", FORMAT) != FORMAT and is_as_written:
        raise CheckpointError(
            f"{path} has format {manifest.get('format')}; this version of adl_dist reads format {FORMAT}: use the "
            "version that wrote it"
        )
    for name, kind in FIELDS.items():
        if type(manifest.get(name)) is not kind:
            found = repr(manifest[name]) if name in manifest else "nothing"
            raise damaged(path, f"its {MANIFEST} should tell '{name}' as {kind.__name__}, found {found}")
    if expected is None or not is_as_written:
        raise damaged(path, f"its {MANIFEST} does not have the checksum that it tells")
    for name, told in manifest["files"].items():
        if Path(name).name != name or name in ("", ".."):
            raise damaged(path, f"its {MANIFEST} names a file elsewhere, {name}")
        if not isinstance(told, dict) or "bytes" not in told or not isinstance(told.get("sha256"), str):
            raise damaged(path, f"its {MANIFEST} should tell 'bytes' and 'sha256' of {name}, found {told!r}")
        if (there := _size(path / name)) != told["bytes"]:
            raise damaged(path, f"{name} should hold {told['bytes']} bytes, found {there}")
    return manifest


def newest_whole(saved: Sequence[Path]) -> Path:
    """The newest of ``saved`` whose manifest and sizes are in order, without reading it.

    Args:
        saved: complete checkpoints, oldest first; at least one.

    Raises:
        UnusableError: of the newest, if none is.
        CheckpointError: one is of another format.
    """
    errors = []
    for path in reversed(saved):
        try:
            read_manifest(path)
            return path
        except UnusableError as error:
            errors.append(error)
    raise errors[0]


def verify(path: Path) -> dict[str, Any]:
    """Read all of a checkpoint and compare it with its checksums.

    Returns:
        The manifest.

    Raises:
        UnusableError, CheckpointError: see :func:`read_manifest`.
    """
    manifest = read_manifest(path)
    for name, told in manifest["files"].items():
        try:
            with (path / name).open("rb") as file:
                found = checksum_of(file)
        except OSError as error:
            raise damaged(path, f"{name} cannot be read ({error.strerror})") from error
        if found != told["sha256"]:
            raise damaged(path, f"{name} should have the SHA-256 {told['sha256'][:12]}..., found {found[:12]}...")
    return manifest


def damaged(path: Path, what: str) -> UnusableError:
    """The error that says so, and how to go on."""
    others = [other.name for other in complete(path.parent) if other != path]
    way_out = (
        f"{others[-1]} beside it may be good: train takes the newest good one with resume=auto, evaluate and export "
        f"take checkpoint={path.parent / others[-1]}"
        if others
        else "start again with another run_dir"
    )
    return UnusableError(f"{path} is damaged: {what}; {way_out}")


def _checksum(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _size(path: Path) -> int | str:
    try:
        return path.stat().st_size if path.is_file() else "no such file"
    except OSError as error:
        return f"none that can be looked at ({error.strerror})"


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
