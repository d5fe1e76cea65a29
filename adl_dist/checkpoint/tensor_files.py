"""The tensors of a checkpoint as safetensors files with an index.

A file holds the tensors of one stage and of one kind, as the format of safetensors prescribes: 8 bytes with the length
of a JSON header, the header, the tensors. Files are read and written here, not by the library: its readers need a local
file, `save_file` writes any number of bytes in one call, during which a slow disk looks like a dead one, and
`serialize` copies all tensors and holds up the interpreter, and with it training, until it has.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import PurePath

import torch
from torch import Tensor

from adl_dist.checkpoint.layout import Digest, create_hashed, damaged
from adl_dist.checkpoint.storage import PIECE_BYTES, Data, progress, storage_of
from adl_dist.errors import in_one_line

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
Described = tuple[str, list[int], int]  # the code of a tensor's dtype, its shape, its bytes


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
    num_bytes: int
    shape: list[int]
    code: str

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the tensor."""
        return DTYPES[self.code]


def file_name(kind: str, stage: int, num_stages: int) -> str:
    """Return the name of a stage's file of one kind; names count from 1."""
    return f"{kind}-{stage + 1:05d}-of-{num_stages:05d}{SUFFIX}"


def why_unstorable(tensor: object) -> str | None:
    """Return the reason why safetensors cannot hold ``tensor``, or None."""
    if not isinstance(tensor, Tensor):
        return f"it is a {type(tensor).__name__}, and safetensors files hold tensors only"
    if tensor.layout is not torch.strided:
        return f"its layout is {tensor.layout}, and safetensors files hold dense tensors only"
    if tensor.dtype not in CODES:
        return f"its dtype is {tensor.dtype}, which safetensors files cannot hold"
    return None


def write(path: PurePath, shards: Mapping[str, Shard]) -> dict[str, Digest]:
    """Create files of the unfinished ``path``; return their digests by name."""
    return {name: create_hashed(path / name, _encoded(shard)) for name, shard in shards.items()}


def write_index(path: PurePath, files: Iterable[str]) -> dict[str, Digest]:
    """Write the index of ``files`` for other programs; return its digest."""
    tensors, _ = scan(path, MODEL, files)
    index = {
        "metadata": {"total_size": sum(stored.num_bytes for stored in tensors.values())},
        "weight_map": {name: stored.file.name for name, stored in sorted(tensors.items())},
    }
    return {INDEX: create_hashed(path / INDEX, [json.dumps(index, indent=1).encode()])}


def scan(path: PurePath, kind: str, files: Iterable[str]) -> tuple[dict[str, Stored], dict[str, str]]:
    """Read the headers of the ``files`` of one kind.

    Return the place of each tensor, and all metadata. Raise UnusableError for a file that cannot be read; nothing is
    allocated for what its header promises.
    """
    tensors: dict[str, Stored] = {}
    metadata: dict[str, str] = {}
    for file in (path / name for name in files if name.startswith(f"{kind}-")):
        try:
            of_file = header(file)
        except (OSError, ValueError) as error:
            raise damaged(path, f"{file.name} cannot be read ({in_one_line(error)})") from error
        tensors |= of_file[0]
        metadata |= of_file[1]
    return tensors, metadata


def header(file: PurePath) -> tuple[dict[str, Stored], dict[str, str]]:
    """Read a file's header, or raise OSError, or ValueError if it is invalid."""
    size = storage_of(file).size(file)
    with storage_of(file).open(file) as content:
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
    for stored in sorted(found.values(), key=lambda stored: (stored.begin, stored.num_bytes)):
        if stored.begin != begin:
            raise ValueError("its tensors overlap or leave a gap")
        begin += stored.num_bytes
    if begin != size:
        raise ValueError(f"it should hold {begin} bytes by its header, found {size}")
    return found, metadata


def _stored(file: PurePath, data: int, *, dtype: str, shape: list[int], data_offsets: list[int]) -> Stored:
    begin, end = data_offsets
    if min([begin, *shape]) < 0 or math.prod(shape) * DTYPES[dtype].itemsize != end - begin:
        raise ValueError(f"{end - begin} bytes for {dtype} {shape}")
    return Stored(file, data + begin, end - begin, [*shape], dtype)


def read(tensors: Mapping[str, Stored]) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors, each read into new memory; raise OSError on failure."""
    for file in sorted({stored.file for stored in tensors.values()}):
        of_file = {name: stored for name, stored in tensors.items() if stored.file == file}
        with storage_of(file).open(file) as content:
            for name, stored in sorted(of_file.items(), key=lambda item: item[1].begin):
                tensor = torch.empty(stored.shape, dtype=stored.dtype)
                content.seek(stored.begin)
                memory = _bytes_of(tensor)
                for start in range(0, stored.num_bytes, PIECE_BYTES):
                    piece = content.read(len(memory[start : start + PIECE_BYTES]))
                    memory[start : start + len(piece)] = piece
                    if len(piece) != len(memory[start : start + PIECE_BYTES]):
                        raise OSError(f"{file} has become shorter")
                progress.count()
                yield name, tensor


def copy(path: PurePath, tensors: Mapping[str, Stored]) -> Digest:
    """Write one file of ``tensors``, with one tensor at a time in memory."""
    described = {name: (stored.code, stored.shape, stored.num_bytes) for name, stored in tensors.items()}
    content = (tensor for name in _in_order(described) for _, tensor in read({name: tensors[name]}))
    return create_hashed(path, _laid_out(described, {}, content))


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _encoded(shard: Shard) -> Iterator[Data]:
    for name, tensor in shard.tensors.items():
        if reason := why_unstorable(tensor):
            raise ValueError(f"{name} cannot be saved: {reason}")
    described = {name: (CODES[t.dtype], list(t.shape), t.nbytes) for name, t in shard.tensors.items()}
    yield from _laid_out(described, shard.metadata, (shard.tensors[name] for name in _in_order(described)))


def _in_order(described: Mapping[str, Described]) -> list[str]:
    """Return the names of tensors as they lie in a file."""
    codes = list(CODES.values())
    return sorted(described, key=lambda name: (codes.index(described[name][0]), name))


def _laid_out(
    described: Mapping[str, Described], metadata: Mapping[str, str], content: Iterable[Tensor]
) -> Iterator[Data]:
    """Yield the bytes of a file with ``content`` in the order of the file."""
    header: dict[str, object] = {"__metadata__": dict(sorted({"format": "pt", **metadata}.items()))}
    end = 0
    for name in _in_order(described):
        code, shape, num_bytes = described[name]
        begin, end = end, end + num_bytes
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for tensor in content:
        yield _bytes_of(tensor.detach().cpu().resolve_conj().resolve_neg().contiguous())
