"""The files of a checkpoint: complete or absent, and verified by content.

checkpoints/update-00000042/     complete as soon as it has a manifest, see :mod:`.storage`
    manifest.json                position, metrics, size and SHA-256 of every file, and a SHA-256 of itself
    model-00001-of-00004.safetensors ...  tensors of stage 0, see :mod:`.state`
checkpoints/rejected-update-...  damaged, and passed over for an older one; kept for the user to look at
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import PurePath
from typing import Any

from adl_dist.checkpoint.storage import Data, iter_pieces, read, storage_of
from adl_dist.errors import CheckpointError, UnusableError
from adl_dist.report.goal import Goal

FORMAT = 5
MANIFEST = "manifest.json"
TOKEN = "saving"  # the file with the token of the save that is under way
UPDATE = "update-"
# Where the run stood: updates made, whole epochs done, samples of the next epoch done; and its last metrics.
# "goal" is what the best checkpoint is the best of, "callbacks" what callbacks remember; older ones have neither.
# "identity" is what the position refers to: sizes of data and batches, length of the run, optimizer; and the cut.
FIELDS = {"update": int, "epochs": int, "sample": int, "metrics": dict, "identity": dict, "files": dict}

Digest = dict[str, Any]  # {"bytes", "sha256"} of a file


def create_hashed(file: PurePath, content: Iterable[Data]) -> Digest:
    """Write a new file; return its size and checksum."""
    checksum, size = hashlib.sha256(), 0

    def hashed() -> Iterator[Data]:
        nonlocal size
        for data in content:
            checksum.update(data)
            size += len(data)
            yield data

    storage_of(file).create(file, hashed())
    return {"bytes": size, "sha256": checksum.hexdigest()}


def place(folder: PurePath, update: int) -> PurePath:
    """Return where the checkpoint of ``update`` is."""
    return folder / f"{UPDATE}{update:08d}"


def is_complete(path: PurePath) -> bool:
    """Return whether ``path`` is the folder of a complete checkpoint."""
    return MANIFEST in storage_of(path).names(path)


def begin(path: PurePath, token: str) -> bool:
    """Begin a save; return False if ``path`` is a complete checkpoint already.

    Raises:
        OSError: What is there cannot be read, and stays; or the save cannot begin.
    """
    if is_complete(path):
        try:
            read_manifest(path)
        except UnusableError as error:
            if isinstance(error.__cause__, OSError):
                raise error.__cause__ from None
        else:
            return False
    remove(path)
    try:
        storage_of(path).create(path / TOKEN, [token.encode()])
    except FileExistsError:  # of another process
        raise
    except OSError:
        with suppress(OSError):
            storage_of(path).delete(path)
        raise
    return True


def has_begun(path: PurePath, token: str) -> bool:
    """Return whether the save under way in ``path`` is the one with ``token``."""
    with suppress(FileNotFoundError, NotADirectoryError):
        return read(path / TOKEN) == token.encode()
    return False


def undo(path: PurePath, token: str) -> None:
    """Remove an incomplete checkpoint of the save with ``token``."""
    if has_begun(path, token) and not is_complete(path):
        storage_of(path).delete(path)


def wrong_size(path: PurePath, files: Mapping[str, Digest]) -> str | None:
    """Describe the first of ``files`` in ``path`` with a wrong size, or None."""
    for name, digest in files.items():
        size: object
        try:
            size = storage_of(path).size(path / name)
        except FileNotFoundError:
            size = "no such file"
        if size != digest["bytes"]:
            return f"{name} should hold {digest['bytes']} bytes, found {size}"
    return None


def commit(path: PurePath, manifest: Mapping[str, Any], files: Mapping[str, Digest]) -> PurePath:
    """Complete the checkpoint ``path`` by the manifest of its ``files``."""
    text = {"format": FORMAT, **manifest, "files": dict(files)}
    content = json.dumps({**text, "sha256": _checksum(text)}, indent=1).encode()
    storage_of(path).write(path / MANIFEST, content)
    with suppress(OSError):  # it does no harm
        storage_of(path).delete(path / TOKEN)
    return path


def complete(folder: PurePath) -> list[PurePath]:
    """Return the complete checkpoints of a folder, oldest first."""
    return [path for path in _update_folders(folder) if is_complete(path)]


def _update_folders(folder: PurePath) -> list[PurePath]:
    names = storage_of(folder).names(folder)
    return [folder / name for name in names if name.startswith(UPDATE) and name.endswith("/")]


def remove(path: PurePath) -> None:
    """Remove a checkpoint, its manifest first, so that no reader trusts it."""
    storage_of(path).delete(path / MANIFEST)
    storage_of(path).delete(path)


def prune(folder: PurePath, *, keep: int, keep_best: bool) -> None:
    """Remove complete checkpoints, but not the newest ``keep`` and the best."""
    saved = complete(folder)
    best = best_of(saved) if keep_best else None
    for path in saved[:-keep]:
        if path != best:
            remove(path)


def best_of(saved: Sequence[PurePath]) -> PurePath | None:
    """Return the best checkpoint by the newest one's goal, the first of ties."""
    manifests = {}
    for path in saved:
        with suppress(CheckpointError, OSError):  # damaged, or removed meanwhile
            manifests[path] = read_manifest(path)
    goal = Goal(**manifests[max(manifests)].get("goal", {})) if manifests else Goal()
    found = {path: goal.score(manifest["metrics"]) for path, manifest in manifests.items()}
    scores = {path: score for path, score in found.items() if score is not None}
    return max(sorted(scores), key=lambda path: scores[path], default=None)


