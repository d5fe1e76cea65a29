"""Files of tokens, mapped into memory.

A ``.bin`` file holds tokens as uint16 or uint32, little-endian, with or without a header of 256 int32. The header is
that of llm.c and modded-nanogpt: a magic number, which tells the width, a version, and the number of tokens. nanoGPT's
files have no header.
"""

import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from adl_dist.data.vocabulary import Vocabulary
from adl_dist.errors import ConfigError, DataError

HEADER_BYTES = 1024
# Magic number and version of a header, by the type of the tokens after it.
HEADERS = {"uint16": (20240520, 1), "uint32": (20240801, 7)}
DTYPES = {name: np.dtype(name).newbyteorder("<") for name in HEADERS}


def open_tokens(path: Path, *, dtype: str | None = None) -> NDArray[Any]:
    """Map the tokens [n] of a file into memory.

    ``dtype`` is the type of tokens in a file without a header, by default ``uint16``.

    Raises:
        DataError: If the file is missing, or its length does not fit the header or ``dtype``.
        ConfigError: If ``dtype`` is unknown, or differs from the header's.
    """
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"data.dtype={dtype}: tokens are {' or '.join(DTYPES)}; null: as the header says")
    try:
        with path.open("rb") as file:
            head = file.read(12)
        num_bytes = path.stat().st_size
    except OSError as error:
        raise _unreadable(path, error) from error
    magic, version, num_tokens = struct.unpack("<iii", head) if len(head) == 12 else (0, 0, 0)
    found = next((name for name, known in HEADERS.items() if known == (magic, version)), None)
    if found is None and magic in {known for known, _ in HEADERS.values()}:
        raise DataError(f"{path} has a header of llm.c of version {version}, which is not known; make it again")
    if found is not None and dtype not in (None, found):
        raise ConfigError(f"data.dtype={dtype}, but the header of {path} says {found}; omit data.dtype")
    kind, offset = found or dtype or "uint16", 0 if found is None else HEADER_BYTES
    num_tokens = num_bytes // DTYPES[kind].itemsize if found is None else num_tokens
    if num_bytes != (expected := offset + num_tokens * DTYPES[kind].itemsize):  # the header may be cut off, too
        raise DataError(
            f"{path}: expected {expected:,} bytes, for {num_tokens:,} tokens of {kind}, found {num_bytes:,}; copy or "
            "make the file again, or correct data.dtype"
        )
    if not num_tokens:  # nothing can be mapped
        return np.empty(0, DTYPES[kind])
    return np.memmap(path, DTYPES[kind], "r", offset, (num_tokens,))


def header_of(dtype: str, num_tokens: int) -> bytes:
    """Return the header of a file of ``num_tokens`` tokens of ``dtype``."""
    return struct.pack("<iii", *HEADERS[dtype], num_tokens).ljust(HEADER_BYTES, b"\0")


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Windows of T + 1 tokens of a file, T = ``context``, without overlap.

    Sample i is tokens i (T+1) to i (T+1) + T: the first T are the input, the last T the target. Tokens after the last
    whole window are not used.
    """

    def __init__(self, path: Path, context: int, vocab_size: int | None = None, dtype: str | None = None) -> None:
        self._path, self._vocab_size, self.context, self._dtype = path, vocab_size, context, dtype
        tokens = open_tokens(path, dtype=dtype)
        self.num_tokens, size = len(tokens), context + 1
        self._windows = tokens[: len(tokens) // size * size].reshape(-1, size)  # [n, T + 1], mapped

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return input int64[T] and target int64[T]."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        inputs, targets = self.batch(torch.tensor([index]), None)
        return inputs[0], targets[0]

    def batch(self, rows: Tensor, seeds: object) -> tuple[Tensor, Tensor]:
        """Return inputs int64[B, T] and targets int64[B, T] of ``rows`` [B].

        ``seeds`` are not used, because a window draws nothing.

        Raises:
            DataError: If a token is not below the size of the vocabulary.
        """
        windows = self._windows[rows.numpy()].astype(np.int64)
        if self._vocab_size is not None and (largest := windows.max(axis=1)).max() >= self._vocab_size:
            place = int((largest >= self._vocab_size).argmax())
            raise DataError(
                f"sample {int(rows[place])}: {self._path} has token {int(largest[place])}, but "
                f"data.vocab_size={self._vocab_size}, so tokens must be below that; correct it, or data.dtype"
            )
        tokens = torch.from_numpy(windows)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the path, not the tokens: a worker maps the file itself."""
        return type(self), (self._path, self.context, self._vocab_size, self._dtype)


def tokens(
    train: str, validation: str, context: int = 256, vocab_size: int | None = None, dtype: str | None = None
) -> tuple[Windows, Windows]:
    """Open two files of tokens, in windows of ``context`` + 1.

    Args:
        train: the file to train on.
        validation: the file to validate on.
        context: T, the tokens of a sequence; each predicts the next one.
        vocab_size: size of the vocabulary; if given, tokens are checked when they are loaded.
        dtype: ``uint16`` (default) or ``uint32``, of files without a header.

    Raises:
        DataError: If a file is missing, damaged, or has less than one window.
        ConfigError: If ``context`` is below 1, or ``dtype`` is unknown.
    """
    if context < 1:
        raise ConfigError(f"data.context must be at least 1 token, got {context}")
    made = [Windows(Path(path).expanduser(), context, vocab_size, dtype) for path in (train, validation)]
    for name, windows in zip(("train", "validation"), made, strict=True):
        if not len(windows):
            raise DataError(
                f"data.{name}: the file has {windows.num_tokens} tokens; expected at least data.context + 1 = "
                f"{context + 1}; use more text, or a smaller data.context"
            )
    return made[0], made[1]


def vocab_size_next_to(path: str) -> int:
    """Return the size of the vocabulary next to the file of tokens ``path``.

    Raises:
        ConfigError: If there is no vocabulary.
        DataError: If the vocabulary is damaged, or ``path`` is missing.
    """
    if not isinstance(path, str):
        raise ConfigError(f"data.train={path}: expected the file of tokens, like tokens/train.bin")
    file = Path(path).expanduser()
    try:
        file.stat()
    except OSError as error:
        raise _unreadable(file, error) from error
    vocabulary = Vocabulary.next_to(file)
    if vocabulary is None:
        raise ConfigError(
            f"data.vocab_size must be given: next to {path} there is no vocabulary of adl-dist tokenize; add "
            "data.vocab_size=NUMBER, 50257 for GPT-2's tokens"
        )
    return vocabulary.size


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(
        f"{path}: expected a file of tokens, but it cannot be read ({error.strerror}); adl-dist tokenize FILE... --out "
        "FOLDER makes FOLDER/train.bin and FOLDER/validation.bin of text. A node without the data needs "
        "data.vocab_size=NUMBER"
    )
