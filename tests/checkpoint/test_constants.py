"""What a model holds next to its state, and what an optimizer copied: the same where a run continues, or refused."""

import numpy as np
import pytest
import torch
from torch import nn

from adl_dist.checkpoint.constants import constants_of
from adl_dist.errors import CheckpointError
from tests.support.commands import assert_same
from tests.support.runs import toy_trainer
from tests.support.toys import FixedImages
from tests.support.values import SILENT

KINDS = {
    "buffer": lambda table: table, "plain": lambda table: table, "array": lambda table: table.numpy(),
    "list": lambda table: table.tolist(),
}  # fmt: skip


class Features(nn.Module):
    """Random features, drawn when the model is built."""

    def __init__(self, kind):
        super().__init__()
        table = torch.randn(6, 6)
        if kind in ("buffer", "persistent"):
            self.register_buffer("table", table, persistent=kind == "persistent")
        else:
            self.table = KINDS[kind](table)

    def forward(self, h):
        return torch.cos(h @ torch.as_tensor(np.asarray(self.table), dtype=h.dtype))


def trainer(kind, seed, K=2, **options):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Flatten(), nn.Linear(72, 6), Features(kind), nn.Linear(6, 5))
    return toy_trainer(K, model=model, balance="even", **options)


def fit(kind, seed, folder, epochs, **options):
    made = trainer(kind, seed, **options)
    made.fit(FixedImages(8), epochs=epochs, batch_size=4, run_dir=folder, monitoring=SILENT)
    return made.full_state_dict()


@pytest.mark.parametrize("K", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_other_constants_are_not_continued_with(kind, K, tmp_path, capfd):
    fit(kind, 0, tmp_path / "run", 1, K=K)
    told = r"'2.table' of the model is no longer what it was in that run, and as it does not move, the checkpoint"
    with pytest.raises(CheckpointError, match=told):
        fit(kind, 1, tmp_path / "run", 2, K=K)
    trainer(kind, 1).load_checkpoint(tmp_path / "run")  # of weights for another use
    assert (
        "'2.table' of the model is no longer what it was in that run, and the checkpoint does" in capfd.readouterr().err
    )
    assert_same(fit(kind, 0, tmp_path / "run", 2, K=K), fit(kind, 0, tmp_path / "whole", 2, K=K))


def continue_with(layers, folder):
    """Train an epoch of one run with each of the ``layers`` in the midst of the model."""
    for epochs, layer in enumerate(layers, start=1):
        model = nn.Sequential(nn.Flatten(), nn.Linear(72, 6), layer, nn.Linear(6, 5))
        trainer = toy_trainer(2, model=model, balance="even")
        trainer.fit(FixedImages(8), epochs=epochs, batch_size=4, run_dir=folder, monitoring=SILENT)


class Scratch(nn.Module):
    """Holds memory that nothing has filled: one that its forward writes to, and one that is for another use."""

    def __init__(self, filled_with):
        super().__init__()
        self.register_buffer("work", torch.full((3, 3), filled_with), persistent=False)
        self.register_buffer("cache", torch.full((3, 3), filled_with), persistent=False)

    def forward(self, h):
        self.work.copy_(h.detach()[:1, :3].expand(3, 3))
        return h + self.work[0, 0]


def test_memory_that_no_forward_reads_may_hold_anything(tmp_path):
    continue_with([Scratch(0.0), Scratch(5.0)], tmp_path)


class Extended(Features):
    """Has a longer table than the run, of which it uses the beginning."""

    def __init__(self, rows):
        super().__init__("buffer")
        self.table = torch.cat([self.table, torch.zeros(rows - 6, 6)])

    def forward(self, h):
        return torch.cos(h @ self.table[:6])


def test_a_table_of_another_size_is_not_compared(tmp_path):
    torch.manual_seed(0)
    layers = [Extended(6)]
    torch.manual_seed(0)
    continue_with([*layers, Extended(9)], tmp_path)


HELD = {
    "backward": np.linspace(0, 1, 32)[::-1], "complex": np.ones(32, np.complex64), "texts": ["a"] * 32,
    "with a tensor": [0.0] * 31 + [torch.ones((), requires_grad=True)], "expanded": torch.ones(1).expand(10**6, 10**6),
    "sparse": torch.eye(32).to_sparse(),
    "rows": [[0.5] * 4] * 8, "empty rows": [[]] * 32, "not finite": [float("nan")] * 32,
}  # fmt: skip


def test_anything_may_stand_next_to_the_weights():
    model = nn.Linear(2, 2)
    model.held = itself = [0.0] * 31
    itself.append(itself)
    for name, value in HELD.items():
        setattr(model, name, value)
    found = constants_of(model)
    assert found == {
        "backward": [32.0, 1.0, pytest.approx(23 / 31), pytest.approx(15 / 31), pytest.approx(7 / 31)],
        "expanded": [1e12, 1.0, 1.0, 1.0, 1.0], "rows": [8.0, 0.5, 0.5, 0.5, 0.5],
        "not finite": [32.0, 0.0, 0.0, 0.0, 0.0], "held": [32.0, 0.0, 0.0, 0.0, 0.0],
        "with a tensor": [32.0, 0.0, 0.0, 0.0, 0.0], "with a tensor[31]": [1.0, 1.0],
    }  # fmt: skip


def test_what_a_checkpoint_holds_may_be_drawn_anew(tmp_path):
    fit("persistent", 0, tmp_path / "run", 1)
    assert_same(fit("persistent", 1, tmp_path / "run", 2), fit("persistent", 0, tmp_path / "whole", 2))


class Lookahead(torch.optim.SGD):
    """Copies the weights that it is made with, and goes halfway back to them at every third step."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)
        self.slow, self.steps = [p.detach().clone() for p in self.param_groups[0]["params"]], 0

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        self.steps += 1
        if self.steps % 3 == 0:
            for slow, p in zip(self.slow, self.param_groups[0]["params"], strict=True):
                slow.lerp_(p, 0.5)
                p.copy_(slow)


def test_copies_in_an_optimizer_are_kept_before_they_move(tmp_path):
    found = {}
    for folder, seeds in (("run", (0, 1)), ("whole", (0,))):
        for epochs, seed in zip((1, 2)[-len(seeds) :], seeds, strict=True):
            found[folder] = fit("persistent", seed, tmp_path / folder, epochs, optimizer=Lookahead)
    assert_same(found["run"], found["whole"])
