"""What is done once before training: it leaves no trace in values, and nothing of the kind is left for training."""

import pytest
import torch
from torch import nn

from adl_dist.errors import ConfigError
from adl_dist.schedule import METHODS
from adl_dist.training import build
from adl_dist.training.warm_up import check_without_warm_up
from tests.support import runs
from tests.support.commands import assert_same
from tests.support.toys import NUM_CLASSES, FixedImages, batch_norm_net
from tests.support.values import QUIET


def trained(name, options, monkeypatch, *, warms_up, model=None, of_trainer=None):
    monkeypatch.setattr(build, "needs_warm_up", lambda spec, device: warms_up)
    model = batch_norm_net(dropout=0.3) if model is None else model
    trainer = runs.toy_trainer(3, 2, name, options, model=model, **(of_trainer or {}))
    data = FixedImages(15)
    summary = trainer.fit(data, epochs=2, batch_size=6, val_dataset=data, monitoring=QUIET)
    return {**trainer.full_state_dict(), "loss": torch.tensor(summary["validation_loss"])}


VARIANTS = [
    *((name, {}) for name in METHODS if name != "dgl"),
    ("dgl", {"head": "linear", "buffer_size": 3}),
    ("gpipe", {"recompute": "always"}),
    ("adl", {"split_backward": True, "delay": "third", "mitigation": ("predict",)}),
]


@pytest.mark.parametrize(("name", "options"), VARIANTS, ids=[" ".join([n, *map(str, o.values())]) for n, o in VARIANTS])
def test_a_warm_up_leaves_no_trace(name, options, monkeypatch):
    plain, warm = (trained(name, options, monkeypatch, warms_up=warms_up) for warms_up in (False, True))
    assert_same(warm, plain)


@pytest.mark.parametrize("loading", [None, "LAZY", "EAGER"])
def test_lengths_that_change_over_nccl_need_loaded_kernels(loading, monkeypatch):
    """There is no warm-up for them, and to load a kernel may wait for a receive that waits for a peer."""
    monkeypatch.delenv("CUDA_MODULE_LOADING", raising=False)
    if loading is not None:
        monkeypatch.setenv("CUDA_MODULE_LOADING", loading)
    check_without_warm_up("gloo")
    if loading == "EAGER":
        check_without_warm_up("nccl")
    else:
        with pytest.raises(ConfigError, match="set CUDA_MODULE_LOADING=EAGER in the environment of all ranks"):
            check_without_warm_up("nccl")


class Remembers(nn.Module):
    """Counts its calls where no state dict has it, and draws from a generator of its own."""

    def __init__(self):
        super().__init__()
        self.calls = 0
        self.generator = torch.Generator().manual_seed(1)

    def forward(self, x):
        self.calls += 1
        return x + torch.rand(1, generator=self.generator, dtype=x.dtype) * self.calls


def test_a_warm_up_leaves_no_trace_in_what_only_python_sees(monkeypatch):
    def final(warms_up):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(72, 8), Remembers(), nn.Linear(8, 8), nn.Linear(8, NUM_CLASSES))
        return trained("adl", {}, monkeypatch, warms_up=warms_up, model=model, of_trainer={"balance": "even"})

    assert_same(final(True), final(False))


def test_each_size_is_computed_before_training(monkeypatch):
    seen: list[int] = []
    warm_up = build.warm_up

    def watched(contexts, *rest):
        with torch.nn.modules.module.register_module_forward_hook(lambda module, args, out: seen.append(len(args[0]))):
            warm_up(contexts, *rest)

    monkeypatch.setattr(build, "warm_up", watched)
    trained("adl", {}, monkeypatch, warms_up=True)
    assert {3, 15 % 6 or 6} <= set(seen)
