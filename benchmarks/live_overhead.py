#!/usr/bin/env python3
"""What looking at a run costs it: the beacon per action, and a run whose status is asked for ten times a second.

    python benchmarks/live_overhead.py [ROUNDS]

The first is the time that the beacon adds to an order of actions that nobody carries out. The second compares two
processes that train, alone and asked, by turns: medians of images/s.
"""

import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

from adl_dist.control.run_socket import ask_run
from adl_dist.errors import ConfigError
from adl_dist.monitor.activity import ActivityRecorder
from adl_dist.schedule import Action, Op, Segment

NUM_ACTIONS = 1_000_000
ASKED_PER_SECOND = 10
RUN = ("data=synthetic", "model=resnet8", "train.epochs=3", "runtime.tensorboard=false", "data.num_samples=8192")


def order() -> Iterator[tuple[int, Action]]:
    """Of one stage."""
    action = Action(Op.FORWARD, 0)
    return itertools.repeat((0, action), NUM_ACTIONS)


def seconds_of(run: Callable[[], Iterator[tuple[int, Action]]]) -> float:
    """Of a core, to take all of an order."""
    taken, start = run(), time.process_time()
    for _ in taken:
        pass
    return time.process_time() - start


def beacon_cost() -> float:
    """Seconds per action."""
    segment = Segment(epoch=0, first_update=0, num_samples=1, micro_batch_size=1, accumulation_steps=1)
    beacon, contexts = ActivityRecorder(1), {0: SimpleNamespace()}
    followed = [seconds_of(lambda: beacon.followed(order(), contexts, segment, {})) for _ in range(5)]  # type: ignore[arg-type]
    return (min(followed) - min(seconds_of(order) for _ in range(5))) / NUM_ACTIONS


def train(*, asked: bool) -> tuple[float, list[float]]:
    """Images/s of a run of two processes, and how long each answer took."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir, over, answers = Path(folder) / "run", threading.Event(), []

        def ask() -> None:
            while not over.wait(1 / ASKED_PER_SECOND):
                start = time.perf_counter()
                try:
                    ask_run(run_dir, "status")
                except ConfigError:  # not there yet, or over
                    continue
                answers.append(time.perf_counter() - start)

        asker = threading.Thread(target=ask)
        if asked:
            asker.start()
        try:
            subprocess.run(
                [sys.executable, "-m", "adl_dist", "train", *RUN, f"run_dir={run_dir}"],
                check=True,
                stdout=subprocess.DEVNULL,
            )
        finally:
            over.set()
            if asked:
                asker.join()
        return json.loads((run_dir / "summary.json").read_text())["samples_per_second"], answers


def main() -> None:
    """Measure both, and print medians."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    print(f"beacon: {beacon_cost() * 1e6:.2f} us per action")
    pairs = [(train(asked=False)[0], train(asked=True)) for _ in range(rounds)]
    alone, asked = [a for a, _ in pairs], [b for _, (b, _) in pairs]
    answers = sorted(seconds for _, (_, answered) in pairs for seconds in answered)
    print(f"alone {statistics.median(alone):,.0f} images/s ({min(alone):,.0f} .. {max(alone):,.0f})")
    print(f"asked {statistics.median(asked):,.0f} images/s ({min(asked):,.0f} .. {max(asked):,.0f})")
    print(
        f"{len(answers)} answers: median {statistics.median(answers) * 1e3:.1f} ms, longest {answers[-1] * 1e3:.0f} ms"
    )


if __name__ == "__main__":
    main()
