"""Any traceable model as a chain of units: what the cut model computes, what its stages hold, and what is refused."""

import copy
import functools
import itertools
import math
import random
from collections import namedtuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import adl_dist
from adl_dist.errors import ConfigError, PartitionError
from adl_dist.partition import cut, linearise
from adl_dist.partition.piece import stage_units
from tests.support.cut_steps import cut_step, uncut_step
from tests.support.equations import assert_close
from tests.support.oracle import train_by_the_equations
from tests.support.toys import NUM_CLASSES, UNET_BALANCE, Block, FixedImages, unet, unet_by_hand
from tests.support.values import QUIET, values

LR, MOMENTUM, MICRO_BATCH = 0.1, 0.9, 3
Out = namedtuple("Out", "main aux")


def trained(model, K, *, loss_fn=F.cross_entropy, method="adl", M=2, **options):
    """The full state, and the summary; micro-batches of 3, 3, 3 and 2, in validation of 3, 3 and 1."""
    options |= {"method": adl_dist.method(method, accumulation_steps=M), "dtype": torch.float64, "threads": 1}
    optimizer = functools.partial(torch.optim.SGD, lr=LR, momentum=MOMENTUM)
    trainer = adl_dist.Trainer(model, loss_fn=loss_fn, optimizer=optimizer, num_stages=K, **values(**options))
    data, held_out = FixedImages(11, dtype=torch.float64), FixedImages(7, seed=1, dtype=torch.float64)
    options = {"batch_size": MICRO_BATCH * M, "val_dataset": held_out, "monitoring": QUIET}
    summary = trainer.fit(data, epochs=2, shuffle=False, **options)
    return trainer.full_state_dict(), summary


def places_of(chain):
    return [unit + 1 for unit in range(len(chain.units) - 1) if unit not in chain.forbidden]


def pieces_of_one_unit(model, granularity="layer"):
    """Cut wherever it can be cut."""
    chain = linearise(model, granularity=granularity)
    bounds = [0, *places_of(chain), len(chain.units)]
    return chain.pieces([stop - start for start, stop in itertools.pairwise(bounds)])


@pytest.mark.parametrize("M", [1, 2])
@pytest.mark.parametrize("K", [1, 2, 3, 4])
def test_skips_over_several_stages_follow_the_equations_to_1e_12(K, M):
    """The input at the last stage, a tensor in three stages, booleans, shapes, in-place ReLUs, uneven micro-batches."""
    data = FixedImages(11, dtype=torch.float64)
    slices = [slice(start, start + MICRO_BATCH) for start in range(0, 11, MICRO_BATCH)]
    batches = [(data.images[samples], torch.tensor(data.labels[samples])) for samples in slices]
    stages, loss_fn = [stage.double() for stage in unet_by_hand(K)], nn.CrossEntropyLoss()
    expected = train_by_the_equations(stages, [batches] * 2, M=M, loss_fn=loss_fn, lr=[LR] * 8, momentum=MOMENTUM)
    state, summary = trained(unet(), K, M=M, balance=UNET_BALANCE[K] if K > 1 else "even")
    assert_close(state, expected)
    uncut = unet().double().eval()
    uncut.load_state_dict(state)
    held_out = FixedImages(7, seed=1, dtype=torch.float64)
    with torch.no_grad():
        loss = F.cross_entropy(uncut(held_out.images), torch.tensor(held_out.labels))
    assert summary["validation_loss"] == pytest.approx(float(loss), rel=1e-12)


def test_a_tensor_whose_shape_alone_is_needed_is_not_sent():
    stages = [stage.train() for stage in cut(unet(), num_stages=4, balance=UNET_BALANCE[4])]
    acts = FixedImages(5).images
    crossing = []
    for stage in stages[:-1]:
        acts = stage(acts)
        crossing.append([tuple(act.shape) for act in acts])
    image, wide, low = (5, 2, 6, 6), (5, 4, 6, 6), (5, 6, 3, 3)
    # Behind the last cut the shape of `low` is asked for, and no more; where `up` is above 0, and the merged image.
    assert crossing == [[image, wide, low], [image, wide, low], [image, wide, (*low, 0), wide, wide]]


