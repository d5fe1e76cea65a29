"""A run folder knows the loss, the optimizer and the schedule of the script that made it."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler

import adl_dist
from adl_dist.checkpoint.run_dir import may_change
from adl_dist.cli.config import schema
from adl_dist.errors import CheckpointError, ConfigError
from adl_dist.optim import cosine
from tests.support.commands import snapshot
from tests.support.runs import toy_trainer
from tests.support.toys import FixedImages
from tests.support.values import SILENT


def sgd(**options):
    return lambda p: torch.optim.SGD(p, **{"lr": 0.1, **options})


def two_groups(rates):
    def make(parameters):
        matrices, rest = ([p for p in parameters if (p.ndim > 1) is wanted] for wanted in (True, False))
        return torch.optim.SGD([{"params": matrices, "lr": rates[0]}, {"params": rest}], lr=rates[1])

    return make


def squares(out, target):
    return (out.softmax(1) - F.one_hot(target, 5)).square().mean()


def fit(run_dir, epochs=1, *, K=2, loss_fn=None, optimizer=None, lr_schedule=None, **more):
    trainer = toy_trainer(K, 2, loss_fn=loss_fn, optimizer=optimizer or sgd(), lr_schedule=lr_schedule, verify=False)
    options = {"batch_size": 8, "run_dir": run_dir, "monitoring": SILENT, **more}
    return trainer.fit(FixedImages(20), epochs=epochs, **options)


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ({}, {"optimizer": sgd(momentum=0.9)}, "optimizer.momentum is 0 there and 0.9 here"),
        (
            {"optimizer": two_groups([0.1, 0.2])},
            {"optimizer": two_groups([0.1, 0.3])},
            r"optimizer.lr is \[0.1, 0.2\] there and \[0.1, 0.3\] here",
        ),
        (
            {"loss_fn": F.cross_entropy},
            {"loss_fn": squares},
            "loss.name is 'torch.nn.functional.cross_entropy' there and 'tests.*squares' here",
        ),
        ({}, {"lr_schedule": cosine}, "lr_schedule.made_by.name is None there and 'adl_dist.optim.cosine' here"),
        (
            {"lr_schedule": lambda o: lr_scheduler.StepLR(o, 3)},
            {"lr_schedule": lambda o: lr_scheduler.ExponentialLR(o, 0.9)},
            "lr_schedule.name is 'torch.optim.lr_scheduler.StepLR' there and 'torch.optim.lr_scheduler.ExponentialLR'",
        ),
    ],
)
def test_an_edited_script_is_refused_with_both_values(before, after, told, tmp_path):
    fit(tmp_path, **before)
    files = snapshot(tmp_path)
    with pytest.raises(ConfigError, match=rf"another run: (?:.* here, )?{told}.*; choose another run_dir .*init_from="):
        fit(tmp_path, 2, **after)
    assert snapshot(tmp_path).keys() - files.keys() == set()


@pytest.mark.parametrize(
    "script",
    [
        lambda: {"optimizer": lambda p: torch.optim.SGD([*p], lr=0.1), "loss_fn": lambda out, y: squares(out, y)},
        lambda: {"optimizer": two_groups([0.1, 0.2]), "loss_fn": Counting()},
        lambda: {"lr_schedule": cosine, "optimizer": partial(torch.optim.SGD, lr=torch.tensor(0.1))},
    ],
    ids=["lambdas", "groups", "cosine"],
)
def test_the_same_script_continues_longer_and_in_another_cut(script, tmp_path):
    for epochs, K in ((1, 2), (2, 3)):
        assert fit(tmp_path, epochs, K=K, **script())["updates"] == 3 * epochs


class Counting(nn.CrossEntropyLoss):
    """Its own counter is no setting once it has moved."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, out, target):
        self.calls += 1
        return super().forward(out, target)


# --- what a script prints ---------------------------------------------------------------------------------------------


def test_what_may_change_is_what_the_page_says():
    """Any other setting of these two, once forgotten there, would keep a run out of its own folder."""
    names = {f"{group}.{key}" for group in ("runtime", "partition") for key in schema.keys_of(group)}
    assert {name for name in names if not may_change(name)} == {
        *("runtime.channels_last", "runtime.autocast", "runtime.codec", "runtime.gradient_codec"),
        *("runtime.checkpoint_every_updates", "partition.tied"),
    }


def test_load_checkpoint_takes_a_run_folder(tmp_path):
    keep = adl_dist.CheckpointPolicy(keep=9)
    fit(tmp_path, 3, checkpoints=keep, val_dataset=FixedImages(7), optimizer=sgd(lr=2.0))
    saved = sorted((tmp_path / "checkpoints").iterdir())
    losses = []
    trainer = toy_trainer(2, verify=False)
    for path, which in ((tmp_path, "best"), (tmp_path, "newest"), *((path, "newest") for path in saved)):
        trainer.load_checkpoint(path, which)
        metrics = trainer.evaluate(FixedImages(7), batch_size=4)
        losses.append((-metrics["validation_accuracy"], metrics["validation_loss"]))
    best, newest, *each = losses
    assert (best, newest) == (min(each), each[-1])
    with pytest.raises(CheckpointError, match="none holds no complete checkpoint"):
        trainer.load_checkpoint(tmp_path / "none")
    with pytest.raises(CheckpointError, match=r"checkpoint=worst: .*expected best, .*newest, or a checkpoint folder"):
        trainer.load_checkpoint(tmp_path, "worst")
