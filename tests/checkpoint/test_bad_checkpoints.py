"""A checkpoint that is not what was written is never resumed from, and nothing in it is executed."""

import errno
import json
import pickle
import random
import resource
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from adl_dist.checkpoint import layout, storage, tensor_files
from adl_dist.checkpoint import state as saved_state
from adl_dist.checkpoint.tensor_files import Shard
from adl_dist.checkpoint.weight_files import WeightFiles
from adl_dist.errors import CheckpointError, UnusableError
from adl_dist.training.lazy_weights import load_initial
from tests.support.ranks import run_ranks
from tests.support.saved import FIRST, MOMENTUM, SECOND, SIGNATURE, Trap, resealed, saved, shards
from tests.support.tiers import slow


@pytest.fixture
def two(tmp_path):
    """Checkpoints of updates 1 and 2."""
    return saved(tmp_path, 1), saved(tmp_path, 2, shards(seed=2))


def newest_good(*candidates):
    return layout.first_usable(candidates, lambda path: saved_state.verify(path, SIGNATURE))


def assert_passed_over(older, newest, match):
    """Refused by itself, and with an older one beside it that one is taken; nothing is moved or changed."""
    with pytest.raises(UnusableError, match=match):
        newest_good(newest)
    path, manifest, rejected = newest_good(newest, older)
    assert (path, manifest["update"], [bad for bad, _ in rejected]) == (older, 1, [newest])


@pytest.mark.parametrize("tries", [100, slow(200)])
@pytest.mark.parametrize("damage", ["truncated", "a bit flipped", "missing"])
def test_a_damaged_checkpoint_is_passed_over(damage, tries, two):
    older, newest = two
    files = sorted(newest.iterdir())
    assert len(files) == 5
    seeds = random.Random(0)
    if damage == "missing":
        files.remove(newest / layout.MANIFEST)  # without it this is no checkpoint
    for number in range(len(files) if damage == "missing" else tries):
        file = files[number % len(files)]
        content = file.read_bytes()
        at = seeds.randrange(len(content))
        flipped = content[:at] + bytes([content[at] ^ 1 << seeds.randrange(8)]) + content[at + 1 :]
        if damage == "missing":
            file.unlink()
        else:
            file.write_bytes(content[:at] if damage == "truncated" else flipped)
        assert_passed_over(older, newest, match=f"{newest.name} is damaged: .*{file.name}")
        file.write_bytes(content)
    assert newest_good(newest)[0] == newest


@pytest.mark.parametrize("where", ["open_file", "size"])
def test_a_checkpoint_the_disk_does_not_give_back_is_passed_over(where, two, monkeypatch):
    older, newest = two
    real = getattr(storage, where)

    def give(file):
        if file.parent == newest and (where == "size") == (file.name == SECOND):
            raise OSError(errno.EIO, "Input/output error")
        return real(file)

    monkeypatch.setattr(storage, where, give)
    assert_passed_over(older, newest, match=r"is damaged: .*Input/output error")


def test_a_checkpoint_of_another_model_is_passed_over(two):
    """Also one of whose files one of another model has taken the place."""
    older, newest = two
    foreign = saved(older.parent / "foreign", 2, {FIRST: Shard({"weight": torch.zeros(7, 4)})})
    for path in (foreign, resealed(newest, {FIRST: (foreign / FIRST).read_bytes()})):
        match = "of another model: (bias|num_batches_tracked) is .* in this model and missing in the checkpoint"
        assert_passed_over(older, path, match)


def test_where_none_is_good_all_are_told_and_stay_as_they_are(two, monkeypatch):
    for path in two:
        (path / FIRST).unlink()
    with pytest.raises(CheckpointError, match=r"none of the 2 .* nothing was changed: .*update-00000002.*0001") as told:
        newest_good(*two[::-1])
    assert not isinstance(told.value, UnusableError)
    assert layout.complete(two[0].parent) == list(two)
    monkeypatch.setattr(storage, "move", Mock(side_effect=OSError("busy")))
    with pytest.raises(CheckpointError, match=r"update-00000001 cannot be moved to rejected-.*: busy; move it"):
        layout.reject(two[0])


@pytest.mark.parametrize(
    ("entry", "match"),
    [
        ({FIRST: 7}, f"{FIRST} cannot be read"),
        ({FIRST: {"sha256": ""}}, f"{FIRST} cannot be read"),
        ({FIRST: {"bytes": 7, "sha256": ""}}, f"{FIRST} cannot be read .it should hold 7 bytes"),
        *(({name: {"bytes": 7, "sha256": ""}}, f"names a file elsewhere: '{name}'") for name in ("", "..", "../model")),
    ],
    ids=str,
)
def test_a_manifest_whose_files_are_none_is_damaged(entry, match, two):
    manifest = json.loads((two[1] / layout.MANIFEST).read_bytes())
    del manifest["sha256"]
    manifest["files"] |= entry
    text = {**manifest, "sha256": layout._checksum(manifest)}
    (two[1] / layout.MANIFEST).write_text(json.dumps(text))
    assert_passed_over(*two, match=match)


# --- what the checksums do not show: those who can write to the folder can write checksums ---------------------------


def with_header(text, data=b""):
    return len(text).to_bytes(8, "little") + text + data


