"""Checkpoints as files: complete or not there, and verified by content before a run continues from them.

checkpoints/update-00000042/     complete: it appears by one rename
    manifest.json                position, metrics, size and SHA-256 of every file, and a SHA-256 of itself
    model-00001-of-00004.safetensors ...  tensors of stage 0, see :mod:`adl_dist.checkpoint.state`
checkpoints/.saving-...          unfinished (.removing-...: half removed); removed at the next start
checkpoints/rejected-update-...  damaged, and passed over for an older one; kept for the user to look at
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from adl_dist.errors import CheckpointError, UnusableError
from adl_dist.report import warn
from adl_dist.report.goal import Goal

FORMAT = 5
MANIFEST = "manifest.json"
# Where the run stood: updates made, whole epochs done, samples of the next epoch done; and its last metrics.
# "goal" is what the best checkpoint is the best of, "callbacks" what callbacks remember; older ones have neither.
# "identity" is what the position refers to: sizes of data and batches, length of the run, optimizer; and the cut.
FIELDS = {"update": int, "epochs": int, "sample": int, "metrics": dict, "identity": dict, "files": dict}
# Large files are written and read in pieces of this size; a piece is on disk before the next one is written.
PIECE_BYTES = 2**26

Digest = dict[str, Any]  # {"bytes", "sha256"} of a file


class Progress:
    """The number of pieces that this process has written and read, so that the watchdog sees a slow disk move."""

    num_pieces = 0

    def count(self) -> None:
        """Add one, without a lock: what matters is that the number changes."""
        self.num_pieces += 1


progress = Progress()


def write_hashed(path: Path, content: Iterable[bytes | memoryview]) -> Digest:
    """Write a new file of plain bytes; return its size and checksum once it is on disk."""
    checksum, size, synced_size = hashlib.sha256(), 0, 0
    with path.open("xb") as file:
        for data in content:
            for start in range(0, len(data), PIECE_BYTES):
                piece = data[start : start + PIECE_BYTES]
                write_piece(file, piece)
                checksum.update(piece)
                size += len(piece)
                if size - synced_size >= PIECE_BYTES:
                    _sync(file)
                    synced_size = size
        _sync(file)
    return {"bytes": size, "sha256": checksum.hexdigest()}


def write_piece(file: IO[bytes], piece: bytes | memoryview) -> None:
    """Write a piece of a file and count it."""
    file.write(piece)
    progress.count()


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())
    progress.count()


def place(folder: Path, update: int) -> Path:
    """Return where the complete checkpoint of ``update`` is."""
    return folder / f"update-{update:08d}"


def begin(folder: Path, update: int) -> Path:
    """Make an empty folder for an unfinished checkpoint."""
    path = folder / f".saving-{update:08d}"
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    return path


def wrong_size(path: Path, files: Mapping[str, Digest]) -> str | None:
    """Return what is wrong with the first of ``files`` in ``path`` that has another size; None: nothing."""
    for name, digest in files.items():
        try:
            size = (path / name).stat().st_size if (path / name).is_file() else "no such file"
        except OSError as error:
            size = f"none that can be looked at ({error.strerror})"
        if size != digest["bytes"]:
            return f"{name} should hold {digest['bytes']} bytes, found {size}"
    return None


def commit(path: Path, manifest: Mapping[str, Any], files: Mapping[str, Digest]) -> Path:
    """Turn an unfinished checkpoint into a complete one by one rename; after an OSError no complete one has changed."""
    text = {"format": FORMAT, **manifest, "files": dict(files)}
    write_hashed(path / MANIFEST, [json.dumps({**text, "sha256": _checksum(text)}, indent=1).encode()])
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
            shutil.rmtree(path.rename(path.with_name(f".removing-{path.name}")))


def best_of(saved: Sequence[Path]) -> Path | None:
    """Return the best checkpoint, by what the newest one says its run is after; the newest of equals."""
    manifests = {}
    for path in saved:
        with suppress(CheckpointError, OSError):  # damaged, or removed meanwhile
            manifests[path] = read_manifest(path)
    goal = Goal(**manifests[max(manifests)].get("goal", {})) if manifests else Goal()
    found = {path: goal.score(manifest["metrics"]) for path, manifest in manifests.items()}
    scores = {path: score for path, score in found.items() if score is not None}
    return max(scores, key=lambda path: (scores[path], path.name), default=None)


def reject(path: Path) -> Path:
    """Keep a checkpoint under a name by which nothing takes it for a good one; return its new place."""
    aside = path.with_name(f"rejected-{path.name}")
    shutil.rmtree(aside, ignore_errors=True)
    return path.rename(aside)


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
        manifest = dict(json.loads((path / MANIFEST).read_bytes()))
        expected = manifest.pop("sha256", None)
        is_as_written = expected is None or _checksum(manifest) == expected  # another format may have no checksum
    except (FileNotFoundError, NotADirectoryError):
        if path in complete(path.parent):
            raise damaged(path, f"it has no {MANIFEST}") from None
        raise CheckpointError(
            f"{path} is not a checkpoint: it has no {MANIFEST}; expected a folder like "
            "runs/NAME/checkpoints/update-00000042"
        ) from None
    except (OSError, ValueError, TypeError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise damaged(path, f"its {MANIFEST} cannot be read ({reason})") from error
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
    if wrong := wrong_size(path, manifest["files"]):
        raise damaged(path, wrong)
    return manifest


def verify(path: Path) -> dict[str, Any]:
    """Read all of a checkpoint, compare it with its checksums, and return the manifest; see `read_manifest`."""
    manifest = read_manifest(path)
    for name, digest in manifest["files"].items():
        checksum = hashlib.sha256()
        try:
            with (path / name).open("rb") as file:
                while piece := file.read(PIECE_BYTES):
                    checksum.update(piece)
                    progress.count()
        except OSError as error:
            raise damaged(path, f"{name} cannot be read ({error.strerror})") from error
        if (found := checksum.hexdigest()) != digest["sha256"]:
            raise damaged(path, f"{name} should have the SHA-256 {digest['sha256'][:12]}..., found {found[:12]}...")
    return manifest


def first_usable(
    candidates: Sequence[Path], read: Callable[[Path], dict[str, Any]]
) -> tuple[Path, dict[str, Any], list[tuple[Path, UnusableError]]]:
    """Return the first of ``candidates`` (at least one) that ``read`` accepts, its manifest, and those before it.

    Raise CheckpointError where none is usable or one has another format. Nothing is changed.
    """
    rejected: list[tuple[Path, UnusableError]] = []
    for path in candidates:
        try:
            return path, read(path), rejected
        except UnusableError as error:
            rejected.append((path, error))
    if len(rejected) == 1:
        raise rejected[0][1]
    reasons = "; ".join(str(error).rpartition(";")[0] for _, error in rejected)
    raise CheckpointError(
        f"none of the {len(rejected)} checkpoints in {candidates[0].parent} can be used, and nothing was changed: "
        f"{reasons}; bring back a copy of one, or start again with another run_dir"
    )


def damaged(path: Path, reason: str) -> UnusableError:
    """Return the error that says why the checkpoint ``path`` cannot be used, and what to do."""
    way_out = "start again with another run_dir"
    if others := [other for other in complete(path.parent) if other != path]:
        way_out = (
            f"{others[-1].name} next to it may be good: train takes the newest good one with resume=auto, evaluate and "
            f"export take checkpoint={others[-1]}"
        )
    return UnusableError(f"{path} is damaged: {reason}; {way_out}")


def _checksum(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
