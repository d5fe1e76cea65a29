"""``tokenize`` and ``generate``: text to files that data=tokens trains on, and text that a trained model draws."""

import functools
import json
import re
import shlex
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import adl_dist
from adl_dist import models
from adl_dist.checkpoint.run_dir import chosen_checkpoint
from adl_dist.cli.config.compose import compose_run, config_folder
from adl_dist.cli.main import main
from adl_dist.cli.tokenize import tokenize
from adl_dist.cli.trained import generate
from adl_dist.data.tokens import open_tokens
from adl_dist.data.vocabulary import FILE, Vocabulary
from adl_dist.errors import ConfigError
from adl_dist.losses import TokenCrossEntropy
from tests.support.commands import in_process, shows
from tests.support.values import SILENT

TEXT = "abcdefgh" * 200


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """A model that has learnt that h comes behind g, and a behind h; its size of the vocabulary is that of the data."""
    folder = tmp_path_factory.mktemp("alphabet")
    (folder / "text").write_text(TEXT)
    tokenize([str(folder / "text"), "--out", str(folder / "tokens"), "--level", "char"])
    words = f"data=tokens data.train={folder}/tokens/train.bin data.validation={folder}/tokens/validation.bin "
    words += "data.context=8 model=gpt model.layers=1 model.heads=2 model.width=32 optimizer=adamw optimizer.lr=0.01 "
    words += "partition.num_stages=1 train.batch_size=8 method.accumulation_steps=2 train.epochs=4 "
    words += f"runtime.tensorboard=false runtime.threads=1 train.ema=0.999 run_dir={folder}/run"
    with pytest.raises(SystemExit) as end:
        main(["train", *words.split()])
    assert not end.value.code
    return folder / "run"


def test_a_model_that_has_learnt_the_text_continues_it(run_dir, capsys):
    """Also far behind the end of its context."""
    generate([str(run_dir), "prompt=defg", "max_tokens=30", "temperature=0"])
    assert capsys.readouterr().out.strip() == (TEXT[3:])[:34]
    with pytest.raises(ConfigError, match=r"temperature=a: expected a number, like 1\.0"):
        generate([str(run_dir), "temperature=a"])
    with pytest.raises(ConfigError, match="has no vocabulary of adl-dist tokenize, which generate needs to"):
        generate([str(run_dir), "data.train=nowhere/train.bin"])


def test_the_run_of_a_script_takes_its_model_and_tokens_by_name(run_dir, tmp_path, capsys):
    model = models.gpt(vocab_size=8, context=8, layers=1, heads=2, width=32)
    of_trainer = {"loss_fn": TokenCrossEntropy(), "optimizer": functools.partial(torch.optim.SGD, lr=0.0)}
    trainer = adl_dist.Trainer(model, method="bp", init_from=chosen_checkpoint(run_dir, None), **of_trainer)
    files = {name: str(run_dir.parent / "tokens" / f"{name}.bin") for name in ("train", "validation")}
    data, _ = adl_dist.data.tokens(**files, context=8)
    trainer.fit(data, epochs=1, max_updates=1, batch_size=8, run_dir=tmp_path, monitoring=SILENT)
    words = "prompt=defg max_tokens=30 temperature=0 model=gpt model.layers=1 model.heads=2 model.width=32"
    words = [str(tmp_path), *words.split(), "model.vocab_size=8", "model.context=8"]
    with pytest.raises(ConfigError, match=r"add data=tokens data.train=FILE"):
        generate(words)
    words += ["data=tokens", *(f"data.{name}={file}" for name, file in files.items())]
    with pytest.raises(ConfigError, match=r"^the model fails with \w+Error: .*; its input has .* data.context=256"):
        generate(words)
    generate([*words, "data.context=8"])
    assert capsys.readouterr().out.strip() == (TEXT[3:])[:34]


