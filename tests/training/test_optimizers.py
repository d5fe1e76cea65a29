"""Without delays, K stages with an optimizer each train as a plain loop with one optimizer of the uncut model."""

from functools import partial

import pytest
import torch
from torch import nn

from adl_dist.optimizers import Muon, mark_roles
from tests.support.commands import assert_same
from tests.support.runs import toy_trainer
from tests.support.toys import NUM_CLASSES, FixedImages
from tests.support.values import SILENT

SIZE, M, GROUPS, SPOILT = 3, 4, 4, 1  # samples of a micro-batch, micro-batches of a group, groups, the one with a NaN
OPTIMIZERS = {
    "muon": partial(Muon, rest_options={"weight_decay": 0.3}),
    "muon and sgd": partial(Muon, weight_decay=0.7, rest="sgd", rest_options={"weight_decay": 0.1}),
    "nadamw": partial(
        torch.optim.NAdam, lr=1e-2, betas=(0.99, 0.999), momentum_decay=0.004, weight_decay=0.1,
        decoupled_weight_decay=True,
    ),
}  # fmt: skip


class Position(nn.Module):
    """Adds a table, and has a layer that is never used."""

    def __init__(self):
        super().__init__()
        self.pos_embed = nn.Parameter(torch.randn(4, 36))
        self.spare = nn.Linear(4, 4)

    def forward(self, x):
        return (x.flatten(2) + self.pos_embed).view(x.shape)


def net():
    torch.manual_seed(0)
    flat = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 16))
    layers = [nn.Conv2d(2, 4, 3, padding=1), Position(), nn.Conv2d(4, 4, 3, padding=1), flat, nn.LayerNorm(16)]
    model = nn.Sequential(*layers, nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, NUM_CLASSES))
    model[2].weight.requires_grad_(False)
    return model


def data():
    images = FixedImages(SIZE * M * GROUPS)
    images.images[SPOILT * SIZE * M + 2, 0, 1, 1] = float("nan")
    return images


def by_a_plain_loop(make):
    model, images = net(), data()
    mark_roles(model)
    optimizer = make(model.parameters())
    for group in range(GROUPS):
        for first in range(group * SIZE * M, (group + 1) * SIZE * M, SIZE):
            x, target = images.images[first : first + SIZE], torch.tensor(images.labels[first : first + SIZE])
            nn.functional.cross_entropy(model(x), target).backward(torch.tensor(1 / M))
        if group != SPOILT:
            optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


@pytest.mark.parametrize(("method", "balance"), [("bp", [8]), ("1f1b", [3, 5]), ("bp", [2, 3, 3])])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_k_is_a_plain_loop_of_the_uncut_model(name, method, balance):
    """With frozen and unused parameters, weight decay, and a group that is skipped: the same bits."""
    options = {"model": net(), "optimizer": OPTIMIZERS[name], "non_finite": "skip", "balance": balance}
    trainer = toy_trainer(len(balance), M, method, **options)
    summary = trainer.fit(data(), epochs=1, batch_size=SIZE * M, shuffle=False, monitoring=SILENT)
    assert (summary["updates"], summary["skipped_updates"]) == (GROUPS, 1)
    found = trainer.full_state_dict()
    assert_same(found, by_a_plain_loop(OPTIMIZERS[name]))
    start = net().state_dict()
    still = ["1.spare.weight", "1.spare.bias", "2.weight"]
    assert [key for key in found if torch.equal(found[key], start[key])] == still


def test_a_rate_that_is_one_tensor_is_each_stage_s_own():
    """torch's schedules write to it, and each stage has a schedule."""
    schedule, states = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.7), []
    for rate in (0.1, torch.tensor(0.1, dtype=torch.float64)):
        optimizer = partial(torch.optim.Adam, lr=rate, eps=1e-3)
        options = {"balance": [2, 3, 3], "optimizer": optimizer, "lr_schedule": schedule, "dtype": torch.float64}
        trainer = toy_trainer(3, 1, model=net(), **options)
        trainer.fit(FixedImages(12, dtype=torch.float64), epochs=1, batch_size=3, monitoring=SILENT)
        states.append(trainer.full_state_dict())
        assert float(rate) == 0.1
    for name, expected in states[0].items():
        torch.testing.assert_close(states[1][name], expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("head", "shapes"), [("linear", [(5, 16)]), ("predsim", [(5, 16), (4, 4, 3, 3)])])
def test_the_heads_of_local_losses_belong_to_the_rest(head, shapes):
    made = []

    def muon(parameters):
        made.append(Muon(parameters))
        return made[-1]

    trainer = toy_trainer(2, 1, "dgl", {"head": head}, optimizer=muon)
    trainer.fit(FixedImages(8), epochs=1, batch_size=4, monitoring=SILENT)
    matrices, rest = ([tuple(p.shape) for p in group["params"]] for group in made[0].param_groups)
    assert matrices == [(4, 2, 3, 3), (4, 4, 3, 3), (4, 4, 3, 3)]
    assert [shape for shape in rest if len(shape) > 1] == shapes
