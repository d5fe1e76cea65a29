"""The port of nanoGPT's loop adds few lines, and logs the losses of the plain one."""

import difflib
import importlib
import sys

import pytest
import torch

from tests.support.commands import ROOT

FOLDER = ROOT / "examples" / "nanogpt"
ALL = [(K, method) for K in (1, 2, 4) for method in ("bp", "1f1b")]
OF_THE_DATA = ("Dataset", "Windows", "_set", "shuffle=", "typing")


@pytest.fixture
def scripts(monkeypatch):
    """The plain script and the port, as modules."""
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module("train"), importlib.import_module("train_adl")
    for name in ("train", "train_adl", "model"):
        sys.modules.pop(name, None)


def test_the_port_adds_25_lines_besides_its_data():
    plain, port = ((FOLDER / name).read_text() for name in ("train.py", "train_adl.py"))
    before, windows = port.split("class Windows")
    port = before + windows[windows.index("\ndef main") :]
    added = [line[2:] for line in difflib.ndiff(plain.splitlines(), port.splitlines()) if line.startswith("+ ")]
    added = [line for line in added if line.strip() and not any(word in line for word in OF_THE_DATA)]
    assert 0 < len(added) <= 25, added


@pytest.mark.parametrize(
    ("dtype", "tolerance", "runs"),
    [
        (torch.float64, 1e-10, [(1, "bp"), (4, "1f1b")]),
        pytest.param(torch.float64, 1e-10, ALL, marks=pytest.mark.docs),
        pytest.param(torch.float32, 1e-5, ALL, marks=pytest.mark.docs),
    ],
)
def test_every_loss_of_the_port_is_that_of_the_plain_loop(dtype, tolerance, runs, scripts, monkeypatch, capsys):
    plain, port = scripts
    monkeypatch.setattr("adl_dist.training.trainer.default_threads", lambda processes: 1)
    text = str(ROOT / "CONTRIBUTING.md")
    for one in scripts:
        for name, value in {"DTYPE": dtype, "MAX_ITERS": 6, "EVAL_INTERVAL": 3, "WARMUP": 2}.items():
            monkeypatch.setattr(one, name, value)
    expected = plain.main(text)
    assert len(expected) == 8
    for K, method in runs:
        monkeypatch.setattr(port, "NUM_STAGES", K)
        monkeypatch.setattr(port, "METHOD", method)
        found = port.main(text)
        assert [of[:2] for of in found] == [of[:2] for of in expected], (K, method)
        assert [of[2] for of in found] == pytest.approx([of[2] for of in expected], abs=tolerance), (K, method)
