"""Modules whose state_dict has a version, or is the user's own, are restored as they were saved."""

import pytest
import torch
from torch import nn

from tests.support.runs import toy_trainer
from tests.support.toys import NUM_CLASSES, FixedImages
from tests.support.values import SILENT


class Versioned(nn.Linear):
    """As torch documents it: weights of version 1 were ten times as large."""

    _version = 2

    def _load_from_state_dict(self, state, prefix, metadata, *others):
        if (metadata.get("version") or 1) < 2:
            state[f"{prefix}weight"] = state[f"{prefix}weight"] / 10
        super()._load_from_state_dict(state, prefix, metadata, *others)


class LeavesOut(nn.Linear):
    """Its bias is frozen, and not saved; its ``load_state_dict`` returns nothing."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.bias.requires_grad_(False)
        self.register_state_dict_post_hook(leave_out)


def leave_out(module, state, prefix, local_metadata):
    del state[f"{prefix}bias"]


class ReturnsNothing(nn.Sequential):
    def load_state_dict(self, *args, **kwargs):
        super().load_state_dict(*args, **kwargs)


def model_of(layer):
    torch.manual_seed(0)
    return ReturnsNothing(nn.Flatten(), layer(72, NUM_CLASSES), nn.Linear(NUM_CLASSES, NUM_CLASSES))


@pytest.mark.parametrize(("layer", "K"), [(Versioned, 1), (Versioned, 2), (LeavesOut, 1)])
def test_a_resumed_run_ends_like_one_that_was_not_stopped(layer, K, tmp_path):
    def run(epochs, run_dir):
        cut = {"balance": [2, 1]} if K > 1 else {}
        trainer = toy_trainer(K, 1, model=model_of(layer), verify=False, **cut)
        trainer.fit(FixedImages(8), epochs=epochs, batch_size=4, run_dir=run_dir, monitoring=SILENT)
        return trainer.full_state_dict()

    expected = run(2, None)
    run(1, tmp_path)
    got = run(2, tmp_path)
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], expected[name]) for name in expected)