def reject(path: PurePath) -> PurePath:
    """Move a checkpoint to a name that no run resumes from; return its path."""
    aside = path.with_name(f"rejected-{path.name}")
    try:
        storage_of(path).delete(aside)
        storage_of(path).move(path, aside)
    except OSError as error:
        reason = error.strerror or error
        raise CheckpointError(f"{path} cannot be moved to {aside.name}: {reason}; move it out of the way") from error
    return aside


def clean(folder: PurePath) -> None:
    """Remove the remains of interrupted saves."""
    for path in (path for path in _update_folders(folder) if not is_complete(path)):
        with suppress(OSError):
            storage_of(path).delete(path)


def read_manifest(path: PurePath) -> dict[str, Any]:
    """Read and check the manifest of a checkpoint, and the sizes of its files.

    Raises:
        UnusableError: the checkpoint is damaged.
        CheckpointError: ``path`` is not a checkpoint, or has another format.
    """
    try:
        manifest = dict(json.loads(read(path / MANIFEST)))
        expected = manifest.pop("sha256", None)
        is_as_written = expected is None or _checksum(manifest) == expected  # another format may have no checksum
    except (FileNotFoundError, NotADirectoryError):
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
        if PurePath(name).name != name or name in ("", ".."):
            raise damaged(path, f"its {MANIFEST} names a file elsewhere, {name}")
        if not isinstance(digest, dict) or "bytes" not in digest or not isinstance(digest.get("sha256"), str):
            raise damaged(path, f"its {MANIFEST} should give 'bytes' and 'sha256' of {name}, found {digest!r}")
    try:
        wrong = wrong_size(path, manifest["files"])
    except OSError as error:
        raise damaged(path, f"its files cannot be looked at ({error.strerror})") from error
    if wrong:
        raise damaged(path, wrong)
    return manifest


def verify(path: PurePath) -> dict[str, Any]:
    """Verify all checksums of a checkpoint, and return its manifest."""
    manifest = read_manifest(path)
    for name, digest in manifest["files"].items():
        checksum = hashlib.sha256()
        try:
            for piece in iter_pieces(path / name):
                checksum.update(piece)
        except OSError as error:
            raise damaged(path, f"{name} cannot be read ({error.strerror})") from error
        if (found := checksum.hexdigest()) != digest["sha256"]:
            raise damaged(path, f"{name} should have the SHA-256 {digest['sha256'][:12]}..., found {found[:12]}...")
    return manifest


def first_usable(
    candidates: Sequence[PurePath], check: Callable[[PurePath], dict[str, Any]]
) -> tuple[PurePath, dict[str, Any], list[tuple[PurePath, UnusableError]]]:
    """Return the first usable candidate, its manifest, and those rejected.

    There must be at least one candidate; ``check`` accepts it or raises UnusableError. Raise CheckpointError where none
    is usable or one has another format. Nothing is changed.
    """
    rejected: list[tuple[PurePath, UnusableError]] = []
    for path in candidates:
        try:
            return path, check(path), rejected
        except UnusableError as error:
            rejected.append((path, error))
    if len(rejected) == 1:
        raise rejected[0][1]
    reasons = "; ".join(str(error).rpartition(";")[0] for _, error in rejected)
    raise CheckpointError(
        f"none of the {len(rejected)} checkpoints in {candidates[0].parent} can be used, and nothing was changed: "
        f"{reasons}; bring back a copy of one, or start again with another run_dir"
    )


def damaged(path: PurePath, reason: str) -> UnusableError:
    """Return the error of a damaged checkpoint, with a reason and a way out."""
    way_out = "start again with another run_dir"
    if others := [other for other in complete(path.parent) if other != path]:
        way_out = (
            f"{others[-1].name} next to it may be good: train takes the newest good one with resume=auto, evaluate and "
            f"export take checkpoint={others[-1]}"
        )
    return UnusableError(f"{path} is damaged: {reason}; {way_out}")


def _checksum(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
