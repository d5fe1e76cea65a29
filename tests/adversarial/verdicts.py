"""The verdict for each odd model in stages; ``python -m tests.adversarial.verdicts`` writes them to verdicts.txt."""

import re
import sys
import warnings
from pathlib import Path

import torch

from tests.adversarial import (  # noqa: F401
    models_attention,
    models_autograd,
    models_containers,
    models_in_place,
    models_layers,
    models_state,
)
from tests.adversarial.cases import CASES
from tests.support.staged import compare

FILE = Path(__file__).with_name("verdicts.txt")
STAGES = (2, 3)
EQUAL = ("equal", "")


def verdict_of(name, K, *, replays=False):
    """Train a model uncut and in K stages."""
    return compare(CASES[name].model, CASES[name].batches(), K, replays=replays)


def expected():
    """Return by name and number of stages the verdict and its text; models that are not in the file are equal.

    The text is a part of the message, or the reason why gradients are only close.
    """
    rows = [line.split(maxsplit=3) for line in FILE.read_text().splitlines() if line[0] != "#"]
    return {(name, int(K)): (kind, text) for name, K, kind, text in rows}


def is_as(found, kind, text):
    """Return whether a verdict is as expected."""
    return found.kind == kind and (kind in ("close", "equal") or text in found.text)


def main():
    """Write the file again, and print the changes."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    before, lines = expected(), ["# Model, stages, verdict, part of the message. All others are equal."]
    for name, K in ((name, K) for name in CASES for K in STAGES):
        kind, text = before.get((name, K), EQUAL)
        if not sys.argv[1:] or name in sys.argv[1:]:
            found = verdict_of(name, K)
            if not is_as(found, kind, text):
                print(f"{name} K={K}: {kind} -> {found.kind} {found.text[:300]}", flush=True)
                kind = found.kind
                text = re.sub(r"^\S+:\d+: (stage \d+: )?|/\S+/|\s\S*$", "", found.text[:90])
        if kind != "equal":
            lines.append(f"{name} {K} {kind} {text}")
    FILE.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