class Net(nn.Module):
    """float[B, 4] to float[B, 4], or several; a forward uses some of its layers, parameters and buffers."""

    num_calls = 0

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))
        self.act, self.norm = nn.ReLU(inplace=True), nn.BatchNorm1d(4)
        self.attention, self.memory = nn.MultiheadAttention(4, 2, batch_first=True), nn.LSTM(4, 4, batch_first=True)
        self.token, self.table = nn.Parameter(torch.randn(1, 1, 4)), nn.ParameterList([torch.randn(3, 4)])
        self.scales = nn.ParameterDict({"before": torch.full((4,), 1.5), "behind": torch.full((4,), 0.3)})
        self.register_buffer("places", torch.tensor([2, 0, 1, 1, 0]), persistent=False)
        for name in ("mean", "average", "scale"):
            self.register_buffer(name, torch.randn(4))
        self.register_buffer("calls", torch.zeros(()))
        self.plain, self.layers = torch.arange(4.0), nn.ModuleDict({"for": nn.Linear(4, 4)})


def net(forward):
    return type(forward.__name__, (Net,), {"forward": forward})


def halved(x):
    return x / 2 if x.sum() > 0 else -x / 2


torch.fx.wrap("halved")


class Forwards:
    def used_in_three_places(self, x):
        """Leaves something behind, on itself."""
        self.seen = self.a(x)
        return self.c(torch.tanh(self.b(self.seen)) + self.seen) * torch.sigmoid(self.seen)

    def sizes(self, x):
        h = self.a(x)
        n, k = h.shape[0], h.size(1)
        y = self.b(h + 1).view(n, 2, k // 2).transpose(1, 2).reshape(x.size(0), -1)
        y = y + torch.arange(h.shape[-1], dtype=h.dtype, device=h.device) / math.sqrt(h.numel()) * h.dim()
        n += 1
        places = torch.arange(x.shape[0], dtype=x.dtype)[:, None] / n
        return self.c(y + torch.zeros(h.shape[0], 4, dtype=h.dtype) + places) * y.new_ones(x.size()).sum() / n

    def converted(self, x):
        h = self.a(x).type(torch.float32).to(torch.float64)
        return self.c(self.b(h).type(x.dtype) + h.to(self.a.weight.dtype))

    def booleans(self, x):
        torch._assert(x.dim() == 2, "rows")
        h = self.a(x)
        above, torch_assert = h > 0, torch._assert
        torch_assert(h.shape[1] == x.shape[1], "as wide as before")
        return torch.where(above, self.b(h), self.c(h) * ~above)

    def other_in_evaluation(self, x):
        """Other operations, another number of tensors across each cut, another kind of output."""
        h = self.a(x)
        aux = self.c(h) if self.training else None
        y = F.relu(self.b(torch.sin(2 * h if torch.is_grad_enabled() else h)), inplace=True)
        return Out(main=y + h, aux=aux) if self.training else {"main": torch.cos(y) + h}

    def in_place(self, x):
        h = self.a(x * 1)
        h.add_(1)
        h.mul_(2)
        y = F.relu(h, inplace=True)
        return torch.relu_(self.c(y) + h)

    def one_module_three_times(self, x):
        return self.act(self.c(self.act(self.b(self.act(self.a(x))))))

    def constants(self, x):
        """A class token, positions computed from a table, numbers, literals."""
        if len(self.mean) == self.token.size(2):
            x = (x - self.mean[None, :]) * self.scales["before"]
        h = self.a(x).unsqueeze(1) * torch.tensor([1.0, 2.0, 3.0, 4.0])
        h = torch.cat([self.token.expand(x.shape[0], -1, -1), h], dim=1) + self.table[0][self.places].view(5, 4)[:2] * 2
        return self.c(self.b(h).mean(1)) * self.scales["behind"] + self.plain

    def defaults(self, x, twice=True, shape=(2, 2), mask=None, *rest, scale=0.5, **others):
        h = self.a(x).view(-1, *shape).flatten(1)
        return self.b(h * 2 if twice else h) * scale

    def counting(self, x):
        """Writes to its buffers, some of it before it reads them."""
        h = self.b(self.a(x))
        if self.training:
            self.calls.add_(1)
            self.average.mul_(0.9).add_(0.1 * h.detach().mean(0))
        return self.c((h - self.average) / (1 + self.calls))

    def tuples(self, x):
        """Layers that return tuples, and a list that is taken apart."""
        h = self.a(x)[:, None]
        seen, _ = self.attention(h, h, h)
        told, (state, _) = self.memory(seen)
        left, right = self.b(told[:, 0]).chunk(2, dim=1)
        return self.c(torch.cat([right, left], dim=1)) + state[0]

    def read_directly(self, x):
        """Uses the parameters of a layer that it never calls, and returns one."""
        return F.linear(torch.tanh(self.a(x)), self.c.weight, self.c.bias), self.b.bias

    def hidden_by_wrap(self, x):
        return self.b(halved(self.a(x)))

    def complex_numbers(self, x):
        h = self.a(x)
        return self.c(torch.relu(self.b(torch.fft.fft(torch.complex(h, 2 * h)).abs())))

    def written_after_it_is_read(self, x):
        h, old = self.a(x), 2 * self.scale + 1
        self.scale.add_(1)
        return self.c(torch.relu(self.b(h)) * old)

    def written_by_out_and_plus_equals(self, x):
        h, scale = self.a(x), self.scale
        torch.add(self.scale, 1.0, out=self.scale)
        scale += 1.0
        return self.c(torch.relu(self.b(h)) * scale)

    def two_names_of_one_tensor(self, x):
        x = self.a(x)
        h = x
        h += 1.0
        return self.c(torch.relu(self.b(x) + h))


class Frozen(net(lambda self, x: self.b(self.norm(self.a(x))))):
    def train(self, mode=True):
        super().train(mode)
        self.norm.eval()
        return self


NETS = {name: net(forward) for name, forward in vars(Forwards).items() if not name.startswith("_")}
MODELS = [*NETS.values(), Frozen, unet]


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_a_model_cut_anywhere_computes_what_the_uncut_one_does(make):
    """Outputs, gradients of input and parameters, and buffers after a step; outputs in evaluation after it.

    Before that, reading the model has changed nothing of it.
    """
    torch.manual_seed(0)
    model = make().double()
    x = FixedImages(3, dtype=torch.float64).images if make is unet else torch.randn(3, 4, dtype=torch.float64)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for module in [*model.modules()][1::2]:
        module.training = False
    modes, attributes, generator = [m.training for m in model.modules()], {*vars(model)}, torch.get_rng_state()
    before = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    pieces, chain = pieces_of_one_unit(model), linearise(model, granularity="layer")
    assert [module.training for module in model.modules()] == modes
    assert {name for name in vars(model) if not name.startswith("_tensor_constant")} == attributes
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(tensor, before[name]) for name, tensor in tensors.items())
    if not make.__name__.startswith("written"):
        is_counting = make.__name__ == "counting"
        assert [len(stage_units(piece)) for piece in pieces] == ([1, 9, 1] if is_counting else [1] * len(pieces))
    assert len(pieces) > 1
    assert sorted(name for piece in pieces for name in piece.state_dict()) == sorted(model.state_dict())
    for tensor in tensors.values():  # nothing of the tracing may be left in what the stages compute
        if tensor.is_floating_point():
            tensor.data.uniform_(0.1, 1.0)
    before = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    expected = uncut_step(model, x)
    in_two = [chain.pieces([place, len(chain.units) - place]) for place in places_of(chain)]
    for cut_pieces in (pieces, *in_two):
        for name, tensor in tensors.items():
            tensor.data.copy_(before[name])
        got, _ = cut_step(model, cut_pieces, x)
        assert_close(got, expected)


