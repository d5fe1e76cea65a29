"""The best checkpoint is the best of the metric that was chosen, for all who ask later."""

import re
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import adl_dist
from adl_dist.checkpoint import layout
from adl_dist.errors import ConfigError
from adl_dist.report.goal import Goal
from tests.support.runs import toy_trainer
from tests.support.saved import position
from tests.support.toys import FixedImages
from tests.support.values import SILENT


def tenth(output, target):
    """A metric of a user's own, which no one knows the way of."""
    return (output[:, 0] > 0).sum(), len(target)


@pytest.mark.parametrize(
    ("goal", "pick"),
    [
        ({"best_metric": "validation_loss"}, min),
        ({"best_metric": "validation_tenth", "best_mode": "min"}, min),
        ({"best_metric": "validation_accuracy"}, max),
    ],
)
def test_the_best_of_evaluations_in_mid_epoch_is_kept(goal, pick, tmp_path):
    """Also where no checkpoint is due; the losses go up and down with the learning rate."""
    found = {}

    class Watch(adl_dist.Callback):
        def on_epoch(self, now):
            found[now.update] = now.metrics[goal["best_metric"]]

    trainer = toy_trainer(2, 2, metrics=["accuracy", tenth], optimizer=partial(torch.optim.SGD, lr=0.7), verify=False)
    policy = adl_dist.CheckpointPolicy(keep=1, keep_best=True, every_epochs=0, **goal)
    options = {"val_dataset": FixedImages(12, seed=1), "monitoring": SILENT, "callbacks": [Watch()]}
    length = {"epochs": 2, "batch_size": 4, "eval_every_updates": 1}
    trainer.fit(FixedImages(20), run_dir=tmp_path, checkpoints=policy, **length, **options)
    best = min(update for update, value in found.items() if value == pick(found.values()))  # the first of equals
    saved = layout.complete(tmp_path / "checkpoints")
    assert [path.name for path in saved] == [f"update-{update:08d}" for update in sorted({best, 10})]
    assert layout.best_of(saved) == layout.place(tmp_path / "checkpoints", best)


def test_what_the_best_mode_of_is_what_the_run_is_after_now(tmp_path):
    """A run may continue with another metric."""
    for update, metric in ((1, "validation_accuracy"), (2, "validation_loss")):
        path, values = layout.place(tmp_path, update), {"validation_loss": update, "validation_accuracy": update}
        layout.begin(path, "token")
        layout.commit(path, {**position(update, **values), "goal": {"metric": metric}}, {})
    assert layout.best_of(layout.complete(tmp_path)).name == "update-00000001"


def own_loss(out, target):
    return nn.functional.cross_entropy(out, target)


def accuracy(output, target):
    return (output.argmax(1) == target).sum(), len(target)


def fitted_with(stopping, folder, *, loss_fn, metrics=()):
    policy = adl_dist.CheckpointPolicy(keep_best=True)
    trainer = toy_trainer(1, loss_fn=loss_fn, metrics=metrics, verify=False)
    given = {"val_dataset": FixedImages(4, seed=1), "monitoring": SILENT, "callbacks": [stopping]}
    trainer.fit(FixedImages(4), epochs=1, batch_size=4, run_dir=folder, checkpoints=policy, **given)
    (saved,) = layout.complete(folder / "checkpoints")
    return layout.read_manifest(saved)["goal"]["metric"], stopping.best_value.split()[0]


@pytest.mark.parametrize(
    ("loss_fn", "metrics", "metric"),
    [
        (own_loss, [], "validation_loss"),
        (own_loss, ["accuracy"], None),
        (own_loss, [accuracy], None),
    ],
    ids=["own", "accuracy asked for", "own accuracy"],
)
def test_a_loss_of_ones_own_decides_itself(loss_fn, metrics, metric, tmp_path):
    """Its target may be of no class, and its accuracy say nothing."""
    found = fitted_with(adl_dist.EarlyStopping(), tmp_path, loss_fn=loss_fn, metrics=metrics)
    assert found == (metric, metric or "validation_accuracy")


def test_early_stopping_of_two_runs_follows_each_as_it_is(tmp_path):
    stopping = adl_dist.EarlyStopping()
    assert fitted_with(stopping, tmp_path / "own", loss_fn=own_loss)[1] == "validation_loss"
    assert fitted_with(stopping, tmp_path / "torch", loss_fn=nn.CrossEntropyLoss())[1] == "validation_accuracy"
    assert stopping.goal == Goal()
    with pytest.raises(ConfigError, match="watches validation_accuracy, but what is measured is validation_loss; give"):
        adl_dist.EarlyStopping(metric="validation_accuracy").on_epoch(SimpleNamespace(metrics={"validation_loss": 1.0}))


def test_a_metric_without_its_prefix_is_told_with_it():
    told = "did you mean 'validation_f1'?; there are validation_loss, validation_accuracy, validation_f1"
    with pytest.raises(ConfigError, match=re.escape(told) + "$"):
        Goal("f1", "max").check(["f1", "accuracy"])