TENSOR = b'{"dtype":"U8","shape":[4],"data_offsets":[0,4]}'
BAD_FILES = {
    "empty": b"",
    "half a length": b"\0\0\0\0",
    "a length beyond the file": (2**26).to_bytes(8, "little") + b"{}",
    "a length beyond the limit": (2**40).to_bytes(8, "little") + b"{}",
    "a length beyond any memory": (2**64 - 1).to_bytes(8, "little") + b"{}",
    "no JSON": with_header(b"never"),
    "deep JSON": with_header(b"[" * 100_000),
    "a list": with_header(b"[]"),
    "no dtype": with_header(b'{"weight":{"shape":[1],"data_offsets":[0,4]}}', b"1234"),
    "an unknown dtype": with_header(b'{"weight":{"dtype":"F99","shape":[1],"data_offsets":[0,4]}}', b"1234"),
    "a dtype of others": with_header(b'{"weight":{"dtype":"F8_E8M0","shape":[4],"data_offsets":[0,4]}}', b"1234"),
    "more than it holds": with_header(b'{"weight":{"dtype":"F32","shape":[1048576],"data_offsets":[0,4194304]}}'),
    "an overflow": with_header(b'{"weight":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]}}'),
    "a shape that does not fit": with_header(b'{"weight":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}', b"1234"),
    "a negative shape": with_header(b'{"weight":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}', b"1234"),
    "the place of another": with_header(b'{"bias":%(one)b,"weight":%(one)b}' % {b"one": TENSOR}, b"1234"),
    "data of no tensor": with_header(b"{}      ", b"1234"),
}


@pytest.mark.parametrize("kind", BAD_FILES)
def test_a_file_that_is_no_safetensors_file_is_told_by_name(kind, two):
    newest = resealed(two[1], {FIRST: BAD_FILES[kind]})
    assert_passed_over(two[0], newest, match=f"{newest.name} is damaged: {FIRST} cannot be read")


def refused_in_little_memory(folder):
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + 2**26, now + 2**26))
    names = sorted(file.name for file in folder.iterdir())
    for name in names:
        with pytest.raises(UnusableError):
            tensor_files.scan(folder, tensor_files.MODEL, [name])
    return names


@pytest.mark.ranks
def test_no_header_takes_memory_or_ends_the_process(tmp_path):
    """Each file is read in a process that can have 64 MiB more than it has."""
    for number, content in enumerate(BAD_FILES.values()):
        (tmp_path / f"model-{number:02d}").write_bytes(content)
    (refused,) = run_ranks(1, refused_in_little_memory, tmp_path)
    assert len(refused) == len(BAD_FILES)


def test_what_is_no_longer_there_when_it_is_loaded_is_told(two):
    """It was in order when it was compared with its checksums."""
    for content, match in (
        (shards()[FIRST].tensors | {"weight": torch.zeros(4, 3)}, "RuntimeError: .*size mismatch for weight"),
        ({"num_batches_tracked": torch.tensor(1)}, "ValueError: weight is missing"),
    ):
        other = saved(two[0].parent / str(len(content)), 2, {FIRST: Shard(content)})
        newest = resealed(two[1], {FIRST: (other / FIRST).read_bytes()})
        with pytest.raises(CheckpointError, match=f"{newest.name} cannot be read: {match}"):
            saved_state.load_weights(newest, Holder())


@pytest.fixture
def made(tmp_path):
    """The folder that a trap makes; the trap itself works."""
    file = tmp_path / "made"
    pickle.loads(pickle.dumps(Trap(file)))
    file.rmdir()
    yield file
    assert not file.exists(), "it was executed"


def test_a_pickle_in_place_of_a_file_of_tensors_is_not_followed(two, made):
    newest = resealed(two[1], dict.fromkeys((FIRST, SECOND, MOMENTUM), pickle.dumps(Trap(made))))
    assert_passed_over(two[0], newest, match=f"{FIRST} cannot be read")
    with pytest.raises(CheckpointError, match=f"{FIRST} cannot be read"):
        saved_state.load_weights(newest, Holder())


def test_a_state_dict_to_start_from_executes_nothing(made, tmp_path):
    torch.save({"weight": torch.zeros(3, 4), "more": Trap(made)}, tmp_path / "state.pt")
    with pytest.raises(CheckpointError, match=r"init_from=.* cannot be read"):
        load_initial(Holder(), tmp_path / "state.pt")


class Holder(nn.Module):
    """The model by SIGNATURE."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(3, 4)), nn.Parameter(torch.zeros(4))
        self.register_buffer("num_batches_tracked", torch.tensor(0))


def test_weights_that_a_model_cannot_take_are_refused(tmp_path):
    tied, file, fails = nn.Sequential(*(nn.Linear(2, 2) for _ in "ab")), tmp_path / "model.safetensors", nn.Linear(2, 2)
    save_file({name: torch.rand(value.shape) for name, value in tied.state_dict().items()}, file)
    files = WeightFiles.at(file)
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match=r"cannot be read any more .OSError: .* has become shorter"):
        files.load_into(tied)
    torch.save({name: value + 1 for name, value in tied.state_dict().items()}, tmp_path / "state.pt")
    tied[1].weight = tied[0].weight
    with pytest.raises(CheckpointError, match=r"0.weight and 1.weight are one tensor in this model and have diff"):
        load_initial(tied, tmp_path / "state.pt")
    torch.save(fails.state_dict(), tmp_path / "state.pt")
    fails.register_load_state_dict_pre_hook(lambda *_: int("mine"))
    with pytest.raises(CheckpointError, match="cannot be loaded: ValueError: invalid literal for int"):
        load_initial(fails, tmp_path / "state.pt")
