"""The refusals of docs/contract.md while a model is recorded, cut and run in stages."""

import threading

import pytest
import torch
from torch import nn

from adl_dist.errors import PartitionError
from adl_dist.partition import Chain
from adl_dist.partition.cut import checked_sizes
from tests.support.random_networks import random_network
from tests.support.staged import chain, compare, loss_of, stages_of

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
    "buffer": (lambda: Net(normed_twice, norm=nn.BatchNorm1d(8)), "is changed by the forward and used on both sides"),
}


@pytest.mark.parametrize(("build", "message"), CUTS.values(), ids=CUTS)
def test_a_cut_that_is_impossible_is_refused_by_its_reason(build, message):
    units = Chain(build(), RECORDED).units
    place = units.index("b")
    with pytest.raises(PartitionError, match=message):
        stages_of(build, RECORDED, [place, len(units) - place])


def test_a_constant_buffer_with_nan_may_be_on_two_stages():
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.gain, self.values = nn.Parameter(torch.ones(8)), nn.Buffer(torch.full((8,), torch.nan))

        def forward(self, h):
            return self.gain * h + self.values.nan_to_num()

    def twice():
        return Net(lambda net, x: net.table(net.b(net.table(net.a(x)))), table=Table())

    units = Chain(twice(), RECORDED).units
    place = units.index("b")
    stages, _ = stages_of(twice, RECORDED, [place, len(units) - place])
    assert [stage.model.table.values.isnan().all().item() for stage in stages] == [True, True]


def test_a_tie_that_must_be_on_one_stage_forbids_cuts():
    def tied():
        net = Net(lambda net, x: net.c(net.b(net.a(x))))
        net.c.weight = net.a.weight
        return net

    found = Chain(tied(), RECORDED, keeps_ties="since the method keeps local losses")
    with pytest.raises(PartitionError, match=r"after 'a': 'a.weight' is used on both sides of it, and must be on one"):
        checked_sizes(found, 2, ["b"])


def test_a_list_that_does_not_fit_names_what_is_there():
    found = Chain(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), RECORDED, granularity="block")
    with pytest.raises(PartitionError, match=r"\[1, 1\]\)? does not fit: expected 2 .* 3 blocks \(0, 1, 2\), got 2"):
        checked_sizes(found, 2, [1, 1])
    with pytest.raises(PartitionError, match="does not fit: expected 1 names, of the units where stages 1 to 1 begin"):
        checked_sizes(found, 2, ["1", "2"])
    with pytest.raises(PartitionError, match="there is no unit or block '3'; near it are 0, 1, 2; adl-dist plan"):
        checked_sizes(found, 2, ["3"])


# --- While the stages run --------------------------------------------------------------------------------------------


def unlike(x):
    """Whether the micro-batch ``x`` is none of the recorded ones."""
    return len(x) == FIVE


def calls_module(net, x):
    h = net.b(net.a(x))
    return net.c(h) if unlike(x) or not net.training else h


def calls_function(net, x):
    h = net.b(net.a(x))
    return torch.sinh(h) if unlike(x) else h


def leaves_out(net, x):
    return net.b(x if unlike(x) else net.a(x))


def positive(net, x):
    h = net.a(x)
    return net.b(h)[h[:, 0] > 0]


def asks_parameter(net, x):
    h = net.b(net.a(x))
    return h * 2 if unlike(x) and net.a.weight.sum() > 0 else h * 1


def asks_present(net, x):
    h = net.a(x)
    zero = int((h * 0).sum())
    return net.b(h) * (int(h.sum()) if unlike(x) else zero)


def asks_absent(net, x):
    h = net.a(x)
    y = net.b(h)
    zero = int((h * 0).sum())
    return y * (int(y.sum()) if unlike(x) else zero)


def positive_weights(net, x):
    weight = net.a.weight.detach()
    return net.b(net.a(x)) / len(weight[weight > 0])


def asks_the_same(net, x):
    h = net.a(x)
    return net.b(h * 2 if h.abs().sum() > 1e6 else h)


def other_weight(net, x):
    return torch.nn.functional.linear(net.b(net.a(x)), net.a.weight if unlike(x) else net.b.weight)


def teaches(net, x):
    with torch.no_grad():
        net.b.weight.data.lerp_(net.a.weight.data, 0.5)
    return net.b(net.a(x))


def new_place(net, x):
    y = net.b(net.a(x))
    return y + torch.tanh(x if unlike(x) else y)


def returns_buffer(net, x):
    y = net.b(net.norm(net.a(x)))
    return (y, net.norm.running_var) if unlike(x) else (y, y)


class Layer(nn.Module):
    """A module without children, which runs whole; what it returns depends on elements."""

    def __init__(self, forward):
        super().__init__()
        self.weight, self.run = nn.Parameter(torch.ones(8)), forward

    def forward(self, x):
        return self.run(self, x * self.weight)


def other_dtype(layer, x):
    return x.double() if torch.isfinite(x).all() and unlike(x) else x


