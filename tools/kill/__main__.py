"""Kills a process of 100 training runs and writes a table: ``python -m tools.kill``. Linux only; about an hour.

Every run trains a small network on digits as two to four processes, is killed once at a moment drawn by the seed, and
is started again: by its launcher, or by the same command. In the end its weights, optimizer state and records must be
those of a run that was not killed, to the bit, and no process, socket or temporary file may be left.
"""

import argparse
import functools
import os
import platform
import shutil
import signal
import statistics
import sys
import tempfile
from pathlib import Path

import torch

from tools.kill.deck import AGAIN, NAMES, NUM_EPOCHS, OURS, TORCHRUN, UPDATES_PER_EPOCH, draw
from tools.kill.run import kill, undisturbed


def main(arguments=None):
    """Kill; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.kill", description=__doc__)
    parser.add_argument("--kills", type=int, default=100, help="how many runs to kill")
    parser.add_argument("--seed", type=int, default=0, help="of who is killed and when")
    parser.add_argument("--only", type=int, nargs="+", help="do the killings of these numbers alone")
    parser.add_argument("--out", type=Path, help="write the table there too")
    chosen = parser.parse_args(arguments)
    if chosen.only and max(chosen.only) >= chosen.kills:
        parser.error(
            f"--only {max(chosen.only)}: there are {chosen.kills}; give --kills as it was, which the draws follow"
        )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # which ends the run under way
    folder = Path(tempfile.mkdtemp(prefix="adl-dist-kills-"))
    plain = functools.cache(lambda starter, stages: undisturbed(folder / f"{starter}-{stages}", starter, stages))
    outcomes = []
    for number, killing in enumerate(draw(chosen.kills, seed=chosen.seed, start_seconds=plain("adl-dist", 2)[1])):
        if chosen.only and number not in chosen.only:
            continue
        expected, _, seconds = plain(killing.starter, killing.num_stages)
        run_folder = folder / f"{number}"
        while (outcome := kill(killing, run_folder, expected, seconds)) is None:
            print(f"{number}: {killing}: too late, once more and earlier", flush=True)
            shutil.rmtree(run_folder)
            killing = killing.earlier()
        outcomes.append(outcome)
        where = ", in mid-save" if outcome.was_saving else ""
        result = f"{outcome.wrong or 'identical'}; {outcome.lost_seconds:.1f} s lost"
        print(f"{number}: {killing}{where}: {result}", flush=True)
        if outcome.wrong:
            again = f"python -m tools.kill --kills {chosen.kills} --seed {chosen.seed} --only {number}"
            print(f"    see {run_folder}; {again}", flush=True)
        else:
            shutil.rmtree(run_folder)
    text = report(outcomes, kills=chosen.kills, seed=chosen.seed)
    print(f"\n{text}")
    if chosen.out is not None:
        chosen.out.write_text(text)
    if any(outcome.wrong for outcome in outcomes):
        return 1
    shutil.rmtree(folder)
    return 0


def report(outcomes, *, kills, seed):
    """The table, in Markdown."""
    ways = (OURS, TORCHRUN, AGAIN)
    lines = [
        "# Killed runs",
        "",
        f"`make test-kill` (`python -m tools.kill --kills {kills} --seed {seed}`), {platform.system()}, "
        f"{os.cpu_count()} cores, torch {torch.__version__}. Each run trains ResNet-8 on digits, {NUM_EPOCHS} epochs "
        f"of {UPDATES_PER_EPOCH} updates, as 2 to 4 processes. It is killed once and started again. Identical: in the "
        "end its weights, optimizer state and records equal those of a run that was not killed, to the bit, and no "
        "process, socket or temporary file is left (but the temporary folder of torchrun).",
        "",
        "Cells: identical of killed, and the mean seconds that a kill cost: the whole run with its restart, less a run "
        "that was not killed.",
        "",
        f"| killed | {' | '.join(f'started again by {way}' for way in ways)} |",
        f"|---|{'---|' * len(ways)}",
    ]
    for kind, name in NAMES.items():
        cells = []
        for way in ways:
            done = [o for o in outcomes if (o.killing.kind, o.killing.restart) == (kind, way)]
            mean = statistics.mean(o.lost_seconds for o in done) if done else 0.0
            cells.append(f"{sum(not o.wrong for o in done)} of {len(done)}, {mean:.1f} s" if done else "")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    identical = sum(not outcome.wrong for outcome in outcomes)
    saving = [outcome.was_saving for outcome in outcomes if outcome.killing.kind == "while saving"]
    lines += ["", f"{identical} of {len(outcomes)} identical. {sum(saving)} of {len(saving)} that were to be killed"]
    return "\n".join([*lines, "while a checkpoint is written left it half written.", ""])


if __name__ == "__main__":
    sys.exit(main())
