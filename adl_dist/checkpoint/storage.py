"""torch.distributed.checkpoint's files, written by each process alone and read without trusting a pickle.

Every stage's tensors are whole and its own, so there is nothing to plan together: each process writes its file and an
index of it, and one of them joins the indexes. No collective is called, which a failing or slow disk could hold up.

The indexes are pickles (torch 2.15). They are read with a list of what may be made of them; tensor data are read by
``torch.load(weights_only=True)``, and other data are refused.
"""

import dataclasses
import io
import math
import pickle
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from os import PathLike, fspath
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from adl_dist.checkpoint.layout import HashedFile, Told

INDEX = ".metadata"
OF_DCP = "torch.distributed.checkpoint"
# All that the index of a checkpoint of tensors consists of, besides dtypes.
MAY_BE_MADE = {
    *((f"{OF_DCP}.metadata", name) for name in ("Metadata", "StorageMeta", "MetadataIndex", "ChunkStorageMetadata")),
    *((f"{OF_DCP}.metadata", name) for name in ("TensorStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING")),
    (f"{OF_DCP}.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
}


def write(path: Path, state: Mapping[str, Tensor], *, rank: int) -> dict[str, Told]:
    """Write the tensors of one process and their index, ``__{rank}_0.distcp`` and ``__{rank}.metadata``.

    Returns:
        Size and checksum of the file of tensors.

    Raises:
        OSError, RuntimeError: they could not be written.
    """
    writer, planner = _Writer(path), dcp.DefaultSavePlanner()
    planner.set_up_planner(dict(state), is_coordinator=True)
    writer.set_up_storage_writer(True, rank=rank, use_collectives=False)
    plans, index = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    (plan,) = writer.prepare_global_plan(plans)
    results = writer.write_data(planner.finish_plan(plan), planner).wait()
    writer.finish(index, [results])
    return {name: told for name, told in writer.fs.told.items() if INDEX not in name}


def join(path: Path, ranks: Collection[int]) -> dict[str, Told]:
    """Make one index of those that the ranks have written.

    Returns:
        Size and checksum of it.

    Raises:
        OSError: it could not be written.
    """
    parts = [path / f"__{rank}{INDEX}" for rank in sorted(ranks)]
    indexes = [read_index(part) for part in parts]
    joined = dataclasses.replace(
        indexes[0],
        state_dict_metadata=_union(index.state_dict_metadata for index in indexes),
        planner_data=_union(index.planner_data for index in indexes),
        storage_data=_union(index.storage_data for index in indexes),
    )
    with HashedFile(path / INDEX) as out:
        pickle.dump(joined, out)
    for part in parts:
        part.unlink()
    return {INDEX: out.told}


def read(path: Path, state: dict[str, Tensor]) -> None:
    """Fill the tensors of ``state`` from a complete checkpoint; those of this process alone.

    Raises:
        CheckpointException: torch's, around whatever went wrong.
    """
    with warnings.catch_warnings():
        # With no_dist=True one process reads alone, which is what is wanted.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(state, storage_reader=_Reader(path), planner=_TensorsOnly(), no_dist=True)


def read_index(file: Path) -> Metadata:
    """Read an index without making anything but an index of it.

    Raises:
        Exception: a damaged or malicious one can raise any.
    """
    # From memory, because a file is read into as many bytes as the pickle says that it will need.
    index = _Unpickler(io.BytesIO(file.read_bytes())).load()
    if not isinstance(index, Metadata) or not isinstance(index.storage_data, dict):
        raise pickle.UnpicklingError("it is no index")
    told = 0
    for name, entry in index.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise pickle.UnpicklingError(f"{name} is no tensor")
        told += _num_bytes(name, entry)
    # Who reads makes tensors of these sizes first.
    if told > (there := sum(data.stat().st_size for data in file.parent.glob("*.distcp"))):
        raise pickle.UnpicklingError(f"it tells of {told:,} bytes of tensors, and the files hold {there:,}")
    for info in index.storage_data.values():
        if Path(info.relative_path).name != info.relative_path:
            raise pickle.UnpicklingError(f"it leads to {info.relative_path}")
    return index


def _union(parts: Iterable[Mapping[Any, Any]]) -> dict[Any, Any]:
    return {key: value for part in parts for key, value in part.items()}


def _num_bytes(name: str, entry: TensorStorageMetadata) -> int:
    size, dtype = entry.size, entry.properties.dtype
    if not isinstance(size, torch.Size) or not isinstance(dtype, torch.dtype) or any(length < 0 for length in size):
        raise pickle.UnpicklingError(f"{name} has size {size} and dtype {dtype}, which no tensor has")
    return math.prod(size) * dtype.itemsize


class _Unpickler(pickle._Unpickler):
    """Makes an index and changes nothing that was there before.

    Python's, not C's, so that instructions can be refused; nor does its memory grow with the numbers in a pickle.
    """

    stack: list[Any]
    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = dict(pickle._Unpickler.dispatch)
    del dispatch[pickle.BYTEARRAY8[0]]  # would make as many bytes as it says

    def _build(self) -> None:
        """Give attributes to the parts of an index alone: a class or a member of an enumeration is everybody's."""
        if not dataclasses.is_dataclass(type(self.stack[-2])):
            raise pickle.UnpicklingError(f"it changes {self.stack[-2]!r}")
        pickle._Unpickler.load_build(self)  # type: ignore[attr-defined]

    dispatch[pickle.BUILD[0]] = _build

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in MAY_BE_MADE:
            return super().find_class(module, name)
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no checkpoint of tensors needs")


class _Files(FileSystem):
    """The local files, hashed while they are written."""

    def __init__(self) -> None:
        self.told: dict[str, Told] = {}

    @contextmanager
    def create_stream(self, path: str | PathLike[str], mode: str) -> Iterator[io.IOBase]:
        assert mode == "wb"
        with HashedFile(Path(path)) as stream:
            yield stream
        self.told[Path(fspath(path)).name] = stream.told

    def exists(self, path: str | PathLike[str]) -> bool:
        return False  # the folder is new; what torch would warn of there is the index of another rank


class _Writer(dcp.FileSystemWriter):
    def __init__(self, path: Path) -> None:
        # The files sync themselves. To copy ahead would need a stream, which in this thread is that of GPU 0.
        super().__init__(path, sync_files=False, per_thread_copy_ahead=0)
        self.fs: _Files = _Files()

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(save_id=self.save_id)  # not the place where it was written


class _Reader(dcp.FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return read_index(Path(self.path) / INDEX)


class _TensorsOnly(dcp.DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        # torch's own would unpickle them.
        raise pickle.UnpicklingError(f"{read_item.dest_index.fqn} is no tensor")
