"""Two methods and two seeds on the digits: four runs, one table.

    python examples/sweep_and_compare.py [FOLDER] [KEY=VALUE ...]

The same command again trains only what is not complete yet.
"""

import subprocess
import sys

import adl_dist


def main(folder: str, overrides: list[str]) -> None:
    """Train each combination, one after the other, and compare what has come of them."""
    settings = ["method=adl,bp", "seed=0,1", "train.epochs=2", "runtime.processes=false", "sweep.jobs=1"]
    command = [sys.executable, "-m", "adl_dist", "train", "--multirun", f"run_dir={folder}", *settings, *overrides]
    subprocess.run(command, check=True)
    table = adl_dist.compare([folder])  # also of folders of several sweeps; with out=FOLDER it is written there
    print(table)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs/sweep", sys.argv[2:])
