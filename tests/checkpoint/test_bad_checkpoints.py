"""A checkpoint that is not what was written is never gone on from, and nothing in it is executed."""

import dataclasses
import errno
import io
import json
import pickle
import random
import shutil
import tracemalloc
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from adl_dist.checkpoint import layout, storage
from adl_dist.checkpoint import state as saved_state
from adl_dist.cli.config import instantiate
from adl_dist.errors import CheckpointError, UnusableError
from tests.support.saved import SIGNATURE, Trap, index_of, resealed, saved, state

DAMAGES = 200
METADATA = "torch.distributed.checkpoint.metadata"


def loaded(path):
    model = {f"model.{name}": torch.empty(shape) for name, shape in SIGNATURE.items()}
    storage.read(path, model)
    return model


@pytest.fixture
def two(tmp_path):
    """Checkpoints of updates 1 and 2."""
    return saved(tmp_path, 1), saved(tmp_path, 2, state(seed=2))


def assert_passed_over(older, newest, match):
    """Refused by itself, and with an older one beside it that one is taken; nothing is moved or changed."""
    with pytest.raises(UnusableError, match=match):
        saved_state.newest_good([newest], SIGNATURE)
    path, manifest, rejected = saved_state.newest_good([newest, older], SIGNATURE)
    assert (path, manifest["update"], [bad for bad, _ in rejected]) == (older, 1, [newest])


def test_a_good_checkpoint_gives_back_what_was_saved(two):
    for path, tensors in zip(two, (state(), state(seed=2)), strict=True):
        assert layout.verify(path)["update"] == int(path.name[-1])
        assert all(torch.equal(value, tensors[name]) for name, value in loaded(path).items())


@pytest.mark.parametrize("damage", ["truncated", "a bit flipped"])
def test_truncated_anywhere_or_with_any_bit_flipped_a_checkpoint_is_passed_over(damage, two):
    older, newest = two
    files = sorted(newest.iterdir())
    assert len(files) == 4
    seeds = random.Random(0)
    for number in range(DAMAGES):
        file = files[number % len(files)]
        content = file.read_bytes()
        at = seeds.randrange(len(content))
        flipped = content[:at] + bytes([content[at] ^ 1 << seeds.randrange(8)]) + content[at + 1 :]
        file.write_bytes(content[:at] if damage == "truncated" else flipped)
        assert_passed_over(older, newest, match=f"{newest.name} is damaged: .*{file.name}")
        file.write_bytes(content)
    assert saved_state.newest_good([newest], SIGNATURE)[0] == newest


def test_without_one_of_its_files_a_checkpoint_is_passed_over(two):
    older, newest = two
    for file in sorted(newest.iterdir()):
        elsewhere = file.rename(newest.parent / "elsewhere")
        assert_passed_over(older, newest, match=file.name)
        elsewhere.rename(file)


@pytest.mark.parametrize("where", ["read_bytes", "stat"])
def test_a_checkpoint_that_the_disk_does_not_give_back_is_passed_over(where, two, monkeypatch):
    older, newest = two
    real = getattr(Path, where)

    def give(file, *args, **options):
        if file.parent == newest and (where == "stat") == (file.name == "__1_0.distcp"):
            raise OSError(errno.EIO, "Input/output error")
        return real(file, *args, **options)

    monkeypatch.setattr(Path, where, give)
    assert_passed_over(older, newest, match=r"is damaged: .*Input/output error")


def test_a_checkpoint_of_another_model_is_passed_over(two):
    older, newest = two
    shutil.rmtree(newest)
    foreign = saved(newest.parent, 2, {"model.weight": torch.zeros(5, 4), "model.bias": torch.zeros(4)})
    assert_passed_over(older, foreign, match="of another model: num_batches_tracked is .* and missing in the")


