"""Storages of run folders: local folders and URLs of fsspec. No torch.

A place is a pure path, so that only this file can look at it: a ``Path`` is local, a :class:`Url` is not. A new kind of
storage is a file system of fsspec.

Atomicity. A storage must give four things: :func:`create` fails if the file is there, and so succeeds for one of
several processes; :func:`write` replaces a file as a whole; a written file is found by every later reader; and a
deleted file is gone. Nothing needs a rename, a lock, a clock, or an order among files. From these four follow:

*A checkpoint is complete or absent.* It exists once its manifest exists. The manifest names each file with size and
checksum. All files are created before the manifest is written, and the manifest is deleted before all other files. So a
process that is killed at any time leaves a manifest with its files, or files without a manifest. These are not read,
and the next start deletes them. Rank 0 puts a token into the folder when a save begins. Other processes create their
files only where they find this token, and ``create`` never replaces a file. So a process left over from a killed run
cannot change a checkpoint; at worst a later save finds the name of a file taken, and fails. See :mod:`.layout` and
:mod:`.async_save`.

*A run folder has one owner.* Owners are numbered: ``owner-00000007`` is created by the process that found no file but
that of an owner 6 that is dead, and only one process can create it. See :mod:`.ownership`.

Every function raises OSError, also FileNotFoundError and FileExistsError, whatever library is below.
"""

import atexit
import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path, PurePath, PurePosixPath
from typing import IO, Any, BinaryIO

from adl_dist.errors import ConfigError, in_one_line
from adl_dist.report.files import write_atomically

Data = bytes | memoryview
PIECE_BYTES = 2**26  # large files are written and read in pieces of this size; on disk, one is synced before the next
READ_AHEAD_BYTES = 2**22  # of a file that is not local


class Progress:
    """The number of pieces of large files written and read by this process.

    It shows the watchdog that a slow disk still works. Small files do not count, because a heartbeat of
    :mod:`.ownership` is no progress of the run.
    """

    num_pieces = 0

    def count(self) -> None:
        """Add one without a lock, since only a change of the number matters."""
        self.num_pieces += 1


progress = Progress()


class Url(PurePosixPath):
    """A place that is not local, like ``s3://bucket/runs/NAME``."""

    def __str__(self) -> str:
        """Return the URL, with both slashes that a path would merge."""
        return super().__str__().replace(":/", "://", 1)


def place_of(place: str | os.PathLike[str]) -> PurePath:
    """Return a URL or absolute local path; ``file://`` and ``~`` are local."""
    scheme, found, rest = os.fspath(place).partition("://")
    if isinstance(place, Url) or (found and scheme != "file"):
        return Url(os.fspath(place))
    return Path(os.path.expanduser(rest if found else place)).absolute()


def on_rank(rank: int, place: PurePath) -> Url:
    """Return a place of another rank, see distributed/rank_files.py."""
    return Url(f"rank://{rank}{place}")


