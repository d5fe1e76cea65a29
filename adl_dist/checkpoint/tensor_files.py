"""The tensors of a checkpoint as safetensors files with an index.

A file holds the tensors of one stage and of one kind, as the format of safetensors prescribes: 8 bytes with the length
of a JSON header, the header, the tensors. Files are read and written here, not by the library: its readers need a local
file; its `save_file` writes any number of bytes in one call, during which a slow disk looks dead; and its `serialize`
copies all tensors and blocks the interpreter, and with it training, until it returns.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import PurePath

import torch
from torch import Tensor

from adl_dist.checkpoint import storage
from adl_dist.checkpoint.layout import Digest, create_hashed, reading
from adl_dist.checkpoint.storage import PIECE_BYTES, Data, progress

SUFFIX = ".safetensors"
INDEX = f"model{SUFFIX}.index.json"
MODEL, OPTIMIZER, HEADS, LOSS, EMA = "model", "optimizer", "heads", "loss", "ema"
# As the library orders them in a file, larger elements first: so every tensor begins at a multiple of the size of its
# elements, and the file has the bytes that the library would write.
CODES = {
    torch.uint64: "U64", torch.int64: "I64", torch.float64: "F64", torch.complex64: "C64",
    torch.float32: "F32", torch.uint32: "U32", torch.int32: "I32",
    torch.bfloat16: "BF16", torch.float16: "F16", torch.uint16: "U16", torch.int16: "I16",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ", torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
DTYPES = {code: dtype for dtype, code in CODES.items()}
MOST_HEADER_BYTES = 100_000_000  # as the library


@dataclass(frozen=True)
class Shard:
    """The content of one file: tensors by name, and text by name."""

    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Stored:
    """The place, size and dtype (one of ``CODES``) of a stored tensor."""

    file: PurePath
    begin: int
    nbytes: int
    shape: list[int]
    dtype: torch.dtype


def file_name(kind: str, stage: int, num_stages: int) -> str:
    """Return the name of a stage's file of one kind; names count from 1."""
    return f"{kind}-{stage + 1:05d}-of-{num_stages:05d}{SUFFIX}"


def why_unstorable(tensor: Tensor) -> str | None:
    """Return the reason why safetensors cannot hold ``tensor``, or None."""
    if tensor.layout is not torch.strided:
        return f"its layout is {tensor.layout}, and safetensors files hold dense tensors only"
    return None if tensor.dtype in CODES else f"its dtype is {tensor.dtype}, which safetensors files cannot hold"


def write(path: PurePath, shards: Mapping[str, Shard]) -> dict[str, Digest]:
    """Write ``shards`` to new files in ``path``; return digests by file name."""
    return {
        name: create_hashed(path / name, _encoded(shard.tensors, shard.metadata, shard.tensors.__getitem__))
        for name, shard in shards.items()
    }


def copy(path: PurePath, tensors: Mapping[str, Stored]) -> Digest:
    """Write one file of ``tensors``, with one tensor at a time in memory."""
    return create_hashed(path, _encoded(tensors, {}, lambda name: next(read({name: tensors[name]}))[1]))


def write_index(path: PurePath, files: Iterable[str]) -> dict[str, Digest]:
    """Write the index of ``files`` for other programs; return {name: digest}."""
    tensors, _ = scan(path, MODEL, files)
    index = {
        "metadata": {"total_size": sum(stored.nbytes for stored in tensors.values())},
        "weight_map": {name: stored.file.name for name, stored in sorted(tensors.items())},
    }
    return {INDEX: create_hashed(path / INDEX, [json.dumps(index, indent=1).encode()])}


def scan(path: PurePath, kind: str, files: Iterable[str]) -> tuple[dict[str, Stored], dict[str, str]]:
    """Read the headers of the ``files`` of one ``kind``.

    Return (places of tensors by name, metadata). Raise UnusableError for a file that cannot be read; no memory is
    allocated for its tensors.
    """
    tensors: dict[str, Stored] = {}
    metadata: dict[str, str] = {}
    for name in (name for name in files if name.startswith(f"{kind}-")):
        with reading(path, name):
            of_file, texts = header(path / name)
        tensors |= of_file
        metadata |= texts
    return tensors, metadata


def header(file: PurePath) -> tuple[dict[str, Stored], dict[str, str]]:
    """Read a file's header; return (places of tensors by name, metadata).

    Raise OSError, or ValueError if the header is invalid.
    """
    size = storage.size(file)
    with storage.open_file(file) as content:
        length = int.from_bytes(content.read(8), "little")
        begin = 8 + length
        if size < 8 or length > min(size - 8, MOST_HEADER_BYTES):
            raise ValueError("its header is longer than the file, or than any header may be")
        try:
            entries = json.loads(content.read(length))
            metadata = entries.pop("__metadata__", {})
            found = {name: _stored(file, begin, **entry) for name, entry in entries.items()}
        except (AttributeError, TypeError, KeyError, ValueError, RecursionError) as error:
            raise ValueError(f"its header is not one of safetensors: {error}") from None
    for stored in sorted(found.values(), key=lambda stored: (stored.begin, stored.nbytes)):
        if stored.begin != begin:
            raise ValueError("its tensors overlap or leave a gap")
        begin += stored.nbytes
    if begin != size:
        raise ValueError(f"it should hold {begin} bytes by its header, found {size}")
    return found, metadata


def _stored(file: PurePath, data: int, *, dtype: str, shape: list[int], data_offsets: list[int]) -> Stored:
    begin, end = data_offsets
    if min([begin, *shape]) < 0 or math.prod(shape) * DTYPES[dtype].itemsize != end - begin:
        raise ValueError(f"{end - begin} bytes for {dtype} {shape}")
    return Stored(file, data + begin, end - begin, [*shape], DTYPES[dtype])


def read(tensors: Mapping[str, Stored]) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor), each read into new memory; OSError on failure."""
    for file in sorted({stored.file for stored in tensors.values()}):
        of_file = {name: stored for name, stored in tensors.items() if stored.file == file}
        with storage.open_file(file) as content:
            for name, stored in sorted(of_file.items(), key=lambda item: item[1].begin):
                tensor = torch.empty(stored.shape, dtype=stored.dtype)
                content.seek(stored.begin)
                memory = _bytes_of(tensor)
                for start in range(0, stored.nbytes, PIECE_BYTES):
                    piece = content.read(len(memory[start : start + PIECE_BYTES]))
                    if len(piece) != len(memory[start : start + PIECE_BYTES]):
                        raise OSError(f"{file} has become shorter")
                    memory[start : start + len(piece)] = piece
                progress.count()
                yield name, tensor


def _encoded(
    held: Mapping[str, Tensor] | Mapping[str, Stored], metadata: Mapping[str, str], tensor_of: Callable[[str], Tensor]
) -> Iterator[Data]:
    """Yield the bytes of a file: its header, and the tensors ``held``."""
    codes = list(CODES)
    names = sorted(held, key=lambda name: (codes.index(held[name].dtype), name))
    header: dict[str, object] = {"__metadata__": dict(sorted({"format": "pt", **metadata}.items()))}
    end = 0
    for name in names:
        begin, end = end, end + held[name].nbytes
        entry = {"dtype": CODES[held[name].dtype], "shape": [*held[name].shape], "data_offsets": [begin, end]}
        header[name] = entry
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in names:
        yield _bytes_of(tensor_of(name).detach().cpu().resolve_conj().resolve_neg().contiguous())


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data
