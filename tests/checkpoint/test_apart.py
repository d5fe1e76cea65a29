"""Machines without a shared file system: rank 0 keeps the checkpoints, and the others reach them through it."""

import errno
import os
import pathlib
import shutil
import socket
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from adl_dist.checkpoint import layout
from adl_dist.checkpoint.run_dir import RunFolder
from adl_dist.distributed.world import disconnect, launched_rank
from adl_dist.training.shared_folder import say_node, share_folder
from adl_dist.training.startup_sync import Agreement
from tests.support.commands import assert_same
from tests.support.ranks import RanksFailed, run_ranks
from tests.support.runs import toy_trainer
from tests.support.toys import FixedImages, batch_norm_net
from tests.support.values import QUIET

pytestmark = pytest.mark.ranks


def fit(K, epochs, run_dir, init_from=None):
    """Train the toy net in so many stages; return its state."""
    trainer = toy_trainer(K, 2, model=batch_norm_net(dropout=0.2), balance="even", init_from=init_from)
    trainer.fit(FixedImages(12), epochs=epochs, batch_size=4, run_dir=run_dir, monitoring=QUIET)
    state = trainer.full_state_dict()
    disconnect()
    return state


def fit_apart(K, epochs, folder, init_from=None):
    """Train with a run folder for each rank, as if each had a machine, and rank 0 the only one with initial weights."""
    if launched_rank() != 0:
        for name in ("stat", "open"):
            setattr(pathlib.Path, name, hiding(getattr(pathlib.Path, name), {init_from, folder / "machine0"}))
    return fit(K, epochs, folder / f"machine{launched_rank()}", init_from)


def hiding(method, hidden):
    def of_others(path, *args, **options):
        if hidden & {path, *path.parents}:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return method(path, *args, **options)

    return of_others


def files_of(checkpoint):
    return {file.name: file.read_bytes() for file in checkpoint.iterdir() if file.name != "manifest.json"}


def test_ranks_without_a_shared_folder_save_and_resume_the_same(tmp_path):
    weights = tmp_path / "weights.pt"
    torch.save({name: tensor + 1 for name, tensor in batch_norm_net().state_dict().items()}, weights)
    run_ranks(2, fit_apart, 2, 2, tmp_path, weights)
    fit(2, 2, tmp_path / "shared", weights)
    kept, expected = tmp_path / "machine0/checkpoints", tmp_path / "shared/checkpoints"
    names = [path.name for path in layout.complete(kept)]
    assert names == ["update-00000003", "update-00000006"]
    for name in names:
        layout.verify(kept / name)
        assert files_of(kept / name) == files_of(expected / name)
    assert [path.name for path in (tmp_path / "machine1").iterdir()] == ["logs"]
    states = run_ranks(3, fit_apart, 3, 4, tmp_path)  # another K
    resumed = fit(3, 4, tmp_path / "shared")
    for state in states:
        assert_same(state, resumed)
    assert [path.name for path in layout.complete(kept)] == ["update-00000009", "update-00000012"]


@pytest.mark.parametrize(
    ("rank", "line"), [(0, "rank 0 to 1 of 4 on {}; reads"), (2, "rank 2 to 3 of 4 on {}; progress")]
)
def test_each_of_several_nodes_says_what_it_has(rank, line, monkeypatch, capsys):
    for name, value in (("LOCAL_WORLD_SIZE", "2"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    agreement = Agreement(dist.HashStore(), 0, 4)
    say_node(SimpleNamespace(rank=rank, size=4), agreement, quiet=False)
    assert capsys.readouterr().out.startswith(line.format(socket.gethostname()))


@pytest.mark.parametrize("begun", [False, True])
def test_rank_0_with_an_empty_disk_is_told(begun, tmp_path, capsys):
    other = {"host": "second", "is_shared": False, "newest": "", "begun": begun}
    agreement = SimpleNamespace(first=lambda value: value, all=lambda mine: [mine, other])
    here, folder = SimpleNamespace(rank=0, size=2, is_distributed=True), RunFolder(tmp_path / "run")
    share_folder(folder, {"place": str(folder.place), "resume": "auto"}, here, agreement)
    assert ("rank 1 on second took part" in capsys.readouterr().err) is begun


def test_a_newer_checkpoint_on_another_machine_is_named(tmp_path):
    run_ranks(2, fit_apart, 2, 1, tmp_path)
    shutil.rmtree(tmp_path / "machine1")
    (tmp_path / "machine0").rename(tmp_path / "machine1")
    with pytest.raises(RanksFailed, match=f"rank 1 on {socket.gethostname()} has update-00000003, but rank 0 on"):
        run_ranks(2, fit_apart, 2, 2, tmp_path)
