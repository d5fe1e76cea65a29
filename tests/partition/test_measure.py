"""What is measured of a model, and the cut that follows from it."""

import time
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from adl_dist.batch import rows_of
from adl_dist.codecs import Codecs
from adl_dist.partition import Chain
from adl_dist.partition.measure import measure, pace
from adl_dist.training.measured import with_split_costs

LOSS, BF16 = nn.CrossEntropyLoss(), torch.bfloat16


@pytest.fixture(autouse=True)
def _few_rounds_are_enough(monkeypatch):
    monkeypatch.setattr("adl_dist.partition.measure.MOST", 5)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def profile_of(model, input_, *, granularity="layer", optimizer=sgd, **options):
    target = torch.zeros(len(input_), dtype=torch.long)
    chain = chain_of(model, input_, granularity=granularity)
    of = {"micro_batch_size": 4}
    told = measure(model, chain, input_=input_, target=target, loss_fn=LOSS, optimizer=optimizer, of=of, **options)
    return {unit.name: unit for unit in told.units}, told


def chain_of(model, input_, **options):
    return Chain(model, [rows_of(input_, slice(2)), input_], **options)


def perceptron():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5))


class Slow(nn.Linear):
    """Sleeps in forward, if ``calls`` are given only in those, counted from 0, and in backward."""

    def __init__(self, forward, backward=0.0, *, calls=None):
        super().__init__(4, 4)
        self.seconds, self.calls, self.num_calls = (forward, backward), calls, 0

    def forward(self, x):
        time.sleep(self.seconds[0] if self.calls is None or self.num_calls in self.calls else 0.0)
        if self.calls is not None:
            self.num_calls += 1
        out = super().forward(x)
        if out.requires_grad:
            out.register_hook(lambda grad: time.sleep(self.seconds[1]))
        return out


class TwoLayers(nn.Module):
    def __init__(self, forward, width=6):
        super().__init__()
        self.first, self.second, self.run = nn.Linear(6, 6), nn.Linear(width, width), forward

    def forward(self, x):
        return self.run(self, x)


@pytest.mark.parametrize(("calls", "expected"), [((0, 1), 0.0), ((2,), 0.1), ((3, 4), 0.2)])
def test_the_model_takes_the_mean_of_all_rounds_but_warm_up(monkeypatch, calls, expected):
    monkeypatch.setattr("adl_dist.partition.measure.MOST", 3)
    _, told = profile_of(nn.Sequential(Slow(0.3, calls=calls)), torch.randn(4, 4))
    assert told.forward == pytest.approx(expected, abs=0.05)


def test_bytes_of_a_perceptron_are_those_counted_by_hand():
    units, told = profile_of(perceptron(), torch.randn(4, 6))
    first, relu, last = (units[name] for name in "012")
    assert [u.parameter_bytes for u in (first, relu, last)] == [4 * (6 * 8 + 8), 0, 4 * (8 * 5 + 5)]
    assert [u.act_bytes for u in (first, relu, last)] == [4 * 4 * 8, 4 * 4 * 8, 0]
    assert [u.grad_bytes for u in (first, relu, last)] == [4 * 4 * 8, 4 * 4 * 8, 0]
    # A linear layer keeps its input, ReLU its output (which is the next layer's input, and counted once), the loss
    # its logarithms (4 x 5 floats), targets (4 longs) and total weight (1 float).
    assert [u.activation_bytes for u in (first, relu)] == [4 * 4 * 6, 4 * 4 * 8]
    assert last.activation_bytes >= 4 * 4 * 5
    # Behind the first layer no graph keeps what crosses, but one behind a cut holds its input; behind ReLU, it does.
    assert (first.held_before, first.held_behind) == (4 * 4 * 8, 4 * 4 * 8)
    assert (relu.held_before, relu.held_behind) == (0, 4 * 4 * 8)
    assert [u.work_bytes for u in (first, relu)] == [2 * first.parameter_bytes + 4 * 4 * (6 + 8), 4 * 4 * (8 + 8)]
    assert told.optimizer_copies == 1.0
    _, with_adam = profile_of(perceptron(), torch.randn(4, 6), optimizer=torch.optim.Adam)
    assert with_adam.optimizer_copies == pytest.approx(2.0, rel=0.1)


CROSSING = {"0.first": (2, 192), "0.second": (1, 96), "1": (1, 0)}
TWO_LAYERS = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 5))
RESIDUAL = TwoLayers(lambda self, x: x + self.second(torch.tanh(self.first(x))))


def test_weights_of_several_units_are_tied_if_they_are_trained():
    for is_trained, tied in ((True, [[0, 4 * 6 * 6]]), (False, [])):
        model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.Linear(6, 5))
        model[2].weight = model[0].weight
        model[0].weight.requires_grad_(is_trained)
        units, _ = profile_of(model, torch.randn(4, 6))
        assert (units["2"].tied, units["2"].parameter_bytes) == (tied, 4 * 6)


