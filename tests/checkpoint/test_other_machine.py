"""A run folder that was made on a machine with a GPU, on one that has none."""

import pytest
import torch
import yaml

from tests.support.commands import in_process, words


@pytest.fixture
def run_dir(tmp_path, monkeypatch):
    """A finished run. That it was one on a GPU only its ``config.yaml`` says: the checkpoint would be the same."""
    assert in_process(*words(tmp_path / "run", "train.max_updates=1")).code == 0
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return tmp_path / "run"


def pretend_it_was_trained_on_a_gpu(run_dir):
    file = run_dir / "config.yaml"
    config = yaml.safe_load(file.read_text())
    config["runtime"]["device"] = "cuda"
    file.write_text(yaml.safe_dump(config))


def test_evaluate_and_export_use_the_cpu_where_there_is_no_gpu(run_dir, tmp_path):
    """Evaluate and export compute on the CPU where the GPU of the run is not and say so."""
    expected, outs = in_process("evaluate", f"run_dir={run_dir}"), [tmp_path / "before.pt", tmp_path / "after.pt"]
    assert expected.code == 0
    assert in_process("export", f"run_dir={run_dir}", f"out={outs[0]}").err == ""

    pretend_it_was_trained_on_a_gpu(run_dir)
    evaluated = in_process("evaluate", f"run_dir={run_dir}")
    exported = in_process("export", f"run_dir={run_dir}", f"out={outs[1]}")
    assert (evaluated.code, exported.code) == (0, 0)
    assert evaluated.out == expected.out
    for outcome in (evaluated, exported):
        assert outcome.err.count("\n") == 1
        assert "runtime.device=cuda" in outcome.err
        assert "computing on the CPU" in outcome.err
    before, after = (torch.load(out) for out in outs)
    assert list(before) == list(after)
    assert all(torch.equal(before[name], after[name]) for name in before)
