"""Models that are cut at a list of layers, by watching them run: what is no such chain is refused."""

import pytest
import torch
from torch import nn

from adl_dist.batch import Several
from adl_dist.errors import PartitionError
from adl_dist.partition import cut, linearise

WIDTH = 4


class Layered(nn.Module):
    """Asks for the values of its mask, so that torch.fx could not read it."""

    layer_list = "layers"

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(3, WIDTH)
        self.drop = nn.Dropout(0.5)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x, mask):
        weight = 1.0 if mask.all() else 0.5
        h = self.drop(self.embed(x))
        for layer in self.layers:
            h = self.between(layer(h))
        return self.head(h) * weight

    def between(self, h):
        return h


class Between(Layered):
    def between(self, h):
        return h.relu()


class Twice(Layered):
    def forward(self, x, mask):
        return self.head(self.layers[0](self.layers[0](self.embed(x))))


class Some(Layered):
    def forward(self, x, mask):
        return self.head(self.layers[0](self.embed(x)))


class Shared(nn.Linear):
    def forward(self, h, bias):
        return super().forward(h) + bias


class SecondGradient(Layered):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Shared(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x, mask):
        h = bias = self.embed(x)
        for layer in self.layers:
            h = layer(h, bias)
        return self.head(h)


class Skip(Layered):
    def forward(self, x, mask):
        embedded = h = self.embed(x)
        for layer in self.layers:
            h = layer(h)
        return self.head(h + embedded)


class MaskOfEmbedded(Layered):
    """NaN is above no number, so that its samples alone would not show the difference."""

    def forward(self, x, mask):
        embedded = h = self.embed(x)
        for layer in self.layers:
            h = layer(h)
        return self.head(h * ~(embedded > 1e6))


class InPlace(Layered):
    def forward(self, x, mask):
        h = self.embed(x)
        h *= 2
        for layer in self.layers:
            h = layer(h)
        return self.head(h)


class OwnParameter(Layered):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))


class Failing(Layered):
    def forward(self, x, mask):
        raise KeyError("no\nsuch")


def samples():
    return tuple(Several.of((torch.randn(n, 3), torch.ones(n, 2, dtype=torch.bool))) for n in (2, 4))


@pytest.mark.parametrize("num_stages", [2, 3, 5])
def test_stages_compute_what_the_model_does_in_both_modes(num_stages):
    """With a mask that is asked for its values in every stage, as it is then."""
    torch.manual_seed(0)
    model, x = Layered(), torch.randn(3, 3)
    stages = cut(model, num_stages=num_stages, samples=samples())
    for mode in (True, False):
        for mask in (torch.ones(3, 2, dtype=torch.bool), torch.tensor([[True, False]] * 3)):
            for module in (model, *stages):
                module.train(mode)
            with torch.random.fork_rng(devices=[]):
                expected = model(x, mask)
            value = (x, mask)
            with torch.random.fork_rng(devices=[]):
                for stage in stages:
                    value = stage(value)
            assert torch.equal(value, expected)


class Moves(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.calls = nn.BatchNorm1d(WIDTH), 0
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, h):
        self.calls += 1
        self.seen += 1
        return self.norm(h) + torch.rand(())


class Frozen(Layered):
    """Its layers move; its own ``train()`` leaves their norms in evaluation."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Moves() for _ in range(3))

    def train(self, mode=True):
        super().train(mode)
        for layer in self.layers:
            layer.norm.eval()
        return self


def test_a_look_at_a_model_leaves_it_as_it_was():
    model, pair = Frozen(), samples()
    model.layers[1].norm.training = True
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modes, stream = [module.training for module in model.modules()], torch.get_rng_state()
    linearise(model, samples=pair)
    assert torch.equal(torch.get_rng_state(), stream)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert [module.training for module in model.modules()] == modes
    assert [layer.calls for layer in model.layers] == [0, 0, 0]


def test_a_stage_has_the_modes_that_the_models_own_train_sets():
    model = Frozen()
    for stage in cut(model, num_stages=3, samples=samples()):
        for mode in (True, False):
            stage.train(mode)
            norms = [module for module in stage.modules() if isinstance(module, nn.BatchNorm1d)]
            assert not any(norm.training for norm in norms)
    assert not any(layer.norm.training for layer in model.layers)


def test_every_tensor_is_on_one_stage_by_its_own_name():
    model = Layered()
    stages = cut(model, num_stages=5, samples=samples())
    assert [sorted({name.rpartition(".")[0] for name in stage.state_dict()}) for stage in stages] == [
        ["embed"], ["layers.0"], ["layers.1"], ["layers.2"], ["head"]
    ]  # fmt: skip
    held = {id(p) for stage in stages for p in stage.parameters()}
    assert held == {id(p) for p in model.parameters()}
    assert linearise(model, samples=samples()).units == ["embed", "layers.0", "layers.1", "layers.2", "head"]


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Between, "computes something between layer 0 and layer 1"),
        (Twice, "calls layer 0 where layer 1 is expected"),
        (Some, "calls 1 of its 3 layers"),
        (SecondGradient, "gives layer 0 a second tensor that takes a gradient"),
        (OwnParameter, "'scale' is held by the module that calls the layers"),
        (Skip, "computes with values of modules that are called before them"),
        (MaskOfEmbedded, "computes with values of modules that are called before them"),
        (InPlace, r"without the modules that it calls before them its forward fails \(RuntimeError: unsupported"),
        (Failing, "Failing fails on a batch of the data: KeyError: .*such"),
    ],
)
def test_a_forward_that_is_no_chain_is_refused_in_one_line(kind, why):
    model = kind()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(PartitionError, match=why) as refused:
        linearise(model, samples=samples())
    assert "\n" not in str(refused.value)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
