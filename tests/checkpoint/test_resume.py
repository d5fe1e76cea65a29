"""Killed runs: the same command continues, exactly; what was not saved whole is not there; nothing is left behind."""

import random
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from adl_dist.checkpoint import layout
from adl_dist.cli import train
from adl_dist.cli.main import main
from adl_dist.distributed.world import disconnect
from tests.support.commands import in_process
from tests.support.kill import ADL_DIST, HOLD, NUM_SAMPLES, SECONDS_PER_SAMPLE, Command, RunEnd, newest, records
from tests.support.ranks import RanksFailed, command_on_ranks, run_ranks
from tests.support.tiers import slow

pytestmark = [pytest.mark.ranks, pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")]

UPDATES_PER_EPOCH = 8  # 126 samples in updates of 16
GONE_SECONDS = 10  # torch's agent would wait 30 s for a rank that hangs, a rank 300 s for its peer
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
INTERRUPTED = "adl-dist: interrupted; the same command resumes from the last checkpoint"

# Dropout, fresh noise on every image, BatchNorm, momentum, and a learning rate that moves at every update and does
# not depend on the number of epochs.
WORDS = (
    *("model._target_=tests.support.kill.net_with_dropout", "data._target_=tests.support.kill.held_images"),
    *("lr_schedule=multistep", "lr_schedule.milestones=[2,3]", "lr_schedule.warmup_epochs=1.5"),
    *("optimizer=sgd", "optimizer.lr=0.05", "train.epochs=4", "train.batch_size=16"),
    *("runtime.tensorboard=false", "runtime.threads=1"),
)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> RunEnd:
    """What four epochs in one process leave."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    assert train_here(folder) == 0
    return RunEnd(folder / "run")


def train_here(folder: Path, *more: str) -> int:
    """Train with all stages in this process; return the exit code."""
    with pytest.raises(SystemExit) as end:
        main(["train", *WORDS, "runtime.processes=false", f"run_dir={folder / 'run'}", *more])
    return int(end.value.code or 0)


def train_as_two_ranks(folder: Path, *more: str, **options: Any) -> None:
    """Train as torchrun's ranks would, without the seconds that it takes to start them."""
    run_ranks(2, train_as_rank, [*WORDS, f"run_dir={folder / 'run'}", *more], **options)


def train_as_rank(words: list[str]) -> None:
    train.train(words)
    disconnect()  # a process of its own does so when it ends, one of multiprocessing's does not


@contextmanager
def held(folder: Path, *more: str, start: Sequence[str] = ADL_DIST) -> Iterator[Command]:
    """The run on images, which does not come to its end before the file HOLD is removed."""
    (folder / HOLD).touch()
    with Command([*WORDS, *more], folder=folder, start=start) as command:
        yield command
    (folder / HOLD).unlink(missing_ok=True)


# --- kill -9 ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("victim", [0, slow(1), slow(None)], ids=str)
def test_a_killed_run_ends_with_the_same_bits_when_run_again(
    victim: int | None, tmp_path: Path, uninterrupted: RunEnd
) -> None:
    """The launcher is None. More moments, and restarts by launchers: ``make test-kill``."""
    saves = tmp_path / "run" / "checkpoints"
    with held(tmp_path) as run:
        # In the first half of the second epoch, and after the checkpoint of the first one has been written.
        run.wait_for_update(UPDATES_PER_EPOCH + random.Random(victim).randrange(UPDATES_PER_EPOCH // 2))
        run.wait_for("the checkpoint", (saves / "update-00000008").exists)
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
        out = command_on_ranks(2, "train", *WORDS, f"run_dir={run.run_dir}").out
    assert run.left_in_tmp() == []  # nor what the launcher that was killed had to leave
    assert f"resumed from {saved} (epoch " in out
    assert RunEnd(run.run_dir).differences(uninterrupted) == []


@pytest.mark.slow
def test_no_rank_outlives_a_torchrun_that_was_killed(tmp_path: Path) -> None:
    """One that did would train on alone, and keep the same command out of its folder."""
    with held(tmp_path, start=(*TORCHRUN, "-m", "adl_dist")) as run:
        run.wait_for_update(0)
        run.send(signal.SIGKILL, rank=None)
        run.wait_until_gone(seconds=GONE_SECONDS)


@pytest.mark.slow
def test_interrupted_while_ranks_start_a_run_leaves_no_process(tmp_path: Path) -> None:
    with held(tmp_path) as run:
        run.wait_for("ranks that load torch", lambda: run.ranks_with_library("libtorch_python") == {0, 1})
        run.interrupt()
        run.wait_until_gone(seconds=10)
    assert run.finish() == 130
    assert run.err.strip() == INTERRUPTED


# --- signals that ask nicely -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_signal_to_any_process_saves_like_a_planned_stop(tmp_path: Path) -> None:
    """Asked by a signal to any process a run saves and says so and continues as if it had been planned."""
    stops = []
    for epoch, number, rank in ((0, signal.SIGTERM, None), (1, signal.SIGUSR1, 1)):
        with held(tmp_path) as run:
            run.wait_for_update(epoch * UPDATES_PER_EPOCH + 1)
            run.send(number, rank=rank)
            run.wait_until_gone(seconds=20)
        assert run.finish() == 75
        saved = newest(run.run_dir)
        stops.append(layout.read_manifest(saved)["update"])
        assert run.err.startswith(
            f"adl-dist: stopped at update {stops[-1]} (epoch {epoch}) by {number.name}; saved {saved}; the same "
            "command resumes it; the pipeline was emptied in mid-epoch, so values will differ"
        )
        assert run.err.count("\n") == 1
        assert run.left_in_tmp() == []
    assert epoch * UPDATES_PER_EPOCH < stops[1] < (epoch + 1) * UPDATES_PER_EPOCH

    planned = tmp_path / "planned"
    for most in stops:
        assert train_here(planned, f"train.max_updates={most}") == 0
    for folder in (tmp_path, planned):
        assert train_here(folder) == 0
    assert RunEnd(run.run_dir).newest == RunEnd(planned / "run").newest


@pytest.mark.slow
def test_a_second_signal_ends_a_run_that_cannot_stop(tmp_path: Path, uninterrupted: RunEnd) -> None:
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


@pytest.mark.slow
def test_ranks_of_torchrun_stop_where_it_leaves_no_trace(tmp_path: Path) -> None:
    """Torchrun asked to end lets its ranks stop where a traceless stop is planned."""
    every = ("runtime.checkpoint_every_updates=3", "data.num_workers=1")
    with held(tmp_path, *every, start=(*TORCHRUN, "-m", "adl_dist")) as run:
        run.wait_for_update(UPDATES_PER_EPOCH)
        run.send(signal.SIGTERM, rank=None)
        run.wait_until_gone(seconds=20)
    update = layout.read_manifest(newest(run.run_dir))["update"]
    assert update - UPDATES_PER_EPOCH in (3, 6, 8)
    assert f"adl-dist: stopped at update {update} (epoch 1) by SIGTERM; saved" in run.err
    assert "values will differ" not in run.err
    straight = tmp_path / "straight"
    for folder in (tmp_path, straight):
        assert train_here(folder, *every) == 0
    assert RunEnd(run.run_dir).differences(RunEnd(straight / "run")) == []


# --- in one process, and from one mode to the other ------------------------------------------------------------------


@pytest.mark.parametrize("change", ["processes to one process", "one process to processes"])
def test_a_run_made_longer_ends_with_the_bits_of_a_long_one(change: str, tmp_path: Path, uninterrupted: RunEnd) -> None:
    """A run made longer ends with the bits of one that was as long from the start."""
    if change == "processes to one process":
        train_as_two_ranks(tmp_path, "train.epochs=2")
        assert train_here(tmp_path) == 0
    else:
        assert train_here(tmp_path, "train.epochs=2") == 0
        train_as_two_ranks(tmp_path)
    assert RunEnd(tmp_path / "run").differences(uninterrupted) == []


def test_processes_read_and_write_checkpoints_of_another_cut(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Processes read a checkpoint of another cut and write one for another as one process does."""
    mixed, alone = tmp_path / "mixed", tmp_path / "alone"
    assert train_here(mixed, "partition.num_stages=3", "train.epochs=1") == 0
    shutil.copytree(mixed, alone)
    train_as_two_ranks(mixed, "train.epochs=2")
    assert train_here(alone, "train.epochs=2") == 0
    for folder in (mixed, alone):
        assert train_here(folder, "partition.num_stages=3", "partition.balance=[1,3,4]", "train.epochs=3") == 0
        assert "another cut (num_stages was 2 and is 3, balance was " in capsys.readouterr().out
    assert RunEnd(mixed / "run").differences(RunEnd(alone / "run")) == []


# --- runs that are over ----------------------------------------------------------------------------------------------


def test_the_command_of_a_finished_run_trains_nothing(
    tmp_path: Path, uninterrupted: RunEnd, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command of a finished run says so trains nothing and writes nothing over."""
    run_dir = shutil.copytree(uninterrupted.run_dir, tmp_path / "run")

    def contents() -> dict[Path, Any]:
        times = {path: path.stat().st_mtime_ns for path in (run_dir / "checkpoints").rglob("*")}
        return times | {path: path.read_bytes() for path in (run_dir / "metrics.jsonl", run_dir / "summary.json")}

    before = contents()
    capsys.readouterr()
    assert train_here(tmp_path) == 0
    here = capsys.readouterr().out
    as_processes = command_on_ranks(2, "train", *WORDS, f"run_dir={run_dir}")
    for said in (here, as_processes.out):
        assert f"nothing left to train: {run_dir} is complete" in said
        assert "epoch 1/4" not in said
    assert as_processes.err == ""
    assert contents() == before


def test_with_one_stage_a_stopped_run_resumes_its_epoch(tmp_path: Path) -> None:
    """With K = 1 nothing is in flight at an update, so a stop by max_updates, exactly there, changes nothing."""
    stopped, straight = tmp_path / "stopped", tmp_path / "straight"
    for folder, stops in ((straight, [16]), (stopped, [11, 16])):
        for most in stops:
            one_stage = ("partition.num_stages=1", "train.epochs=2", f"train.max_updates={most}")
            assert train_here(folder, *one_stage) == 0
            assert layout.read_manifest(newest(folder / "run"))["update"] == most
            made = [record["update"] for record in records(folder / "run") if record["name"] == "train/loss"]
            assert made == list(range(most))
    ends = [RunEnd(folder / "run") for folder in (stopped, straight)]
    assert ends[0].newest == ends[1].newest
    losses = [[value for key, value in end.values.items() if key[0] == "train/loss"] for end in ends]
    assert losses[0] == losses[1]


# --- run folders -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_second_command_in_a_training_folder_refuses(tmp_path: Path, uninterrupted: RunEnd) -> None:
    """A second command in the folder of one that trains refuses and leaves it alone."""
    with held(tmp_path) as run:
        run.wait_for_update(1)
        second = in_process("train", *WORDS, "runtime.processes=false", f"run_dir={run.run_dir}")
        assert "another process is training here" in second.refusal()
        (tmp_path / HOLD).unlink()
        assert run.finish() == 0
    assert RunEnd(run.run_dir).differences(uninterrupted) == []


def test_what_only_rank_0_can_refuse_ends_all_ranks_at_once(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed, match="expected at least 200 samples, but HeldImages has 126") as failed:
        train_as_two_ranks(tmp_path, "train.batch_size=200", timeout_seconds=10)
    assert "still ran" not in str(failed.value)
