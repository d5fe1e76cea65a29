"""One run on digits that is killed once, started again, and compared with a run that was not."""

import signal
import stat
import sys
import time
from dataclasses import dataclass

from adl_dist.checkpoint import layout
from tests.support.kill import ADL_DIST, Command, RunEnd
from tools.kill.deck import NUM_EPOCHS, OURS, TORCHRUN, UPDATES_PER_EPOCH, Killing
from tools.kill.slow_saves import SLOW

TIMEOUT_SECONDS = 20.0  # of a message; the processes of one machine also start within it
MOST_SECONDS = 180.0  # for one command, from its start to its end
# For what is left of a killed run to see that and end. torch's agent would wait 30 s for a rank that is stopped.
GONE_SECONDS = 40.0
# Of a run with a process that is stopped. A machine with other work to do must not take that long for one action.
STALL_SECONDS, ABORT_SECONDS = 3.0, 10.0
WORDS = (
    *("model=resnet8", "data._target_=tools.kill.slow_saves.digits", "data.in_channels=1", "data.num_classes=10"),
    *(f"train.epochs={NUM_EPOCHS}", "train.batch_size=32", "optimizer=adamw"),
    *("lr_schedule=multistep", "lr_schedule.milestones=[4,8]"),
    *("runtime.tensorboard=false", "runtime.report=false", "runtime.threads=1", "runtime.stage_records_every=1"),
    f"runtime.timeout_seconds={TIMEOUT_SECONDS:g}",
)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a killed run."""

    killing: Killing
    wrong: str  # what is not as it should be; nothing if all is
    was_saving: bool  # whether a checkpoint was half written when it was killed
    lost_seconds: float  # from its first start to its end, less a run that was not killed


def start(starter, num_stages, restarts=0, *, aborts=False):
    """What stands before ``train``, and what after it; ``aborts``: soon after nothing moves any more."""
    words = [*WORDS, f"partition.num_stages={num_stages}"]
    if aborts:
        words += [
            f"runtime.watchdog_warn_seconds={STALL_SECONDS:g}",
            f"runtime.watchdog_abort_seconds={ABORT_SECONDS:g}",
        ]
    if starter == "adl-dist":
        return ADL_DIST, [*words, f"runtime.max_restarts={restarts}"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_stages}"]
    return [*torchrun, f"--max-restarts={restarts}", "-m", "adl_dist"], words


def undisturbed(folder, starter, num_stages):
    """Run without disturbance; also return how long it took to the first update, and to the end."""
    folder.mkdir()
    before, words = start(starter, num_stages)
    began = time.monotonic()
    with Command(words, folder=folder, start=before) as run:
        run.wait_for_update(0, seconds=MOST_SECONDS)
        first = time.monotonic() - began
        assert run.finish(seconds=MOST_SECONDS) == 0, run.err
    return RunEnd(folder / "run"), first, time.monotonic() - began


def kill(killing, folder, expected, usual_seconds):
    """Kill a run, start it again if no launcher does, look at what is left; None: it ended before the kill."""
    folder.mkdir()
    restarts = 1 if killing.restart in (OURS, TORCHRUN) else 0
    before, words = start(killing.starter, killing.num_stages, restarts, aborts=killing.kind == "stopped")
    began = time.monotonic()
    wrong, code, was_saving, left = "", 0, False, []
    try:
        with Command(words, folder=folder, start=before) as run:
            try:
                _wait_for_the_moment(run, killing)
                run.send(signal.SIGSTOP if killing.kind == "stopped" else signal.SIGKILL, rank=killing.rank)
                was_saving = any((run.run_dir / "checkpoints").glob(f"*/{layout.TOKEN}"))
                (folder / SLOW).unlink(missing_ok=True)
            except (AssertionError, StopIteration) as error:
                # A rank that was there and is gone: the run ends, of which its other ranks may still be a part.
                if (isinstance(error, StopIteration) or not run.processes()) and run.finish() == 0:
                    return None
                raise AssertionError(f"not killed, for it failed before: {error}") from error
            if restarts:
                code = run.finish(seconds=MOST_SECONDS)
                left += _processes(run)  # before they are killed at the end of this block
            else:
                run.wait_until_gone(seconds=GONE_SECONDS)
        if not restarts:
            with Command(words, folder=folder, start=before) as run:
                code = run.finish(seconds=MOST_SECONDS)
                left += _processes(run)
        if code:
            wrong = f"exit code {code}: {run.err[-500:]}"
    except AssertionError as error:
        wrong = f"{error}"
    lost_seconds = time.monotonic() - began - usual_seconds
    if not wrong:
        wrong = ", ".join([*left, *_left_behind(run, killing), *RunEnd(run.run_dir).differences(expected)])
    return Outcome(killing=killing, wrong=wrong, was_saving=was_saving, lost_seconds=lost_seconds)


def _wait_for_the_moment(run, killing):
    if killing.kind == "while saving":
        folder, update = run.run_dir / "checkpoints", killing.update + 1
        the_one = layout.place(folder, update)
        if update > UPDATES_PER_EPOCH:
            earlier = layout.place(folder, update - UPDATES_PER_EPOCH) / layout.MANIFEST
            run.wait_for(earlier.parent.name, lambda: earlier.exists() or the_one.exists(), seconds=MOST_SECONDS)
        (run.run_dir.parent / SLOW).touch()
        run.wait_for("a save", the_one.exists, seconds=MOST_SECONDS)
        time.sleep(killing.seconds)
        return
    if killing.update is not None:
        run.wait_for_update(killing.update, seconds=MOST_SECONDS)
    run.wait_for("its ranks", lambda: killing.rank is None or killing.rank in run.processes().values())
    time.sleep(killing.seconds)


def _left_behind(run, killing):
    """Sockets and temporary files that should not be there."""
    everything = [*run.run_dir.rglob("*"), *run.temporary.rglob("*")]
    left = [f"socket {path}" for path in everything if stat.S_ISSOCK(path.lstat().st_mode)]
    # torchrun itself leaves the folder of its logs, killed or not, and a launcher that was killed its own.
    if killing.rank is None:
        return left
    return left + [n for n in run.left_in_tmp() if killing.starter == "adl-dist" or n.startswith("adl-dist")]


def _processes(run):
    """Those that should have ended before their launcher."""
    return [f"process {pid} of rank {rank}" for pid, rank in run.processes().items()]
