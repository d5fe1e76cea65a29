"""Storages of run folders: local folders and URLs of fsspec. No torch.

A place is a pure path, so that only this file can look at it: a ``Path`` is local, a :class:`Url` is not. A new kind of
storage is one class here with the methods of :class:`LocalFolders`.

Atomicity. A storage must give four things: ``create`` fails if the file is there, and so succeeds for one of several
processes; ``write`` replaces a file as a whole; what was written is found by all who look afterwards; and what was
deleted is gone. Nothing needs a rename, a lock, a clock, or an order among files. From these four follow:

*A checkpoint is complete or absent.* It exists once its manifest exists. The manifest names each file with size and
checksum. All files are created before the manifest is written, and the manifest is deleted before all other files. So
a process that is killed at any time leaves a manifest with its files, or files without a manifest. These are not read,
and the next start deletes them. Rank 0 puts a token into the folder when a save begins. Other processes create their
files only where they find this token, and ``create`` never replaces a file. So a process left over from a killed run
cannot change a checkpoint; at worst a later save finds the name of a file taken, and fails. See :mod:`.layout` and
:mod:`.async_save`.

*A run folder has one owner.* Owners are numbered: ``owner-00000007`` is created by the process that found no file but
that of an owner 6 that is dead, and only one process can create it. See :mod:`.ownership`.

Every method raises OSError, whatever library is below, FileNotFoundError and FileExistsError among them.
"""

import atexit
import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from pathlib import Path, PurePath, PurePosixPath
from typing import IO, Any, BinaryIO

from adl_dist.errors import ConfigError, in_one_line
from adl_dist.report.files import write_atomically

Data = bytes | memoryview
PIECE_BYTES = 2**26  # large files are written and read in pieces of this size; on disk, one is synced before the next
READ_AHEAD_BYTES = 2**22  # of a file that is not local


class Progress:
    """The number of pieces that this process has written and read.

    The watchdog sees by it that a slow disk still moves. ``create`` and reading count. ``write`` does not: a beat of
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
    """Return the user's URL or local path, made absolute, as a place; ``file://`` is local."""
    scheme, found, rest = os.fspath(place).partition("://")
    if isinstance(place, Url) or (found and scheme != "file"):
        return Url(os.fspath(place))
    return Path(rest if found else place).absolute()


def on_rank(rank: int, place: PurePath) -> Url:
    """Return the local ``place`` of another rank, see :mod:`~adl_dist.distributed.rank_files`."""
    return Url(f"rank://{rank}{place}")


