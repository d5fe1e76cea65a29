"""Killed runs: the same command goes on, exactly; what was not saved whole is not there; nothing is left behind."""

import hashlib
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from adl_dist.checkpoint import layout
from adl_dist.cli import train
from adl_dist.cli.main import main
from adl_dist.distributed.world import disconnect
from adl_dist.errors import CheckpointError
from tests.support.kill import (
    ADL_DIST,
    HOLD,
    NUM_SAMPLES,
    SECONDS_PER_SAMPLE,
    Command,
    random_update_of_epoch,
    records,
)
from tests.support.ranks import RanksFailed, command_on_ranks, run_ranks
from tests.support.tiers import slow

pytestmark = pytest.mark.ranks

needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")

UPDATES_PER_EPOCH = 8  # 126 samples in updates of 16
SECOND = 1  # epochs are counted from 0
GONE_SECONDS = 10  # torch's agent would wait 30 s for a rank that hangs, a rank 300 s for its peer
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")

# Dropout, fresh noise on every image, BatchNorm, momentum, and a learning rate that moves at every update and does
# not depend on the number of epochs.
SCHEDULE = ("lr_schedule=multistep", "lr_schedule.milestones=[2,3]", "lr_schedule.warmup_epochs=1.5")
COMMON = ("train.epochs=4", "runtime.tensorboard=false", "runtime.threads=1", *SCHEDULE)
SGD_ON_IMAGES = (
    *COMMON,
    "model._target_=tests.support.kill.net_with_dropout",
    "data._target_=tests.support.kill.held_images",
    "train.batch_size=16",
    "optimizer=sgd",
    "optimizer.lr=0.05",
)
ADAMW_ON_DIGITS = (
    *COMMON,
    "model=resnet8",
    "data._target_=tests.support.kill.few_digits",
    "data.in_channels=1",
    "train.batch_size=32",
    "optimizer=adamw",
)
IMAGES, DIGITS = "sgd on noisy images with dropout", "adamw on augmented digits"
RUNS = {IMAGES: SGD_ON_IMAGES, DIGITS: ADAMW_ON_DIGITS}

TIMINGS = ("train/samples_per_second", "stage/busy_share", "stage/peak_memory")  # the only values that may differ


@dataclass
class Uninterrupted:
    """What a run that nothing happened to has in the end."""

    run_dir: Path
    tensors: dict[str, Tensor] = field(init=False)
    values: dict[tuple[Any, ...], float] = field(init=False)

    def __post_init__(self) -> None:
        self.tensors, self.values = tensors_of(newest(self.run_dir)), values_of(self.run_dir)

    def assert_equal_to(self, run_dir: Path) -> None:
        """Weights, buffers and optimizer state to the bit; every record once and with the same value."""
        tensors, values = tensors_of(newest(run_dir)), values_of(run_dir)
        assert newest(run_dir).name == newest(self.run_dir).name
        assert tensors.keys() == self.tensors.keys()
        assert [name for name in tensors if not torch.equal(tensors[name], self.tensors[name])] == []
        assert values.keys() == self.values.keys()
        assert {k: (v, self.values[k]) for k, v in values.items() if v != self.values[k] and k[0] not in TIMINGS} == {}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Uninterrupted]:
    """Four epochs in one process, by the name in RUNS."""
    known: dict[str, Uninterrupted] = {}

    def run(name: str) -> Uninterrupted:
        if name not in known:
            folder = tmp_path_factory.mktemp("uninterrupted")
            assert train_here(name, folder) == 0
            known[name] = Uninterrupted(folder / "run")
        return known[name]

    return run


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Path], Path]:
    """Two epochs in one process; each test gets a copy."""
    known: dict[str, Path] = {}

    def copy(name: str, folder: Path) -> Path:
        if name not in known:
            known[name] = tmp_path_factory.mktemp("half")
            assert train_here(name, known[name], "train.epochs=2") == 0
        shutil.copytree(known[name] / "run", folder / "run")
        return folder / "run"

    return copy


def train_here(name: str, folder: Path, *more: str) -> int:
    """Train with all stages in this process; return the exit code."""
    return ended([*RUNS[name], "runtime.processes=false", f"run_dir={folder / 'run'}", *more])


