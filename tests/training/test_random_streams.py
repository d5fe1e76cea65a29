"""What layers draw from the global random streams is seeded; the caller's streams stay in place."""

import random
import threading

import pytest
import torch
from torch import nn

import adl_dist
from tests.support.commands import assert_same
from tests.support.runs import pick, sgd, toy_trainer
from tests.support.toys import FixedImages, batch_norm_net
from tests.support.values import SILENT


class DrawsInAThread(adl_dist.Callback):
    """Draws from Python's stream in another thread while training runs, as the retries of a storage do."""

    def __init__(self):
        self.over, self.drawn = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self.draw, daemon=True)

    def on_start(self, now):
        self.thread.start()

    def on_end(self, now):
        self.over.set()
        self.thread.join()

    def draw(self):
        while not self.over.wait(0.001):
            random.random()
            self.drawn.set()


def test_draws_of_another_thread_change_nothing():
    found, drawing = [], DrawsInAThread()
    for callbacks in ([], [drawing]):
        trainer = toy_trainer(2, 2, model=batch_norm_net(dropout=0.2))
        trainer.fit(FixedImages(20), epochs=1, batch_size=4, monitoring=SILENT, callbacks=callbacks)
        found.append(trainer.full_state_dict())
    assert drawing.drawn.is_set()
    assert_same(*found)


class NoisyGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return noisy(grad)


class Noise(nn.Module):
    def forward(self, x):
        return NoisyGradient.apply(x)


class NoisySGD(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        for p in self.param_groups[0]["params"]:
            p.add_(torch.randn_like(p), alpha=0.01)


def noisy(grad):
    return grad + 0.1 * torch.randn_like(grad) * random.random()


def noise_in_backward():
    net = batch_norm_net(dropout=0.2)
    return nn.Sequential(*net[:2], Noise(), *net[2:4], Noise(), *net[4:])


def noise_by_hooks():
    net = batch_norm_net(dropout=0.2)
    for p in net.parameters():
        p.register_hook(noisy)
    return net


NOISY = {
    "backward": {"model": noise_in_backward},
    "hooks": {"model": noise_by_hooks},
    "optimizer": {"model": lambda: batch_norm_net(dropout=0.2), "optimizer": lambda p: NoisySGD(p, lr=0.1)},
}
NOISY_WAYS = [
    ("backward", "1f1b", 3, {"split_backward": True}), ("hooks", "adl", 2, {}), ("optimizer", "fr", 3, {}),
]  # fmt: skip


def with_noise(where, method, K, options, **more):
    made = {name: make() if name == "model" else make for name, make in NOISY[where].items()}
    trainer = toy_trainer(K, 2, method, options, **{"optimizer": sgd, **made, **more})
    summary = trainer.fit(FixedImages(12), epochs=2, batch_size=4, monitoring=SILENT)
    return trainer.full_state_dict(), summary


@pytest.mark.parametrize(("where", "method", "K", "options"), NOISY_WAYS)
def test_draws_of_a_backward_and_an_update_know_no_order(where, method, K, options):
    """Whichever stage of one process is first."""
    balance = {} if where == "hooks" else {"balance": "even"}
    with pick(min):
        first_stage_first, _ = with_noise(where, method, K, options, **balance)
    assert_same(first_stage_first, with_noise(where, method, K, options, **balance)[0])
    (moved,) = [t for name, t in first_stage_first.items() if name.endswith("2.bias")]
    assert moved.abs().sum() > 0


def test_nor_do_those_of_the_update_of_a_head():
    cut = {"balance": "even", "granularity": "block"}  # a head takes one tensor
    with pick(min):
        first_stage_first, _ = with_noise("optimizer", "dni", 3, {}, **cut)
    assert_same(first_stage_first, with_noise("optimizer", "dni", 3, {}, **cut)[0])


def test_draws_of_a_hook_are_seeded_with_one_stage_too():
    """Those of Python's stream, which is seeded only where the trial has seen something draw from it."""
    found = []
    for seed in (1, 2):
        trainer = toy_trainer(1, 2, model=noise_by_hooks(), optimizer=sgd)
        random.seed(seed)
        trainer.fit(FixedImages(12), epochs=1, batch_size=4, monitoring=SILENT)
        found.append(trainer.full_state_dict())
    assert_same(*found)


class LayerDrop(nn.Module):
    """Residual layers that are left out at random, which all stages must decide alike."""

    def __init__(self, dropout):
        super().__init__()
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Dropout(dropout)) for _ in range(5)]
        self.first, self.layers, self.last = nn.Linear(72, 8), nn.ModuleList(layers), nn.Linear(8, 5)

    def forward(self, x):
        x = self.first(x.flatten(1))
        for layer in self.layers:
            if self.training and torch.rand([]) < 0.4:
                continue
            x = x + layer(x)
        return self.last(x)


def test_a_stage_whose_layers_are_all_left_out_draws_nothing():
    """The comparison at the start goes on with the streams of the stage before."""
    data, options = FixedImages(60, dtype=torch.float64), {"balance": "flops", "dtype": torch.float64, "verify": True}
    trainer = toy_trainer(4, 2, model=LayerDrop(dropout=0.2), **options)
    trainer.fit(data, epochs=1, batch_size=4, monitoring=SILENT)