def test_an_assertion_of_the_forward_is_made_on_its_stage():
    first, *_ = pieces_of_one_unit(NETS["booleans"]())
    assert len(first(torch.zeros(3, 4))) == 2
    with pytest.raises(AssertionError, match="rows"):
        first(torch.zeros(3, 3, 4))


class Split(nn.Sequential):
    def forward(self, x):
        return {"low": super().forward(x), "high": 2 * x}


class Pair(nn.Module):
    def forward(self, x):
        return Out(main=x, aux=torch.tanh(x))


class Containers(nn.Module):
    """A block that returns a dictionary, one that returns a named tuple of it."""

    def __init__(self):
        super().__init__()
        self.split, self.pair, self.last = Split(nn.Linear(4, 4)), Pair(), nn.Linear(4, 4)

    def forward(self, x):
        both = self.split(x)
        pair = self.pair(both["low"])
        return self.last(pair.main + both["high"]) + pair.aux


@pytest.mark.parametrize("granularity", ["layer", "block"])
def test_what_blocks_return_in_containers_crosses_cuts(granularity):
    torch.manual_seed(0)
    model, x = Containers(), torch.randn(3, 4)
    assert linearise(model, granularity="block").units == ["split", "pair", "add", "last", "add_2"]
    got, sent = cut_step(model, pieces_of_one_unit(model, granularity), x)
    assert_close(got, uncut_step(model, x))
    assert max(sent) == 3


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU())
        self.blocks = nn.Sequential(Block(4), nn.Sequential(Block(4), Block(4)))
        self.act = nn.Tanh()
        self.head = nn.Linear(4, NUM_CLASSES)

    def forward(self, x):
        x = self.act(self.blocks(self.stem(x))).mean((2, 3))
        return self.head(self.act(x * 2).flatten(1) + 1)