def ended(words: list[str]) -> int:
    with pytest.raises(SystemExit) as end:
        main(["train", *words])
    return int(end.value.code or 0)


def train_as_two_ranks(name: str, folder: Path, *more: str, **options: Any) -> None:
    """Train as torchrun's ranks would, without the seconds that it takes to start them."""
    run_ranks(2, train_as_rank, [*RUNS[name], f"run_dir={folder / 'run'}", *more], **options)


def train_as_rank(words: list[str]) -> None:
    train.train(words)
    disconnect()  # a process of its own does so when it ends, one of multiprocessing's does not


def newest(run_dir: Path) -> Path:
    return layout.complete(run_dir / "checkpoints")[-1]


def tensors_of(path: Path) -> dict[str, Tensor]:
    """All tensors that a checkpoint holds, by file and name."""
    return {f"{file.name} {key}": t for file in path.glob("*.safetensors") for key, t in load_file(file).items()}


def values_of(run_dir: Path) -> dict[tuple[Any, ...], float]:
    """Values of metrics.jsonl by (name, stage, update); none is there twice."""
    values: dict[tuple[Any, ...], float] = {}
    for record in records(run_dir):
        key = (record["name"], record.get("stage"), record["update"])
        assert key not in values, f"{key} is recorded twice"
        values[key] = record["value"]
    return values


def losses(run_dir: Path) -> dict[int, float]:
    return {update: value for (name, _, update), value in values_of(run_dir).items() if name == "train/loss"}


def contents(run_dir: Path) -> dict[str, tuple[str, int]]:
    """Hash and time of what a run must not write over."""
    files = [path for path in (run_dir / "checkpoints").rglob("*") if path.is_file()]
    told = {str(f.relative_to(run_dir)): (hashed(f), f.stat().st_mtime_ns) for f in files}
    return told | {name: (hashed(run_dir / name), 0) for name in ("metrics.jsonl", "summary.json")}


