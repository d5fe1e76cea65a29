"""Saves in the background and saves that fail: what is there before stays, what is half made goes, training goes on."""

import errno
import json
import os
import re
import resource
import threading

import pytest

import adl_dist
from adl_dist.checkpoint import async_save, layout, storage
from adl_dist.checkpoint.async_save import PartReport, PartWriter, Saver
from adl_dist.checkpoint.policy import CheckpointPolicy
from adl_dist.checkpoint.run_dir import chosen_checkpoint
from adl_dist.report import MetricsWriter
from tests.support.commands import assert_same, in_process, snapshot, words
from tests.support.runs import trainer_of
from tests.support.saved import position, save, saved, shards, writing
from tests.support.toys import FixedImages, batch_norm_net
from tests.support.values import values

UPDATES = 2  # of an epoch: 8 samples by 4


def fit(run_dir):
    """Train the toy net; return its weights."""
    trainer = trainer_of(batch_norm_net())
    options = values(quiet=True, tensorboard=False, keep=9)
    trainer.fit(FixedImages(8), epochs=3, batch_size=4, run_dir=run_dir, **options)
    return trainer.full_state_dict()


def names(run_dir):
    return sorted(path.name for path in run_dir.glob("checkpoints/*"))


def full_after(monkeypatch, num_bytes):
    """From now on the disk takes so many bytes more of checkpoints, and no more."""
    write, left = storage.write_piece, [num_bytes]

    def limited(file, data):
        write(file, data[: left[0]])
        left[0] -= len(data)
        if left[0] < 0:
            left[0] = 0
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(storage, "write_piece", limited)


# --- one save --------------------------------------------------------------------------------------------------------


def test_a_disk_full_at_any_byte_keeps_the_old_checkpoint(tmp_path, monkeypatch, capfd):
    """And the next save, for which there is room again, is complete."""
    saver = Saver(tmp_path, CheckpointPolicy(keep=1, background=True))
    save(saver, writing(saver, shards()), position(1))
    assert saver.wait().name == "update-00000001"
    before = snapshot(tmp_path)
    needed = sum(file.stat().st_size for file in saver.wait().iterdir())
    failed = 0
    for room in range(0, 2 * needed, needed // 12):
        with monkeypatch.context() as patch:
            full_after(patch, room)
            save(saver, writing(saver, shards(seed=room)), position(2))
            path = saver.wait()
        if path is not None:
            break
        failed += 1
        assert "update 2 could not be saved" in saver.failure
        assert "No space left on device" in saver.failure
        assert snapshot(tmp_path) == before
    assert failed >= 12, "it was full in the middle of each file"
    assert [path.name for path in tmp_path.iterdir()] == ["update-00000002"]
    layout.verify(path)
    assert capfd.readouterr().err.count("adl-dist: warning: update 2 could not be saved in") == failed


def test_a_manifest_that_may_not_be_on_disk_is_taken_back(tmp_path, monkeypatch):
    sync, manifest = os.fsync, layout.place(tmp_path, 1) / layout.MANIFEST

    def fails_after_the_manifest(descriptor):
        if manifest.exists():
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fails_after_the_manifest)
    saver = Saver(tmp_path, CheckpointPolicy(background=False))
    save(saver, writing(saver, shards()), position(1))
    assert "Input/output error" in saver.failure
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_that_was_moved_and_linked_is_found(tmp_path):
    path = saved(tmp_path / "elsewhere", 1)
    (tmp_path / path.name).symlink_to(path)
    assert layout.complete(tmp_path) == [tmp_path / path.name]
    layout.remove(tmp_path / path.name)
    assert layout.complete(tmp_path) == []


def test_a_reader_never_sees_half_a_checkpoint(tmp_path):
    """Two processes write their parts in the background, and older checkpoints are removed meanwhile."""
    saver, over = Saver(tmp_path, CheckpointPolicy(keep=2, background=True)), threading.Event()
    read, half_made = set(), []

    def poll():
        while not over.is_set():
            for path in layout.complete(tmp_path):
                try:
                    layout.read_manifest(path)
                    read.add(path.name)
                except adl_dist.AdlError as error:
                    if layout.is_complete(path):  # else its manifest, and then the rest, has been removed meanwhile
                        half_made.append(str(error))

    reader = threading.Thread(target=poll)
    reader.start()
    try:
        for update in range(50):
            save(saver, writing(saver, shards(), PartWriter(1, saver.take_part).write), position(update))
        assert saver.wait() == layout.complete(tmp_path)[-1]
    finally:
        over.set()
        reader.join()
    assert half_made == []
    assert len(read) > 20, "it read too few of the 50 to say anything"


