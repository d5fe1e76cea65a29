"""What is done once before training: it leaves no trace in values, and nothing of the kind is left for training."""

import functools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from adl_dist.errors import ConfigError
from adl_dist.stage import Stage
from adl_dist.training import build
from adl_dist.training.warm_up import check_without_warm_up
from tests.support import runs
from tests.support.commands import assert_same
from tests.support.toys import FixedImages, batch_norm_net
from tests.support.values import QUIET


def trained(name, options, monkeypatch, *, warms_up, model=None, of_trainer=None):
    monkeypatch.setattr(build, "needs_warm_up", lambda spec, device: warms_up)
    model = batch_norm_net(dropout=0.3) if model is None else model
    trainer = runs.toy_trainer(3, 2, name, options, model=model, **{"verify": False, **(of_trainer or {})})
    data = FixedImages(15)
    summary = trainer.fit(data, epochs=2, batch_size=6, val_dataset=data, monitoring=QUIET)
    return {**trainer.full_state_dict(), "loss": torch.tensor(summary["validation_loss"])}


@pytest.fixture
def over_nccl(monkeypatch):
    """All versions of the weights are used in the warm-up, as over NCCL; the operations that it calls."""
    run, seen = build.WarmUp.run, Operations()

    def watched(self, stages):
        self.with_updates = True
        with seen:
            run(self, stages)

    monkeypatch.setattr(build.WarmUp, "run", watched)
    return seen.names


class Operations(TorchDispatchMode):
    """Takes note of the operations of torch that are called, by name."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(str(func))
        return func(*args, **kwargs or {})


def halving(parameters):
    """Make an optimizer, and register a hook with each parameter."""
    parameters = [*parameters]
    for parameter in parameters:
        parameter.register_hook(lambda grad: grad / 2)
    return torch.optim.SGD(parameters, lr=0.1)


adamw = functools.partial(torch.optim.AdamW, lr=0.01, foreach=True)
momentum = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=True)
UPDATES = {
    "adamw": ("adl", {}, {"optimizer": adamw, "clip_norm": 0.3, "ema": 0.9, "codec": "int8"}),
    "mitigated": ("adl", {"mitigation": ("discount", "spike", "delay_compensation")}, {"optimizer": momentum}),
    "2bw": ("2bw", {}, {"optimizer": momentum, "clip_norm": 0.3, "ema": 0.9}),
    "head": ("dni", {}, {"optimizer": adamw, "clip_norm": 0.3}),
    "replayed": ("fr", {}, {"optimizer": momentum}),
    "split": ("adl", {"split_backward": True, "delay": "third", "mitigation": ("predict",)}, {"optimizer": momentum}),
    "hooks": ("adl", {}, {"optimizer": halving}),
}


@pytest.mark.parametrize("case", UPDATES)
def test_no_update_does_anything_for_the_first_time(case, over_nccl, monkeypatch):
    """An operation that the warm-up has not called has a kernel that a GPU would load while receives wait on it."""
    (name, options, of_trainer), update, seen = UPDATES[case], Stage.update, Operations()

    def watched(stage):
        with seen:
            update(stage)

    plain = trained(name, options, monkeypatch, warms_up=False, of_trainer=of_trainer)
    monkeypatch.setattr(Stage, "update", watched)
    assert_same(trained(name, options, monkeypatch, warms_up=True, of_trainer=of_trainer), plain)
    assert len(seen.names) > 3
    assert seen.names <= over_nccl


def test_what_a_warm_up_lacks_is_told_before_training(monkeypatch):
    monkeypatch.delenv("CUDA_MODULE_LOADING", raising=False)
    with pytest.raises(ConfigError, match=r"set CUDA_MODULE_LOADING=EAGER in .* \(it is unset\), or pad all samples"):
        check_without_warm_up("nccl")
    monkeypatch.setattr("torch._inductor.config.cpp.cxx", (None, "no-such-compiler"))
    with pytest.raises(ConfigError, match=r"needs a C\+\+ compiler .*, and there is none; install it, or omit"):
        build.check_compiler(torch.device("cpu"))
