"""Stands before the programs that a block calls: gives them the settings of its mark. Imports next to nothing."""

import os
import shlex
import sys

# Commands of adl-dist that take the settings of a run.
TAKE_SETTINGS = ("train", "plan", "bench", "race", "schedule")


def with_settings(words: list[str], overrides: list[str]) -> list[str]:
    """Return the ``words`` of a command with ``overrides``, right behind the command that takes settings."""
    place = next((i for i, word in enumerate(words) if word in TAKE_SETTINGS), None)
    if place is None or not overrides:
        return words
    rest = words[place + 1 :]
    for override in overrides:
        key = override.partition("=")[0]
        if key.startswith("--"):
            while key in rest:
                at = rest.index(key)
                del rest[at : at + 2]
        rest = [word for word in rest if word.partition("=")[0] != key.removeprefix("-")]
    added = [override for override in overrides if override.startswith("--") or not override.startswith("-")]
    return [*words[: place + 1], *added, *rest]


if __name__ == "__main__":
    given = with_settings(sys.argv[1:], shlex.split(os.environ.pop("DOCS_OVERRIDES", "")))
    os.execv(given[0], given)
