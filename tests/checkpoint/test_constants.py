"""What a model holds next to its state, and what an optimizer copied: the same where a run continues, or refused."""

import numpy as np
import pytest
import torch
from torch import nn

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
    """Random features, which a model that is built anew draws anew."""

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
def test_other_constants_are_not_continued_with(kind, K, tmp_path):
    fit(kind, 0, tmp_path / "run", 1, K=K)
    told = r"'2.table' of the model is no longer what it was in that run, and as it does not move, the checkpoint"
    with pytest.raises(CheckpointError, match=told):
        fit(kind, 1, tmp_path / "run", 2, K=K)
    with pytest.raises(CheckpointError, match=told):
        trainer(kind, 1).load_checkpoint(tmp_path / "run")
    assert_same(fit(kind, 0, tmp_path / "run", 2, K=K), fit(kind, 0, tmp_path / "whole", 2, K=K))


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
