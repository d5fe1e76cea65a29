"""The files of a checkpoint: complete or absent, and verified by content.

checkpoints/update-00000042/     complete as soon as it has a manifest, see :mod:`.storage`
    manifest.json                position, metrics, size and SHA-256 of every file, and a SHA-256 of itself
    model-00001-of-00004.safetensors ...  tensors of stage 0, see :mod:`.state`
checkpoints/rejected-update-...  damaged, and passed over for an older one; kept for the user to look at
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import PurePath
from typing import Any

from adl_dist.checkpoint import storage
from adl_dist.checkpoint.storage import PIECE_BYTES, Data, progress
from adl_dist.errors import CheckpointError, UnusableError, in_one_line, text_of
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
    """Write a new file in counted pieces; return its size and checksum."""
    checksum, num_bytes = hashlib.sha256(), 0

    def pieces() -> Iterator[Data]:
        nonlocal num_bytes
        for data in content:
            for start in range(0, len(data), PIECE_BYTES):
                piece = data[start : start + PIECE_BYTES]
                checksum.update(piece)
                num_bytes += len(piece)
                yield piece
                progress.count()

    storage.create(file, pieces())
    return {"bytes": num_bytes, "sha256": checksum.hexdigest()}


def place(folder: PurePath, update: int) -> PurePath:
    """Return the path of the checkpoint of ``update``."""
    return folder / f"{UPDATE}{update:08d}"


def is_complete(path: PurePath) -> bool:
    """Return whether ``path`` is the folder of a complete checkpoint."""
    return MANIFEST in storage.names(path)


def complete(folder: PurePath) -> list[PurePath]:
    """Return the complete checkpoints of a folder, oldest first."""
    return [path for path in _update_folders(folder) if is_complete(path)]


def clean(folder: PurePath) -> None:
    """Remove the remains of interrupted saves."""
    for path in (path for path in _update_folders(folder) if not is_complete(path)):
        with suppress(OSError):
            storage.delete(path)


def _update_folders(folder: PurePath) -> list[PurePath]:
    return [folder / name for name in storage.names(folder) if name.startswith(UPDATE) and name.endswith("/")]


def begin(path: PurePath, token: str) -> bool:
    """Begin a save; return False if ``path`` is a complete checkpoint already.

    Raise OSError if the save cannot begin, or if a checkpoint at ``path`` cannot be read; it is kept.
    """
    if is_complete(path):
        try:
            read_manifest(path)
            return False
        except CheckpointError as error:
            if isinstance(error.__cause__, OSError) and not isinstance(error.__cause__, FileNotFoundError):
                raise error.__cause__ from None
    remove(path)
    storage.create(path / TOKEN, [token.encode()])
    return True


def has_begun(path: PurePath, token: str) -> bool:
    """Return whether the save under way in ``path`` is the one with ``token``."""
    with suppress(FileNotFoundError, NotADirectoryError):
        return storage.read(path / TOKEN) == token.encode()
    return False


def undo(path: PurePath, token: str) -> None:
    """Remove an incomplete checkpoint of the save with ``token``."""
    if has_begun(path, token) and not is_complete(path):
        storage.delete(path)


def commit(path: PurePath, manifest: Mapping[str, Any], files: Mapping[str, Digest]) -> PurePath:
    """Complete the checkpoint ``path`` by writing the manifest of ``files``."""
    try:
        _write_manifest(path, {"format": FORMAT, **manifest, "files": dict(files)})
    except OSError:
        with suppress(OSError):  # it may be there, though not on disk for certain
            storage.delete(path / MANIFEST)
        raise
    with suppress(OSError):  # it does no harm
        storage.delete(path / TOKEN)
    return path


def add_metrics(path: PurePath, made: Mapping[str, Any]) -> None:
    """Add the metrics in ``made``, a later manifest, to a checkpoint without.

    The state of the callbacks, which have seen these metrics, is replaced as well.
    """
    manifest = read_manifest(path)
    if made["metrics"] and not manifest["metrics"]:
        _write_manifest(path, {**manifest, "metrics": dict(made["metrics"]), "callbacks": made["callbacks"]})


def _write_manifest(path: PurePath, manifest: Mapping[str, Any]) -> None:
    """Write a manifest with its checksum."""
    storage.write(path / MANIFEST, json.dumps({**manifest, "sha256": _checksum(manifest)}, indent=1).encode())


def remove(path: PurePath) -> None:
    """Remove a checkpoint, its manifest first, so that no reader trusts it."""
    storage.delete(path / MANIFEST)
    storage.delete(path)


def prune(folder: PurePath, *, keep: int, keep_best: bool) -> None:
    """Remove old checkpoints; keep the newest ``keep``, and the best if asked."""
    saved = complete(folder)
    best = best_of(saved) if keep_best else None
    for path in saved[:-keep]:
        if path != best:
            remove(path)


def best_of(saved: Sequence[PurePath]) -> PurePath | None:
    """Return the best checkpoint by the newest's goal, the oldest of equals."""
    manifests = {}
    for path in sorted(saved):
        with suppress(CheckpointError, OSError):  # damaged, or removed meanwhile
            manifests[path] = read_manifest(path)
    goal = Goal(**manifests[max(manifests)].get("goal", {})) if manifests else Goal()
    scores = {path: score for path, one in manifests.items() if (score := goal.score(one["metrics"])) is not None}
    return max(scores, key=lambda path: scores[path], default=None)


