"""The example of an own optimizer follows its equations, and trains by its name."""

import json
import runpy

from tests.support.commands import ROOT, in_process, words

EXAMPLES = ROOT / "examples"
rotated_adam = runpy.run_path(str(EXAMPLES / "rotated_adam.py"))["RotatedAdam"]


def test_it_trains_by_its_name(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    own = ["optimizer._target_=rotated_adam.RotatedAdam", "optimizer.rest=sgd", "train.max_updates=2"]
    outcome = in_process(*words(tmp_path, *own))
    assert outcome.code == 0, outcome
    assert json.loads((tmp_path / "summary.json").read_text())["updates"] == 2
