"""The refusals of docs/contract.md while a model is recorded, cut and run in stages."""

import threading

import pytest
import torch
from torch import nn

from adl_dist.errors import PartitionError
from adl_dist.partition import Chain
from adl_dist.partition.cut import checked_sizes
from tests.support.staged import stages_of

FIVE = 5  # samples of a micro-batch that is unlike the recorded ones


def normal(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


RECORDED = [normal(2, 8), normal(4, 8)]


class Net(nn.Module):
    """Three layers, and a forward that each test gives it."""

    def __init__(self, forward, **modules):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        for name, module in modules.items():
            setattr(self, name, module)
        self.run = forward

    def forward(self, *args):
        return self.run(self, *args)


# --- When the model is recorded --------------------------------------------------------------------------------------


def branches(net, x):
    return net.b(net.a(-x if x.sum() > 0 else x))


def writes_parameter(net, x):
    net.a.weight.data.add_(x.mean())
    return net.b(net.a(x))


def writes_input(net, x, ids):
    ids += x.sum(1).long()
    return net.b(net.a(x)) * ids[:, None]


def plain(net, x):
    return net.b(net.a(x))


def hooked():
    net = Net(plain)
    net.register_full_backward_hook(lambda *_: None)
    return net


IDS = [(x, torch.ones(len(x), dtype=torch.long)) for x in RECORDED]
RECORDING = {
    "branch": (lambda: Net(branches), [normal(2, 8).abs(), -normal(4, 8).abs()], "asks for elements of a value of the"),
    "vmap": (lambda: Net(lambda net, x: net.b(torch.vmap(torch.tanh)(net.a(x)))), RECORDED, "which cannot be followed"),
    "parameter": (lambda: Net(writes_parameter), RECORDED, "the forward writes values of the batch to parameter 'a.w"),
    "input": (lambda: Net(writes_input), IDS, "the forward writes to input 1"),
    "backward hook": (hooked, RECORDED, "has backward hooks, which need both ends of the model on one stage"),
    "lazy": (lambda: Net(plain, a=nn.LazyLinear(8)), RECORDED, "'a.weight' has no shape yet, as a parameter of a lazy"),
    "lock": (lambda: Net(plain, lock=threading.Lock()), RECORDED, "Net cannot be copied"),
    "nothing": (lambda: Net(lambda net, x: x), RECORDED, "the model computes nothing that could be cut"),
}


@pytest.mark.parametrize(("build", "batches", "message"), RECORDING.values(), ids=RECORDING)
def test_a_model_that_cannot_be_recorded_is_refused(build, batches, message):
    with pytest.raises(PartitionError, match=message):
        Chain(build(), batches)


# --- When the model is cut -------------------------------------------------------------------------------------------


def back_and_forth(net, x):
    """The buffers of the training mode and of the evaluation mode need another order."""
    return net.b(net.a(x)) if net.training else net.a(net.b(x))


def writes_to_shared(net, x):
    h = net.a(x)
    view = h[:, :4]
    h.add_(net.b(x))
    return net.c(h) + view.sum()


def normed_twice(net, x):
    return net.norm(net.b(net.norm(net.a(x))))


CUTS = {
    "mode": (lambda: Net(back_and_forth), "'a' needs a value that 'b' makes after the cut"),
    "memory": (lambda: Net(writes_to_shared), "writes to memory that it shares with another value of an earlier stage"),
    "buffer": (
        lambda: Net(normed_twice, norm=nn.BatchNorm1d(8, affine=False)),
        "is changed by the forward and used on both sides",
    ),
}


@pytest.mark.parametrize(("build", "message"), CUTS.values(), ids=CUTS)
def test_a_cut_that_is_impossible_is_refused_by_its_reason(build, message):
    units = Chain(build(), RECORDED).units
    place = units.index("b")
    with pytest.raises(PartitionError, match=message):
        stages_of(build, RECORDED, [place, len(units) - place])


def test_a_tie_that_must_be_on_one_stage_forbids_cuts():
    def tied():
        net = Net(lambda net, x: net.c(net.b(net.a(x))))
        net.c.weight = net.a.weight
        return net

    found = Chain(tied(), RECORDED, keeps_ties="since the method keeps local losses")
    with pytest.raises(
        PartitionError, match=r"cut after 'a': 'a.weight' is used on both sides of it, and must be on one"
    ):
        checked_sizes(found, 2, ["b"])


def test_a_list_that_does_not_fit_names_what_is_there():
    found = Chain(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), RECORDED, granularity="block")
    with pytest.raises(
        PartitionError, match=r"\[1, 1\] does not fit: expected 2 numbers.* 3 blocks \(0, 1, 2\), got 2"
    ):
        checked_sizes(found, 2, [1, 1])
    with pytest.raises(PartitionError, match="does not fit: expected 1 names, of the units where stages 1 to 1 begin"):
        checked_sizes(found, 2, ["1", "2"])


# --- While the stages run --------------------------------------------------------------------------------------------


def unlike(x):
    """Whether the micro-batch ``x`` is none of the recorded ones."""
    return len(x) == FIVE