def test_where_none_is_good_all_are_told_and_stay_as_they_are(two):
    for path in two:
        (path / "__0_0.distcp").unlink()
    with pytest.raises(CheckpointError, match=r"none of the 2 .* nothing was changed: .*update-00000002.*0001") as told:
        saved_state.newest_good(two[::-1], SIGNATURE)
    assert not isinstance(told.value, UnusableError)
    assert layout.complete(two[0].parent) == list(two)


@pytest.mark.parametrize(
    ("entry", "match"),
    [
        ({"__0_0.distcp": 7}, "should tell 'bytes' and 'sha256' of __0_0.distcp, found 7"),
        ({"__0_0.distcp": {"bytes": 7}}, "should tell 'bytes' and 'sha256' of __0_0.distcp"),
        ({"__0_0.distcp": {"bytes": 7, "sha256": 7}}, "should tell 'bytes' and 'sha256' of __0_0.distcp"),
        *(({name: {"bytes": 7, "sha256": ""}}, f"names a file elsewhere, {name}") for name in ("", "..", "../__0_0")),
    ],
    ids=lambda told: str(told)[:40],
)
def test_a_manifest_whose_files_are_none_is_damaged(entry, match, two):
    manifest = json.loads((two[1] / layout.MANIFEST).read_bytes())
    del manifest["sha256"]
    manifest["files"] |= entry
    text = {**manifest, "sha256": layout._checksum(manifest)}
    (two[1] / layout.MANIFEST).write_text(json.dumps(text))
    assert_passed_over(*two, match=match)


# --- pickles that do something ---------------------------------------------------------------------------------------


@pytest.fixture
def made(tmp_path):
    """The folder that a trap makes; the trap itself works."""
    file = tmp_path / "made"
    pickle.loads(pickle.dumps(Trap(file)))
    file.rmdir()
    yield file
    assert not file.exists(), "it was executed"


def test_an_index_that_asks_for_more_than_an_index_is_not_followed(two, made):
    older, newest = two
    index = index_of(newest)
    index.planner_data["model.weight"] = Trap(made)
    newest = resealed(newest, metadata=pickle.dumps(index))
    assert_passed_over(older, newest, match="asks for posix.mkdir, which no checkpoint of tensors needs")


@pytest.mark.parametrize("names", [("posix", "system"), ("builtins", "eval"), ("torch", "load"), ("torch", "hub.load")])
def test_no_index_gets_at_what_executes(names, two, made):
    """By protocol 4, where dots lead into a module."""
    module, name = (f"\x8c{chr(len(word))}{word}".encode("latin1") for word in names)
    newest = resealed(two[1], metadata=b"\x80\x04" + module + name + b"\x93.")
    assert_passed_over(two[0], newest, match=f"asks for {names[0]}.{names[1]}")


OF_CLASSES = [
    (METADATA, "TensorProperties", ""),  # a class
    ("torch.serialization", "_get_layout", ""),  # a function
    (METADATA, "_MEM_FORMAT_ENCODING", "I0\n\x85R"),  # a member of an enumeration
]


@pytest.mark.parametrize(("module", "name", "call"), OF_CLASSES, ids=lambda word: word)
@pytest.mark.parametrize("slots", [False, True], ids=["its attributes", "its slots"])
def test_no_index_changes_what_others_use_and_a_good_one_is_read_after_it(module, name, call, slots, two):
    older, newest = two
    state = b"}X\x05\x00\x00\x00wrongK\x01s"
    what = f"c{module}\n{name}\n{call}".encode("latin1")
    newest = resealed(newest, metadata=b"\x80\x02" + what + (b"N" + state + b"\x86" if slots else state) + b"b.")
    assert_passed_over(older, newest, match=f"it changes .*{name}")
    assert "wrong" not in vars(pickle.loads(b"\x80\x02" + what + b"."))


