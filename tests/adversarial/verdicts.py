"""The verdict for each odd model in stages; ``python -m tests.adversarial.verdicts`` writes them to verdicts.txt."""

import re
import sys
import warnings
from pathlib import Path

import torch

from tests.adversarial.table import MODELS
from tests.support.staged import compare

FILE = Path(__file__).with_name("verdicts.txt")
STAGES = (2, 3)


def verdict_of(name, K):
    """Train a model uncut and in K stages."""
    case = MODELS[name]
    return compare(case.model, case.batches(), K)


def expected():
    """Return by name and number of stages the verdict and its text; what is not in the file is equal.

    The text is a part of the message, or the reason why gradients are only close.
    """
    rows = [line.split(maxsplit=3) for line in FILE.read_text().splitlines() if line and line[0] != "#"]
    return {(name, int(K)): (kind, text[0] if text else "") for name, K, kind, *text in rows}


def is_as(found, kind, text):
    """Return whether a verdict is as expected."""
    return found.kind == kind and (kind == "close" or text in found.text)


def part_of(text, before):
    """Return the part of a message that the file has: that ``before``, or its first words without file and stage."""
    if before and before in text:
        return before
    text = re.sub(r"^\S+:\d+: (stage \d+: )?", "", text)
    return re.sub(r"/\S+/|\s\S*$", "", text[:90]) if len(text) > 90 else text


def main():
    """Write the file anew, and print what has changed."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    before, lines = expected() if FILE.exists() else {}, []
    names = sys.argv[1:] or list(MODELS)
    for name, K in ((name, K) for name in MODELS for K in STAGES):
        kind, text = before.get((name, K), ("equal", ""))
        if name in names:
            found = verdict_of(name, K)
            if not is_as(found, kind, text):
                print(f"{name} K={K}: {kind} -> {found.kind} {found.text[:300]}", flush=True)
                text = ""
            kind, text = found.kind, text if found.kind == "close" else part_of(found.text, text)
        if kind != "equal":
            lines.append(f"{name} {K} {kind} {text}".rstrip())
    FILE.write_text("# Model, stages, verdict, part of the message. All others are equal.\n" + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