NESTED = {
    "block": ["stem.0", "stem.1", "blocks.0", "blocks.1.0", "blocks.1.1"],
    "layer": [
        *("stem.0", "stem.1"),
        *(f"blocks.{block}.{step}" for block in ("0", "1.0", "1.1") for step in ("conv", "norm", "add", "relu")),
    ],
}


@pytest.mark.parametrize("granularity", ["layer", "block"])
def test_units_are_named_by_the_layer_and_function_they_run(granularity):
    expected = [*NESTED[granularity], "act", "mean", "mul", "act_2", "add", "head"]
    assert linearise(Nested(), granularity=granularity).units == expected


@pytest.mark.parametrize(
    ("balance", "first"),
    [
        (["blocks"], ["stem.0", "blocks.0.conv"]),
        (["blocks.1", "act"], ["stem.0", "blocks.1.0.conv", "act"]),
        (["blocks.0.add", "blocks.1.1.norm", "act_2"], ["stem.0", "blocks.0.add", "blocks.1.1.norm", "act_2"]),
    ],
)
def test_a_balance_of_names_begins_a_stage_at_each(balance, first):
    stages = cut(Nested(), num_stages=len(balance) + 1, balance=balance, granularity="layer")
    assert [stage_units(stage)[0] for stage in stages] == first
    assert [name for stage in stages for name in stage_units(stage)] == linearise(Nested(), granularity="layer").units


@pytest.mark.parametrize(
    ("K", "balance", "message"),
    [
        (2, ["blocks.2"], r"there is no unit or block 'blocks.2'; near it are blocks.*adl-dist plan --units lists"),
        (2, ["1.0"], r"there is no unit or block '1.0'; near it are blocks.1.0;"),
        (3, ["act", "stem.1"], r"\[act, stem.1\] does not fit: expected 2 names.*in the order they run"),
        (3, ["blocks", "blocks.0.conv"], "does not fit"),
        (2, ["stem"], r"expected 1 names, of the units where stages 1 to 1 begin"),
        (2, ["blocks.0", "act"], r"expected 1 names"),
    ],
)
def test_a_balance_of_names_that_mean_no_cut_is_refused(K, balance, message):
    with pytest.raises(PartitionError, match=message):
        cut(Nested(), num_stages=K, balance=balance, granularity="layer")


def tied():
    model = net(lambda self, x: torch.tanh(self.c(self.b(self.a(x)))))()
    model.c.weight = model.a.weight
    return model


read_twice = net(lambda self, x: torch.tanh(self.b(self.a(x) * self.c.bias) * self.c.bias))


@pytest.mark.parametrize(
    ("make", "message", "even"),
    [
        (tied, "cannot be cut after a: 'a.weight' and 'c.weight' are one and the same tensor", "tanh"),
        (read_twice, "cannot be cut after mul: 'c.bias'.* would cross it; .* on one stage", "mul"),
    ],
)
def test_a_tensor_that_two_stages_need_is_named(make, message, even):
    """An even cut keeps it on one."""
    model = make()
    with pytest.raises(PartitionError, match=message):
        cut(model, num_stages=2, balance=["b"], granularity="layer")
    stages = cut(model, num_stages=2, granularity="layer")
    assert stage_units(stages[1])[0] == even
    assert sorted(name for stage in stages for name in stage.state_dict()) == sorted(model.state_dict())