def rows_of_elements(layer, x):
    return torch.ones(9 + int(x.abs().sum()), 8) * x.mean()


def shape_of_elements(net, x):
    return net.a(x).sum() + net.b(x)


def other_buffer(net, x):
    return net.b(net.norm(net.a(x))) * (net.norm.running_var if unlike(x) else 1.0)


def other_activation(net, x):
    y = net.b(net.norm(net.a(x)))
    return y * net.act(net.norm.running_var if unlike(x) else y)


def maps(net, x):
    y = net.b(net.a(x))
    return y * torch.tanh(torch.vmap(torch.tanh)(net.b.bias) if unlike(x) else y)


def writes_places(net, x):
    h, places = net.a(x), torch.empty(0, dtype=torch.long)
    torch.nonzero(h.detach(), out=places)
    return net.b(h)


NORM = {"norm": nn.BatchNorm1d(8), "act": nn.Tanh()}
RUNNING = {
    "activation": (lambda: Net(other_activation, **NORM), "'act' is computed with a parameter or buffer that another"),
    "places": (lambda: Net(writes_places), "the shape of a tensor that another stage writes to is not known"),
    "module": (lambda: Net(calls_module), "calls 'c', which no recorded micro-batch did; let the recorded ones"),
    "function": (lambda: Net(calls_function), r"refusals.py:\d+: stage 0: calls 'sinh' on values of the batch, which"),
    "left out": (lambda: Net(leaves_out), "'a' did not run in this micro-batch, but its result crosses to the next"),
    "other shape": (lambda: Net(positive), "'__getitem__' returns .* where the recorded micro-batches let stages"),
    "other dtype": (lambda: Net(plain, a=Layer(other_dtype)), "float64 arrived for 'a', where .*float32 is expected"),
    "shape": (lambda: Net(shape_of_elements, a=Layer(rows_of_elements)), "is not known on a stage that does not"),
    "buffer": (lambda: Net(other_buffer, norm=nn.BatchNorm1d(8)), "is kept in an object or reached past the calls of"),
    "shape of weights": (lambda: Net(positive_weights), "for a parameter of another stage is not known"),
    "asked elsewhere": (lambda: Net(asks_present), "asks for elements that other stages do not have"),
    "parameter": (lambda: Net(asks_parameter), "asks for elements of a parameter or input that this stage does not"),
    "absent": (lambda: Net(asks_absent), "asks for elements of a tensor that stage 0 does not have"),
    "other weight": (lambda: Net(other_weight), "'linear' is computed with a parameter that another stage holds"),
    "teacher": (lambda: Net(teaches), "writes values of a parameter that another stage holds to a tensor of this one"),
    "new place": (lambda: Net(new_place), "which it lacks: no recorded micro-batch used it there"),
    "returned": (lambda: Net(returns_buffer, norm=nn.BatchNorm1d(8)), "returns a tensor that an earlier stage has"),
}


@pytest.mark.parametrize(("build", "message"), RUNNING.values(), ids=RUNNING)
def test_what_was_not_recorded_ends_the_run_with_its_line(build, message):
    units = Chain(build(), RECORDED).units
    place = units.index("b")
    stages, _ = stages_of(build, RECORDED, [place, len(units) - place])
    with pytest.raises(PartitionError, match=message):
        chain(stages, normal(FIVE, 8), loss_of, 0)


def test_writes_of_two_stages_to_one_tensor_may_be_refused():
    case = random_network(340)
    told = compare(case.build, case.batches[:3], [1, 9])
    assert told.kind == "refused"
    assert "another stage writes to a tensor that this stage has computed with" in told.text


def offsets(net, x):
    offset = torch.zeros(len(x), 1)
    x = net.a(x) + offset
    offset += 0.1
    return net.b(x) + offset


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (maps, "from a computation that a replay of the forward cannot repeat"),
        (offsets, r"writes to a tensor \[5, 1\] after its use, so a replay would compute with other elements"),
    ],
)
def test_a_replay_that_cannot_repeat_the_forward_is_refused(forward, message):
    stages, _ = stages_of(lambda: Net(forward), RECORDED, [1, len(Chain(Net(forward), RECORDED).units) - 1])
    with pytest.raises(PartitionError, match=message):
        chain(stages, normal(FIVE, 8), loss_of, 0, replays=True)


def test_an_answer_that_changes_ends_the_run():
    stages, _ = stages_of(lambda: Net(asks_the_same), RECORDED, 2)
    with pytest.raises(PartitionError, match="the answer is True here, and was False in all recorded micro-batches"):
        chain(stages, normal(FIVE, 8) * 0 + 1e9, loss_of, 0)


def test_inputs_of_other_dimensions_are_refused():
    stages, _ = stages_of(lambda: Net(plain), RECORDED, 2)
    with pytest.raises(PartitionError, match=r"gets inputs of shapes \[\[2, 3, 8\]\], unlike when it was recorded"):
        chain(stages, normal(2, 3, 8), loss_of, 0)
