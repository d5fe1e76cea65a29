"""The cut model is compared with the uncut one before the first update: what differs is refused, and nothing moves."""

import contextlib
import random
from itertools import accumulate

import numpy as np
import pytest
import torch
from adl_dist.partition.module_state import ModuleState
from torch import nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import adl_dist
from adl_dist.errors import ConfigError, PartitionError
from adl_dist.schedule import METHODS, Pipeline
from adl_dist.stage import Precision, TrainSpec
from adl_dist.streams import Streams
from adl_dist.training.trial.samples import Samples
from adl_dist.training.trial.trial import Trial
from tests.support.runs import sgd, toy_trainer
from tests.support.toys import FixedImages, UNet, batch_norm_net
from tests.support.values import SILENT

WIDTH, CLASSES = 6, 5
CPU = torch.device("cpu")


def samples(*shape, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(7, *(shape or (WIDTH,)), generator=generator, dtype=torch.float64).to(dtype)
    return Samples.of(inputs, torch.randint(CLASSES, (7,), generator=generator), trains=True)


def tried(model, stages, *, method="adl", data=None, dtype=torch.float64, **precision):
    """Try ``stages`` out as the cut of ``model``; return what is known of them."""
    pipeline = Pipeline(adl_dist.method(method), len(stages))
    precision = Precision(dtype=dtype, **precision)
    spec = TrainSpec(pipeline=pipeline, loss_fn=nn.CrossEntropyLoss(), optimizer=sgd, precision=precision)
    return Trial(model, spec, data or samples(dtype=dtype), CPU).run(stages, verify=True)


def layer():
    return nn.Linear(WIDTH, WIDTH)


def last():
    return nn.Linear(WIDTH, CLASSES)


def cut(model):
    """Cut a Sequential in the middle."""
    units = list(model)
    return [nn.Sequential(*units[: len(units) // 2]), nn.Sequential(*units[len(units) // 2 :])]


class Called(nn.Module):
    """Computes by a function of itself and its input, over a layer of its own."""

    def __init__(self, forward):
        super().__init__()
        self.layer, self.function, self.calls = layer(), forward, 0
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x):
        return self.function(self, x)


def counts(self, x):
    self.calls += 1
    return self.layer(x) * self.calls


def moves_mean(self, x):
    with torch.no_grad():
        self.mean += x.mean(0)
    return self.layer(x)


def plain(self, x):
    return self.layer(x)


def fails(self, x):
    raise RuntimeError("no such thing")


# What the uncut model does, what its second stage does instead, and what is told of it.
UNLIKE = {
    "another branch": (plain, lambda self, x: self.layer(torch.sin(x)), ["the output differs", "first micro-batch"]),
    "a counter read once": (counts, plain, ["the output differs", "second micro-batch"]),
    "an error": (plain, fails, ["which runs: stage 1 (0 .. 1) gets", "no such thing; use partition.granularity=block"]),
    "detached": (plain, lambda self, x: self.layer(x.detach()), ["gradient of '1.bias' is missing"]),
    "evaluation only": (
        plain,
        lambda self, x: self.layer(x) if self.training else x,
        ["the output differs", "in evaluation", "does something else in evaluation"],
    ),
    "a buffer that stays": (moves_mean, plain, ["what a forward moves, 'uncut.2.mean' differs"]),
    "a scaled gradient": (
        plain,
        lambda self, x: self.layer(x * 2 - x.detach()),
        ["the gradient of '1.bias' differs by 0.5", "a hook"],
    ),
}


class Switched(nn.Module):
    """Is called as the uncut model, and cut into stages that do something else."""

    def __init__(self, uncut):
        super().__init__()
        self.uncut = uncut

    def forward(self, x):
        return self.uncut(x)


@pytest.mark.parametrize(("forward", "instead", "told"), UNLIKE.values(), ids=UNLIKE)
@pytest.mark.parametrize("method", ["adl", "bp"])
def test_a_cut_that_computes_something_else_is_refused(forward, instead, told, method):
    torch.manual_seed(0)
    units = [layer(), layer(), Called(forward), last()]
    second = Called(instead)
    second.layer, second.mean = units[2].layer, units[2].mean
    stages = [nn.Sequential(units[0], units[1]), nn.Sequential(second, units[3])]
    if "mean" in told[0]:
        told = [told[0].replace("uncut.", "")]
    with pytest.raises(PartitionError) as refused:
        tried(nn.Sequential(*units), stages, method=method)
    text = str(refused.value)
    assert "\n" not in text
    for part in ("the cut model is not the uncut one", *told):
        assert part in text


class Recomputes(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Sequential(layer(), nn.Tanh(), layer())

    def forward(self, x):
        return checkpoint(self.layer, x, use_reentrant=False)


def test_a_stage_that_recomputes_is_found():
    model = nn.Sequential(layer(), Recomputes(), layer(), last())
    agreed = tried(model, [*map(nn.Sequential, model)])
    assert [traits.recomputes for traits in agreed.traits.values()] == [False, True, False, False]
    agreed = tried(model, [*map(nn.Sequential, model)], method="bp")
    assert not any(traits.recomputes for traits in agreed.traits.values()), "its weights never change in between"


class LinearRecomputes(Recomputes):
    """The gradients of its own parameters do not depend on them: the stage in front gets another one."""

    def __init__(self):
        super().__init__()
        self.layer = layer()


def test_the_stage_that_recomputes_is_told_from_the_one_in_front():
    model = nn.Sequential(layer(), LinearRecomputes(), nn.Sequential(layer(), nn.Tanh()), LinearRecomputes(), last())
    agreed = tried(model, [*map(nn.Sequential, model)])
    assert [traits.recomputes for traits in agreed.traits.values()] == [False, True, False, True, False]


def test_recomputing_with_the_latest_weights_is_refused():
    model = nn.Sequential(layer(), Recomputes(), layer(), last())
    with pytest.raises(PartitionError, match=r"stage 0 .* as activation checkpointing does.*method.weights=latest"):
        tried(model, cut(model), method="paci")


class Views(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = layer()
        self.flat = self.layer.weight.view(-1)

    def forward(self, x):
        return F.linear(x, self.flat.view(WIDTH, WIDTH))


def test_a_kept_view_of_a_weight_that_is_replaced_is_refused():
    model = nn.Sequential(Views(), layer(), layer(), last())
    with pytest.raises(PartitionError, match=r"first that differs is '0'.* keeps a view .* choose method=bp"):
        tried(model, cut(model), dtype=torch.float32)
    tried(model, cut(model), method="gpipe", dtype=torch.float32)


class UsesAnother(nn.Module):
    def __init__(self, other):
        super().__init__()
        self.layer, self.others = layer(), [other]

    def forward(self, x):
        return self.layer(x) @ self.others[0].weight


@pytest.mark.parametrize("method", ["adl", "bp"])
def test_a_tie_that_is_not_registered_is_refused_by_name(method):
    first = layer()
    model = nn.Sequential(first, layer(), UsesAnother(first), last())
    told = r"'0.weight' is a tensor of stage 0 \(0 .. 1\), but stage 1 \(0 .. 1\) computes with it, too"
    with pytest.raises(PartitionError, match=told):
        tried(model, cut(model), method=method)


@pytest.mark.parametrize("method", ["adl", "bp"])
def test_a_tie_without_gradient_is_refused_by_name(method):
    class Follows(UsesAnother):
        def forward(self, x):
            return self.layer(x) + x @ self.others[0].weight.detach()

    first = layer()
    model = nn.Sequential(first, layer(), Follows(first), last())
    with pytest.raises(
        PartitionError, match=r"'0.weight' is a tensor of stage 0 .* but stage 2 \(0\) computes with it"
    ):
        tried(model, [*map(nn.Sequential, model)], method=method)


def test_a_reference_that_no_forward_reads_is_no_tie():
    class Knows(UsesAnother):
        def forward(self, x):
            return self.layer(x)

    first = layer()
    model = nn.Sequential(first, layer(), Knows(first), last())
    tried(model, cut(model))


class Moves(nn.Module):
    """Moves all that a forward can, in training and in evaluation."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, WIDTH, max_norm=0.5)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.calls, self.counted = [0], 0
        self.numpys, self.pythons = np.random.default_rng(0), random.Random(0)
        self.torchs = torch.Generator().manual_seed(0)
        self.plain = torch.zeros(WIDTH)
        self.register_buffer("passing", torch.zeros(WIDTH), persistent=False)

    def forward(self, x):
        self.calls[0] += 1
        self.counted += 1
        self.plain += 1
        self.passing += 1
        self.calls.append(self.numpys.random() + self.pythons.random())
        noise = torch.rand(WIDTH, generator=self.torchs) + random.random() + np.random.rand()
        return self.norm(x + noise + torch.rand(WIDTH) + self.embed(torch.arange(len(x))))


@pytest.mark.parametrize("K", [1, 3])
def test_the_trial_leaves_no_marks(K):
    torch.manual_seed(0)
    model = nn.Sequential(Moves(), layer(), nn.Dropout(0.5), last()).double()
    model[1].weight.grad = torch.ones(WIDTH, WIDTH, dtype=torch.float64)
    model[2].eval()
    modes = [module.training for module in model.modules()]
    stages = [nn.Sequential(model[0]), nn.Sequential(model[1]), nn.Sequential(model[2], model[3])][:K]
    torch.manual_seed(7)
    before, streams = ModuleState.of(model), Streams()
    addresses = [p.data_ptr() for p in model.parameters()]
    agreed = tried(model, stages if K > 1 else [model])
    assert before.changes() == []
    assert streams.moved() == set()
    assert [p.data_ptr() for p in model.parameters()] == addresses
    assert [module.training for module in model.modules()] == modes
    assert [p.grad is None for p in model.parameters()] == [name != "1.weight" for name, _ in model.named_parameters()]
    assert agreed.traits[0].draws == {"python", "numpy"}
    if K > 1:
        assert {"0.passing", "0.plain", "0.counted", "0.numpys"} <= {*agreed.traits[0].moves}
        assert not agreed.traits[1].moves


@pytest.mark.parametrize("method", METHODS)
def test_toy_models_are_found_equal_with_every_method(method):
    data = samples(2, 6, 6)
    for model, sizes in ((batch_norm_net(dropout=0.2), [2, 3, 2]), (UNet(), None)):
        chain = adl_dist.partition.linearise(model, granularity="block" if sizes else "layer")
        sizes = sizes or adl_dist.partition.even_sizes(chain, 3)
        if METHODS[method].has_heads and isinstance(model, UNet):
            continue
        tried(model, chain.pieces(sizes), method=method, data=data)


@pytest.mark.parametrize("precision", [{"dtype": torch.float32}, {"dtype": torch.float32, "autocast": torch.bfloat16}])
def test_rounding_is_no_difference(precision):
    """A convolution's bias right before BatchNorm has a gradient of nothing but rounding."""
    torch.manual_seed(0)
    units = [[nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4)], [nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)]]
    model = nn.Sequential(*units[0], *units[1], nn.Flatten(), nn.Linear(16, CLASSES))

    class Swapped(nn.Conv2d):
        """Sums in another order."""

        def forward(self, x):
            flipped = F.conv2d(x.flip(1), self.weight.flip(1))
            return flipped + self.bias[:, None, None]

    other = Swapped(4, 4, 3)
    other.weight, other.bias = model[2].weight, model[2].bias
    stages = [nn.Sequential(model[0], model[1]), nn.Sequential(other, *list(model)[3:])]
    tried(model, stages, data=samples(2, 6, 6, dtype=torch.float32), **precision)


def test_the_seconds_of_the_check_are_told(capsys):
    trainer = toy_trainer(2, 2)
    trainer.fit(FixedImages(8), epochs=1, batch_size=4, monitoring=adl_dist.Monitoring(tensorboard=False))
    assert "the cut model was found equal to the uncut one on 6 samples in " in capsys.readouterr().out


def test_without_the_check_another_model_is_trained():
    first = layer()
    model = nn.Sequential(first, layer(), UsesAnother(first), last())
    data = torch.utils.data.TensorDataset(torch.randn(8, WIDTH), torch.zeros(8, dtype=torch.long))
    trainer = toy_trainer(2, 1, model=model, verify=False)
    trainer.fit(data, epochs=1, batch_size=4, monitoring=SILENT)


@pytest.mark.parametrize("K", [2, 4])
def test_the_check_holds_four_copies_of_the_parameters_at_most(K, monkeypatch):
    monkeypatch.setenv("KINETO_LOG_LEVEL", "99")
    width, num_layers = 256, 8
    units = [nn.Linear(width, width) for _ in range(num_layers)]
    data = Samples.of(torch.randn(7, width), torch.randint(width, (7,)), trains=True)
    size = num_layers // K
    stages = [nn.Sequential(*units[first : first + size]) for first in range(0, num_layers, size)]
    model = nn.Sequential(*units)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        tried(model, stages, data=data, dtype=torch.float32)
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes = (event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))
    copy = sum(p.nbytes for p in model.parameters())
    assert max(accumulate(changes)) < (4 + 2 / num_layers) * copy, "and what the comparison of one tensor takes"


# --- What it has found lasts ------------------------------------------------------------------------------------


class Recomputing(nn.Module):
    def __init__(self, *, recomputes):
        super().__init__()
        self.first, self.second, self.recomputes = layer(), layer(), recomputes

    def compute(self, x):
        return self.second(torch.tanh(self.first(x)))

    def forward(self, x):
        return checkpoint(self.compute, x, use_reentrant=False) if self.recomputes else self.compute(x)


@pytest.mark.parametrize(
    ("K", "method", "options"),
    [(3, "adl", {}), (3, "adl", {"verify": False}), (2, "pipedream", {"verify": False}), (1, "2bw", {})],
)
def test_a_block_recomputes_right_also_in_a_second_fit(K, method, options):
    states = []
    for recomputes in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*(Recomputing(recomputes=recomputes) for _ in range(2)), last())
        trainer = toy_trainer(K, 2, model=model, method=method, dtype=torch.float64, **options)
        for num in (16, 17):  # the second one ends with a micro-batch of one sample, which is tried out then
            x = torch.linspace(-1, 1, num * WIDTH, dtype=torch.float64).view(num, WIDTH)
            dataset = torch.utils.data.TensorDataset(x, torch.arange(num) % CLASSES)
            trainer.fit(dataset, epochs=2, batch_size=8, monitoring=SILENT)
        states.append(trainer.full_state_dict())
    for name, weights in states[0].items():
        torch.testing.assert_close(states[1][name], weights, rtol=1e-12, atol=1e-12)


def test_without_the_check_recomputing_with_latest_is_refused():
    model = nn.Sequential(*(Recomputing(recomputes=True) for _ in range(2)), last())
    trainer = toy_trainer(3, 2, model=model, method="paci", verify=False)
    data = torch.utils.data.TensorDataset(torch.randn(8, WIDTH), torch.zeros(8, dtype=torch.long))
    with pytest.raises(PartitionError, match=r"stage \d .* as activation checkpointing does.*method.weights=latest"):
        trainer.fit(data, epochs=1, batch_size=8, monitoring=SILENT)


@pytest.mark.parametrize("K", [1, 2])
def test_a_layer_that_is_trained_only_later_needs_a_new_trainer(K):
    model = nn.Sequential(layer(), nn.Tanh(), layer(), last())
    model[0].requires_grad_(False)
    trainer = toy_trainer(K, 2, model=model, balance="even")
    x = torch.linspace(-1, 1, 8 * WIDTH, dtype=torch.float64).view(8, WIDTH)
    dataset = torch.utils.data.TensorDataset(x, torch.arange(8) % CLASSES)
    trainer.fit(dataset, epochs=1, batch_size=8, monitoring=SILENT)
    model[0].requires_grad_(True)
    refused = pytest.raises(ConfigError, match=r"'0\.bias' takes a gradient now") if K > 1 else contextlib.nullcontext()
    with refused:
        trainer.fit(dataset, epochs=1, batch_size=8, monitoring=SILENT)


@pytest.mark.parametrize(("K", "method"), [(3, "adl"), (1, "2bw")])
def test_a_block_recomputes_right_with_other_targets(K, method):
    """Which are tried out when they come, without a look at who recomputes."""
    states = []
    for recomputes in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*(Recomputing(recomputes=recomputes) for _ in range(2)), last())
        trainer = toy_trainer(K, 2, model=model, method=method, dtype=torch.float64)
        for kind in (torch.int64, torch.uint8):
            x = torch.linspace(-1, 1, 16 * WIDTH, dtype=torch.float64).view(16, WIDTH)
            dataset = torch.utils.data.TensorDataset(x, (torch.arange(16) % CLASSES).to(kind))
            trainer.fit(dataset, epochs=2, batch_size=8, monitoring=SILENT)
        states.append(trainer.full_state_dict())
    for name, weights in states[0].items():
        torch.testing.assert_close(states[1][name], weights, rtol=1e-12, atol=1e-12)
