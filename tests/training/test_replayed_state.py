"""A forward that is replayed is the first one: what it moves besides buffers is met as it was, and moved once."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import adl_dist
from adl_dist.errors import ConfigError, PartitionError
from adl_dist.partition.module_state import ModuleState
from adl_dist.training.trial.replayed_state import remembered
from tests.support.runs import sgd
from tests.support.values import SILENT, values

WIDTH, CLASSES = 6, 5


class Moves(nn.Module):
    """Its output depends on all that it moves."""

    def __init__(self):
        super().__init__()
        self.calls, self.log, self.last = 0, [], None
        self.numpys, self.pythons = np.random.default_rng(0), random.Random(0)
        self.torchs = torch.Generator().manual_seed(0)
        self.seen = torch.ones(WIDTH, dtype=torch.float64)
        self.scale = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))
        self.frozen = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64), requires_grad=False)

    def forward(self, h):
        self.calls += 1
        self.log.append(self.numpys.random() + self.pythons.random())
        noise = torch.rand(WIDTH, generator=self.torchs, dtype=torch.float64)
        with torch.no_grad():
            self.seen.mul_(0.5).add_(h.mean(0))
            self.frozen.lerp_(self.scale, 0.3)
        last, self.last = self.last, h.detach().mean(0)
        h = h * self.seen * self.scale + self.frozen + noise * self.calls + sum(self.log)
        return h if last is None else h + last


def test_a_replay_meets_what_the_first_forward_met():
    module, draw = Moves(), torch.Generator().manual_seed(0)
    acts = [torch.randn(4, WIDTH, generator=draw, dtype=torch.float64) for _ in range(3)]
    replays, outs, gradients = [], [], []
    for act in acts:
        replays.append(remembered(module, F.mse_loss))
        out = module(act.clone())
        outs.append(out.detach())
        gradients.append((act * module.seen).sum(0))
    after = ModuleState.of(module)
    for act, replay, out, gradient in zip(acts, replays, outs, gradients, strict=True):
        with replay():
            again = module(act.clone())
        assert torch.equal(again, out)
        assert after.changes() == []
        module.scale.grad = None
        again.sum().backward()
        assert torch.allclose(module.scale.grad, gradient, rtol=1e-12)  # of the tensor that the forward saw


class Decays(nn.Linear):
    def forward(self, h):
        self.weight.data.mul_(0.98)
        return super().forward(h)


class Normalises(nn.Linear):
    def forward(self, h):
        self.weight.data = F.normalize(self.weight.data, dim=1)
        return super().forward(h)


class CountingLoss:
    def __init__(self):
        self.calls = 0

    def __call__(self, output, target):
        self.calls += 1
        return F.cross_entropy(output, target) * (1 + 0.1 * (self.calls % 5))


def trained(layer=nn.Linear, loss_fn=F.cross_entropy, *, K=2, evaluates_first=False, **of_method):
    """Train a little; return all weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), layer(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES))
    method = adl_dist.method("gpipe", accumulation_steps=3, **of_method)
    settings = values(dtype=torch.float64, threads=1)
    trainer = adl_dist.Trainer(model, loss_fn=loss_fn, optimizer=sgd, method=method, num_stages=K, **settings)
    draw = torch.Generator().manual_seed(1)
    data = torch.utils.data.TensorDataset(
        torch.randn(12, WIDTH, generator=draw), torch.randint(CLASSES, (12,), generator=draw)
    )
    if evaluates_first:
        trainer.evaluate(data, batch_size=2)
    trainer.fit(data, epochs=1, batch_size=6, monitoring=SILENT)
    return trainer.full_state_dict()


def test_a_loss_that_counts_counts_a_replay_once():
    right, found = trained(loss_fn=CountingLoss()), trained(loss_fn=CountingLoss(), recompute="always")
    assert all(torch.equal(right[name], tensor) for name, tensor in found.items())


@pytest.mark.parametrize("evaluates_first", [False, True])
@pytest.mark.parametrize("K", [1, 2])
def test_a_weight_that_a_replay_would_change_again_is_refused(K, evaluates_first):
    more = {"K": K, "evaluates_first": evaluates_first, "recompute": "always"}
    with pytest.raises(ConfigError, match=r"forward of stage 0 .* changes its weight '1.weight' each time"):
        trained(Decays, **more)
    trained(Normalises, **more)


def test_a_weight_written_while_a_backward_needs_it_is_refused():
    """By ``data``, so that torch does not tell; the weights do not change between the two."""
    with pytest.raises(PartitionError, match=r"writes to what the backward of an earlier micro-batch needs.*method=bp"):
        trained(Decays)
