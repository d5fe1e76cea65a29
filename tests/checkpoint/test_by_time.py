"""``checkpoint_every_minutes``: saved where the pipeline is empty anyway, so that no value changes."""

import json

import pytest

from tests.support.commands import assert_same
from tests.support.runs import toy_trainer
from tests.support.toys import FixedImages, batch_norm_net
from tests.support.values import values

OFTEN = {"every_epochs": 0, "every_minutes": 1e-9, "keep": 99}


def fit(run_dir, method, *, epochs=2, quiet=True, **of_checkpoints):
    trainer = toy_trainer(2, 2, method, model=batch_norm_net(dropout=0.2), balance=[3, 4])
    options = values(quiet=quiet, tensorboard=False, **of_checkpoints)
    trainer.fit(FixedImages(20), epochs=epochs, batch_size=4, run_dir=run_dir, **options)
    records = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    losses = [record["value"] for record in records if record["name"] == "train/loss"]
    return trainer.full_state_dict(), losses, sorted(path.name for path in run_dir.glob("checkpoints/*"))


@pytest.mark.parametrize(("method", "num_saved"), [("1f1b", 10), ("adl", 2)])
def test_saving_by_time_changes_no_loss_and_no_weight(method, num_saved, tmp_path):
    """A method that empties its pipeline at each update saves there; others at the end of an epoch."""
    state, losses, saved = fit(tmp_path / "by-time", method, **OFTEN)
    expected, expected_losses, at_end = fit(tmp_path / "at-end", method, every_epochs=0)
    assert_same(state, expected)
    assert losses == expected_losses
    assert (len(saved), at_end) == (num_saved, saved[-1:])


def test_a_checkpoint_by_time_in_mid_epoch_continues_the_same(tmp_path):
    *_, saved = fit(tmp_path / "by-time", "1f1b", epochs=1, **OFTEN)
    middle = tmp_path / "by-time/checkpoints" / saved[2]
    trainer = toy_trainer(2, 2, "1f1b", model=batch_norm_net(dropout=0.2), balance=[3, 4])
    trainer.fit(
        FixedImages(20), epochs=1, batch_size=4, run_dir=tmp_path / "on", resume=str(middle), **values(quiet=True)
    )
    assert_same(trainer.full_state_dict(), fit(tmp_path / "whole", "1f1b", epochs=1)[0])


@pytest.mark.parametrize(("minutes", "has_note"), [(1e-9, True), (60.0, False)])
def test_a_period_shorter_than_an_epoch_is_noted_once(minutes, has_note, tmp_path, capsys):
    fit(tmp_path, "adl", quiet=False, every_minutes=minutes)
    notes = [line for line in capsys.readouterr().out.splitlines() if "every_updates=1" in line]
    assert len(notes) == has_note
