"""The live line: every figure is that of the epoch so far, whenever it is drawn."""

import io
import math
import re

import pytest

from adl_dist.report import progress as progress_module
from adl_dist.report.progress import Progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def lines(monkeypatch):
    """A terminal on which every record draws the line again."""
    monkeypatch.setattr(progress_module, "REDRAW_SECONDS", -1.0)
    return Terminal()


def loss(update, size):
    return {"name": "train/loss", "value": 0.5, "num_samples": size, "elapsed_seconds": 1.0, "update": update}


def staleness(stage, *offsets):
    return {"name": "stage/staleness", "stage": stage, "value": sum(offsets) / len(offsets), "by_offset": offsets}


def test_accuracy_is_that_of_the_samples_it_was_counted_on(lines):
    progress = Progress(num_stages=1, out=lines)
    progress.begin(0, 1, 3)
    for update, size in enumerate((4, 4, 2)):
        progress.update(loss(update, size))
        progress.update({"name": "train/accuracy", "value": 1.0, "update": update})
    progress.end(None, None)
    assert set(re.findall(r"acc +([\d.]+)%", lines.getvalue())) == {"100.00"}


def test_staleness_is_the_mean_of_the_epoch_not_of_a_group(lines):
    progress = Progress(num_stages=2, out=lines)
    progress.begin(0, 2, 4)
    for record in (staleness(0, 1, 1, 1, 1), staleness(0, 2), staleness(1, 0)):
        progress.update(record)
    progress.update(loss(0, 4))
    assert "staleness 1.2/0" in lines.getvalue().splitlines()[-1]
    progress.begin(1, 2, 4)
    progress.update(staleness(0, 3))
    progress.update(loss(1, 4))
    assert "staleness 3/-" in lines.getvalue()


def test_the_loss_of_training_is_the_mean_over_the_epoch(lines):
    progress = Progress(num_stages=1, out=lines)
    for epoch, losses, mean in ((0, (1.0, 3.0), 7 / 3), (1, (5.0, 6.0), 17 / 3)):
        progress.begin(epoch, 2, 4)
        assert progress.train_loss is None
        for update, value in enumerate(losses):
            progress.update({**loss(update, 1 + update), "value": value})
        assert progress.train_loss == mean


def test_perplexity_is_that_of_the_mean_loss(lines):
    progress = Progress(num_stages=1, out=lines)
    progress.begin(0, 1, 3)
    for update, value in enumerate((1.0, 3.0)):
        progress.update({**loss(update, 4), "value": value})
        of_update = {"value": math.exp(value), "num_targets": 4, "is_metric": True, "update": update}
        progress.update({"name": "train/perplexity", **of_update})
    progress.update({"name": "train/skipped_updates", "value": 1, "update": 2})
    last = lines.getvalue().splitlines()[-1]
    assert f"perplexity {math.exp(2.0):.4g} " in last
    assert last.endswith("skipped 1")
