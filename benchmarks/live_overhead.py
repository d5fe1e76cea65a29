#!/usr/bin/env python3
"""What looking at a run costs it: the log per action, and a run whose status is asked for ten times a second.

    python benchmarks/live_overhead.py [ROUNDS]

The first is the time that the log adds to actions that do nothing. The second compares two
processes that train, alone and asked, by turns: medians of images/s.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from adl_dist import engine
from adl_dist.control.run_socket import ask_run
from adl_dist.engine import StageContext
from adl_dist.errors import ConfigError
from adl_dist.monitor.activity import ActivityLog
from adl_dist.schedule import Action, Op, Segment

NUM_ACTIONS = 1_000_000
ASKED_PER_SECOND = 10
RUN = ("data=synthetic", "model=resnet8", "train.epochs=3", "runtime.tensorboard=false", "data.num_samples=8192")


def seconds_of(log: ActivityLog | None, contexts: dict[int, StageContext]) -> float:
    """Return the seconds of a core that the engine takes for actions that do nothing."""
    actions = [(0, Action(Op.WEIGHTS, 0))] * NUM_ACTIONS
    start = time.process_time()
    engine.run(actions, contexts, log)
    return time.process_time() - start


def log_cost() -> float:
    """Return the seconds that the log adds to an action."""
    stage: Any = SimpleNamespace(version=0, use_weights=lambda version: None)
    contexts = {0: StageContext(stage)}
    log = ActivityLog(1)
    segment = Segment(epoch=0, first_update=0, num_samples=1, micro_batch_size=1, accumulation_steps=1)
    log.open(contexts, segment, training=True)
    logged, alone = (min(seconds_of(used, contexts) for _ in range(5)) for used in (log, None))
    return (logged - alone) / NUM_ACTIONS


def train(*, asked: bool) -> tuple[float, list[float]]:
    """Return the images/s of a run of two processes, and the seconds of each answer."""
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
    print(f"log: {log_cost() * 1e6:.2f} us per action")
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
