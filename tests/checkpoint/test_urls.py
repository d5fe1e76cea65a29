"""Run folders at a URL: every storage keeps the same promises, and a run there ends like one in a local folder."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from types import SimpleNamespace

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

import adl_dist
from adl_dist.checkpoint import layout, ownership, storage
from adl_dist.checkpoint.async_save import Saver
from adl_dist.checkpoint.ownership import Ownership
from adl_dist.checkpoint.policy import CheckpointPolicy
from adl_dist.checkpoint.run_dir import RunFolder, chosen_checkpoint
from adl_dist.checkpoint.storage import place_of, read
from adl_dist.errors import ConfigError
from adl_dist.training.shared_folder import share_folder
from tests.support.commands import assert_same, in_process, words
from tests.support.ranks import run_ranks
from tests.support.runs import toy_trainer
from tests.support.saved import position, save, saved, shards, writing
from tests.support.tiers import slow
from tests.support.toys import FixedImages
from tests.support.values import SILENT

BUCKET = "adl-dist-tests"


@pytest.fixture(scope="module")
def s3_server():
    """A server that speaks S3, in this process."""
    server = pytest.importorskip("moto.server", reason="moto[s3], flask and flask-cors are not installed")
    pytest.importorskip("s3fs", reason="s3fs is not installed")
    running = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    yield "http://{}:{}".format(*running.get_host_and_port())
    running.stop()


@pytest.fixture
def s3(s3_server, monkeypatch):
    """The URL of a folder of that server, which this process and those that it starts reach."""
    for name, value in (("ENDPOINT_URL", s3_server), ("ACCESS_KEY_ID", "id"), ("SECRET_ACCESS_KEY", "secret")):
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    storage._file_system.cache_clear()
    fsspec.filesystem("s3").clear_instance_cache()
    with contextlib.suppress(FileExistsError):
        fsspec.filesystem("s3").mkdir(BUCKET)
    yield f"s3://{BUCKET}/{uuid.uuid4().hex}"
    storage._file_system.cache_clear()


@pytest.fixture(params=["local", "memory", "s3"])
def folder(request, tmp_path):
    """An empty folder of each storage."""
    if request.param == "s3":
        return place_of(request.getfixturevalue("s3"))
    return tmp_path / "run" if request.param == "local" else place_of(f"memory://{uuid.uuid4().hex}")


# --- what a storage promises ------------------------------------------------------------------------------------------


def test_what_a_storage_promises(folder, monkeypatch):
    """A large file goes to S3 in several parts, of which none is there before all are."""
    monkeypatch.setattr(storage, "PIECE_BYTES", 6 * 2**20)
    file, large = folder / "below" / "file", bytes(13 * 2**20)
    assert storage.names(folder) == []
    storage.create(file, [b"one", memoryview(b" two")])
    with pytest.raises(FileExistsError):
        storage.create(file, [b"another"])
    storage.write(folder / "small", b"1")
    storage.write(folder / "small", b"22")
    assert (read(file), read(folder / "small"), storage.size(folder / "small")) == (b"one two", b"22", 2)
    assert (storage.names(folder), storage.names(file.parent)) == (["below/", "small"], ["file"])
    with storage.open_file(file) as opened:
        opened.seek(4)
        assert opened.read(2) == b"tw"
    for _ in range(2):
        storage.delete(file)
        storage.delete(folder / "small")
    assert (storage.names(file.parent), "small" in storage.names(folder)) == ([], False)
    for look in (storage.open_file, storage.size):
        with pytest.raises(FileNotFoundError):
            look(file)
    assert layout.create_hashed(file, [large])["bytes"] == storage.size(file) == len(large)
    with pytest.raises(FileExistsError):
        storage.create(file, [large])

    def fails():
        yield large
        raise OSError("the disk of the sender fails")

    with pytest.raises(OSError, match="the sender"):
        storage.create(folder / "half", fails())
    assert str(folder).startswith("memory") or "half" not in storage.names(folder)
    storage.delete(folder)
    assert storage.names(folder) == []


def test_checkpoints_are_saved_pruned_and_rejected_anywhere(folder):
    saver = Saver(folder, CheckpointPolicy(keep=2, background=True))
    for update in range(1, 5):
        save(saver, writing(saver, shards(seed=update)), position(update))
    assert saver.wait() == layout.place(folder, 4)
    assert [path.name for path in layout.complete(folder)] == ["update-00000003", "update-00000004"]
    newest = layout.complete(folder)[-1]
    model = next(name for name in storage.names(newest) if name.startswith("model-"))
    assert layout.verify(newest)["update"] == 4
    storage.write(newest / model, read(newest / model)[:-1] + b"\0")
    path, _, ((bad, _),) = layout.first_usable(layout.complete(folder)[::-1], layout.verify)
    assert (path, bad) == (layout.place(folder, 3), newest)
    assert layout.reject(bad).name == "rejected-update-00000004"
    storage.create(layout.place(folder, 5) / model, [b"of a save that was killed"])
    layout.clean(folder)
    assert storage.names(folder) == ["rejected-update-00000004/", "update-00000003/"]


# --- failures at any operation ----------------------------------------------------------------------------------------


class Flaky:
    """Lets so many operations of ``memory://`` through, and then none."""

    def __init__(self, monkeypatch, room):
        self.left = room
        for name in ("open", "cat_file", "pipe_file", "rm", "ls"):
            monkeypatch.setattr(MemoryFileSystem, name, self._failing(getattr(MemoryFileSystem, name)))

    def _failing(self, real):
        def operation(*args, **options):
            self.left -= 1
            if self.left < 0:
                raise RuntimeError("the network is gone")
            return real(*args, **options)

        return operation


