"""A cut, delays and links that follow from a measurement."""

import json
import re
import time

import pytest
import torch
from torch import nn

import adl_dist
from adl_dist.errors import ConfigError, PartitionError
from adl_dist.partition.costs import Profile
from adl_dist.schedule import method
from tests.support.toys import NUM_CLASSES, FixedImages
from tests.support.values import SILENT, values

LOSS = nn.CrossEntropyLoss()


@pytest.fixture(autouse=True)
def _few_rounds_are_enough(monkeypatch):
    monkeypatch.setattr("adl_dist.partition.measure.MOST", 5)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


class Slow(nn.Linear):
    def __init__(self, seconds):
        super().__init__(4, 4)
        self.seconds = seconds

    def forward(self, x):
        time.sleep(self.seconds)
        return super().forward(x)


def trainer_of(model, **changed):
    options = {"method": method("adl", accumulation_steps=2), "num_stages": 2, "balance": "auto", **changed}
    return adl_dist.Trainer(model, loss_fn=LOSS, optimizer=sgd, **values(**options))


def slow_in_the_middle():
    flat = nn.Sequential(nn.Flatten(), nn.Linear(72, 4))
    return nn.Sequential(flat, Slow(0.002), Slow(0.002), Slow(0.002), Slow(0.012), nn.Linear(4, NUM_CLASSES))


def fit(trainer, run_dir=None, **changed):
    return trainer.fit(FixedImages(8), batch_size=4, monitoring=SILENT, **{"epochs": 1, "run_dir": run_dir, **changed})


def test_auto_cuts_before_the_slow_unit_and_keeps_its_profile(tmp_path):
    trainer = trainer_of(slow_in_the_middle(), granularity="block")
    fit(trainer, tmp_path)
    assert trainer._partitioned.sizes == [4, 2]
    profile = Profile.load(tmp_path / "profile.json")
    assert [unit.name for unit in profile.units] == ["0.1", "1", "2", "3", "4", "5"]
    assert set(trainer.full_state_dict()) == set(slow_in_the_middle().state_dict())

    # The same command cuts by the same measurement, whatever it would measure now; one of something else is not read.
    assert Profile.load(tmp_path / "profile.json", {**profile.of, "micro_batch_size": 7}) is None
    assert Profile.load(tmp_path / "profile.json", profile.of) == profile
    told = json.loads((tmp_path / "profile.json").read_text())
    told["units"][0]["forward"] = 100.0
    (tmp_path / "profile.json").write_text(json.dumps(told))
    again = trainer_of(slow_in_the_middle(), granularity="block")
    fit(again, tmp_path, epochs=2)
    assert again._partitioned.sizes == [1, 5]

    slower = trainer_of(slow_in_the_middle(), granularity="block", speeds=[1.0, 6.0])
    fit(slower)
    assert slower._partitioned.sizes[0] < 4
    (tmp_path / "profile.json").write_text("[]")
    with pytest.raises(PartitionError, match=r"profile\.json is not a profile .*; remove it to measure again"):
        Profile.load(tmp_path / "profile.json")


def test_measured_delays_are_those_of_the_run_for_good(tmp_path):
    """Values depend on them: whatever is measured when the run continues, it keeps them."""
    auto = {"method": method("adl", accumulation_steps=1, delay="auto"), "num_stages": 3, "granularity": "block"}

    def means(run_dir=None, **changed):
        trainer = trainer_of(slow_in_the_middle(), **auto)
        return trainer, [stage["staleness_max"] for stage in fit(trainer, run_dir, **changed)["stages"]]

    first, staleness = means(tmp_path)
    delays = json.loads((tmp_path / "delays.json").read_text())
    assert 2 <= sum(delays) <= 5, "at least K-1-k where work is not negligible"
    assert delays[-1] == 0
    assert staleness == [min(d, 1) for d in delays], "in a run of two micro-batches"
    (tmp_path / "delays.json").write_text("[7, 3, 0]")
    again, _ = means(tmp_path, epochs=2)
    assert "delays of this run: [7, 3, 0] micro-batches" in again._partitioned.notes
    with pytest.raises(ConfigError, match=r"has the delays \[7, 3, 0\], but this trainer has settled on"):
        fit(first, tmp_path, epochs=3)
    (tmp_path / "delays.json").write_text('{"a": 1}')
    with pytest.raises(ConfigError, match=r"delays\.json cannot be read: invalid .* remove it"):
        means(tmp_path, epochs=3)
    with pytest.raises(ConfigError, match=r"follows from measured stages; use PartitionSpec\(balance='auto'\)"):
        trainer_of(slow_in_the_middle(), **auto, balance="even")


# --- Links -------------------------------------------------------------------------------------------------------


def test_after_a_run_a_script_hears_how_uneven_its_cut_was(capsys):
    trainer = trainer_of(slow_in_the_middle(), balance=[5, 1])
    trainer.fit(FixedImages(8), batch_size=4, epochs=1, run_dir=None, monitoring=adl_dist.Monitoring())
    assert re.search(r"^note: stages were busy \d+%, \d+% of the time: .*balance='auto'", capsys.readouterr().out, re.M)
