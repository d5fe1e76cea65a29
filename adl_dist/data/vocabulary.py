"""Vocabularies of bytes, characters or a ``tokenizers`` file."""

import functools
import importlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adl_dist.errors import ConfigError, DataError

FILE = "vocabulary.json"  # in the folder of the tokens


@dataclass(frozen=True)
class Vocabulary:
    """A converter of text to tokens, and back.

    Attributes:
        kind: ``byte`` (UTF-8), ``char`` or ``tokenizers``.
        size: number of tokens.
        chars: for ``char``, the characters in the order of their tokens.
        definition: for ``tokenizers``, the content of that package's file.
    """

    kind: str
    size: int
    chars: str = ""
    definition: str = ""

    @classmethod
    def of_bytes(cls) -> "Vocabulary":
        """Build the vocabulary of 256 bytes."""
        return cls("byte", 256)

    @classmethod
    def of_chars(cls, texts: Iterable[str]) -> "Vocabulary":
        """Build the vocabulary of the characters of ``texts``, in Unicode order."""
        chars = "".join(sorted(set[str]().union(*texts)))
        return cls("char", len(chars), chars=chars)

    @classmethod
    def of_tokenizer(cls, path: Path) -> "Vocabulary":
        """Build the vocabulary of a ``tokenizers`` file, like tokenizer.json.

        Raises:
            ConfigError: If the package is not installed.
            DataError: If the file is not one of that package.
        """
        definition = _text_of(path)
        largest = max(_tokenizer(definition, str(path)).get_vocab().values(), default=0)  # there may be gaps
        return cls("tokenizers", int(largest) + 1, definition=definition)

    @classmethod
    def next_to(cls, tokens: Path) -> "Vocabulary | None":
        """Read the vocabulary next to ``tokens``, if any; DataError if damaged."""
        path = tokens.parent / FILE
        if not path.exists():
            return None
        try:
            return cls(**json.loads(_text_of(path)))
        except (TypeError, ValueError) as error:
            raise DataError(f"{path} is not a vocabulary of adl-dist tokenize; make the tokens again") from error

    def to_json(self) -> str:
        """Return the text that :meth:`next_to` reads."""
        return json.dumps({key: value for key, value in vars(self).items() if value != ""}, ensure_ascii=True)

    def encode(self, text: str) -> NDArray[Any]:
        """Return the tokens uint32[n] of ``text``; ConfigError if one is unknown."""
        if self.kind == "byte":
            return np.frombuffer(text.encode("utf-8", "surrogateescape"), np.uint8).astype(np.uint32)
        if self.kind == "tokenizers":
            # Without the tokens that mark the ends of a text, because a prompt has none.
            return np.array(_tokenizer(self.definition, FILE).encode(text, add_special_tokens=False).ids, np.uint32)
        known = np.frombuffer(self.chars.encode("utf-32-le"), np.uint32)  # sorted
        wanted = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        places = np.searchsorted(known, wanted).clip(max=len(known) - 1)
        if (unknown := wanted[known[places] != wanted]).size:
            raise ConfigError(
                f"{chr(unknown[0])!r} is none of the {self.size} characters that the tokens were made of; use others"
            )
        return places.astype(np.uint32)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of ``tokens``; invalid UTF-8 is replaced."""
        if self.kind == "byte":
            return bytes(tokens).decode("utf-8", "replace")
        if self.kind == "tokenizers":
            return str(_tokenizer(self.definition, FILE).decode(list(tokens)))
        return "".join(self.chars[token] for token in tokens)


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); correct the path") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is no text: byte {error.start} is not UTF-8; give another file") from error


@functools.lru_cache(maxsize=1)  # to read one takes a moment
def _tokenizer(definition: str, where: str) -> Any:
    try:
        package = importlib.import_module("tokenizers")
    except ImportError as error:
        raise ConfigError(
            f"{where} needs the package tokenizers, which is not installed; pip install tokenizers, or make tokens of "
            "bytes or characters (adl-dist tokenize --level byte|char)"
        ) from error
    try:
        return package.Tokenizer.from_str(definition)
    except Exception as error:  # that package raises plain exceptions
        raise DataError(f"{where} is not a file of the package tokenizers: {error}") from error
