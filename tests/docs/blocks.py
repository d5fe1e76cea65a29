"""The code blocks of README and docs: found, read with their marks, and run as a reader would run them.

A comment right above a block says how it is run; several may stand there:

    <!-- not run: REASON -->        never run
    <!-- run with: OVERRIDES -->    smaller settings: KEY=VALUE or --flag=value replaces, -KEY removes
    <!-- run after: NAME, NAME -->  what must be run before, in the same folder: blocks by name, or setups (setups.py)
    <!-- name: NAME -->             what other blocks call this one

A Python block whose first line is ``# NAME.py`` is that file. Python blocks that come after others continue them.
"""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.docs.setups import SETUPS
from tests.support.commands import ADL_DIST, OF_RANKS, ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SHELL = ("sh", "bash", "console")
RUNNABLE = (*SHELL, "python")
MARKS = ("not run", "run with", "run after", "name")
SECONDS = 300.0

_FENCE = re.compile(r"^( *)```(\w*)\s*$")
_MARK = re.compile(r"^ *<!-- ([a-z ]+): (.*?) -->$")
_COMMAND = re.compile(r"^ {4,}((?:benchmarks/\S+\.sh|adl-dist|python|make|torchrun) .*)$")


@dataclass(frozen=True)
class Block:
    """A block of a page: where, in which language, its text, and its marks."""

    page: str
    line: int
    language: str
    text: str
    marks: dict[str, str] = field(default_factory=dict)

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def before(self) -> list[str]:
        return [name.strip() for name in self.marks.get("run after", "").split(",") if name.strip()]

    @property
    def commands(self) -> list[list[str]]:
        """Each command of a shell block, in words; one that is joined by && or | counts as several."""
        text = "\n".join(re.findall(r"^\$ (.*)", self.text, re.MULTILINE)) if self.language == "console" else self.text
        lines = re.sub(r"\\\n", " ", text).splitlines()
        lexers = [shlex.shlex(line, posix=True, punctuation_chars="&|;") for line in lines]
        words: list[list[str]] = []
        for lexer in lexers:
            lexer.whitespace_split = True
            words.append([])
            for word in lexer:
                if set(word) <= set("&|;"):
                    words.append([])
                else:
                    words[-1].append(word)
        return [each for each in words if each]


def blocks_of(path: Path) -> Iterator[Block]:
    """Yield the fenced blocks of a page."""
    lines = path.read_text().splitlines()
    page, index = path.relative_to(ROOT).as_posix(), 0
    while index < len(lines):
        if (opening := _FENCE.match(lines[index])) is None:
            index += 1
            continue
        end = next(i for i in range(index + 1, len(lines)) if lines[i].strip() == "```")
        text = "\n".join(line.removeprefix(opening[1]) for line in lines[index + 1 : end])
        yield Block(page, index + 1, opening[2], text, _marks_above(lines, index))
        index = end + 1


def _marks_above(lines: list[str], index: int) -> dict[str, str]:
    marks = {}
    while index and (mark := _MARK.match(lines[index - 1])):
        marks[mark[1]] = mark[2]
        index -= 1
    return marks


def indented_commands(path: Path) -> Iterator[Block]:
    """Yield the commands that stand indented in a page, as results name what they were measured with."""
    page, is_fenced = path.relative_to(ROOT).as_posix(), False
    text = re.sub(r"\\\n *", " ", path.read_text())
    for number, line in enumerate(text.splitlines(), start=1):
        is_fenced ^= line.lstrip().startswith("```")
        if not is_fenced and (match := _COMMAND.match(line)):
            yield Block(page, number, "sh", match[1])


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
NAMED = {block.marks["name"]: block for block in BLOCKS if "name" in block.marks}
NAMED |= {name: Block("tests/docs/setups.py", 0, *setup) for name, setup in SETUPS.items()}


def run(block: Block, folder: Path) -> subprocess.CompletedProcess:
    """Run ``block`` in ``folder``, after all that it comes after; the last outcome, or the first that failed."""
    python, done = "", None
    for each in _in_order(block):
        text = each.text
        if each.language == "python":
            if file := re.match(r"# (\w+\.py)\n", text):
                (folder / file[1]).write_text(text + "\n")
            else:
                text = python = f"{python}{text}\n"
            (folder / "block.py").write_text(text)
            command = [sys.executable, file[1] if file else "block.py"]
        else:
            if each.language == "console":
                text = "\n".join(re.findall(r"^\$ (.*)", text, re.MULTILINE))
            (folder / "block.sh").write_text(text + "\n")
            command = ["bash", "-euo", "pipefail", "block.sh"]
        if each.language == "python" and each is not block and not file:
            continue  # it is run as the beginning of what comes after
        done = _run(command, folder, shlex.split(each.marks.get("run with", "")))
        if done.returncode:
            break
    assert done is not None
    return done


def _in_order(block: Block) -> list[Block]:
    order: list[Block] = []
    for name in block.before:
        order += [each for each in _in_order(NAMED[name]) if each not in order]
    return [*order, block]


def _run(command: list[str], folder: Path, overrides: list[str]) -> subprocess.CompletedProcess:
    return subprocess.run(
        command, cwd=folder, env=environment(folder, overrides), timeout=SECONDS, stdin=subprocess.DEVNULL,
        capture_output=True, text=True,
    )  # fmt: skip


def environment(folder: Path, overrides: Iterable[str]) -> dict[str, str]:
    """Return variables for a block in ``folder``: its programs are those of this checkout, with ``overrides``."""
    programs = folder / ".programs"
    programs.mkdir(exist_ok=True)
    for name, program in {
        "adl-dist": ADL_DIST,
        "torchrun": f"{sys.executable} -m torch.distributed.run",
        "python": sys.executable,
    }.items():
        (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable} -m tests.docs.shim {program} "$@"\n')
        (programs / name).chmod(0o755)
    clean = {name: value for name, value in os.environ.items() if name not in OF_RANKS}
    return clean | {
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "DOCS_OVERRIDES": shlex.join(overrides),
    }