class LocalFolders:
    """Local folders, also of a shared file system, with writes synced to disk.

    The module docstring has the guarantees of the methods.
    """

    def names(self, folder: PurePath) -> list[str]:
        """Return the sorted names in ``folder``, empty if it is missing.

        Names of folders end with a slash.
        """
        try:
            return sorted(f"{path.name}/" if path.is_dir() else path.name for path in Path(folder).iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return []

    def size(self, file: PurePath) -> int:
        """Return the number of bytes of ``file``."""
        return Path(file).stat().st_size

    def open(self, file: PurePath) -> BinaryIO:
        """Open ``file`` for reading from any position."""
        return Path(file).open("rb")

    def read(self, file: PurePath) -> bytes:
        """Return the content of a small ``file``, as it was at one moment."""
        return Path(file).read_bytes()

    def create(self, file: PurePath, content: Iterable[Data]) -> None:
        """Write a new ``file``; raise FileExistsError if it exists.

        A failure leaves no file, or a part of it.
        """
        folder = Path(file).parent
        if is_new := not folder.is_dir():
            folder.mkdir(parents=True, exist_ok=True)
        self._fill(file, _pieces(content), progress.count)
        for made in (folder, folder.parent) if is_new else (folder,):
            _sync_folder(made)

    def write(self, file: PurePath, content: bytes) -> None:
        """Write or replace ``file``, whole or not at all."""
        folder = Path(file).parent
        folder.mkdir(parents=True, exist_ok=True)
        with write_atomically(Path(file)) as unfinished:
            unfinished.unlink(missing_ok=True)  # of a process of this number that was killed
            self._fill(unfinished, [content], lambda: None)
        _sync_folder(folder)

    def delete(self, place: PurePath) -> None:
        """Delete a file, or a folder with all that is in it, if it is there."""
        if Path(place).is_dir():
            shutil.rmtree(place)
        else:
            Path(place).unlink(missing_ok=True)

    def move(self, folder: PurePath, target: PurePath) -> None:
        """Move a folder to a free name.

        A failure deletes nothing. No other process may write there.
        """
        Path(folder).rename(target)
        _sync_folder(Path(target).parent)

    @staticmethod
    def _fill(file: PurePath, pieces: Iterable[Data], count: Callable[[], None]) -> None:
        unsynced = 0
        with Path(file).open("xb") as out:
            for piece in pieces:
                write_piece(out, piece)
                count()
                unsynced += len(piece)
                if unsynced >= PIECE_BYTES:
                    _sync(out)
                    count()
                    unsynced = 0
            _sync(out)
            count()


class Fsspec:
    """A storage of fsspec; ``create`` is a conditional put, as S3 has it."""

    def __init__(self, scheme: str) -> None:
        """Connect to ``scheme``, configured by environment variables and files.

        Raises:
            ConfigError: If fsspec does not know ``scheme``, or its packages are missing.
        """
        import fsspec  # imported late: a run in a local folder needs none of it

        fsspec.register_implementation("rank", "adl_dist.distributed.rank_files.RankFiles", clobber=True)
        try:
            self._files: Any = fsspec.filesystem(scheme, use_listings_cache=False)
        except (ImportError, ValueError) as error:
            raise ConfigError(f"{scheme}:// cannot be used: {error}; give a local folder, s3:// or gs://") from None

    def names(self, folder: PurePath) -> list[str]:
        """See :class:`LocalFolders`."""
        with _os_errors():
            try:
                entries = self._files.ls(str(folder), detail=True)
            except FileNotFoundError:
                return []
            entries = [each for each in entries if not str(folder).endswith(each["name"])]  # a file names itself
            found = {PurePosixPath(each["name"]).name: each["type"] == "directory" for each in entries}
            return sorted(f"{name}/" if is_folder else name for name, is_folder in found.items())

    def size(self, file: PurePath) -> int:
        """See :class:`LocalFolders`."""
        with _os_errors():
            return int(self._files.size(str(file)))

    def open(self, file: PurePath) -> BinaryIO:
        """See :class:`LocalFolders`."""
        with _os_errors():
            opened: BinaryIO = self._files.open(str(file), "rb", block_size=READ_AHEAD_BYTES)
            return opened

    def read(self, file: PurePath) -> bytes:
        """Read a file in one request, as it may be replaced between two."""
        with _os_errors():
            content: bytes = self._files.cat_file(str(file))
            return content

    def create(self, file: PurePath, content: Iterable[Data]) -> None:
        """See :class:`LocalFolders`."""
        with _os_errors():
            out = self._files.open(str(file), "xb")
            try:
                for piece in _pieces(content):
                    write_piece(out, piece)
                    progress.count()
            except BaseException:
                with contextlib.suppress(Exception):
                    out.discard()  # or what came so far would be uploaded
                    out.closed = True
                raise
            out.close()

    def write(self, file: PurePath, content: bytes) -> None:
        """See :class:`LocalFolders`."""
        with _os_errors():
            self._files.pipe_file(str(file), content)

    def delete(self, place: PurePath) -> None:
        """See :class:`LocalFolders`."""
        with _os_errors(), contextlib.suppress(FileNotFoundError):
            self._files.rm(str(place), recursive=True)

    def move(self, folder: PurePath, target: PurePath) -> None:
        """See :class:`LocalFolders`. The storage itself copies."""
        with _os_errors():
            start, files = len(self._files._strip_protocol(str(folder))), self._files.find(str(folder))
            self._files.copy(files, [f"{target}{file[start:]}" for file in files], on_error="raise")
        self.delete(folder)


Storage = LocalFolders | Fsspec
_local = LocalFolders()
_by_url = lru_cache(Fsspec)


def storage_of(place: PurePath) -> Storage:
    """Return the storage of ``place``; raise ConfigError if it has none."""
    return _local if isinstance(place, Path) else _by_url(str(place).partition("://")[0])


def read(file: PurePath) -> bytes:
    """Return the content of a small file."""
    return storage_of(file).read(file)


def iter_pieces(file: PurePath) -> Iterator[bytes]:
    """Yield the content of a large file in pieces, which are counted."""
    with _os_errors(), storage_of(file).open(file) as opened:
        while piece := opened.read(PIECE_BYTES):
            progress.count()
            yield piece


def working_folder() -> Path:
    """Make a folder of this process, which is removed when the process ends."""
    folder = Path(tempfile.mkdtemp(prefix="adl-dist-run-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def copy_small_files(source: PurePath, target: Path) -> list[PurePath]:
    """Copy missing small files, no tensors or curves; return their names."""
    copied = []
    for name in _small_files(source):
        if not (target / name).exists():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            (target / name).write_bytes(read(source / name))
            copied.append(name)
    return copied


def local_run(run_dir: str) -> Path:
    """Return a local path to a run folder; copy small files from a URL."""
    place = place_of(run_dir)
    if isinstance(place, Path):
        return place
    copy_small_files(place, folder := working_folder())
    return folder


def _small_files(folder: PurePath) -> Iterator[PurePath]:
    for name in storage_of(folder).names(folder):
        if name.endswith("/") and not name.startswith(("tensorboard", "rejected")):
            yield from (name[:-1] / below for below in _small_files(folder / name))
        elif not name.endswith(("/", ".safetensors")):
            yield PurePath(name)


def write_piece(file: IO[bytes], piece: Data) -> None:
    """Write a piece of a file."""
    file.write(piece)


def _pieces(content: Iterable[Data]) -> Iterator[Data]:
    for data in content:
        for start in range(0, len(data), PIECE_BYTES):
            yield data[start : start + PIECE_BYTES]


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _os_errors() -> Iterator[None]:
    """Turn the errors of the libraries below fsspec into OSError."""
    try:
        yield
    except (OSError, ConfigError):
        raise
    except Exception as error:
        raise OSError(errno.EIO, in_one_line(error)) from error
