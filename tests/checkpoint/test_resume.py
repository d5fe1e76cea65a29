"""Killed runs: the same command continues, exactly; what was not saved whole is not there; nothing is left behind."""

import random
import shutil
import signal
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from adl_dist.checkpoint import layout
from adl_dist.cli.main import main
from tests.support.kill import ADL_DIST, HELD_RUN, HOLD, NUM_SAMPLES, SECONDS_PER_SAMPLE, Command, RunEnd, newest
from tests.support.ranks import command_on_ranks
from tests.support.tiers import slow

pytestmark = [pytest.mark.ranks, pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")]

UPDATES_PER_EPOCH = 8  # 126 samples in updates of 16
GONE_SECONDS = 10  # torch's agent would wait 30 s for a rank that hangs, a rank 300 s for its peer
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
INTERRUPTED = "adl-dist: interrupted; the same command resumes from the last checkpoint"

# Momentum, what a mitigation remembers, and a learning rate that moves at every update and does not depend on the
# number of epochs.
SCHEDULE = ("lr_schedule=multistep", "lr_schedule.milestones=[2,3]", "lr_schedule.warmup_epochs=1.5")
WORDS = (*HELD_RUN, *SCHEDULE, "optimizer=sgd", "method.mitigation=[predict,error_feedback]", "train.epochs=4")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """What four epochs in one process leave."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    assert train_here(folder) == 0
    return RunEnd(folder / "run")


def train_here(folder, *more):
    """Train with all stages in this process; return the exit code."""
    with pytest.raises(SystemExit) as end:
        main(["train", *WORDS, "runtime.processes=false", f"run_dir={folder / 'run'}", *more])
    return int(end.value.code or 0)


def train_as_two_ranks(folder, *more):
    """Train as torchrun's ranks would, without the seconds that it takes to start them."""
    return command_on_ranks(2, "train", *WORDS, f"run_dir={folder / 'run'}", *more)


@contextmanager
def held(folder, *more, start=ADL_DIST):
    """The run on images, which does not come to its end before the file HOLD is removed."""
    (folder / HOLD).touch()
    with Command([*WORDS, *more], folder=folder, start=start) as command:
        yield command
    (folder / HOLD).unlink(missing_ok=True)


# --- kill -9 ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("victim", [0, slow(1), slow(None)], ids=str)
def test_a_killed_run_ends_with_the_same_bits_when_run_again(victim, tmp_path, uninterrupted):
    """The launcher is None. More moments, and restarts by launchers: ``make test-kill``."""
    saves = tmp_path / "run" / "checkpoints"
    with held(tmp_path) as run:
        # In the first half of the second epoch, and after the checkpoint of the first one has been written.
        run.wait_for_update(UPDATES_PER_EPOCH + random.Random(victim).randrange(UPDATES_PER_EPOCH // 2))
        run.wait_for("the checkpoint", (saves / "update-00000008" / layout.MANIFEST).exists)
        run.send(signal.SIGKILL, rank=victim)
        run.wait_until_gone(seconds=GONE_SECONDS)
    assert "Traceback" not in run.err
    saved = newest(run.run_dir)  # that of update 8, unless the machine was slow to kill
    if victim is None:
        assert run.finish() == -signal.SIGKILL
        with Command(WORDS, folder=tmp_path) as again:
            assert again.finish() == 0, again.err
        out = again.out
    else:
        assert run.finish() == 1
        assert f"adl-dist: rank {victim} was killed by SIGKILL; the same command resumes the run\n" in run.err
        out = train_as_two_ranks(tmp_path).out
    assert victim is None or run.left_in_tmp() == []
    assert f"resumed from {saved} (update " in out
    assert RunEnd(run.run_dir).differences(uninterrupted) == []


@pytest.mark.slow
def test_no_rank_outlives_a_torchrun_that_was_killed(tmp_path):
    """One that did would train on alone, and keep the same command out of its folder."""
    with held(tmp_path, start=(*TORCHRUN, "-m", "adl_dist")) as run:
        run.wait_for_update(0)
        run.send(signal.SIGKILL, rank=None)
        run.wait_until_gone(seconds=GONE_SECONDS)


@pytest.mark.slow
def test_interrupted_while_ranks_start_a_run_leaves_no_process(tmp_path):
    def load_torch():
        ranks = [Path(f"/proc/{pid}/maps") for pid, rank in run.processes().items() if rank is not None]
        return len(ranks) == 2 and all("libtorch_python" in maps.read_text() for maps in ranks)

    with held(tmp_path) as run:
        run.wait_for("ranks that load torch", load_torch)
        run.interrupt()
        run.wait_until_gone(seconds=10)
    assert run.finish() == 130
    assert run.err.strip() == INTERRUPTED


# --- signals that ask nicely -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_signal_to_any_process_stops_saves_and_says_so(tmp_path):
    """From the launcher, then from a rank of the run that continues; a loader has a process of its own."""
    for epoch, number, rank in ((0, signal.SIGTERM, None), (1, signal.SIGUSR1, 1)):
        with held(tmp_path, "data.num_workers=1") as run:
            run.wait_for_update(epoch * UPDATES_PER_EPOCH + 1)
            run.send(number, rank=rank)
            run.wait_until_gone(seconds=20)
        assert run.finish() == 75
        saved = newest(run.run_dir)
        update = layout.read_manifest(saved)["update"]
        assert epoch * UPDATES_PER_EPOCH < update < (epoch + 1) * UPDATES_PER_EPOCH
        assert run.err.startswith(
            f"adl-dist: stopped at update {update} ({epoch} of 4 epochs complete) by {number.name}; saved {saved}; the "
            "same command resumes it; the pipeline was emptied in mid-epoch, so values will differ"
        )
        assert run.err.count("\n") == 1
        assert run.left_in_tmp() == []


@pytest.mark.slow
def test_a_second_signal_ends_a_run_that_cannot_stop(tmp_path, uninterrupted):
    """At a second signal a run that cannot stop ends at once and leaves one line and no process."""
    with held(tmp_path) as run:
        run.wait_for_update(2 * UPDATES_PER_EPOCH)
        time.sleep(4 * NUM_SAMPLES * SECONDS_PER_SAMPLE)  # by then no data come any more
        run.interrupt()
        time.sleep(1)
        assert set(run.processes().values()) == {None, 0, 1}
        run.interrupt()
        run.wait_until_gone(seconds=10)
    assert run.finish() == 130
    assert run.err.strip() == INTERRUPTED
    assert run.left_in_tmp() == []
    assert train_here(tmp_path) == 0
    assert RunEnd(run.run_dir).differences(uninterrupted) == []


# --- runs that nothing disturbs --------------------------------------------------------------------------------------


def test_processes_read_and_write_checkpoints_of_another_cut(tmp_path, capsys):
    mixed, alone = tmp_path / "mixed", tmp_path / "alone"
    assert train_here(mixed, "partition.num_stages=3", "train.epochs=1") == 0
    shutil.copytree(mixed, alone)
    assert train_as_two_ranks(mixed, "train.epochs=2").code == 0
    assert train_here(alone, "train.epochs=2") == 0
    for folder in (mixed, alone):
        assert train_here(folder, "partition.num_stages=3", "partition.balance=[1,3,4]", "train.epochs=3") == 0
        assert "another cut (num_stages was 2 and is 3, balance was " in capsys.readouterr().out
    assert RunEnd(mixed / "run").differences(RunEnd(alone / "run")) == []


def test_the_command_of_a_finished_run_trains_nothing(tmp_path, uninterrupted, capsys):
    run_dir = shutil.copytree(uninterrupted.run_dir, tmp_path / "run")

    def contents():
        times = {path: path.stat().st_mtime_ns for path in (run_dir / "checkpoints").rglob("*")}
        return times | {path: path.read_bytes() for path in (run_dir / "metrics.jsonl", run_dir / "summary.json")}

    before = contents()
    capsys.readouterr()
    assert train_here(tmp_path) == 0
    here = capsys.readouterr().out
    as_processes = train_as_two_ranks(tmp_path)
    for said in (here, as_processes.out):
        assert f"nothing left to train: {run_dir} is complete" in said
        assert "epoch 1/4" not in said
    assert as_processes.err == ""
    assert contents() == before