def reject(path: PurePath) -> PurePath:
    """Move a checkpoint to a name that no run resumes from; return its path."""
    aside = path.with_name(f"rejected-{path.name}")
    try:
        storage.delete(aside)
        storage.move(path, aside)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be moved to {aside.name}: {error}; move it out of the way") from error
    return aside


@contextmanager
def reading(path: PurePath, name: str) -> Iterator[None]:
    """Turn an error of reading file ``name`` of ``path`` into UnusableError."""
    try:
        yield
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        reason = text_of(error) if isinstance(error, OSError | ValueError) else in_one_line(error)
        raise UnusableError(
            f"{path} is damaged: {name} cannot be read ({reason}); continue from one next to it, if there "
            "is one (train takes the newest good one with resume=auto, evaluate and export take checkpoint=PATH), or "
            "start again with another run_dir"
        ) from error


def read_manifest(path: PurePath) -> dict[str, Any]:
    """Read and check the manifest of a checkpoint, and the sizes of its files.

    Raise UnusableError if the checkpoint is damaged, CheckpointError if it is no checkpoint, or has a different format.
    """
    with reading(path, MANIFEST):
        if not is_complete(path):
            newest = complete(path / "checkpoints")[-1:]
            like = newest[0] if newest else "runs/NAME/checkpoints/update-00000042"
            raise CheckpointError(f"{path} is not a checkpoint: it has no {MANIFEST}; expected a folder like {like}")
        manifest = dict(json.loads(storage.read(path / MANIFEST)))
        expected = manifest.pop("sha256", None)
        is_as_written = expected == _checksum(manifest)
        if manifest.get("format", FORMAT) != FORMAT and (is_as_written or expected is None):
            raise CheckpointError(
                f"{path} has format {manifest.get('format')}; this version of adl_dist reads format {FORMAT}: use the "
                "version that wrote it"
            )
        if not is_as_written:
            raise ValueError("it does not have the checksum that it gives")
        # Those who can write to the folder can write checksums, too.
        if missing := [name for name, kind in FIELDS.items() if type(manifest.get(name)) is not kind]:
            raise ValueError(f"it has no '{missing[0]}', or of another kind")
        if elsewhere := [n for n in manifest["files"] if PurePath(n).name != n or n in ("", "..")]:
            raise ValueError(f"it names a file elsewhere: '{elsewhere[0]}'")
    check_sizes(path, manifest["files"])
    return manifest


def check_sizes(path: PurePath, files: Mapping[str, Digest]) -> None:
    """Raise UnusableError for a missing file, or a wrong size."""
    for name, digest in files.items():
        with reading(path, name):
            if (found := storage.size(path / name)) != digest["bytes"]:
                raise ValueError(f"it should hold {digest['bytes']} bytes, found {found}")


def verify(path: PurePath) -> dict[str, Any]:
    """Verify all checksums of a checkpoint, and return its manifest."""
    manifest = read_manifest(path)
    for name, digest in manifest["files"].items():
        with reading(path, name):
            checksum = hashlib.sha256()
            for piece in storage.iter_pieces(path / name):
                checksum.update(piece)
            if (found := checksum.hexdigest()) != digest["sha256"]:
                raise ValueError(f"its SHA-256 should be {digest['sha256'][:12]}..., found {found[:12]}...")
    return manifest


def first_usable(
    candidates: Sequence[PurePath], check: Callable[[PurePath], dict[str, Any]]
) -> tuple[PurePath, dict[str, Any], list[tuple[PurePath, UnusableError]]]:
    """Return the first usable candidate, its manifest, and the rejected ones.

    Candidates are newest first, and at least one. ``check`` returns a candidate's manifest or raises UnusableError.
    Rejected are those before the usable one, as pairs (path, error). Raise CheckpointError if no candidate is usable,
    or one has a different format. Nothing is changed.
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


def _checksum(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
