"""Kills ranks of one run on two machines that share no folder: ``python -m tools.kill.apart``. Linux, as root.

The machines are two mount namespaces, with another folder each under the same path. One of their ranks, drawn by the
seed, is killed; the other must end by itself; both are started again by the same command. Each start must continue from
the newest checkpoint of rank 0's machine. In the end weights, optimizer state and records are those of a run that was
not killed, to the bit, and a run of one stage continues from there.
"""

import argparse
import contextlib
import os
import random
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path

from adl_dist.checkpoint import layout
from tests.support.kill import ADL_DIST, Command, RunEnd, records
from tools.kill.deck import UPDATES_PER_EPOCH
from tools.kill.run import MOST_SECONDS
from tools.kill.run import WORDS as OF_RUN

NUM_EPOCHS = 40
WORDS = (*OF_RUN, f"train.epochs={NUM_EPOCHS}")
STARTS = """
import os, subprocess, sys
subprocess.run(["mount", "--bind", sys.argv[1], sys.argv[2]], check=True)
os.execvp(sys.argv[3], sys.argv[3:])
"""
# A rank that waits for the next command of a rank 0 that is gone ends after that.
WATCH = ("runtime.watchdog_warn_seconds=10", "runtime.watchdog_abort_seconds=30")
GONE_SECONDS = 90.0  # for the rank that is left to see that the other one is gone


@contextlib.contextmanager
def machines(folder, words, num_stages=2):
    """Start the command on each machine; yield both commands."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    path = folder / "run"
    path.mkdir(exist_ok=True)
    with contextlib.ExitStack() as stack:
        commands = []
        for rank in range(num_stages):
            own = folder / f"machine{rank}"
            own.mkdir(exist_ok=True)
            place = {"RANK": rank, "WORLD_SIZE": num_stages, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
            place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
            apart = ["unshare", "--mount", sys.executable, "-c", STARTS, str(own), str(path)]
            start = ["env", *(f"{name}={value}" for name, value in place.items()), *apart, *ADL_DIST]
            words_of = [*words, *WATCH, f"partition.num_stages={num_stages}"]
            commands.append(stack.enter_context(Command(words_of, folder=folder, start=start, node=f"node{rank}")))
        yield commands


def newest(folder):
    """Return the number of updates of the newest complete checkpoint of machine 0."""
    saved = layout.complete(folder / "machine0/checkpoints")
    return int(saved[-1].name.removeprefix(layout.UPDATE)) if saved else 0


def kill_once(folder, rng):
    """Start, check from where it goes on, kill one rank in mid-training; return what was done."""
    begins, run_dir = newest(folder), folder / "machine0"
    until = min(begins + rng.randrange(1, 2 * UPDATES_PER_EPOCH), (NUM_EPOCHS - 1) * UPDATES_PER_EPOCH)
    with machines(folder, WORDS) as (first, second):
        before = len(records(run_dir))
        first.wait_for(f"update {until}", lambda: any(r["update"] >= until for r in records(run_dir)[before:]))
        time.sleep(rng.uniform(0, 0.3))
        rank = rng.randrange(2)
        [first, second][rank].send(signal.SIGKILL, rank=None)
        [second, first][rank].finish(seconds=GONE_SECONDS)
        said, err = first.out, first.err + second.err
    where = f"resumed from {folder}/run/checkpoints/update-{begins:08d}"
    assert where in said or not begins, f"expected: {where}\n{said}\n{err}"
    assert newest(folder) >= begins, f"update {begins} was lost\n{err}"
    assert layout.verify(layout.place(run_dir / "checkpoints", newest(folder))) if newest(folder) else True
    assert not (folder / "machine1/checkpoints").exists()
    return f"begun at {begins}, killed rank {rank} after update {until}, newest {newest(folder)}"


def main(arguments=None):
    """Kill; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.kill.apart", description=__doc__)
    parser.add_argument("--kills", type=int, default=20, help="how often a rank is killed")
    parser.add_argument("--seed", type=int, default=0, help="of which rank is killed, and when")
    chosen = parser.parse_args(arguments)
    rng, folder = random.Random(chosen.seed), Path(tempfile.mkdtemp(prefix="adl-dist-apart-"))
    whole = folder / "whole"
    whole.mkdir()
    with Command([*WORDS, "partition.num_stages=2"], folder=whole) as run:
        assert run.finish(seconds=MOST_SECONDS) == 0, run.err
    for number in range(chosen.kills):
        print(f"{number}: {kill_once(folder, rng)}", flush=True)
    with machines(folder, WORDS) as commands:
        codes = [command.finish(seconds=MOST_SECONDS) for command in commands]
        assert codes == [0, 0], "\n".join(command.err for command in commands)
    wrong = RunEnd(folder / "machine0").differences(RunEnd(whole / "run"))
    assert not wrong, wrong
    # The other machine is gone.
    with machines(folder, [*OF_RUN, f"train.epochs={NUM_EPOCHS + 1}"], num_stages=1) as (alone,):
        assert alone.finish(seconds=MOST_SECONDS) == 0, alone.err
        assert "num_stages was 2 and is 1" in alone.out, alone.out
    print(f"{chosen.kills} kills: nothing lost beyond the last checkpoint; identical to a run that was not killed")
    return 0


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.exit(main())
