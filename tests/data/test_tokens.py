"""Files of tokens: all layouts are read alike, samples share no token, and what is damaged is named."""

import itertools
import struct
import sys

import numpy as np
import pytest
import torch
from torch.utils.data import Subset

from adl_dist.data import Loader, tokens
from adl_dist.data.tokens import header_of, vocab_size_next_to
from adl_dist.data.vocabulary import FILE, Vocabulary
from adl_dist.errors import AdlError, ConfigError, DataError

IDS = np.arange(100) * 7 % 50


def written(path, ids=IDS, dtype="uint16", *, header=True):
    path.write_bytes((header_of(dtype, len(ids)) if header else b"") + np.asarray(ids, dtype).tobytes())
    return str(path)


@pytest.mark.parametrize("header", [True, False])
@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_all_layouts_hold_the_same_tokens(tmp_path, dtype, header):
    path = written(tmp_path / "a.bin", dtype=dtype, header=header)
    train, _ = tokens(path, path, context=4, dtype=None if header else dtype)
    assert len(train) == 20
    for index in range(20):
        input_, target = train[index]
        assert input_.dtype == target.dtype == torch.int64
        assert input_.tolist() == IDS[5 * index : 5 * index + 4].tolist()
        assert target.tolist() == IDS[5 * index + 1 : 5 * index + 5].tolist()


def test_no_other_type_of_tokens_is_read(tmp_path):
    path = written(tmp_path / "a.bin")
    with pytest.raises(ConfigError, match=r"data\.dtype=int32: tokens are uint16 or uint32"):
        tokens(path, path, context=4, dtype="int32")


def test_the_header_is_that_of_llm_c():
    """256 int32, of which the first three are a magic number, a version and the number of tokens."""
    assert struct.unpack("<256i", header_of("uint16", 5)) == (20240520, 1, 5, *[0] * 253)
    assert struct.unpack("<256i", header_of("uint32", 5)) == (20240801, 7, 5, *[0] * 253)


def test_tokens_behind_the_last_whole_window_are_not_used(tmp_path):
    path = written(tmp_path / "a.bin", IDS[:14])
    train, validation = tokens(path, path, context=4)
    assert (len(train), len(validation)) == (2, 2)
    with pytest.raises(IndexError):
        train[2]


def test_a_token_that_the_model_does_not_have_is_named(tmp_path):
    path = written(tmp_path / "a.bin", [1, 2, 3, 4, 5, 50256, 0, 0])
    train, _ = tokens(path, path, context=3, vocab_size=50)
    for num_workers in (0, 1):
        loader = Loader(train, seed=0, shuffle=False, num_workers=num_workers)
        with pytest.raises(DataError, match=r"^sample 1: .*a.bin has token 50256, but data.vocab_size=50"):
            list(loader.batches(0, [2]))
    with pytest.raises(DataError, match=r"sample 1: .*a.bin has token 50256, but data.vocab_size=50"):
        train[1]


@pytest.mark.parametrize("subset", [None, np.array([5, 2, 7, 7, 0])])
def test_windows_taken_at_once_are_the_windows_taken_one_by_one(tmp_path, subset):
    path = written(tmp_path / "a.bin")
    dataset, _ = tokens(path, path, context=4)
    dataset = dataset if subset is None else Subset(dataset, subset)
    at_once = list(Loader(dataset, seed=1, shuffle=True).batches(3, [2, 3]))
    one_by_one = list(Loader([*map(dataset.__getitem__, range(len(dataset)))], seed=1, shuffle=True).batches(3, [2, 3]))
    for ours, theirs in zip(itertools.chain(*at_once), itertools.chain(*one_by_one), strict=True):
        assert torch.equal(ours, theirs)
        assert (ours.dtype, ours.stride()) == (theirs.dtype, theirs.stride())


def test_the_vocabulary_next_to_tokens_says_how_many_there_are(tmp_path):
    path = written(tmp_path / "a.bin")
    with pytest.raises(ConfigError, match=r"data.vocab_size must be given: next to .* there is no vocabulary"):
        vocab_size_next_to(path)
    (tmp_path / FILE).write_text(Vocabulary.of_chars(["abc", "cäd"]).to_json())
    assert vocab_size_next_to(path) == 5
    with pytest.raises(DataError, match=r"without the data needs data.vocab_size=NUMBER$"):
        vocab_size_next_to(f"{path}.missing")
    for damaged in ("", "[]", '{"kind": "byte"}'):
        (tmp_path / FILE).write_text(damaged)
        with pytest.raises(DataError, match="is not a vocabulary of adl-dist tokenize"):
            vocab_size_next_to(path)


@pytest.mark.parametrize("vocabulary", [Vocabulary.of_bytes(), Vocabulary.of_chars(["Größe 7\n", "日本 😀"])])
def test_what_is_encoded_is_decoded_again(tmp_path, vocabulary):
    text = "😀 Größe 日本 7\n"
    (tmp_path / FILE).write_text(vocabulary.to_json())
    again = Vocabulary.next_to(tmp_path / "a.bin")
    assert again == vocabulary
    ids = again.encode(text)
    assert int(ids.max()) < vocabulary.size
    assert again.decode(ids.tolist()) == text


def test_a_file_that_does_not_fit_is_refused(tmp_path):
    written(tmp_path / "whole"), written(tmp_path / "short", IDS[:3], header=False)
    (tmp_path / "new").write_bytes(struct.pack("<iii", 20240520, 7, 0).ljust(1024, b"\0"))
    (tmp_path / "cut").write_bytes((tmp_path / "whole").read_bytes()[:-1])
    for name, options, told in (
        ("new", {}, "new has a header of llm.c of version 7, which is not known; make it again"),
        ("whole", {"dtype": "uint32"}, "dtype=uint32, but the header of .* says uint16; omit"),
        ("cut", {}, "cut: expected 1,224 bytes, for 100 tokens of uint16, found 1,223; copy or make the file again"),
        ("whole", {"context": 0}, "context must be at least 1 token, got 0"),
        ("short", {}, r"the file has 3 tokens; expected at least data.context \+ 1 = 5; use more text"),
    ):
        with pytest.raises(AdlError, match=told):
            tokens(*[str(tmp_path / name)] * 2, **{"context": 4, **options})


def test_what_no_vocabulary_can_read_is_refused(tmp_path, monkeypatch):
    (tmp_path / "bytes").write_bytes(b"\xff"), (tmp_path / "other").write_text("{}")
    with pytest.raises(ConfigError, match="'d' is none of the 3 characters that the tokens were made of; use others"):
        Vocabulary.of_chars(["abc"]).encode("abd")
    for name, told in (
        ("bytes", "bytes is no text: byte 0 is not UTF-8; give another file"),
        ("nowhere", "nowhere cannot be read .No such file or directory.; correct the path"),
        ("other", "other is not a file of the package tokenizers: "),
        ("other", "other needs the package tokenizers, which is not installed; pip install tokenizers, or"),
    ):
        if "installed" in told:
            monkeypatch.setitem(sys.modules, "tokenizers", None)
        with pytest.raises(AdlError, match=told):
            Vocabulary.of_tokenizer(tmp_path / name)