def hashed(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@contextmanager
def held(folder: Path, *more: str, start: Sequence[str] = ADL_DIST) -> Iterator[Command]:
    """The run on images, which does not come to its end before the file HOLD is removed."""
    (folder / HOLD).touch()
    with Command([*RUNS[IMAGES], *more], folder=folder, start=start) as command:
        yield command
    (folder / HOLD).unlink(missing_ok=True)


def run_again(folder: Path) -> Command:
    """The same command, to its end."""
    with Command(RUNS[IMAGES], folder=folder) as again:
        assert again.finish() == 0, again.err
    return again


def left_in_tmp(run: Command) -> list[str]:
    return [f.name for f in run.temporary.iterdir() if f.name.startswith(("adl-dist", "torchelastic"))]


# --- kill -9 ---------------------------------------------------------------------------------------------------------


@needs_proc
@pytest.mark.parametrize(
    ("victim", "seed"),
    [(0, 0), slow(1, 1), slow(None, 2)],
    ids=["stage 0", "stage 1", "launcher"],
)
def test_a_killed_run_ends_with_the_same_bits_when_run_again(
    victim: int | None, seed: int, tmp_path: Path, uninterrupted: Callable[[str], Uninterrupted]
) -> None:
    """A run whose process was killed in an epoch ends with the same bits after the same command again."""
    update = random_update_of_epoch(SECOND, updates_per_epoch=UPDATES_PER_EPOCH, seed=seed)
    with held(tmp_path) as run:
        run.wait_for_update(update)
        run.wait_for("the checkpoint", lambda: newest(run.run_dir).name == "update-00000008")  # written meanwhile
        run.send(signal.SIGKILL, rank=victim)
        run.wait_until_gone(seconds=GONE_SECONDS)
    if victim is None:
        assert run.finish() == -signal.SIGKILL
    else:
        assert run.finish() == 1
        assert f"adl-dist: rank {victim} was killed by SIGKILL; the same command resumes the run\n" in run.err
        assert left_in_tmp(run) == []
    assert "Traceback" not in run.err

    again = run_again(tmp_path)
    assert f"resumed from {run.run_dir}/checkpoints/update-00000008 (epoch 1, update 8)\n" in again.out
    uninterrupted(IMAGES).assert_equal_to(run.run_dir)
    assert left_in_tmp(again) == []  # nor what a launcher that was killed had to leave


@pytest.mark.slow
@needs_proc
def test_killed_while_it_saves_a_run_ends_with_the_same_bits(
    tmp_path: Path, uninterrupted: Callable[[str], Uninterrupted]
) -> None:
    """A run killed while it saves ends with the same bits after the same command again."""
    with held(tmp_path) as run:
        saving = run.run_dir / "checkpoints" / ".saving-00000016"
        run.wait_for("a save", lambda: saving.exists() or (saving.parent / "update-00000016").exists())
        run.send(signal.SIGKILL, rank=0)
        run.wait_until_gone(seconds=GONE_SECONDS)
    run_again(tmp_path)
    assert list(saving.parent.glob(".*")) == []
    uninterrupted(IMAGES).assert_equal_to(run.run_dir)


@needs_proc
@pytest.mark.parametrize("launcher", [slow("torchrun"), slow("our own")])
def test_with_restarts_a_killed_run_ends_with_the_same_bits(
    launcher: str, tmp_path: Path, uninterrupted: Callable[[str], Uninterrupted]
) -> None:
    """With restarts a run whose process was killed ends with the same bits without another command."""
    victim = 0 if launcher == "torchrun" else 1
    update = random_update_of_epoch(SECOND, updates_per_epoch=UPDATES_PER_EPOCH, seed=3 + victim)
    if launcher == "torchrun":
        command = held(tmp_path, start=(*TORCHRUN, "--max-restarts=3", "-m", "adl_dist"))
    else:
        command = held(tmp_path, "runtime.max_restarts=1")
    with command as run:
        run.wait_for_update(update)
        run.send(signal.SIGKILL, rank=victim)
        (tmp_path / HOLD).unlink()
        assert run.finish() == 0, run.err
        assert run.processes() == {}
    assert "Traceback" not in run.err
    if launcher == "our own":
        assert "adl-dist: rank 1 was killed by SIGKILL; starting all ranks again (restart 1 of 1)\n" in run.err
        assert left_in_tmp(run) == []
    uninterrupted(IMAGES).assert_equal_to(run.run_dir)


@pytest.mark.slow
@needs_proc
def test_no_rank_outlives_a_launcher_killed_early(tmp_path: Path) -> None:
    with held(tmp_path) as run:
        run.wait_for("the ranks", lambda: {0, 1} <= set(run.processes().values()))
        run.send(signal.SIGKILL, rank=None)
        run.wait_until_gone(seconds=GONE_SECONDS)
    assert records(run.run_dir) == []


@pytest.mark.slow
@needs_proc
def test_no_rank_outlives_a_torchrun_that_was_killed(tmp_path: Path) -> None:
    """One that did would train on alone, and keep the same command out of its folder."""
    with held(tmp_path, start=(*TORCHRUN, "-m", "adl_dist")) as run:
        run.wait_for_update(0)
        run.send(signal.SIGKILL, rank=None)
        run.wait_until_gone(seconds=GONE_SECONDS)


@pytest.mark.slow
@needs_proc
def test_interrupted_while_ranks_start_a_run_leaves_no_process(tmp_path: Path) -> None:
    with held(tmp_path) as run:
        run.wait_for("ranks that load torch", lambda: run.ranks_with_library("libtorch_python") == {0, 1})
        run.interrupt()
        run.wait_until_gone(seconds=10)
    assert run.finish() == 130
    assert run.err.strip() == "adl-dist: interrupted; the same command resumes from the last checkpoint"


# --- signals that ask nicely -----------------------------------------------------------------------------------------


@pytest.mark.slow
@needs_proc
def test_a_signal_to_any_process_saves_like_a_planned_stop(
    tmp_path: Path,
) -> None:
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
        assert left_in_tmp(run) == []
    assert epoch * UPDATES_PER_EPOCH < stops[1] < (epoch + 1) * UPDATES_PER_EPOCH

    planned = tmp_path / "planned"
    for most in stops:
        assert train_here(IMAGES, planned, f"train.max_updates={most}") == 0
    for folder in (tmp_path, planned):
        assert train_here(IMAGES, folder) == 0
    expected = tensors_of(newest(planned / "run"))
    assert [n for n, t in tensors_of(newest(run.run_dir)).items() if not torch.equal(t, expected[n])] == []


@pytest.mark.slow
@needs_proc
def test_a_second_signal_ends_a_run_that_cannot_stop(
    tmp_path: Path, uninterrupted: Callable[[str], Uninterrupted]
) -> None:
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
    assert run.err.strip() == "adl-dist: interrupted; the same command resumes from the last checkpoint"
    assert left_in_tmp(run) == []
    assert train_here(IMAGES, tmp_path) == 0
    uninterrupted(IMAGES).assert_equal_to(run.run_dir)


@pytest.mark.slow
@needs_proc
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
        assert train_here(IMAGES, folder, *every) == 0
    Uninterrupted(straight / "run").assert_equal_to(run.run_dir)


# --- saves -----------------------------------------------------------------------------------------------------------


def test_what_an_interrupted_save_left_is_removed_and_never_read(
    tmp_path: Path, half: Callable[[str, Path], Path], uninterrupted: Callable[[str], Uninterrupted]
) -> None:
    run_dir = half(IMAGES, tmp_path)
    leftover = run_dir / "checkpoints" / ".saving-00000099"
    leftover.mkdir()
    for name in ("model-00001-of-00002.safetensors", "model.safetensors.index.json", "manifest.json"):
        (leftover / name).write_bytes(b"garbage")
    with (run_dir / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"name": "train/loss", "value": 0.5, "stage": 1, "update": 16, "epoch": 2}\n')
        metrics.write('{"name": "train/loss", "val')  # as far as it came
    assert train_here(IMAGES, tmp_path) == 0
    assert sorted(path.name for path in (run_dir / "checkpoints").iterdir()) == ["update-00000024", "update-00000032"]
    uninterrupted(IMAGES).assert_equal_to(run_dir)


def test_a_reader_never_sees_half_a_checkpoint(tmp_path: Path) -> None:
    folder, over = tmp_path / "run" / "checkpoints", threading.Event()
    read: set[str] = set()
    half_made: list[str] = []

    def poll() -> None:
        while not over.is_set():
            for path in layout.complete(folder):
                try:
                    layout.read_manifest(path)
                    read.add(path.name)
                except (CheckpointError, FileNotFoundError) as error:
                    if not is_pruned(path):
                        half_made.append(str(error))
            time.sleep(0.001)

    reader = threading.Thread(target=poll)
    reader.start()
    try:
        train_as_two_ranks(IMAGES, tmp_path, "train.epochs=25")
    finally:
        over.set()
        reader.join()
    assert half_made == []
    assert len(read) > 10, "it read too few of the 25 to say anything"


def is_pruned(path: Path, *, seconds: float = 5) -> bool:
    """Whether ``path`` goes away rather than getting whole."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not path.exists():
            return True
        try:
            layout.read_manifest(path)
        except (CheckpointError, FileNotFoundError):
            continue
        return False
    return False


def test_a_checkpoint_being_removed_is_not_listed_as_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remove = shutil.rmtree
    listed: list[str] = []

    def look_and_remove(path: Path, **options: Any) -> None:
        listed.extend(other.name for other in layout.complete(path.parent) if other == path)
        remove(path, **options)

    monkeypatch.setattr(shutil, "rmtree", look_and_remove)
    assert train_here(IMAGES, tmp_path) == 0
    assert listed == []


# --- in one process, and from one mode to the other ------------------------------------------------------------------


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("change", ["one process", "processes to one process", "one process to processes"])
def test_a_run_made_longer_ends_with_the_bits_of_a_long_one(
    name: str,
    change: str,
    tmp_path: Path,
    half: Callable[[str, Path], Path],
    uninterrupted: Callable[[str], Uninterrupted],
) -> None:
    """A run made longer ends with the bits of one that was as long from the start."""
    if change == "processes to one process":
        train_as_two_ranks(name, tmp_path, "train.epochs=2")
    else:
        half(name, tmp_path)
    if change == "one process to processes":
        train_as_two_ranks(name, tmp_path)
    else:
        assert train_here(name, tmp_path) == 0
    uninterrupted(name).assert_equal_to(tmp_path / "run")


def test_processes_read_and_write_checkpoints_of_another_cut(
    tmp_path: Path,
) -> None:
    """Processes read a checkpoint of another cut and write one for another as one process does."""
    mixed, alone = tmp_path / "mixed", tmp_path / "alone"
    assert train_here(IMAGES, mixed, "partition.num_stages=3", "train.epochs=1") == 0
    shutil.copytree(mixed, alone)
    train_as_two_ranks(IMAGES, mixed, "train.epochs=2")
    assert train_here(IMAGES, alone, "train.epochs=2") == 0
    for folder in (mixed, alone):
        assert train_here(IMAGES, folder, "partition.num_stages=3", "train.epochs=3") == 0
    Uninterrupted(alone / "run").assert_equal_to(mixed / "run")


# --- runs that are over ----------------------------------------------------------------------------------------------


@needs_proc
def test_the_command_of_a_finished_run_trains_nothing(
    tmp_path: Path, uninterrupted: Callable[[str], Uninterrupted], capsys: pytest.CaptureFixture[str]
) -> None:
    """The command of a finished run says so trains nothing and writes nothing over."""
    shutil.copytree(uninterrupted(IMAGES).run_dir, tmp_path / "run")
    before = contents(tmp_path / "run")
    capsys.readouterr()
    assert train_here(IMAGES, tmp_path) == 0
    here = capsys.readouterr().out
    as_processes = command_on_ranks(2, "train", *RUNS[IMAGES], f"run_dir={tmp_path / 'run'}")
    for said in (here, as_processes.out):
        assert f"nothing left to train: {tmp_path / 'run'} is complete" in said
        assert "epoch 1/4" not in said
    assert as_processes.err == ""
    assert contents(tmp_path / "run") == before


def test_max_updates_ends_a_run_at_exactly_that_update(tmp_path: Path) -> None:
    """Max updates ends a run in mid epoch at exactly that update and raised it continues."""
    run_dir = tmp_path / "run"
    for most, first in ((11, 0), (20, 11)):
        assert train_here(IMAGES, tmp_path, f"train.max_updates={most}") == 0
        assert layout.read_manifest(newest(run_dir))["update"] == most
        assert sorted(losses(run_dir)) == list(range(most)), f"from update {first} on"


def test_with_one_stage_a_stopped_run_resumes_its_epoch(tmp_path: Path) -> None:
    """With K = 1 nothing is in flight at an update, so a stop there must not change anything."""
    stopped, straight = tmp_path / "stopped", tmp_path / "straight"
    for folder, stops in ((straight, [16]), (stopped, [11, 16])):
        for most in stops:
            one_stage = ("partition.num_stages=1", "train.epochs=2", f"train.max_updates={most}")
            assert train_here(IMAGES, folder, *one_stage) == 0
    assert losses(stopped / "run") == losses(straight / "run")
    expected = tensors_of(newest(straight / "run"))
    assert [n for n, t in tensors_of(newest(stopped / "run")).items() if not torch.equal(t, expected[n])] == []


# --- run folders -----------------------------------------------------------------------------------------------------


def test_what_only_rank_0_can_refuse_ends_all_ranks_at_once(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed, match="expected at least 200 samples, but HeldImages has 126") as failed:
        train_as_two_ranks(IMAGES, tmp_path, "train.batch_size=200", timeout_seconds=10)
    assert "still ran" not in str(failed.value)


def test_a_second_run_writes_nothing_into_the_first_ones_folder(tmp_path: Path) -> None:
    """A second run in the same process writes nothing into the folder of the first."""
    first, second = tmp_path / "first", tmp_path / "second"
    assert train_here(IMAGES, first, "train.epochs=1") == 0
    log = (first / "run" / "logs" / "rank0.log").read_text()
    assert train_here(IMAGES, second, "train.epochs=1") == 0
    assert (first / "run" / "logs" / "rank0.log").read_text() == log