def test_hooks_of_layers_run_on_their_stage():
    def hooked():
        model, seen = unet().double(), []
        model.down.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
        model.merge.register_forward_hook(lambda module, args, out: seen.append("merge"))
        model.head.register_full_backward_hook(lambda module, grad_in, grad_out: seen.append("head"))
        return model, seen

    (model, seen), (uncut, expected) = hooked(), hooked()
    x = FixedImages(3, dtype=torch.float64).images
    got, _ = cut_step(model, pieces_of_one_unit(model), x)
    assert_close(got, uncut_step(uncut, x))
    assert expected == ["merge", "head", "merge"]  # of training, backward, evaluation
    assert seen == ["merge", "head", *expected], "the cut one is tried before"


@pytest.mark.parametrize("granularity", ["block", "layer"])
def test_a_block_with_hooks_is_one_unit_and_they_run(granularity):
    """Also an nn.Sequential, which is a block of its own then."""

    def hooked():
        model = Nested().double()
        model.blocks[0].register_forward_hook(lambda module, args, out: out * 2)
        model.blocks[1].register_full_backward_pre_hook(lambda module, grads: (grads[0] / 2,))
        return model

    model, x = hooked(), FixedImages(3, dtype=torch.float64).images
    units = linearise(model, granularity=granularity).units
    assert [unit for unit in units if unit.startswith("blocks")] == ["blocks.0", "blocks.1"]
    uncut = hooked()
    uncut.load_state_dict(model.state_dict())
    assert_close(cut_step(model, pieces_of_one_unit(model, granularity), x)[0], uncut_step(uncut, x))


def assert_same_run(one, other):
    (got, summary), (expected, expected_summary) = one, other
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    assert summary["validation_loss"] == expected_summary["validation_loss"]


