#!/usr/bin/env python3
"""What a split backward costs on real kernels: images/s of split and whole, two processes, by turns.

    python benchmarks/split.py [ROUNDS] [KEY=VALUE ...]

Both train with the delays of ADL, which keep the stages busy with either, so that the difference is the cost of the
kernels apart, of Python in each layer's backward, and of the order of the actions. A last row has a third of the delay,
for which the split is made. Further words are settings of ``adl-dist train``, for all rows.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

K, M, BATCH, NUM_SAMPLES = 2, 4, 128, 4096
MODELS = ("resnet18", "resnet56")
ROWS = {
    "whole": ("method.split_backward=false",),
    "split": ("method.split_backward=true",),
    "split, a third of the delay": ("method.split_backward=true", "method.delay=third"),
}


def images_per_second(model: str, words: tuple[str, ...]) -> float:
    """Return the images/s of one run with these settings."""
    usual = (
        *("data=synthetic", f"data.num_samples={NUM_SAMPLES}", "train.epochs=2", f"train.batch_size={BATCH}"),
        *("method=adl", f"method.accumulation_steps={M}", f"partition.num_stages={K}", "runtime.tensorboard=false"),
    )
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        settings = [f"model={model}", *usual, *words, f"run_dir={run_dir}"]
        command = [sys.executable, "-m", "adl_dist", "train", *settings]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return float(json.loads((run_dir / "summary.json").read_text())["samples_per_second"])


def main() -> None:
    """Print one line for each row and model."""
    words = sys.argv[1:]
    rounds = int(words.pop(0)) if words and words[0].isdigit() else 5
    for model in MODELS:
        found: dict[str, list[float]] = {row: [] for row in ROWS}
        for number in range(rounds):
            for row in list(ROWS)[:: 1 if number % 2 == 0 else -1]:  # neither is always the first
                found[row].append(images_per_second(model, (*ROWS[row], *words)))
        medians = {row: statistics.median(figures) for row, figures in found.items()}
        for row, median in medians.items():
            each = " ".join(f"{figure:.1f}" for figure in found[row])
            print(f"{model:9} {row:28} {median:8.1f} images/s, {median / medians['whole']:.3f} of whole  ({each})")


if __name__ == "__main__":
    main()
