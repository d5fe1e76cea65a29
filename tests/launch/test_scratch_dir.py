"""The temporary folder of a launcher."""

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import tempfile

import pytest

from adl_dist.launch.scratch_dir import LOCK, PREFIX, launch_folder

STAYS = (
    "import time; from adl_dist.launch.scratch_dir import launch_folder\n"
    "with launch_folder() as folder: print(folder, flush=True); time.sleep(60)"
)


@pytest.fixture
def tmpdir_of_launchers(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


@contextlib.contextmanager
def launcher():
    with subprocess.Popen([sys.executable, "-c", STAYS], stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process.stdout.readline().strip(), process
        finally:
            process.kill()


def test_a_launcher_removes_its_folder_and_those_of_killed_ones(tmpdir_of_launchers):
    for name in ("adl-dist-bench-1", f"{PREFIX}just-made"):
        (tmpdir_of_launchers / name).mkdir()
    others = set(tmpdir_of_launchers.iterdir())
    with launcher() as (killed, victim), launcher() as (running, _):
        victim.send_signal(signal.SIGKILL)
        victim.wait()
        assert os.path.exists(killed)
        with launch_folder() as own:
            assert {*tmpdir_of_launchers.iterdir()} == {*others, own, tmpdir_of_launchers / os.path.basename(running)}
        assert not own.exists()


def test_a_new_folder_is_not_seen_before_it_is_locked(tmpdir_of_launchers, monkeypatch):
    flock, seen = fcntl.flock, []

    def lock_and_look(lock, how):
        seen.extend(tmpdir_of_launchers.glob(f"{PREFIX}*"))
        flock(lock, how)

    monkeypatch.setattr(fcntl, "flock", lock_and_look)
    with launch_folder() as folder:
        assert seen == []
        with (folder / LOCK).open() as lock, pytest.raises(BlockingIOError):
            flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
