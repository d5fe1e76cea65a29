"""Each process writes its part alone: a slow or failing disk of one neither holds up nor ends another."""

import errno
import json
import os
import re
import signal
import time
from pathlib import Path

import pytest
from torch import nn

from adl_dist.checkpoint import layout, storage
from adl_dist.distributed.world import disconnect, launched_rank
from adl_dist.errors import AdlError
from tests.support.ranks import RanksFailed, run_ranks
from tests.support.runs import trainer_of
from tests.support.toys import Counted, FixedImages, batch_norm_net
from tests.support.user_code import Explodes
from tests.support.values import SILENT, values

pytestmark = pytest.mark.ranks

UPDATES = 2  # of an epoch: 8 samples by 4


def piecewise(rank, before_each_piece):
    """Have ``rank`` do something before each piece that it writes, given the update that is being saved."""
    write = storage.write_piece

    def written(file, data):
        before_each_piece(int(Path(file.name).parent.name.rpartition("-")[2]))
        write(file, data)

    if launched_rank() == rank:
        storage.write_piece = written


def saves_of_rank_1_are_slow_then_fail_then_succeed(folder):
    second_epoch, went_on = folder / "second-epoch-has-begun", []

    def by_update(update):
        if update == UPDATES:
            deadline = time.monotonic() + 20
            while not second_epoch.exists() and time.monotonic() < deadline:
                time.sleep(0.01)
            went_on.append(second_epoch.exists())
        if update == 2 * UPDATES:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    piecewise(1, by_update)
    options = values(quiet=True, tensorboard=False, keep=9)
    data = Counted(8, {13: second_epoch.touch})
    trainer_of(batch_norm_net()).fit(data, epochs=3, batch_size=4, run_dir=folder, **options)
    disconnect()
    return went_on


def test_a_rank_with_slow_or_failing_saves_does_not_end_the_run(tmp_path):
    none, went_on = run_ranks(2, saves_of_rank_1_are_slow_then_fail_then_succeed, tmp_path)
    assert none == []
    assert went_on
    assert all(went_on), "it trained on while the first save was being written"
    saved, alone = sorted((tmp_path / "checkpoints").iterdir()), tmp_path / "alone"
    assert [path.name for path in saved] == ["update-00000002", "update-00000006"]
    in_foreground = values(quiet=True, tensorboard=False, keep=9, background=False)
    trainer_of(batch_norm_net()).fit(FixedImages(8), epochs=3, batch_size=4, run_dir=alone, **in_foreground)
    for path in saved:
        files = layout.verify(path)["files"]
        models = {f"model-0000{k}-of-00002.safetensors" for k in (1, 2)}
        assert files.keys() == {*models, "model.safetensors.index.json"}
        for name in files:
            assert (path / name).read_bytes() == (alone / "checkpoints" / path.name / name).read_bytes()
    assert "update 4 could not be saved" in (tmp_path / "logs" / "rank0.log").read_text()
    assert "checkpoints: rank 1: OSError: [Errno 5] Input/output error" in (tmp_path / "metrics.jsonl").read_text()


def the_only_save_fails_on_rank_1(folder):
    def full(update):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    piecewise(1, full)
    return ending(folder, batch_norm_net())


def rank_1_is_killed_while_it_writes_its_part(folder):
    piecewise(1, lambda update: os.kill(os.getpid(), signal.SIGKILL) if update == 2 * UPDATES else None)
    (folder / "ending.json").write_text(json.dumps(ending(folder, batch_norm_net(), epochs=2)))


def the_loss_is_nan_while_rank_0_writes(folder):
    piecewise(0, lambda update: time.sleep(0.05))
    return ending(folder, nn.Sequential(*batch_norm_net(), Explodes(after=9)), epochs=3)


def ending(folder, model, epochs=1):
    with pytest.raises(AdlError) as error:
        trainer_of(model).fit(FixedImages(8), epochs=epochs, batch_size=4, run_dir=folder, monitoring=SILENT)
    return type(error.value).__name__, error.value.exit_code, str(error.value)


def test_a_last_save_that_fails_ends_all_with_exit_code_1(tmp_path):
    endings = run_ranks(2, the_only_save_fails_on_rank_1, tmp_path)
    assert [ending[:2] for ending in endings] == [("SaveError", 1), ("StageFailed", 1)]
    for _, _, text in endings:
        assert "update 2 could not be saved" in text
        assert "checkpoints: rank 1: OSError: [Errno 28] No space left on device" in text
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_a_process_that_dies_in_the_last_save_is_named(tmp_path):
    with pytest.raises(RanksFailed) as failed:
        run_ranks(2, rank_1_is_killed_while_it_writes_its_part, tmp_path, timeout_seconds=40)
    assert str(failed.value) == "rank 1: exit code -9"
    name, code, text = json.loads((tmp_path / "ending.json").read_text())
    assert (name, code) == ("StageFailed", 1)
    assert re.fullmatch(r"stage 1 \(\S+, pid \d+\): the process is gone.*", text)
    assert [path.name for path in layout.complete(tmp_path / "checkpoints")] == ["update-00000002"]


@pytest.mark.slow
def test_a_save_that_is_under_way_when_a_rank_fails_is_completed(tmp_path):
    endings = run_ranks(2, the_loss_is_nan_while_rank_0_writes, tmp_path)
    assert [ending[:2] for ending in endings] == [("StageFailed", 2), ("DivergedError", 2)]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["update-00000002"]
