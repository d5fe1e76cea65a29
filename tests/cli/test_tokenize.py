"""adl-dist tokenize: text to files that data=tokens trains on."""

import json

import pytest

from adl_dist.cli.config.compose import compose_run
from adl_dist.cli.config.instantiate import build_data, build_model
from adl_dist.cli.tokenize import tokenize
from adl_dist.data.tokens import open_tokens
from adl_dist.data.vocabulary import FILE, Vocabulary

TEXTS = ("Größe, or size. " * 30, "a second file\n" * 20)


@pytest.fixture
def files(tmp_path):
    for name, text in zip("ab", TEXTS, strict=True):
        (tmp_path / name).write_text(text, encoding="utf-8")
    return [str(tmp_path / name) for name in "ab"]


@pytest.mark.parametrize("level", ["byte", "char"])
def test_both_files_together_hold_the_text(tmp_path, files, level, capsys):
    tokenize([*files, "--out", str(tmp_path / "out"), "--level", level, "--validation", "0.25"])
    vocabulary = Vocabulary.next_to(tmp_path / "out" / "train.bin")
    assert vocabulary.size == (256 if level == "byte" else len(set("".join(TEXTS))))
    train, validation = (open_tokens(tmp_path / "out" / f"{name}.bin").tolist() for name in ("train", "validation"))
    behind = [len(text) * 3 // 4 for text in TEXTS]  # the end of each file
    assert vocabulary.decode(train) == "".join(text[:at] for text, at in zip(TEXTS, behind, strict=True))
    assert vocabulary.decode(validation) == "".join(text[at:] for text, at in zip(TEXTS, behind, strict=True))
    assert f"{len(train):,} tokens" in capsys.readouterr().out


def test_a_model_for_these_tokens_needs_no_further_sizes(tmp_path, files):
    out = tmp_path / "out"
    tokenize([*files, "--out", str(out), "--level", "char"])
    sizes = ["model.layers=1", "model.heads=1", "model.width=4", "data.context=8"]
    config, _ = compose_run(
        ["model=gpt", "data=tokens", f"data.train={out}/train.bin", f"data.validation={out}/validation.bin", *sizes]
    )
    x, target = build_data(config.data)[0][0]
    assert build_model(config)(x[None]).shape == (1, 8, len(set("".join(TEXTS))))
    assert x[1:].tolist() == target[:-1].tolist()
    assert config.loss["_target_"] == "adl_dist.losses.TokenCrossEntropy"


def test_a_file_of_tokenizers_is_kept_with_the_tokens(tmp_path, files):
    package = pytest.importorskip("tokenizers")
    words = package.Tokenizer(package.models.WordLevel({"or": 0, "size": 1, "second": 2, "?": 9}, unk_token="?"))
    words.pre_tokenizer = package.pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    tokenize([*files, "--out", str(tmp_path / "out"), "--tokenizer", str(tmp_path / "tokenizer.json")])
    (tmp_path / "tokenizer.json").unlink()
    found = json.loads((tmp_path / "out" / FILE).read_text())
    assert (found["kind"], found["size"]) == ("tokenizers", 10)
    vocabulary = Vocabulary.next_to(tmp_path / "out" / "train.bin")
    assert vocabulary.encode("size or x").tolist() == [1, 0, 9]
    assert vocabulary.decode([1, 0]) == "size or"
