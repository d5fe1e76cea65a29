"""A run folder that was made on a machine with a GPU, on one that has none."""

import torch
import yaml

from tests.support.commands import in_process, words


def test_evaluate_and_export_use_the_cpu_where_there_is_no_gpu(tmp_path, monkeypatch):
    """That the run was one on a GPU only its ``config.yaml`` says: the checkpoint would be the same."""
    run_dir = tmp_path / "run"
    assert in_process(*words(run_dir, "train.max_updates=1")).code == 0
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    expected, outs = in_process("evaluate", f"run_dir={run_dir}"), [tmp_path / "before.pt", tmp_path / "after.pt"]
    assert expected.code == 0
    assert in_process("export", f"run_dir={run_dir}", f"out={outs[0]}").err == ""

    config = yaml.safe_load((run_dir / "config.yaml").read_text())
    config["runtime"]["device"] = "cuda"
    (run_dir / "config.yaml").write_text(yaml.safe_dump(config))
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