def test_the_newest_and_the_best_checkpoints_are_kept(tmp_path):
    accuracies = {1: 0.5, 2: 0.9, 3: 0.9, 4: 0.7, 5: 0.6}
    for update, accuracy in accuracies.items():
        saved(tmp_path, update, validation_loss=1 / update, validation_accuracy=accuracy)
    layout.prune(tmp_path, keep=4, keep_best=True)
    assert [path.name[-1] for path in layout.complete(tmp_path)] == list("2345")
    layout.prune(tmp_path, keep=1, keep_best=True)
    assert [path.name[-1] for path in layout.complete(tmp_path)] == list("35"), "of equals the lower loss"
    (tmp_path / "update-00000003" / "manifest.json").write_text("damaged")
    layout.prune(tmp_path, keep=1, keep_best=True)
    assert [path.name[-1] for path in layout.complete(tmp_path)] == ["5"]
    blind = tmp_path / "without classes"
    for update, loss in ((6, 0.3), (7, 0.2), (8, 0.4)):
        saved(blind / "checkpoints", update, validation_loss=loss)
    layout.prune(blind / "checkpoints", keep=1, keep_best=True)
    assert names(blind) == ["update-00000007", "update-00000008"]
    assert [chosen_checkpoint(blind, wanted).name[-1] for wanted in ("best", None)] == ["7", "8"]
    saved(tmp_path / "no validation" / "checkpoints", 1)
    with pytest.raises(adl_dist.AdlError, match=r"checkpoint=best: .*expected best, which needs a validation"):
        chosen_checkpoint(tmp_path / "no validation", "best")


# --- while training --------------------------------------------------------------------------------------------------


def test_a_save_that_fails_is_recorded_and_the_run_continues(tmp_path, monkeypatch, capfd):
    """And it ends as if nothing had been; with a failing disk: test_saving_ranks.py."""
    expected, real = fit(None), async_save._copied

    def fails_in_the_second_save(*arguments):
        token = tmp_path / "checkpoints" / f"update-{2 * UPDATES:08d}" / layout.TOKEN
        if token.exists() and token.stat().st_size:
            raise MemoryError("no more")
        return real(*arguments)

    monkeypatch.setattr(async_save, "_copied", fails_in_the_second_save)
    assert_same(fit(tmp_path), expected)
    assert names(tmp_path) == ["update-00000002", "update-00000006"]
    told = "update 4 could not be saved in .*: rank 0: MemoryError: no more"
    (line,) = capfd.readouterr().err.splitlines()
    assert re.search(f"adl-dist: warning: {told}.*; the checkpoints before it are untouched", line)
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    (recorded,) = (record["reason"] for record in records if record["name"] == "checkpoint/failed")
    assert re.search(told, recorded)


@pytest.mark.parametrize("reported_before", [False, True])
def test_a_save_fails_at_once_where_a_process_is_gone(reported_before, tmp_path):
    def dies(path, shards, token, background):
        if reported_before:
            PartWriter(1, saver.take_part).write(path, shards, token=token, background=False)
        saver.take_part(PartReport(rank=1, failure="stage 1: the process is gone", is_gone=True))

    saver = Saver(tmp_path, CheckpointPolicy(keep=1, background=True))
    save(saver, writing(saver, shards(), dies), position(1))
    path = saver.wait(20)
    if reported_before:
        assert (path, saver.lost) == (tmp_path / "update-00000001", None)
    else:
        assert path is None
        assert (str(saver.lost), saver.lost.is_gone) == ("stage 1: the process is gone", True)
        assert saver.failure.endswith("stage 1: the process is gone")


def test_a_run_whose_last_save_fails_resumes_from_the_one_before(tmp_path, monkeypatch):
    assert in_process(*words(tmp_path / "run")).code == 0
    with monkeypatch.context() as patch:
        full_after(patch, 1000)
        outcome = in_process(*words(tmp_path / "run", "train.epochs=2"))
    assert outcome.code == 1
    warning, error = outcome.err.splitlines()
    assert warning.startswith("adl-dist: warning: update 4 could not be saved in")
    assert error.startswith("adl-dist: error: update 4 could not be saved in")
    assert "No space left on device" in error
    assert error.endswith("give the same command again; checkpoints that were saved before are kept")
    outcome = in_process(*words(tmp_path / "run", "train.epochs=2"))
    assert (outcome.code, names(tmp_path / "run")) == (0, ["update-00000002", "update-00000004"])
    assert "resumed from" in outcome.out


# --- other files -----------------------------------------------------------------------------------------------------


@pytest.fixture
def small_files():
    """No file may grow beyond so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda most: resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


# TensorBoard's own thread ends with the error, which Python tells, and its caller hears of it at the next call.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_records_that_cannot_be_written_leave_no_half_line(tmp_path, small_files, monkeypatch):
    warnings = []
    monkeypatch.setattr("adl_dist.report.recorder.warn", warnings.append)
    before = threading.enumerate()
    recorder = MetricsWriter(tmp_path, loggers=["tensorboard"])
    recorder.start(from_update=0)
    threads = set(threading.enumerate()) - set(before)
    for update in range(20):
        small_files(150 if 1 < update < 15 else resource.RLIM_INFINITY)
        recorder.write({"name": "train/loss", "value": 0.5, "update": update, "epoch": 0})
        recorder.flush()
    recorder.close()
    for thread in threads:
        thread.join(60)  # Python reports its error when it ends; a later test would be blamed
    written = [json.loads(line)["update"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert written == [0, 1, *range(15, 20)], "two records take 124 bytes"
    told = [("metrics.jsonl" in text, "TensorBoard" in text) for text in warnings]
    assert sorted(told) == [(False, True), (True, False)]
