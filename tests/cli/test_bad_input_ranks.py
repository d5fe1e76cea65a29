"""Bad input to K processes: one readable line from one of them, exit code 2, and none of them left behind.

Ranks come from a fork server, or, in the slow tier, from the launcher, as a user starts them.
"""

import functools
import os
import shutil
import socket

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from adl_dist.cli.main import main
from adl_dist.distributed import parent_process
from adl_dist.launch import local
from tests.support.commands import ADL_DIST, TORCHRUN, as_command, left_behind, shows, snapshot, words
from tests.support.ranks import RanksFailed, command_on_ranks, run_ranks
from tests.support.tiers import slow

pytestmark = pytest.mark.ranks

USER = "tests.support.user_code"
OLDER = "update-00000002"


@pytest.fixture(scope="module", params=["fork server", slow("own launcher")])
def start(request):
    """Run a command as two processes."""
    by_fork_server, by_launcher = functools.partial(command_on_ranks, 2), functools.partial(as_command, ADL_DIST)
    return by_fork_server if request.param == "fork server" else by_launcher


def logs_of(run_dir):
    return [(run_dir / f"logs/rank{rank}.log").read_text() for rank in range(2)]


@pytest.mark.slow
def test_a_mistake_that_every_rank_finds_is_reported_once(tmp_path):
    """The model is built by the ranks alone: each finds the same mistake, and the user reads one line of it."""
    outcome = as_command(ADL_DIST, *words(tmp_path / "run", "init_from=nosuch.pt", processes=True))
    shows(outcome.refusal(), ["init_from=nosuch.pt cannot be read (FileNotFoundError", "expected a state_dict"])
    assert left_behind(tmp_path) == []
    assert snapshot(tmp_path) == {}


@pytest.fixture(scope="module")
def diverged(tmp_path_factory, start):
    """A run in two processes whose loss is NaN from the tenth micro-batch on, the second of epoch 1."""
    run_dir = tmp_path_factory.mktemp("diverged") / "run"
    command = words(run_dir, f"model._target_={USER}.explodes", "model.after=9", "train.epochs=3", processes=True)
    return run_dir, command, start(*command)


def test_a_nan_loss_stops_both_processes_and_keeps_a_checkpoint(diverged):
    run_dir, _, outcome = diverged
    shows(outcome.refusal(), ["stage 1: the loss is nan at update 2 (epoch 2)", "The last checkpoint, if any, is kept"])
    assert "\nepoch 1/3" in outcome.out
    assert left_behind(run_dir) == []
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == [OLDER]
    for log in logs_of(run_dir):
        shows(log, ["the loss is nan at update 2"])


def test_a_damaged_checkpoint_of_two_processes_is_told_once(diverged, start, tmp_path):
    run_dir = shutil.copytree(diverged[0], tmp_path / "run", ignore=shutil.ignore_patterns("*.sock"))
    file = run_dir / "checkpoints" / OLDER / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    before = snapshot(run_dir / "checkpoints")
    outcome = start(*[word.replace(str(diverged[0]), str(run_dir)) for word in diverged[1]])
    shows(
        outcome.refusal(),
        [f"{OLDER} is damaged", "model-00002-of-00002.safetensors cannot be read (it should hold", "another run_dir"],
    )
    assert left_behind(tmp_path) == []
    assert snapshot(run_dir / "checkpoints") == before


def test_another_runs_folder_stays_as_it_is_for_processes(diverged, start):
    run_dir, command, _ = diverged
    before = snapshot(run_dir)
    outcome = start(*command, "seed=1")
    shows(outcome.refusal(), [f"run_dir={run_dir} belongs to another run", "seed is 0 there and 1 here"])
    assert left_behind(run_dir) == []
    assert snapshot(run_dir) == before


@pytest.mark.parametrize("by_torchrun", [False, slow(True)])
def test_another_number_of_processes_than_stages_is_told_once(by_torchrun, tmp_path):
    arguments = words(tmp_path / "run", "partition.num_stages=3", processes=True)
    if by_torchrun:
        outcome = as_command(*TORCHRUN, "--nproc-per-node=2", "-m", "adl_dist", *arguments)
        (line,) = [line for line in outcome.err.splitlines() if line.startswith("adl-dist")]
        assert outcome.code != 0
        assert "exitcode  : 2" in outcome.err, "that of the rank, in torchrun's own report"
        assert "adl_dist/" not in outcome.err, "no traceback but torchrun's"
        assert left_behind(tmp_path) == []
    else:
        line = command_on_ranks(2, *arguments).refusal()
    needs = "partition.num_stages=3 needs 3 processes, but torchrun started 2"
    shows(line, [needs, "--nproc-per-node=3", "partition.num_stages=2"])
    assert snapshot(tmp_path) == {}


def test_a_rank_that_reaches_nobody_ends_in_time(tmp_path):
    command = words(tmp_path / "run", "runtime.timeout_seconds=2", processes=True)
    by_hand = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    with socket.socket() as taken:  # bound and not listening: nobody answers there, and nobody else can bind it
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        outcome = command_on_ranks(1, *command, env={**by_hand, "MASTER_PORT": str(port)}, timeout_seconds=30)
    line = outcome.refusal(code=1)  # not, or not surely, the user's mistake
    shows(line, ["rank 1 could not join", f"127.0.0.1:{port} within 2 s", "is the port free", "did every rank start?"])
    assert left_behind(tmp_path) == []
    assert not list(tmp_path.glob("run/checkpoints"))