def test_a_failure_at_any_operation_keeps_checkpoints_whole(monkeypatch, capfd):
    folder = place_of(f"memory://{uuid.uuid4().hex}")
    first, failed, room = saved(folder, 1), 0, 0
    while True:
        saver = Saver(folder, CheckpointPolicy(keep=2, background=False))
        with monkeypatch.context() as patch:
            Flaky(patch, room)
            save(saver, writing(saver, shards(seed=1)), position(2))
        saved_here = layout.complete(folder)
        for path in saved_here:
            layout.verify(path)
        if saver.wait() is not None:
            break
        assert "the network is gone" in saver.failure
        assert saved_here == [first], "what is told to have failed is not found later"
        failed, room = failed + 1, room + 1
    assert failed > 10
    assert layout.complete(folder) == [first, layout.place(folder, 2)]


# --- who may write ----------------------------------------------------------------------------------------------------


def test_a_folder_has_one_owner_and_is_free_after_it(folder):
    first, second = Ownership(folder), Ownership(folder)
    assert first.take()
    assert not second.take()
    assert second.is_held()
    first.check()
    first.release()
    assert second.take()
    second.release()
    assert storage.names(folder) == []


@pytest.mark.parametrize("folder", ["local", slow("s3")], indirect=True)
def test_an_owner_elsewhere_is_dead_when_it_no_longer_beats(folder, monkeypatch):
    monkeypatch.setattr(ownership, "BEAT_SECONDS", 0.1)
    monkeypatch.setattr(ownership, "LEASE_SECONDS", 1.5)
    here = Ownership(folder, "a")
    assert here.take()
    monkeypatch.setattr(ownership, "machine", lambda: "another machine")
    there, third = Ownership(folder, "b"), Ownership(folder, "c")
    assert not there.take()
    here._over.set()  # its thread ends, as if its process had been killed
    here._thread.join()
    assert there.take()
    with pytest.raises(adl_dist.TakenOverError, match=r"has taken .* over"):
        here.check()
    there.release()
    here.release()
    assert third.take()
    third.release()


def contend(folder, environment):
    """Take and release the folder again and again; fail if another process owns it at the same time."""
    os.environ.update(environment)
    place, wins = place_of(folder), 0
    until = time.monotonic() + 1
    while time.monotonic() < until:
        mine = Ownership(place)
        if mine.take():
            storage.create(place / "held", [b"by one"])  # fails if it is there
            wins += 1
            storage.delete(place / "held")
            mine.release()
    return wins


@pytest.mark.ranks
@pytest.mark.parametrize("where", ["file", slow("s3")])
def test_of_several_processes_one_owns_a_folder(where, request, tmp_path):
    folder = f"file://{tmp_path}/run" if where == "file" else request.getfixturevalue("s3")
    reached = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    assert sum(run_ranks(3, contend, folder, reached)) > (10 if where == "file" else 0)