def test_what_a_split_can_put_off_is_measured_for_each_unit():
    model, input_ = perceptron(), torch.ones(4, 6)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    _, profile = profile_of(model, input_)
    of_batch = {"input_": input_, "target": torch.zeros(4, dtype=torch.long), "loss_fn": LOSS, "within": nullcontext}
    told = with_split_costs(profile, model, chain_of(model, input_), **of_batch)
    first, relu, last = told.units
    assert [unit.deferred_bytes for unit in (first, relu, last)] == [4 * 4 * (6 + 8), 0, 4 * 4 * (8 + 5)], "x and grad"
    assert min(first.backward_weight, last.backward_weight) > 0
    assert relu.backward_weight == 0
    assert all(unit.backward_weight <= unit.backward for unit in told.costs(1))
    assert told.split_slowdown >= 1
    assert 0 < told.share_deferrable <= 1
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    ("model", "figure", "expected"),
    [
        # What the next unit keeps is held at the end of the stage before it only.
        (TWO_LAYERS, lambda unit: (unit.held_before, unit.held_behind), {"0": (128, 0), "1": (0, 4)}),
        (TWO_LAYERS, lambda unit: unit.activation_bytes >= 4 * 4 * 8, {"0": False, "1": True}),
        (nn.Sequential(RESIDUAL, nn.Linear(6, 5)), lambda unit: (unit.num_tensors, unit.act_bytes), CROSSING),
    ],
    ids=["held", "kept", "crossing"],
)
def test_what_units_keep_send_and_where_they_may_be_cut(model, figure, expected):
    units, _ = profile_of(model, torch.randn(4, 6))
    assert {name: figure(unit) for name, unit in units.items()} == expected


class Counts(nn.Module):
    """Counts its calls in a buffer that is not saved, and has state that is no tensor."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()), persistent=False)
        self.register_buffer("cache", torch.zeros(0), persistent=False)

    def get_extra_state(self):
        return {"words": "of its own"}

    def set_extra_state(self, state):
        assert state == {"words": "of its own"}

    def forward(self, x):
        self.calls.add_(1)
        self.cache = torch.zeros(len(x))  # it may stay, of another size than it was found
        return x * 1


def test_measuring_leaves_weights_mode_and_streams_as_they_were():
    """Statistics, buffers that are not saved, and state that is no tensor, too."""
    layers = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.Flatten(), nn.Linear(64, 5)
    model = nn.Sequential(*layers, Counts()).eval()
    model[1].train()
    before = {name: t.clone() for name, t in (*model.named_parameters(), *model.named_buffers())}
    modes = [module.training for module in model.modules()]
    random = torch.get_rng_state()
    images = torch.randn(4, 2, 6, 6, generator=torch.Generator().manual_seed(0))
    profile_of(model, images, granularity="block")
    pace(model, images, torch.zeros(4, dtype=torch.long), LOSS)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        assert torch.equal(tensor, before[name]), name
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), random)
    assert [module.training for module in model.modules()] == modes


def test_times_are_those_of_each_unit():
    model = nn.Sequential(nn.Linear(4, 4), Slow(0.02, 0.03), nn.Linear(4, 5))
    units, told = profile_of(model, torch.randn(4, 4), granularity="block")
    assert min(units["1"].forward - 0.02, units["1"].backward - 0.03, told.forward - 0.02, told.backward - 0.03) >= 0
    others = sum(unit.forward + unit.backward for name, unit in units.items() if name != "1")
    assert others < (units["1"].forward + units["1"].backward) / 2, "a busy machine slows all of them"


def test_autocast_and_a_codec_halve_what_is_sent():
    """Under autocast lowered weights are kept with each graph; a codec leaves what is kept as it is."""
    plain, lowered = (
        profile_of(perceptron(), torch.randn(4, 6), **options)[0]
        for options in ({}, {"within": partial(torch.autocast, "cpu", dtype=BF16)})
    )
    narrow = {name: unit.coded(Codecs("bf16", "bf16"), {}) for name, unit in plain.items()}
    assert lowered["0"].act_bytes * 2 == plain["0"].act_bytes == 4 * 8 * 4
    assert lowered["0"].parameter_bytes == plain["0"].parameter_bytes
    assert lowered["2"].activation_bytes - plain["2"].activation_bytes == 2 * 5 * 8  # its weights, lowered
    assert (narrow["0"].act_bytes, narrow["0"].grad_bytes, narrow["0"].widened_bytes) == (64, 64, 64)
    kept = [[unit.act_bytes + unit.widened_bytes for unit in units.values()] for units in (plain, narrow)]
    assert kept[0] == kept[1] == [128, 128, 0]
