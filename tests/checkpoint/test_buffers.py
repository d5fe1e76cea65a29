"""Buffers that a ``state_dict`` omits survive a save and a resume if the forwards of the run move them."""

import logging
from collections import deque

import pytest
import torch
from torch import nn

from adl_dist.checkpoint import layout, storage
from adl_dist.checkpoint.state import refuse_hidden_state
from adl_dist.errors import ConfigError
from tests.support.commands import assert_same
from tests.support.runs import toy_trainer
from tests.support.toys import FixedImages
from tests.support.values import SILENT


class Scaled(nn.Module):
    """Divides by a running maximum, counts its training forwards, and adds a constant table."""

    def __init__(self):
        super().__init__()
        self.register_buffer("largest", torch.ones(()), persistent=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64), persistent=False)
        self.register_buffer("table", torch.linspace(0, 1, 72), persistent=False)
        self.register_buffer("recent", None, persistent=False)

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.largest.mul_(0.9).add_(x.detach().abs().max(), alpha=0.1)
                self.count.add_(1)
                new = x.detach().mean(0, keepdim=True)
                self.recent = new if self.recent is None else torch.cat([self.recent[-2:], new])
        return (
            x / self.largest.clone() + self.table / self.count + (0.0 if self.recent is None else self.recent.mean(0))
        )


class Remembers(nn.Module):
    """Keeps a number and a tensor in attributes, and computes with both."""

    def __init__(self):
        super().__init__()
        self.calls, self.memory = 0, None

    def forward(self, x):
        self.calls += 1
        y = x * (1 + 0.1 * self.calls) + (0 if self.memory is None else self.memory)
        self.memory = x.detach().mean()
        return y


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(72, 72), Scaled(), nn.Linear(72, 72), Scaled(), nn.Linear(72, 5))


def run(run_dir, epochs, K=2):
    trainer = toy_trainer(K, 2, model=net(), **({} if K == 1 else {"balance": {2: [3, 3], 3: [2, 2, 2]}[K]}))
    options = {"batch_size": 8, "val_dataset": FixedImages(9), "monitoring": SILENT}
    summary = trainer.fit(FixedImages(20), epochs=epochs, run_dir=run_dir, **options)
    return trainer, summary["validation_loss"]


def moved_in(run_dir):
    path = layout.complete(run_dir / "checkpoints")[-1]
    return {*storage.scan(path, storage.BUFFERS, layout.read_manifest(path)["files"])[0]}


@pytest.mark.parametrize("K", [1, 2])
def test_a_resumed_run_has_the_buffers_that_moved(K, tmp_path):
    whole, loss = run(None, 3, K)
    for epochs in (1, 2):
        run(tmp_path, epochs, K)
    resumed, resumed_loss = run(tmp_path, 3, K)
    assert_same(resumed.full_state_dict(), whole.full_state_dict())
    assert resumed_loss == loss
    assert moved_in(tmp_path) == {f"{unit}.{name}" for unit in (2, 4) for name in ("largest", "count", "recent")}
    assert not any("largest" in name for name in whole.full_state_dict())


def test_moved_buffers_have_the_same_names_in_another_cut(tmp_path):
    """And those that were restored are saved again, though this run does not move them."""
    run(tmp_path, 1, 2)
    _, loss = run(tmp_path, 1, 3)
    assert moved_in(tmp_path) == {f"{unit}.{name}" for unit in (2, 4) for name in ("largest", "count", "recent")}
    assert run(tmp_path, 1, 1)[1] == loss
    run(tmp_path, 2, 3)
    assert run(tmp_path, 2, 1)[1] == run(tmp_path, 2, 3)[1]


class Counts(nn.Module):
    """Its forward, which is cut, counts in a buffer of its own; a part of it counts in another one."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(72, 72), nn.Linear(72, 5)
        self.register_buffer("count", torch.zeros(()), persistent=False)
        self.register_buffer("later", torch.zeros(()), persistent=False)

    def forward(self, x):
        x = self.first(x.flatten(1))
        x = x * (1 + 0.1 * self.count.add_(1).clone())
        x = self.last(x.relu())
        return x * (1 + 0.1 * self.later.add_(1).clone())


def test_what_a_cut_module_moves_is_that_of_one_stage(tmp_path):
    """Each stage has a module in its place; one that does not move the buffer must not save what it was."""

    def trained(run_dir, epochs):
        torch.manual_seed(0)
        trainer = toy_trainer(2, 2, model=Counts())
        trainer.fit(FixedImages(20), epochs=epochs, batch_size=8, run_dir=run_dir, monitoring=SILENT)
        return trainer

    whole = trained(None, 4)
    for epochs in (1, 2, 3):
        trained(tmp_path, epochs)
    assert_same(trained(tmp_path, 4).full_state_dict(), whole.full_state_dict())


def test_an_evaluation_of_a_checkpoint_has_them_too(tmp_path):
    _, loss = run(tmp_path, 2)
    plain = toy_trainer(1, model=net(9))
    plain.load_checkpoint(tmp_path)
    assert plain.evaluate(FixedImages(9), batch_size=4)["validation_loss"] == pytest.approx(loss, rel=1e-6)


def test_a_second_fit_saves_what_the_first_one_moved(tmp_path):
    """The model's buffers are then no longer those of a new one."""
    options = {"batch_size": 8, "run_dir": tmp_path, "monitoring": SILENT}

    class Once(Scaled):
        def forward(self, x):
            if self.training and self.count < 3:
                self.count.add_(1)
            return x / self.count

    torch.manual_seed(0)
    trainer = toy_trainer(1, 2, model=nn.Sequential(nn.Flatten(), nn.Linear(72, 72), Once(), nn.Linear(72, 5)))
    for epochs in (1, 2):
        trainer.fit(FixedImages(20), epochs=epochs, **options)
    assert moved_in(tmp_path) == {"2.count"}


