"""Checkpoints as files: complete or not there, and verified by content before a run continues from them.

    checkpoints/update-00000042/     complete: it appears by one rename
        manifest.json                position, metrics, size and SHA-256 of every file, and a SHA-256 of itself
        model-00001-of-00004.safetensors ...  tensors of stage 0, see :mod:`adl_dist.checkpoint.storage`
    checkpoints/.saving-...          unfinished (.removing-...: half removed); removed at the next start
    checkpoints/rejected-update-...  damaged, and passed over for an older one; kept for the user to look at

:mod:`adl_dist.checkpoint.state` says which tensors there are.
"""

import hashlib
import io
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from adl_dist.errors import CheckpointError, UnusableError
from adl_dist.report import warn

if TYPE_CHECKING:
    from typing_extensions import Buffer  # in collections.abc from Python 3.12 on

FORMAT = 3
MANIFEST = "manifest.json"
# Where the run stood: updates made, whole epochs done, samples of the next epoch done; and its last metrics.
# "of" is what the position refers to: sizes of data and batches, length of the run, optimizer; and the cut.
FIELDS = {"update": int, "epochs": int, "sample": int, "metrics": dict, "of": dict, "files": dict}
# Large files are written and read in pieces of this size; a piece is on disk before the next one is written.
PIECE_BYTES = 2**26

Digest = dict[str, Any]  # {"bytes", "sha256"} of a file


class Progress:
    """The number of pieces that this process has written and read, so that the watchdog sees a slow disk move."""

    num_pieces = 0

    def count(self) -> None:
        """Add one. Threads need no lock: what matters is that the number changes."""
        self.num_pieces += 1


progress = Progress()


class HashedFile(io.BufferedWriter):
    """A new file that knows size and checksum of what was written to it, and is on disk once it is closed."""

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
        """Close the file once its content has reached the disk."""
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
    def digest(self) -> Digest:
        """Size and checksum of what was written."""
        return {"bytes": self._size, "sha256": self._hash.hexdigest()}


def place(folder: Path, update: int) -> Path:
    """Return where the complete checkpoint of ``update`` is."""
    return folder / f"update-{update:08d}"


def begin(folder: Path, update: int) -> Path:
    """Make an empty folder for an unfinished checkpoint of ``update``."""
    path = folder / f".saving-{update:08d}"
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    return path


def check_sizes(path: Path, files: Mapping[str, Digest]) -> None:
    """Compare, on rank 0, the files in ``path`` with what the processes that wrote them have reported.

    Raises:
        OSError: a file is missing here, or has another size.
    """
    for name, digest in files.items():
        if (size := _size(path / name)) != digest["bytes"]:
            raise OSError(
                f"{path / name} should hold {digest['bytes']} bytes, found {size}; run_dir must lie on a file system "
                "that all nodes share"
            )