# --- runs -------------------------------------------------------------------------------------------------------------


def fit(run_dir, epochs, **options):
    trainer = toy_trainer(2, 2, verify=False)
    trainer.fit(FixedImages(20), epochs=epochs, batch_size=8, run_dir=run_dir, **{"monitoring": SILENT, **options})
    return trainer.full_state_dict()


def records(text):
    return [json.loads(line) for line in text.splitlines()]


def test_a_run_at_a_url_resumes_as_in_a_folder(s3, tmp_path):
    checkpoints = adl_dist.CheckpointPolicy(keep=1)
    for epochs in (1, 2):
        found = fit(s3, epochs, checkpoints=checkpoints)
    assert_same(found, fit(tmp_path / "local", 2))
    place = place_of(s3)
    names = storage.names(place)
    assert names == ["checkpoints/", "config.yaml", "logs/", "metrics.jsonl", "start.json", "summary.json"]
    here = records((tmp_path / "local" / "metrics.jsonl").read_text())
    there = records(read(place / "metrics.jsonl").decode())
    assert [(r["name"], r["update"]) for r in there] == [(r["name"], r["update"]) for r in here]
    assert [path.name for path in layout.complete(place / "checkpoints")] == ["update-00000006"]
    loaded = toy_trainer(2, 2, verify=False)
    loaded.load_checkpoint(s3)
    assert_same(loaded.full_state_dict(), found)
    with pytest.raises(ConfigError, match="belongs to another run: seed is"):
        toy_trainer(2, 2, seed=1, verify=False).fit(
            FixedImages(20), epochs=3, batch_size=8, run_dir=s3, monitoring=SILENT
        )
    owner = Ownership(place)
    assert owner.take()
    with pytest.raises(ConfigError, match=r"pid \d+ on .* is training here"):
        fit(s3, 3)
    owner.release()


def test_the_commands_take_a_url(s3, tmp_path):
    assert in_process(*words(s3, "runtime.trace=true")).code == 0
    assert json.loads(read(place_of(s3) / "trace.json"))["traceEvents"]
    out = tmp_path / "model.safetensors"
    for command in (["evaluate", s3], ["export", s3, f"out={out}"], ["report", s3, f"out={tmp_path / 'page.html'}"]):
        assert in_process(*command).code == 0
    assert out.exists()
    refused = in_process("status", s3)
    assert refused.code == 2
    assert "give the working folder" in refused.err


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_run_of_processes_that_is_killed_continues_from_s3(s3, tmp_path):
    """Two ranks, of which one is killed while it trains; one process ends the run."""
    command = [sys.executable, "-m", "adl_dist", *words(s3, "runtime.processes=true", "train.epochs=40")]
    running = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    deadline, checkpoints = time.monotonic() + 240, place_of(s3) / "checkpoints"
    while len(layout.complete(checkpoints)) < 2 and time.monotonic() < deadline and running.poll() is None:
        time.sleep(0.1)
    running.send_signal(signal.SIGKILL)
    said = running.communicate()
    saved_there = layout.complete(checkpoints)
    assert saved_there, said
    for path in saved_there:
        layout.verify(path)
    ended = in_process(*words(s3, f"train.epochs={2 + int(saved_there[-1].name[-8:]) // 2}"))
    assert ended.code == 0, ended
    assert f"resumed from {chosen_checkpoint(s3, None).parent}/update-" in ended.out


def test_a_url_that_cannot_be_used_is_told():
    with pytest.raises(ConfigError, match="nothing:// cannot be used: Protocol not known: nothing; give a local"):
        fit("nothing://bucket/run", 1)


def test_memory_is_refused_for_several_processes():
    """Each has a memory of its own, so the parts of a checkpoint would never meet."""
    folder, world = RunFolder("memory://run"), SimpleNamespace(rank=0, size=2, is_distributed=True)
    of_rank_0 = {"place": str(folder.place), "resume": "auto"}
    with pytest.raises(ConfigError, match="each process has a memory of its own; give a folder, s3:// or gs://"):
        share_folder(folder, of_rank_0, world, SimpleNamespace(first=lambda value: value))