def test_hidden_state_is_refused_by_its_names():
    refuse_hidden_state([])
    with pytest.raises(
        ConfigError, match=r"^run_dir: 0.calls, 1.calls, 2.calls and 1 more of the model .* buffers, or"
    ):
        refuse_hidden_state([f"{unit}.calls" for unit in range(4)])


LOGGER = logging.getLogger("a user's model")
CALLS = 0


class Logs(nn.Module):
    def forward(self, x):
        LOGGER.debug("gets %s", x.shape)
        return x


class CountsGlobally(nn.Module):
    def forward(self, x):
        global CALLS
        CALLS += self.training
        return x * (1.0 + 0.1 * (CALLS % 3))


def fit_with(layer, run_dir):
    model = nn.Sequential(nn.Flatten(), layer, nn.Linear(72, 6))
    toy_trainer(1, 1, model=model).fit(FixedImages(8), epochs=1, batch_size=4, run_dir=run_dir, monitoring=SILENT)


def test_a_forward_may_log(tmp_path):
    fit_with(Logs(), tmp_path)


def test_a_global_variable_that_moves_is_refused_with_a_run_dir(tmp_path):
    with pytest.raises(ConfigError, match="run_dir: global CALLS of the model or the loss change with every"):
        fit_with(CountsGlobally(), tmp_path)


def test_a_resumed_run_has_numbers_and_tensors_in_attributes(tmp_path):
    def run(run_dir, epochs):
        torch.manual_seed(0)
        layers = nn.Linear(72, 8), Remembers(), nn.Linear(8, 8), Remembers(), nn.Linear(8, 5)
        trainer = toy_trainer(2, 2, model=nn.Sequential(nn.Flatten(), *layers))
        trainer.fit(FixedImages(20), epochs=epochs, batch_size=8, run_dir=run_dir, monitoring=SILENT)
        return trainer.full_state_dict()

    run(tmp_path / "stopped", 1)
    assert_same(run(tmp_path / "stopped", 2), run(tmp_path / "whole", 2))


class Recurrent(nn.Module):
    """Keeps the state of an LSTM, a pair that is not there before the first forward, and counts in a list."""

    def __init__(self, keeps=tuple):
        super().__init__()
        self.cell, self.calls, self.state, self.keeps = nn.LSTMCell(8, 8), [0], None, keeps

    def forward(self, x):
        if self.training:
            self.calls[0] += 1
        before = None if self.state is None else [part[: len(x)] for part in self.state]
        if before is not None and len(before[0]) < len(x):
            before = None
        h, c = self.cell(x, before)
        if self.training:
            self.state, self.shape = self.keeps((h.detach(), c.detach())), x.shape
        return h / self.calls[0]


def recurrent_run(run_dir, epochs, **options):
    torch.manual_seed(0)
    layers = nn.Linear(72, 8), Recurrent(**options), nn.Linear(8, 8), Recurrent(**options), nn.Linear(8, 5)
    trainer = toy_trainer(2, 2, model=nn.Sequential(nn.Flatten(), *layers))
    trainer.fit(FixedImages(20), epochs=epochs, batch_size=8, run_dir=run_dir, monitoring=SILENT)
    return trainer.full_state_dict()


def test_a_resumed_run_has_containers_in_attributes(tmp_path):
    recurrent_run(tmp_path / "stopped", 1)
    assert_same(recurrent_run(tmp_path / "stopped", 2), recurrent_run(tmp_path / "whole", 2))


def test_what_becomes_an_object_is_refused_at_the_first_update(tmp_path):
    told = r"^run_dir: what a forward leaves .* 4.state is a deque now; expected tensors.* train without run_dir$"
    with pytest.raises(ConfigError, match=told):
        recurrent_run(tmp_path, 1, keeps=deque)
    recurrent_run(None, 1, keeps=deque)


class Cached(nn.Module):
    """Keeps a table of as many rows as the micro-batch has, and makes another where that is not so."""

    def __init__(self, *, makes_another=True):
        super().__init__()
        self.table, self.makes_another = None, makes_another

    def forward(self, x):
        if self.table is None or (self.makes_another and len(self.table) != len(x)):
            self.table = torch.linspace(1, 2, len(x))[:, None] * torch.ones(x.shape[1])
        return x * self.table


def cached(**options):
    torch.manual_seed(0)
    layers = nn.Linear(72, 8), Cached(**options), nn.Linear(8, 8), Cached(**options), nn.Linear(8, 5)
    return toy_trainer(2, 2, model=nn.Sequential(nn.Flatten(), *layers))


def test_a_restored_cache_serves_micro_batches_of_other_sizes(tmp_path):
    trainer = cached()
    trainer.fit(FixedImages(20), epochs=1, batch_size=8, run_dir=tmp_path, monitoring=SILENT)
    assert moved_in(tmp_path) == {"2.table", "4.table"}
    plain = cached()
    plain.load_checkpoint(tmp_path)
    for size in (9, 2):
        losses = [one.evaluate(FixedImages(9), batch_size=size)["validation_loss"] for one in (trainer, plain)]
        assert losses[0] == losses[1]


def test_a_cache_of_one_size_is_refused_before_training(tmp_path):
    with pytest.raises(ConfigError, match=r"stage 0 .* gets float32\[B, 2, 6, 6\] and fails on it: .*must match"):
        cached(makes_another=False).fit(FixedImages(20), epochs=1, batch_size=8, run_dir=tmp_path, monitoring=SILENT)