class Heads(nn.Module):
    """A named tuple in training, a dictionary in evaluation; then fewer tensors cross each cut, one before the ReLU."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(72, 8), nn.Linear(8, NUM_CLASSES), nn.Linear(8, NUM_CLASSES)

    def forward(self, x):
        h = torch.tanh(self.a(x.flatten(1)))
        aux = self.b(torch.sin(h)) if self.training else None
        y = F.relu(self.c(torch.tanh(h + 1)), inplace=True) + 8
        return Out(main=y, aux=aux) if self.training else {"main": y}


def loss_of_heads(out, target):
    if isinstance(out, dict):
        return F.cross_entropy(out["main"], target)
    return F.cross_entropy(out.main, target) + 0.3 * F.cross_entropy(out.aux, target)


class FirstFour(nn.Module):
    def forward(self, x):
        return x.flatten(1)[:, :4]


WRITING = [name for name in NETS if name.startswith(("written", "two_names"))]


@pytest.mark.parametrize("name", ["heads", *WRITING])
def test_a_model_trains_the_same_wherever_it_is_cut(name):
    """Under bp nothing is delayed, so the uncut model is the oracle; to the bit, if no value has three uses."""

    def run(K, **options):
        torch.manual_seed(0)
        model, loss_fn = Heads(), loss_of_heads
        if name != "heads":
            model, loss_fn = nn.Sequential(FirstFour(), NETS[name]()), lambda out, _: out.square().mean()
        chain = linearise(model, granularity="layer")
        return chain, *trained(model, K, loss_fn=loss_fn, method="bp", granularity="layer", **options)

    chain, *expected = run(1)
    assert name != "heads" or len(places_of(chain)) >= 8
    for place in places_of(chain):
        _, *got = run(2, balance=[place, len(chain.units) - place])
        if name == "heads":
            assert_same_run(got, expected)
        assert_close(got[0], expected[0])
        assert got[1]["validation_loss"] == pytest.approx(expected[1]["validation_loss"], rel=1e-12)


def test_a_module_that_stands_twice_is_run_twice():
    act = nn.Tanh()
    model, x = nn.Sequential(nn.Linear(3, 3), act, nn.Linear(3, 3), act, nn.Linear(3, 2)), torch.randn(4, 3)
    first, second = cut(model, num_stages=2, balance=[2, 3])
    assert torch.equal(second(first(x)), model(x))


def test_a_stage_in_place_in_training_leaves_its_input_alone():
    """The stage before it needs the output of its tanh for its own backward, in this process the very same tensor."""

    def run(inplace):
        torch.manual_seed(0)
        layers = nn.Linear(72, 8), nn.Tanh(), nn.Dropout(0.4, inplace=inplace), nn.Linear(8, NUM_CLASSES)
        # Unverified: torch refuses the backward of the uncut model, whose tanh is overwritten.
        return trained(nn.Sequential(nn.Flatten(), *layers), 2, balance=["3"], verify=False)

    assert_same_run(run(True), run(False))


def draws_by(draw):
    return net(lambda self, x: self.b(self.a(x)) if draw() < 0.5 else self.a(x))


class Refused:
    def two_inputs(self, x, mask, scale=1.0):
        return self.a(x) * mask * scale

    def no_input(self, *, scale):
        return self.a.weight * scale

    def branches(self, x):
        if x.sum() > 0:  # this line is named
            return self.a(x)
        return self.b(x)

    def no_grad(self, x):
        with torch.no_grad():
            h = self.a(x)
        return self.b(h)

    def assigning(self, x):
        self.num_calls += 1
        self.calls = self.calls + 1
        return self.c(self.b(self.a(x)) / self.num_calls)

    def named_by_python(self, x):
        return self.c(self.layers["for"](self.a(x)))

    def autocast(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = self.b(self.a(x))
        return self.c(h)

    def shared_memory(self, x):
        x = self.a(x.flatten(1)[:, :4])
        halves = x.view(-1, 2, 2)
        halves *= 2.0
        return self.c(self.b(x) + x)


def branching():
    model = net(lambda self, x: self.inner(self.a(x)))()
    model.inner = nn.Sequential(net(Refused.branches)(), nn.Linear(4, 4))
    return model


class ExtraState(net(lambda self, x: self.b(self.a(x)))):
    def get_extra_state(self):
        return torch.zeros(1)


def hooked_sequential():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model.register_forward_pre_hook(lambda module, args: None)
    return model


DRAWS = "draws random numbers that do not depend on its input.*fx.wrap"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            net(Refused.two_inputs),
            r"forward takes x, mask, scale, but the input has 1 by place .*: let the dataset",
        ),
        (net(Refused.no_input), r"no_input.forward takes scale, but the input has 1 by place"),
        (branching, rf"{__file__}:\d+: if x.sum\(\) > 0:.*\(inner.0\).*torch.fx.wrap.*partition.granularity=block"),
        (draws_by(random.random), DRAWS),
        (draws_by(lambda: torch.rand(()).item()), DRAWS),
        (draws_by(np.random.rand), DRAWS),
        (net(Refused.no_grad), r"h = self.a\(x\).*torch.no_grad.*would not be read: call .detach\(\)"),
        (net(Refused.assigning), "assigning.forward changes calls, num_calls, which a cut model would not: write"),
        (net(Refused.autocast), r"torch.autocast would not be read.*torch.fx.wrap"),
        (net(Refused.named_by_python), "has a name that Python keeps for itself, like 'for'; rename it"),
        (ExtraState, r"'_extra_state' of the model's state is neither a parameter nor a buffer"),
        (hooked_sequential, r"Sequential has hooks, but is taken apart when it is cut"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_a_cut_model_would_get_wrong_is_refused(make, message):
    """The message gives the place and a way out; model and random streams are as before."""
    model = make()
    state = copy.deepcopy(model.state_dict())
    generators = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    with pytest.raises(PartitionError, match=message):
        cut(model, num_stages=2, granularity="layer")
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), generators[0])
    assert random.getstate() == generators[1]
    assert (np.random.get_state()[1] == generators[2]).all()


def lazy():
    model = net(lambda self, x: self.c(self.b(self.a(x.flatten(1)[:, :4]))))()
    model.b = nn.LazyLinear(4)
    return model


@pytest.mark.parametrize(
    ("make", "begin", "message"),
    [
        (net(Refused.shared_memory), "imul", "writes in place to one that shares its memory .*cut elsewhere"),
        (lazy, "b", r"b.weight of the model has no shape yet; run the model on one batch"),
    ],
)
def test_what_a_stage_cannot_take_is_refused_before_training(make, begin, message):
    with pytest.raises((ConfigError, PartitionError), match=message):
        trained(make(), 2, balance=[begin])
