"""The processes of a run, and those of its restart, get settings and folder of the command that the user gave."""

import itertools
import os
import pathlib
import subprocess
import time

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

import adl_dist
from adl_dist.cli.config import compose
from adl_dist.distributed import affinity, procfs
from adl_dist.launch import local
from tests.support.commands import in_process, words


def working_elsewhere(folder):
    """Return a callback, and change the working directory, as some code of users does."""
    os.chdir(folder)
    return adl_dist.Callback()


def test_a_restart_continues_in_the_folder_of_the_first_start(tmp_path, monkeypatch, capsys):
    """Though its name tells the time, is relative, and the user's code changes the working directory."""
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    here.mkdir()
    elsewhere.mkdir()
    monkeypatch.chdir(here)
    clock = itertools.count(step=3600)
    monkeypatch.setattr(compose, "started_at", lambda pid: next(clock))
    attempts = []

    def play_ranks(arguments, num_processes, stopping):
        assert os.getcwd() == str(here)
        os.environ.pop("ADL_DIST_LAUNCHER", None)  # this process is no child of its own
        more = [] if attempts else ["train.max_updates=1"]
        attempts.append(in_process(*arguments, *more, "runtime.processes=false"))
        os.chdir(here)  # a process of its own would have been there still
        if len(attempts) == 1:
            failure = ProcessFailure(local_rank=0, pid=os.getpid(), exitcode=-9, error_file="<N/A>")
            raise ChildFailedError("adl_dist", {0: failure})

    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")  # the launcher sets it, and leaves it set
    monkeypatch.setattr(local, "_run_ranks", play_ranks)
    callbacks = f"callbacks=[{{_target_:{__name__}.working_elsewhere,folder:{elsewhere}}}]"
    command = words("runs/${now:%H}", callbacks, "train.max_updates=2", "resume=never", processes=True)
    command.remove("runtime.max_restarts=0")  # the default is 2
    outcome = in_process(*command)
    assert (outcome.code, [attempt.code for attempt in attempts]) == (0, [0, 0]), [outcome, attempts]
    assert "restart 1 of 2" in outcome.err
    (run_dir,) = (here / "runs").iterdir()
    assert f"resumed from {run_dir}/checkpoints/update-00000001" in attempts[1].out
    assert (run_dir / "summary.json").is_file()
    assert list(elsewhere.iterdir()) == []


def test_threads_are_those_of_omp_num_threads(monkeypatch):
    monkeypatch.setattr(affinity, "num_cores", lambda: 8)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    for chosen, threads in [("3", 3), ("", 4), ("0", 4), ("many", 4)]:
        monkeypatch.setenv("OMP_NUM_THREADS", chosen)
        assert affinity.default_threads(2) == threads


def test_the_time_in_a_setting_is_that_of_the_start_of_torchrun(monkeypatch):
    """Which starts all ranks, and starts them again."""
    asked = []
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setattr(compose, "started_at", lambda pid: asked.append(pid) or 86_400 * 366)
    assert compose.compose_run(["run_dir=runs/${now:%Y}"])[0].run_dir == "runs/1971"
    assert set(asked) == {os.getppid()}


def test_the_start_of_a_process_is_found_to_a_second():
    with subprocess.Popen(["sleep", "60"]) as process:
        started = procfs.started_at(process.pid)
        process.kill()
    assert abs(started - time.time()) < 2


@pytest.mark.parametrize(("of_torchrun", "threads"), [({"OMP_NUM_THREADS": "3"}, 3), ({}, 4)])
def test_threads_that_torchrun_sets_by_itself_do_not_count(of_torchrun, threads, monkeypatch):
    monkeypatch.setattr(affinity, "num_cores", lambda: 8)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("OMP_NUM_THREADS", of_torchrun.get("OMP_NUM_THREADS", "1"))
    with subprocess.Popen(["/bin/sleep", "60"], env=of_torchrun) as process:
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline and b"sleep" not in pathlib.Path(f"/proc/{process.pid}/cmdline").read_bytes():
            time.sleep(0.01)  # until then it has the environment of this process
        monkeypatch.setattr(os, "getppid", lambda: process.pid)
        found = affinity.default_threads(2)
        process.kill()
    assert found == threads