def commit(path: Path, manifest: Mapping[str, Any], files: Mapping[str, Digest]) -> Path:
    """Turn an unfinished checkpoint into a complete one by one rename.

    Args:
        path: from :func:`begin`, with all files in it; see :func:`check_sizes`.
        manifest: position and metrics.
        files: size and checksum of each file, from the process that wrote it.

    Returns:
        The complete checkpoint.

    Raises:
        OSError: it could not be completed; no complete checkpoint has changed.
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
    except OSError as error:  # to report that it was not saved would be wrong: it may well be found later
        warn(f"{final} is saved, but may not survive a power failure: its folder cannot be synced: {error.strerror}")
    return final


def complete(folder: Path) -> list[Path]:
    """Return all complete checkpoints in a ``checkpoints`` folder, oldest first."""
    return sorted(path for path in folder.glob("update-*") if path.is_dir())


def prune(folder: Path, *, keep: int, keep_best: bool) -> None:
    """Remove all complete checkpoints but the newest ``keep`` and, if asked to, the best one."""
    saved = complete(folder)
    best = best_of(saved) if keep_best else None
    for path in saved[:-keep]:
        if path != best:
            # It disappears by one rename, as it appeared, so no reader finds half of it.
            hidden = path.with_name(f".removing-{path.name}")
            path.rename(hidden)
            shutil.rmtree(hidden)


def best_of(saved: Sequence[Path]) -> Path | None:
    """Return the checkpoint of highest validation accuracy, else of lowest loss; the newest of equals."""
    scores = {}
    for path in saved:
        try:
            metrics = read_manifest(path)["metrics"]
        except (CheckpointError, OSError):  # damaged, or removed meanwhile
            continue
        if "validation_loss" in metrics:
            scores[path] = metrics.get("validation_accuracy", 0.0), -metrics["validation_loss"]
    return max(scores, key=lambda path: (scores[path], path.name), default=None)


def reject(path: Path) -> Path:
    """Keep a checkpoint under a name by which nothing takes it for a good one; return its new place."""
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
        UnusableError: the checkpoint is damaged.
        CheckpointError: ``path`` is not a checkpoint, or has another format.
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
    is_as_written = expected is None or _checksum(manifest) == expected  # format 1 had no checksum
    if manifest.get("format", FORMAT) != FORMAT and is_as_written:
        raise CheckpointError(
            f"{path} has format {manifest.get('format')}; this version of adl_dist reads format {FORMAT}: use the "
            "version that wrote it"
        )
    for name, kind in FIELDS.items():
        if type(manifest.get(name)) is not kind:
            found = repr(manifest[name]) if name in manifest else "nothing"
            raise damaged(path, f"its {MANIFEST} should give '{name}' as {kind.__name__}, found {found}")
    if expected is None or not is_as_written:
        raise damaged(path, f"its {MANIFEST} does not have the checksum that it gives")
    for name, digest in manifest["files"].items():
        if Path(name).name != name or name in ("", ".."):
            raise damaged(path, f"its {MANIFEST} names a file elsewhere, {name}")
        if not isinstance(digest, dict) or "bytes" not in digest or not isinstance(digest.get("sha256"), str):
            raise damaged(path, f"its {MANIFEST} should give 'bytes' and 'sha256' of {name}, found {digest!r}")
        if (size := _size(path / name)) != digest["bytes"]:
            raise damaged(path, f"{name} should hold {digest['bytes']} bytes, found {size}")
    return manifest


def newest_whole(saved: Sequence[Path]) -> Path:
    """Return the newest of ``saved`` whose manifest and file sizes are in order, without reading the files.

    Args:
        saved: complete checkpoints, oldest first; at least one.

    Raises:
        UnusableError: none is; says what is wrong with the newest.
        CheckpointError: one has another format.
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
    for name, digest in manifest["files"].items():
        try:
            with (path / name).open("rb") as file:
                checksum = _checksum_of(file)
        except OSError as error:
            raise damaged(path, f"{name} cannot be read ({error.strerror})") from error
        if checksum != digest["sha256"]:
            raise damaged(path, f"{name} should have the SHA-256 {digest['sha256'][:12]}..., found {checksum[:12]}...")
    return manifest


def damaged(path: Path, reason: str) -> UnusableError:
    """Return the error that says why the checkpoint ``path`` cannot be used, and what to do."""
    others = [other.name for other in complete(path.parent) if other != path]
    way_out = (
        f"{others[-1]} next to it may be good: train takes the newest good one with resume=auto, evaluate and export "
        f"take checkpoint={path.parent / others[-1]}"
        if others
        else "start again with another run_dir"
    )
    return UnusableError(f"{path} is damaged: {reason}; {way_out}")


def _checksum_of(file: IO[bytes]) -> str:
    digest = hashlib.sha256()
    while piece := file.read(PIECE_BYTES):
        digest.update(piece)
        progress.count()
    return digest.hexdigest()


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
