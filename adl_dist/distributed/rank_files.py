"""The local files of another rank, as a file system of fsspec.

Machines without a shared file system use them. ``rank://0/root/run`` is ``/root/run`` on the machine of rank 0. Files
travel in pieces of ``MESSAGE_BYTES``. Each rank makes one call at a time, and RPC has a thread for each rank, so that
other threads stay free for the watchdog.
"""

import errno
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.rpc as rpc
from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

from adl_dist.distributed.rpc_errors import Call, PeerError
from adl_dist.distributed.world import name_of, world_of_process

MESSAGE_BYTES = 2**20
SYNC_BYTES = 2**26  # written to disk before the next

_local = LocalFileSystem()


class RankFiles(AbstractFileSystem):  # type: ignore[misc]
    """Files of other ranks, to be read, created and deleted."""

    protocol = "rank"

    def call(self, work: Callable[..., Any], path: str, *arguments: object) -> Any:
        """Return the result of ``work`` on the rank of ``path``, or raise OSError."""
        rank, _, rest = self._strip_protocol(path).partition("/")
        start = partial(rpc.rpc_async, name_of(int(rank)), _result_or_error, (work, f"/{rest}", *arguments))
        world = world_of_process()
        limit = (dist.default_pg_timeout if world is None else world.timeout).total_seconds()
        try:
            result = Call[Any](f"rank {rank}", lambda seconds: start(timeout=seconds), limit).wait()
        except PeerError as error:
            raise OSError(errno.EIO, str(error)) from error
        if isinstance(result, OSError):
            raise result
        return result

    def info(self, path: str, **_: object) -> Any:
        """Return the size, type and other facts of a file or folder."""
        return self.call(_local.info, path)

    def ls(self, path: str, detail: bool = True, **_: object) -> Any:
        """Return the entries of a folder."""
        return self.call(_local.ls, path, detail)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: object) -> bytes:
        """Return the bytes of a file from ``start`` to ``end``, or all."""
        begin, stop = start or 0, self.info(path)["size"] if end is None else end
        pieces = range(begin, stop, MESSAGE_BYTES)
        return b"".join(self.call(_local.cat_file, path, at, min(at + MESSAGE_BYTES, stop)) for at in pieces)

    def rm(self, path: str, recursive: bool = False, maxdepth: int | None = None) -> None:
        """Delete a file or a folder."""
        self.call(_local.rm, path, recursive)

    def _open(self, path: str, mode: str = "rb", block_size: int | None = None, **_: object) -> "_RankFile":
        return _RankFile(self, path, mode, block_size or MESSAGE_BYTES)


class _RankFile(AbstractBufferedFile):  # type: ignore[misc]
    def _initiate_upload(self) -> None:
        pass

    def _upload_chunk(self, final: bool = False) -> bool:
        content = self.buffer.getvalue()
        for at in range(0, len(content), MESSAGE_BYTES):
            self.fs.call(_append, self.path, self.offset + at, content[at : at + MESSAGE_BYTES])
        if final:
            self.fs.call(_append, self.path, self.offset + len(content), b"")
        return True


def _append(path: str, begin: int, piece: bytes) -> None:
    """Append a piece to a file; the first creates it, an empty one ends it."""
    with Path(path).open("ab" if begin else "xb") as out:
        out.write(piece)
        if not piece or (begin + len(piece)) % SYNC_BYTES < len(piece):
            out.flush()
            os.fsync(out.fileno())


def _result_or_error(work: Callable[..., object], *arguments: object) -> object:
    """Return a result or OSError, as RPC would lose the number of the latter."""
    try:
        return work(*arguments)
    except OSError as error:
        return error