def test_a_rank_without_a_meeting_place_says_what_is_missing(tmp_path):
    outcome = command_on_ranks(
        1, *words(tmp_path / "run", "runtime.timeout_seconds=2", processes=True), env={"RANK": "1", "WORLD_SIZE": "2"}
    )
    shows(outcome.refusal(), ["RANK and WORLD_SIZE are set", "MASTER_ADDR and MASTER_PORT do not say where"])


def command_on_a_rank(folder, arguments):
    """Run ``adl-dist`` as one rank, with its standard error in a file; end the process unless all went well."""
    parent_process.RANK_0_SECONDS = 0.0  # no launcher ends the ranks
    os.dup2(os.open(f"{folder}/err{os.environ['RANK']}", os.O_WRONLY | os.O_CREAT), 2)
    main(arguments)


FAULTY = f"model._target_={USER}.faulty"
FAULTY_AT_THE_START = f"model._target_={USER}.faulty_at_the_start"
BUG = ["unexpected KeyError", "a bug of the user's", "the traceback is in"]
ENDINGS = {
    "misfit": ([f"model._target_={USER}.second_half_does_not_fit"], (2, 2), ["error: the model gets", "2x8 and 9x8"]),
    "no such class": (["model.num_classes=5"], (2, 2), ["error: training dataset: micro-batch 0", "target 5"]),
    "bug on rank 1": ([FAULTY, "model.at=5"], (1, 1), ["rank 1: ", *BUG, "rank1.log"]),
    "bug on rank 0": ([FAULTY_AT_THE_START, "model.at=5"], (1, 1), ["rank 0: ", *BUG, "rank0.log"]),
    "killed": (
        [f"model._target_={USER}.killed", "model.at=5"], (1, -9), ["error: stage 1 (", "the process is gone: killed"]
    ),
}  # fmt: skip


@pytest.mark.parametrize(("overrides", "codes", "parts"), ENDINGS.values(), ids=ENDINGS)
def test_one_rank_reports_and_all_end_with_its_exit_code(overrides, codes, parts, tmp_path):
    timeout = [] if -9 in codes else ["runtime.timeout_seconds=5"]
    arguments = words(tmp_path / "run", *overrides, *timeout, processes=True)
    with pytest.raises(RanksFailed, match="rank 0: exit code {}\nrank 1: exit code {}".format(*codes)):
        run_ranks(2, command_on_a_rank, str(tmp_path), arguments, timeout_seconds=40)
    said = (tmp_path / "err0").read_text()
    assert "Traceback" not in "".join(file.read_text() for file in tmp_path.glob("err*"))
    # torch was loaded before the ranks could ask it for silence, so it talks here, too
    (line,) = [line for line in said.splitlines() if "adl-dist" in line]
    shows(line, ["adl-dist: ", *parts])
    for log in logs_of(tmp_path / "run") if codes == (2, 2) else []:  # both know why
        shows(log, parts[1:])
    if codes == (1, 1):
        shows((tmp_path / "run/logs" / parts[-1]).read_text(), ["Traceback", "user_code.py", "raise KeyError"])
    assert not list(tmp_path.glob("run/checkpoints/*"))


TWO = ["rank 0 was killed by SIGKILL", "rank 1 was killed by SIGKILL"]
OF_RANKS = {  # exit codes, that of the rank that was first at the front, and what the launcher says
    "a library": ({1: 7, 0: -15}, ["rank 1 ended with exit code 7"]),
    "exit(-1)": ({0: 255, 1: 143}, ["rank 0 ended with exit code 255"]),
    "an error": ({1: 1, 0: -15}, []),
    "a mistake": ({1: 2, 0: -15}, []),
    "a mistake, and another rank hangs": ({1: 2, 0: -9}, []),
    "killed": ({1: -9, 0: 1}, ["rank 1 was killed by SIGKILL"]),
    "two killed": ({1: -9, 0: -9}, TWO),
    "ended by kill, twice": ({0: 143, 1: 143}, ["rank 0 was killed by SIGTERM"]),
    "a signal without a name": ({0: -40, 1: -15}, ["rank 0 was killed by signal 40"]),
}
STAY_DOWN = {"an error", "a mistake", "a mistake, and another rank hangs", "ended by kill, twice"}


@pytest.mark.parametrize(("how", "codes", "said"), [(how, *row) for how, row in OF_RANKS.items()], ids=OF_RANKS)
def test_ranks_that_say_nothing_are_named_by_the_launcher(how, codes, said, monkeypatch, capfd):
    ends = {rank: ProcessFailure(rank, 0, code, "") for rank, code in codes.items()}
    for number, end in enumerate(ends.values()):
        end.timestamp += 30 * number * (said != TWO)

    starts = []

    def fail(*_):
        starts.append(None)
        raise ChildFailedError("", ends)

    monkeypatch.setattr(local, "_run_ranks", fail)
    assert local.launch_local([], num_processes=2, max_restarts=0) == (2 if 2 in codes.values() else 1)
    assert capfd.readouterr().err.splitlines() == [
        f"adl-dist: {line}; the same command resumes the run" for line in said
    ]
    local.launch_local([], num_processes=2, max_restarts=2)
    assert len(starts) == 1 + (1 if how in STAY_DOWN else 3)