def test_text_of_the_average_is_that_of_its_weights(run_dir, capsys):
    """At a temperature at which other weights draw other text."""
    texts = []
    for ema in ("false", "true", "true"):
        generate([str(run_dir), "prompt=a", "temperature=5", f"ema={ema}"])
        texts.append(capsys.readouterr().out)
    assert texts[0] != texts[1] == texts[2]


def test_the_commands_of_experiment_gpt_lead_to_new_text(tmp_path, monkeypatch, capsys):
    """As its header says, in fewer updates."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "FILE").write_text(Path(__file__).read_text())
    commands = re.findall(
        r"^#.*?adl-dist (.*)", (config_folder() / "experiment" / "gpt.yaml").read_text(), re.MULTILINE
    )
    fewer = {"train": ["train.max_updates=3", "runtime.processes=false", "runtime.tensorboard=false"]}
    assert len(commands) == 3
    for command in commands:
        name, *words = shlex.split(command.replace("...", ""))
        with pytest.raises(SystemExit) as end:
            main([name, *words, *fewer.get(name, [])])
        assert not end.value.code
    assert "The " in capsys.readouterr().out.rpartition("adl-dist export")[2]


class Fixed(nn.Module):
    """The same outputs behind whatever it is given."""

    def __init__(self, *shares):
        super().__init__()
        self.outputs = torch.tensor(shares).log()

    def forward(self, ids):
        return self.outputs.expand(*ids.shape, -1)


def counts(model, **options):
    options = {"context": 3, "num_kinds": 4, "temperature": 1.0, "top_k": 4} | options
    tokens = models.generate(model, [0], max_tokens=3000, seed=0, **options)
    return torch.bincount(torch.tensor(tokens), minlength=5) / 3000


def test_tokens_are_drawn_by_their_shares():
    model = Fixed(0.1, 0.2, 0.3, 0.4, 100.0)  # the last one is no token of the text
    torch.testing.assert_close(counts(model), torch.tensor([0.1, 0.2, 0.3, 0.4, 0.0]), atol=0.04, rtol=0)
    torch.testing.assert_close(counts(model, top_k=2), torch.tensor([0.0, 0.0, 3 / 7, 4 / 7, 0.0]), atol=0.04, rtol=0)
    squares = torch.tensor([1.0, 4.0, 9.0, 16.0, 0.0]) / 30
    torch.testing.assert_close(counts(model, temperature=0.5), squares, atol=0.04, rtol=0)
    assert counts(model, temperature=0.0).tolist() == [0, 0, 0, 1, 0]


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


@pytest.mark.parametrize("name", ["out", "two w\u00f6rds"])
def test_the_command_that_tokenize_prints_can_be_pasted(tmp_path, files, capsys, name):
    tokenize([*files, "--out", str(tmp_path / name)])
    words = shlex.split(capsys.readouterr().out.partition("adl-dist train ")[2])
    config, _ = compose_run(words)
    assert config.data["validation"] == str(tmp_path / name / "validation.bin")


def test_a_text_that_is_not_utf_8_has_bytes_only(tmp_path, monkeypatch):
    (tmp_path / "a").write_bytes(("Größe " * 40).encode("latin-1"))
    words = [str(tmp_path / "a"), "--out", str(tmp_path / "out"), "--level"]
    refusal = in_process("tokenize", *words, "char").refusal()
    shows(refusal, ["byte 2 is not UTF-8; convert the file, or use --level byte"])
    assert in_process("tokenize", *words, "byte").code == 0
    (tmp_path / "b").write_text("")
    monkeypatch.setattr(sys.modules[tokenize.__module__], "MOST_TOKENS", 3)
    for name, out, told in (
        ("a", "out", "is there already and would be written over; choose another --out"),
        ("a", "a/out", "a/out cannot be written: Not a directory; choose another place"),
        ("a", "c", "more than 3 tokens do not fit into one file; give fewer files at a time"),
        ("b", "c", "b: too little text for training and validation"),
        ("nowhere", "c", "nowhere cannot be read (No such file or directory); give files of text"),
    ):
        shows(in_process("tokenize", str(tmp_path / name), "--out", str(tmp_path / out)).refusal(), [told])


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
