"""``adl-dist tokenize FILE... --out DIR``: text to files of tokens."""

import contextlib
import os
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from adl_dist.cli.config.compose import Parser, number
from adl_dist.data.tokens import DTYPES, HEADER_BYTES, header_of
from adl_dist.data.vocabulary import FILE, Vocabulary
from adl_dist.errors import ConfigError, DataError
from adl_dist.report.files import write_atomically

MOST_TOKENS = 2**31 - 1  # that a header can tell


def tokenize(arguments: Sequence[str]) -> None:
    """Write DIR/train.bin, DIR/validation.bin and DIR/vocabulary.json."""
    parser = Parser(
        prog="adl-dist tokenize",
        description="Makes tokens of text: DIR/train.bin, DIR/validation.bin and DIR/vocabulary.json, for data=tokens.",
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="text, one file after the other")
    parser.add_argument("--out", required=True, metavar="DIR", help="a folder, which is made")
    parser.add_argument("--level", choices=("byte", "char"), default="byte", help="what a token is; default: byte")
    parser.add_argument("--tokenizer", metavar="FILE", help="a file of the package tokenizers, like tokenizer.json")
    share = "end of each file to validate on; default: 0.1"
    parser.add_argument("--validation", type=number(float, 1e-6, 0.999999), default=0.1, metavar="SHARE", help=share)
    chosen = parser.parse_args(arguments)
    folder = Path(chosen.out)
    paths = [Path(name) for name in chosen.files]
    outs = [folder / name for name in ("train.bin", "validation.bin", FILE)]
    for out in outs:
        if os.path.lexists(out):
            raise ConfigError(f"{out} is there already and would be written over; choose another --out")
    if chosen.tokenizer is not None:
        vocabulary = Vocabulary.of_tokenizer(Path(chosen.tokenizer))
    elif chosen.level == "byte":
        vocabulary = Vocabulary.of_bytes()
    else:
        vocabulary = Vocabulary.of_chars(_read(path, chosen.level) for path in paths)
    dtype = "uint16" if vocabulary.size <= 2**16 else "uint32"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _opened(outs[0]) as train, _opened(outs[1]) as validation:
            for path in paths:
                text = _read(path, vocabulary.kind)
                # The end of each file, not of all of them: the last one may be unlike the others.
                behind = len(text) - round(len(text) * chosen.validation)
                train.write(vocabulary.encode(text[:behind]).astype(DTYPES[dtype]).tobytes())
                validation.write(vocabulary.encode(text[behind:]).astype(DTYPES[dtype]).tobytes())
            counts = _end(train, dtype), _end(validation, dtype)
            if not all(counts):
                raise DataError(f"{' '.join(chosen.files)}: too little text for training and validation")
        with write_atomically(outs[2]) as unfinished:
            unfinished.write_text(vocabulary.to_json(), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out {folder} cannot be written: {error.strerror}; choose another place") from error
    # Hydra takes other letters than these in quotes only.
    words = [name if re.fullmatch(r"[\w./-]+", name, re.ASCII) else f'"{name}"' for name in map(str, outs)]
    sys.stdout.write(
        f"{outs[0]}: {counts[0]:,} tokens\n{outs[1]}: {counts[1]:,} tokens\n{outs[2]}: {vocabulary.size:,} kinds "
        f"({vocabulary.kind})\nto train on them: adl-dist train model=gpt data=tokens "
        f"{shlex.join([f'data.train={words[0]}', f'data.validation={words[1]}'])}\n"
    )


def _read(path: Path, kind: str) -> str:
    try:
        # Bytes need not be text: each that is none comes back when they are encoded.
        return path.read_bytes().decode("utf-8", "surrogateescape" if kind == "byte" else "strict")
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); give files of text") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: byte {error.start:,} is not UTF-8; convert the file, or use --level byte") from error


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    with write_atomically(path) as unfinished, unfinished.open("wb") as file:
        file.write(bytes(HEADER_BYTES))
        yield file


def _end(file: IO[bytes], dtype: str) -> int:
    """Write the header of a file of tokens, and return the number of tokens."""
    count = (file.tell() - HEADER_BYTES) // DTYPES[dtype].itemsize
    if count > MOST_TOKENS:
        raise DataError(f"more than {MOST_TOKENS:,} tokens do not fit into one file; give fewer files at a time")
    file.seek(0)
    file.write(header_of(dtype, count))
    return count