def names(folder: PurePath) -> list[str]:
    """Return the sorted names in ``folder``; names of folders end with "/".

    The list is empty if the folder is missing.
    """
    with _files_of(folder) as files:

        def is_folder(name: str, entry: Mapping[str, Any]) -> bool:
            return entry["type"] == "directory" or bool(entry.get("islink") and files.isdir(str(folder / name)))

        try:
            entries = files.ls(str(folder), detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return []
        found = {PurePosixPath(each["name"]).name: each for each in entries if not str(folder).endswith(each["name"])}
        return sorted(f"{name}{'/' * is_folder(name, each)}" for name, each in found.items())  # a file names itself


def size(file: PurePath) -> int:
    """Return the number of bytes of ``file``."""
    with _files_of(file) as files:
        return int(files.size(str(file)))


def open_file(file: PurePath) -> BinaryIO:
    """Open ``file`` for reading from any position."""
    with _files_of(file) as files:
        opened: BinaryIO = files.open(str(file), "rb", block_size=READ_AHEAD_BYTES)
        return opened


def read(file: PurePath) -> bytes:
    """Return the content of a small ``file`` at one moment, by one request."""
    with _files_of(file) as files:
        content: bytes = files.cat_file(str(file))
        return content


def iter_pieces(file: PurePath) -> Iterator[bytes]:
    """Yield a large file in pieces, and count each as progress."""
    with _files_of(file), open_file(file) as opened:
        while piece := opened.read(PIECE_BYTES):
            progress.count()
            yield piece


def create(file: PurePath, content: Iterable[Data]) -> None:
    """Write a new ``file`` to disk, or raise FileExistsError.

    If writing fails, no file is left; on another rank a part of it may be. On S3 this is a conditional put.
    """
    is_local = isinstance(file, Path)
    is_new = is_local and not Path(file.parent).is_dir()
    if is_new:
        Path(file.parent).mkdir(parents=True, exist_ok=True)
    with _files_of(file) as files:
        out, unsynced = files.open(str(file), "xb"), 0
        try:
            for piece in content:
                write_piece(out, piece)
                unsynced += len(piece)
                if is_local and unsynced >= PIECE_BYTES:
                    _sync(out)
                    unsynced = 0
            if is_local:
                _sync(out)
        except BaseException:
            with contextlib.suppress(Exception):
                if is_local:
                    _remove_unfinished(Path(file), out, with_folder=is_new)
                else:
                    out.discard()  # or what came so far would be uploaded
                    out.closed = True
            raise
        out.close()
    if is_local:
        _sync_folder(file.parent)
    if is_new:
        _sync_folder(file.parent.parent)


def _remove_unfinished(file: Path, out: IO[bytes], *, with_folder: bool) -> None:
    """Close and remove ``file``, unless a newer run has replaced it."""
    written = os.fstat(out.fileno()).st_ino
    with contextlib.suppress(Exception):  # as of a full disk, which it is to leave all the same
        out.close()
    if written == os.stat(file).st_ino:
        delete(file)
    if with_folder:
        file.parent.rmdir()  # which fails if it is not empty


def write(file: PurePath, content: bytes) -> None:
    """Write or replace a small ``file``, whole or not at all."""
    if not isinstance(file, Path):
        with _files_of(file) as files:
            files.pipe_file(str(file), content)
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    with write_atomically(file) as unfinished:
        unfinished.unlink(missing_ok=True)  # of a process of this number that was killed
        create(unfinished, [content])
    _sync_folder(file.parent)


def delete(place: PurePath) -> None:
    """Delete a file, or a folder with all that is in it, if it is there."""
    with _files_of(place) as files, contextlib.suppress(FileNotFoundError):
        files.rm(str(place), recursive=True)


def move(folder: PurePath, target: PurePath) -> None:
    """Move a folder that no process uses; a failure keeps all of it."""
    if isinstance(folder, Path):
        folder.rename(target)
        _sync_folder(folder.parent)
        return
    with _files_of(folder) as files:
        start, found = len(files._strip_protocol(str(folder))), files.find(str(folder))
        files.copy(found, [f"{target}{file[start:]}" for file in found], on_error="raise")
    delete(folder)


def write_piece(file: IO[bytes], piece: Data) -> None:
    """Write a piece of a file."""
    file.write(piece)


def working_folder() -> Path:
    """Make a folder of this process, which is removed when the process ends."""
    folder = Path(tempfile.mkdtemp(prefix="adl-dist-run-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def copy_small_files(source: PurePath, target: Path, below: str = "") -> list[PurePath]:
    """Copy missing files but tensors and TensorBoard's; return their names."""
    copied = []
    for name in names(source / below):
        place = f"{below}{name}"
        if name.endswith("/") and not name.startswith(("tensorboard", "rejected")):
            copied += copy_small_files(source, target, place)
        elif not name.endswith(("/", ".safetensors")) and not (target / place).exists():
            (target / place).parent.mkdir(parents=True, exist_ok=True)
            (target / place).write_bytes(read(source / place))
            copied.append(PurePath(place))
    return copied


def local_run(run_dir: str) -> Path:
    """Return a local path to a run folder; copy small files from a URL."""
    place = place_of(run_dir)
    if isinstance(place, Path):
        return place
    copy_small_files(place, folder := working_folder())
    return folder


@lru_cache
def _file_system(scheme: str) -> Any:
    import fsspec  # imported late: commands that read no run need none of it

    fsspec.register_implementation("rank", "adl_dist.distributed.rank_files.RankFiles", clobber=True)
    try:
        return fsspec.filesystem(scheme, use_listings_cache=False)  # configured by environment variables and files
    except (ImportError, ValueError) as error:
        raise ConfigError(f"{scheme}:// cannot be used: {error}; give a local folder, s3:// or gs://") from None


@contextlib.contextmanager
def _files_of(place: PurePath) -> Iterator[Any]:
    """Yield the file system of ``place``; turn its errors into OSError."""
    try:
        yield _file_system("file" if isinstance(place, Path) else str(place).partition("://")[0])
    except (OSError, ConfigError):
        raise
    except Exception as error:
        raise OSError(errno.EIO, in_one_line(error)) from error


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_folder(folder: PurePath) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
