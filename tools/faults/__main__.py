"""Disturbs runs: ``python -m tools.faults`` simulates 10,000 seeds, ``python -m tools.faults SEED`` replays one.

Exits 1 if a run does not end as the undisturbed one does, or with an error that nothing planted explains. Its story is
printed, and replaying the seed prints it again.
"""

import argparse
import multiprocessing
import os
import sys
import time
from collections import Counter

import torch

from tools.faults.simulation import SEEDS_PER_JOB, simulate


def main(arguments=None):
    """Simulate in several processes, or one seed here; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.faults", description=__doc__)
    parser.add_argument("seed", nargs="?", type=int, help="replay this one and tell its story")
    parser.add_argument("--seeds", type=int, default=10_000, help="how many to simulate")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="that share them")
    chosen = parser.parse_args(arguments)
    if chosen.seed is not None:
        story = simulate(chosen.seed)
        print("\n".join(story.lines))
        return 1 if story.wrong else 0
    seeds = range(chosen.first, chosen.first + chosen.seeds)
    began, struck, wrong = time.monotonic(), Counter(), []
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tools.faults.simulation"])
    with context.Pool(chosen.processes, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for done, story in enumerate(pool.imap(simulate, seeds, chunksize=SEEDS_PER_JOB), start=1):
            struck.update(story.struck)
            if story.wrong:
                wrong.append(story.seed)
                print("\n".join(story.lines), flush=True)
            if done % 500 == 0 or done == len(seeds):
                seconds = time.monotonic() - began
                print(f"{done} of {len(seeds)} seeds, {len(wrong)} wrong, {seconds:.0f} s", flush=True)
    rows = [f"| {kind} | {number} |" for kind, number in sorted(struck.items())]
    print("\n".join(["| fault | number |", "|---|--:|", *rows]))
    if wrong:
        print(f"wrong: {' '.join(map(str, wrong))}; python -m tools.faults SEED tells the story again")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
