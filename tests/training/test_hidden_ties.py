"""State that two stages reach in one process, and would each have a copy of in two."""

from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import adl_dist
from adl_dist.errors import PartitionError
from adl_dist.schedule import Pipeline
from adl_dist.stage import Precision, TrainSpec
from adl_dist.training.trial.samples import Samples
from adl_dist.training.trial.trial import Trial
from tests.support.runs import sgd

WIDTH, CLASSES = 6, 5


def tried(units, *, loss_fn=F.cross_entropy, method="adl", begins=(2,)):
    """Try out a Sequential of ``units``, whose stages begin at 0 and ``begins``."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(7, WIDTH, generator=generator, dtype=torch.float64)
    samples = Samples.of(inputs, torch.randint(CLASSES, (7,), generator=generator), trains=True)
    bounds = [0, *begins, len(units)]
    stages = [nn.Sequential(*units[start:stop]) for start, stop in pairwise(bounds)]
    pipeline = Pipeline(adl_dist.method(method), len(stages))
    spec = TrainSpec(pipeline=pipeline, loss_fn=loss_fn, optimizer=sgd, precision=Precision(dtype=torch.float64))
    return Trial(nn.Sequential(*units), spec, samples, torch.device("cpu")).run(stages, verify=True)


class Block(nn.Module):
    """Computes by a function of itself, its input and whatever it is given."""

    def __init__(self, function, *given):
        super().__init__()
        self.inner, self.function, self.given = nn.Linear(WIDTH, WIDTH), function, given

    def forward(self, h):
        return self.function(self, self.inner(h), *self.given)


def chain(function, *given):
    """Two blocks of one kind, which fall on two stages, and a last layer."""
    return [Block(function, *given), nn.Tanh(), Block(function, *given), nn.Linear(WIDTH, CLASSES)]


def adds_up(block, h, shared):
    shared += h.detach().mean(0)
    return h + shared.clone()


def counts(block, h, shared):
    shared["calls"] = shared.get("calls", 0) + 1
    return h


def leaves_and_takes(block, h, shared):
    if not shared:
        shared.append(h.detach().mean())
        return h
    return h * shared.pop()


SHARED = {
    "a plain tensor": (adds_up, lambda: torch.zeros(WIDTH), "given"),
    "a dictionary that nothing reads": (counts, dict, r"given\[0\]\['calls'\]"),
    "a list that is emptied again": (leaves_and_takes, list, "given"),
}


@pytest.mark.parametrize("method", ["adl", "bp"])
@pytest.mark.parametrize(("function", "shared", "name"), SHARED.values(), ids=SHARED)
def test_state_that_two_stages_write_to_is_refused(function, shared, name, method):
    told = rf"stage 0 \(0 .. 1\) writes to '0.{name}.*', which stage 1 \(0 .. 1\) reaches, too"
    with pytest.raises(PartitionError, match=told):
        tried(chain(function, shared()), method=method)


def test_views_of_one_memory_are_one_state():
    whole = torch.zeros(2, WIDTH, dtype=torch.float64)
    units = [Block(adds_up, whole[0]), nn.Tanh(), Block(lambda block, h, seen: h + seen[0], whole), nn.Linear(WIDTH, 5)]
    with pytest.raises(PartitionError, match=r"writes to .0.given"):
        tried(units)


def test_state_that_one_stage_shares_is_not_refused():
    tried(chain(counts, {}), begins=(3,))


def makes_once(block, h, tables):
    if "ramp" not in tables:
        tables["ramp"] = torch.linspace(0, 1, WIDTH, dtype=h.dtype)
    return h * tables["ramp"]


def test_a_table_that_each_stage_would_make_itself_is_none():
    tried(chain(makes_once, {}))


def test_a_constant_that_no_stage_writes_to_is_none():
    tried(chain(lambda block, h, shared: h * shared["gain"] + shared["shift"], {"gain": 2.0, "shift": torch.ones(1)}))


def test_what_a_layer_hands_to_the_loss_by_a_list_is_refused():
    """A penalty of an expert layer, as it is often collected."""
    penalties = []

    def collects(block, h, penalties):
        penalties.append(h.pow(2).mean())
        return h

    def loss_fn(output, target):
        loss = F.cross_entropy(output, target) + sum(penalties)
        penalties.clear()
        return loss

    units = [Block(collects, penalties), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)]
    with pytest.raises(PartitionError, match=r"stage 0 .* writes to '0.given\[0\]', which stage 1 .* reaches"):
        tried(units, loss_fn=loss_fn)


def follows(block, h, other):
    block.average = getattr(block, "average", 0.0) * 0.5 + other[0].weight.detach()
    return h


READS = {
    "in training, for later": follows,
    "as an array": lambda block, h, other: h * float(other[0].weight.detach().numpy().mean()),
    "as a list": lambda block, h, other: h * other[0].bias.tolist()[0],
    "in evaluation": lambda block, h, other: h if block.training else h * other[0].weight.detach().mean(),
    "of its data": lambda block, h, other: h * other[0].weight.data.mean(),
}


@pytest.mark.parametrize("reads", READS.values(), ids=READS)
def test_a_weight_of_another_stage_that_is_read_is_refused(reads):
    first = nn.Linear(WIDTH, WIDTH)
    units = [first, nn.Tanh(), Block(reads, [first]), nn.Linear(WIDTH, CLASSES)]
    told = r"'0.(weight|bias)' is a tensor of stage 0 \(0 .. 1\), but stage 1 \(0 .. 1\) computes with it"
    with pytest.raises(PartitionError, match=told):
        tried(units)


def test_a_weight_of_another_stage_in_the_loss_is_refused():
    first = nn.Linear(WIDTH, WIDTH)

    def loss_fn(output, target):
        with torch.no_grad():
            size = first.weight.norm()
        return F.cross_entropy(output, target) / size

    with pytest.raises(PartitionError, match=r"'0.weight' is a tensor of stage 0"):
        tried([first, nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)], loss_fn=loss_fn)


def test_a_question_for_the_shape_of_another_weight_is_none():
    first = nn.Linear(WIDTH, WIDTH)
    asks = Block(lambda block, h, other: h / other[0].weight.shape[0], [first])
    tried([first, nn.Tanh(), asks, nn.Linear(WIDTH, CLASSES)])
