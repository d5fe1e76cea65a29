"""The owner of a run folder: who counts as alive, what a process does that is no longer the owner, and full disks."""

import errno
import json
import os
import subprocess
import sys
import time

import pytest

import adl_dist
from adl_dist.checkpoint import layout, ownership, storage
from adl_dist.checkpoint.async_save import Saver
from adl_dist.checkpoint.ownership import Ownership
from adl_dist.checkpoint.policy import CheckpointPolicy
from adl_dist.checkpoint.run_dir import RunFolder
from tests.support.commands import snapshot
from tests.support.runs import toy_trainer
from tests.support.saved import FIRST, position, save, saved, shards, writing
from tests.support.toys import FixedImages
from tests.support.values import SILENT

OTHER = {"machine": "another", "pid": 7, "started": 1, "launch": None, "host": "node9", "since": "12:00", "beat": 3}


def owned_by(folder, number=1, **record):
    """Write the owner file of another process."""
    folder.mkdir(exist_ok=True)
    (folder / f"owner-{number:08d}").write_text(json.dumps({**OTHER, **record}))


def owner_of_process(pid, folder, monkeypatch):
    """Have the process ``pid`` of this machine own the folder."""
    with monkeypatch.context() as patch:
        patch.setattr(ownership.os, "getpid", lambda: pid)
        owner = Ownership(folder)
    assert owner.take()
    return owner


def full(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def wait_until(there):
    deadline = time.monotonic() + 10
    while not there() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert there()


# --- alive or dead ----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="looks at processes in /proc")
def test_a_process_that_nobody_waits_for_is_dead_at_its_end(tmp_path, monkeypatch):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        owner = owner_of_process(child.pid, tmp_path, monkeypatch)
        assert Ownership(tmp_path).is_held()
        child.stdin.close()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert not Ownership(tmp_path).is_held()
    owner.release()


def test_the_same_launch_elsewhere_is_alive_while_it_beats(tmp_path, monkeypatch):
    """Two commands of torchrun may have the same --rdzv-id."""
    monkeypatch.setattr(ownership, "BEAT_SECONDS", 0.05)
    here = Ownership(tmp_path, "job1")
    assert here.take()
    monkeypatch.setattr(ownership, "machine", lambda: "another machine")
    there = Ownership(tmp_path, "job1")
    assert not there.is_held()
    assert not there.take()
    here.check()
    here.release()


@pytest.mark.parametrize("text", [b"no JSON", b"[1]", b'{"machine": "half of it"}'])
def test_a_garbled_owner_file_must_change_within_the_lease(text, tmp_path, monkeypatch):
    monkeypatch.setattr(ownership, "LEASE_SECONDS", 0.3)
    (tmp_path / "owner-00000001").write_bytes(text)
    owner = Ownership(tmp_path)
    assert owner.take()
    owner.release()


def test_a_process_waits_once_for_an_owner_and_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(ownership, "LEASE_SECONDS", 0.3)
    owned_by(tmp_path)
    RunFolder(tmp_path).check({}, resume="auto", waits=False)  # as a launcher does, whose ranks wait
    assert capsys.readouterr().out == ""
    for _ in range(2):
        RunFolder(tmp_path).check({}, resume="auto")
    folder = RunFolder(tmp_path)
    folder.open(resume="auto")
    folder.close()
    (line,) = capsys.readouterr().out.splitlines()
    assert line == f"waiting up to 0.3 s to see whether pid 7 on node9, which owns {tmp_path}, still runs ..."


# --- the present owner -----------------------------------------------------------------------------------------------


class TakesOver(adl_dist.Callback):
    """Takes the folder over, as another process would, after a checkpoint."""

    def __init__(self, folder):
        self.folder = folder

    def on_checkpoint(self, state):
        owned_by(self.folder, 2)


def test_a_run_ends_when_another_has_taken_its_folder(tmp_path):
    told = r"run_dir=.*: pid 7 on node9 has taken the folder over at 12:00, .*; stop that one"
    with pytest.raises(adl_dist.TakenOverError, match=told):
        toy_trainer(2, 2).fit(
            FixedImages(20),
            epochs=4,
            batch_size=8,
            run_dir=tmp_path,
            monitoring=SILENT,
            callbacks=[TakesOver(tmp_path)],
        )
    assert len(layout.complete(tmp_path / "checkpoints")) <= 2
    assert not (tmp_path / "summary.json").exists()


def test_a_beat_finds_out_that_the_folder_is_lost(tmp_path, monkeypatch):
    monkeypatch.setattr(ownership, "BEAT_SECONDS", 0.02)
    folder = RunFolder(tmp_path)
    folder.open(resume="auto")
    folder.check_not_lost()
    owned_by(tmp_path, 2)
    wait_until(lambda: folder._ownership.lost is not None)
    with pytest.raises(adl_dist.TakenOverError):
        folder.check_not_lost()
    folder.close()


# --- checkpoints -----------------------------------------------------------------------------------------------------


def test_a_failed_save_leaves_the_checkpoint_of_the_new_owner(tmp_path):
    """Which has replaced the folder meanwhile."""
    path = layout.place(tmp_path, 1)

    def taken_over():
        layout.remove(path)
        saved(tmp_path, 1)
        raise OSError("another process has taken the folder over")

    saver = Saver(tmp_path, CheckpointPolicy(keep=1, background=False), before_commit=taken_over)
    save(saver, writing(saver, shards()), position(1))
    assert "another process" in saver.failure
    layout.verify(path)


def test_only_a_damaged_checkpoint_of_an_update_is_replaced(tmp_path, monkeypatch):
    """None that is good, or cannot be read now."""
    path = saved(tmp_path, 1)
    before = snapshot(tmp_path)

    def fails(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    saver = Saver(tmp_path, CheckpointPolicy(keep=1, background=False))
    for name in ("read", "size"):
        with monkeypatch.context() as patch:
            patch.setattr(storage, name, fails)
            save(saver, writing(saver, shards(seed=1)), position(1))
        assert "Input/output error" in saver.failure
        assert snapshot(tmp_path) == before
    save(saver, writing(saver, shards(seed=1)), position(1))
    assert (saver.failure, saver.wait(), snapshot(tmp_path)) == (None, path, before)
    (path / FIRST).write_bytes(b"")
    save(saver, writing(saver, shards(seed=1)), position(1))
    assert (saver.failure, saver.wait()) == (None, path)
    layout.verify(path)