@pytest.mark.parametrize(
    "pickled",
    [
        b"\x80\x02Nr\x00\x00\x00\x04.",
        b"\x80\x05\x96\x00\x00\x00\x20\x00\x00\x00\x00.",
        b"\x80\x04\x8e\x00\x00\x00\x20\x00\x00\x00\x00.",
    ],
    ids=["a place in the memo", "writable bytes", "bytes"],
)
def test_a_few_bytes_of_an_index_take_no_memory(pickled, two):
    """Each names 2 ** 26 entries or 2 ** 29 bytes, and holds none of them."""
    (two[1] / storage.INDEX).write_bytes(pickled)
    tracemalloc.start()
    try:
        with pytest.raises((EOFError, KeyError, pickle.UnpicklingError)):
            storage.read_index(two[1] / storage.INDEX)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2**20


def test_an_index_that_tells_of_more_than_the_files_hold_is_refused_before_a_tensor_is_made(two):
    older, newest = two
    index = index_of(newest)
    momentum = index.state_dict_metadata["optimizer.weight.momentum_buffer"]
    momentum.size = torch.Size([2**40, 4])
    newest = resealed(newest, metadata=pickle.dumps(index))
    assert_passed_over(older, newest, match=r"it tells of 17,592,186,.* bytes of tensors, and the files hold \d,\d+")
    momentum.size = torch.Size([-(2**40), 4])
    newest = resealed(newest, metadata=pickle.dumps(index))
    assert_passed_over(older, newest, match=r"momentum_buffer has size .*-1099511627776, 4.*, which no tensor has")


def test_tensor_data_that_are_a_pickle_of_something_else_are_refused(two, made):
    index, data = index_of(two[1]), io.BytesIO()
    torch.save(Trap(made), data)
    for where in index.storage_data.values():
        where.offset, where.length = 0, data.tell()
    content = data.getvalue()
    newest = resealed(two[1], __0_0distcp=content, __1_0distcp=content, metadata=pickle.dumps(index))
    assert saved_state.newest_good([newest], SIGNATURE)[0] == newest, "index and checksums are in order"
    with pytest.raises(CheckpointError, match=r"update-00000002 cannot be read: UnpicklingError: Weights only load"):
        saved_state.load_weights(newest, Holder())


def test_data_that_are_no_tensor_are_refused_by_the_index_and_by_the_reader(two, made, monkeypatch):
    index, data = index_of(two[1]), io.BytesIO()
    torch.save(Trap(made), data)
    index.state_dict_metadata["model.weight"] = BytesStorageMetadata()
    where = next(info for info in index.storage_data.values() if info.relative_path == "__0_0.distcp")
    good = (two[1] / "__0_0.distcp").read_bytes()  # which is read before it
    index.storage_data[MetadataIndex("model.weight")] = dataclasses.replace(where, offset=len(good), length=data.tell())
    newest = resealed(two[1], __0_0distcp=good + data.getvalue(), metadata=pickle.dumps(index))
    assert_passed_over(two[0], newest, match="asks for .*BytesStorageMetadata")
    # Even if the index let it through.
    monkeypatch.setattr(storage, "read_index", lambda file: index)
    with pytest.raises(CheckpointError, match=r"cannot be read: UnpicklingError: model.weight is no tensor"):
        saved_state.load_weights(newest, Holder())


def test_an_index_that_leads_to_another_file_is_refused(two):
    index = index_of(two[1])
    next(iter(index.storage_data.values())).relative_path = "../update-00000001/__0_0.distcp"
    newest = resealed(two[1], metadata=pickle.dumps(index))
    assert_passed_over(two[0], newest, match=r"it leads to \.\./update-00000001")


def test_a_state_dict_to_start_from_executes_nothing(made, tmp_path):
    torch.save({"weight": torch.zeros(3, 4), "more": Trap(made)}, tmp_path / "state.pt")
    with pytest.raises(CheckpointError, match=r"init_from=.* cannot be read"):
        instantiate._load_state(Holder(), tmp_path / "state.pt")


class Holder(nn.Module):
    """The model by SIGNATURE."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(3, 4)), nn.Parameter(torch.zeros(4))
        self.register_buffer("num_batches_tracked", torch.tensor(0))
