"""Small models on which prototypes of the cut were wrong or crashed, at every cut into two and three stages.

Names begin with what went wrong then: w, a wrong number; c, an unclear error; r, a refusal without need.
"""

import itertools
import random
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from adl_dist.errors import PartitionError
from adl_dist.partition import Chain
from tests.support.staged import Verdict, compare, recorded_of, seed_all

TRAPS, BATCHES = {}, {}


def trap(name, batches=None):
    """Register a model, with batches of its own, if [B, T, 8] will not do."""

    def register(build):
        TRAPS[name], BATCHES[name] = build, batches
        return build

    return register


def normal(*shape):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def linear():
    return nn.Linear(8, 8)


class TwoLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = linear(), linear()


class ThreeLayers(TwoLayers):
    def __init__(self):
        super().__init__()
        self.c = linear()


class Weight(nn.Module):
    """A module without children, and with a weight."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(8))


class Block(nn.Module):
    """A module with a layer."""

    def __init__(self):
        super().__init__()
        self.layer = linear()


def two(a, b=linear):
    """Give a class two layers that are made like this."""

    def init(cls):
        def __init__(self):
            nn.Module.__init__(self)
            self.a = a()
            self.b = b()

        cls.__init__ = __init__
        return cls

    return init


# A guessed shape or number


class Flat(Weight):
    def forward(self, x):
        return (x * self.w).reshape(1, -1, 8)


@trap("w1")
@two(Flat)
class SizeAsNumber(nn.Module):
    """A size that is no size of the argument is used as a number."""

    def forward(self, x):
        tokens = self.a(x)
        return self.b(x) / tokens.shape[1]


class ReturnsSize(Block):
    def forward(self, x):
        return self.layer(x), x.shape[0]


@trap("w2")
@two(ReturnsSize)
class NumberOfBlock(nn.Module):
    def forward(self, x):
        h, n = self.a(x)
        return self.b(h) / n


class ReturnsLargest(Block):
    def forward(self, x, ids):
        return self.layer(x), int(ids.max())


@trap("w2b", [(normal(3, 8), torch.tensor([1, 5 * i, 4])) for i in range(1, 5)])
@two(ReturnsLargest)
class NumberOfValues(nn.Module):
    def forward(self, x, ids):
        h, n = self.a(x, ids)
        return self.b(h) * n


@trap("r8", [normal(8, 8), normal(8, 8), normal(8, 8), normal(3, 8)])
class WidthIsBatch(TwoLayers):
    """A batch size that equals a width: which of both is a size of the result?"""

    def forward(self, x):
        h = self.a(x)
        return self.b(h) / h.shape[-1] + self.b(x)


class Pool(Weight):
    n = 1

    def forward(self, x):
        return (x * self.w)[:, : self.n]


@trap("r9", [(normal(3, 6, 8), torch.tensor([i, 0, 0])) for i in (1, 2, 3, 4)])
@two(Pool)
class AttributeIsShape(nn.Module):
    """The root sets an attribute of a block, from which follows what the block returns."""

    def forward(self, x, ids):
        self.a.n = int(ids.max()) + 1
        h = self.a(x)
        return self.b(x) / h.shape[1] + h.mean()


@trap("w12")
class AutocastDtype(TwoLayers):
    def forward(self, x):
        h = self.a(x).float()
        with torch.autocast("cpu", torch.bfloat16):
            scores = h @ h.mT
        return self.b(x) * scores.element_size()


# Effects beyond what a module returns


class Appends(Weight):
    def forward(self, x, kept):
        y = x * self.w
        kept.append(y)
        return y.tanh()


@trap("w3")
@two(Appends, Appends)
class AppendsToArgument(nn.Module):
    def forward(self, x):
        kept = []
        x = self.b(self.a(x, kept), kept)
        return x + torch.stack(kept).sum(0)


class Keeps(Weight):
    last = 0.0

    def forward(self, x):
        self.last = x * self.w
        return self.last.tanh()


@trap("w3b")
@two(Keeps)
class ReadsWhatLayerKeeps(nn.Module):
    def forward(self, x):
        return self.b(self.a(x)) + self.a.last


class ReadsOther(Weight):
    def __init__(self, other):
        super().__init__()
        self.__dict__["other"] = other

    def forward(self, x):
        return x * self.w + self.other.last


@trap("c5")
class LayerReadsWhatLayerKeeps(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = Keeps()
        self.b = ReadsOther(self.a)

    def forward(self, x):
        return self.b(self.a(x))


class Attention(Weight):
    map = None

    def forward(self, x):
        self.map = (x * self.w).softmax(-1)
        return x + self.map


@trap("w17")
class MapsOfAllLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Attention() for _ in range(2)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x, [layer.map for layer in self.layers if layer.map is not None]


class Context:
    n = 0


class Counts(Block):
    def __init__(self, context):
        super().__init__()
        self.context = context

    def forward(self, x):
        self.context.n += 1
        return self.layer(x) / self.context.n


@trap("w13")
class SharedObject(nn.Module):
    """Two blocks count in one plain object, which the root resets."""

    def __init__(self):
        super().__init__()
        self.context = Context()
        self.a, self.b = Counts(self.context), Counts(self.context)

    def forward(self, x):
        self.context.n = 0
        return self.b(self.a(x))


# Objects in arguments and results


@dataclass
class Out:
    h: Tensor
    aux: Tensor


@trap("w4")
class ReturnsDataclass(TwoLayers):
    def forward(self, x):
        h = self.a(x)
        return Out(self.b(h), h.detach().tanh().mean(-1))


@dataclass
class State:
    h: Tensor
    notes: list = field(default_factory=list)


class TakesState(Weight):
    def forward(self, state):
        return state.h * self.w


@trap("w14")
@two(TakesState)
class DataclassIntoLayer(nn.Module):
    def forward(self, x):
        h = self.a(State(x))
        return self.b(x) * h.shape[0]


# Hooks


@trap("w5")
class HookBehindCut(ThreeLayers):
    """The hook halves all of a gradient, of which a part comes from an earlier stage."""

    def forward(self, x):
        h = self.a(x)
        skip = self.b(h)
        y = self.c(h)
        if h.requires_grad:
            h.register_hook(lambda grad: grad * 0.5)
        return y + skip


@trap("r3")
class HookNotSent(ThreeLayers):
    """The hook is of a tensor that does not cross the cut."""

    def forward(self, x):
        h = self.a(x)
        z = self.c(self.b(h))
        if h.requires_grad:
            h.register_hook(lambda grad: grad * 0.5)
        return z


# Writes


@trap("w6")
class ReassignedBuffer(TwoLayers):
    def __init__(self):
        super().__init__()
        self.register_buffer("m", torch.zeros(8))

    def forward(self, x):
        h = self.b(self.a(x))
        self.m = 0.9 * self.m + 0.1 * h.detach().mean((0, 1))
        return h - self.m


class WritesPart(Block):
    def __init__(self, n):
        super().__init__()
        self.n = n

    def forward(self, x, out):
        y = self.layer(x)
        out[:, self.n] = y
        return y


@trap("w7")
class WritesToArgument(nn.Module):
    """Blocks write into a tensor that the root made for them."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = WritesPart(0), WritesPart(1), linear()

    def forward(self, x):
        out = torch.zeros(len(x), 2, 8, dtype=x.dtype)
        y = self.b(self.a(x[:, 0], out), out)
        return self.c(y) + out.sum(1)


class Moves(Block):
    def forward(self, x, place):
        place += 1
        return self.layer(x) * place[:, None, None].clone()


@trap("w7b")
@two(Moves, Moves)
class MovesArgument(nn.Module):
    def forward(self, x):
        place = torch.zeros(len(x), dtype=torch.long)
        return self.b(self.a(x, place), place)


@trap("w8")
class ShapeInPlace(ThreeLayers):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 4)

    def forward(self, x):
        h = self.a(x)
        h.transpose_(1, 2)
        return self.c(self.b(x)) / h.shape[1]


@trap("w15")
class FlagAfterWrite(TwoLayers):
    def forward(self, x):
        h = x * 1
        h += self.a(x)
        return self.b(x) * (2 if h.requires_grad else 1)


@trap("w18")
class WritesWeights(TwoLayers):
    def forward(self, x):
        self.b.weight.data.clamp_(-0.1, 0.1)
        return self.b(self.a(x))


@trap("w18b")
class MomentumEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k = linear(), linear().requires_grad_(False)

    def forward(self, x):
        y = self.q(x)
        with torch.no_grad():
            for p, q in zip(self.q.parameters(), self.k.parameters(), strict=True):
                q.data.mul_(0.9).add_(p.data, alpha=0.1)
            z = self.k(x)
        return (y - z).square().mean()


@trap("w20")
class ViewBeforeWrite(TwoLayers):
    def forward(self, x):
        z = torch.zeros(x.shape, dtype=x.dtype)
        v = z[:, :3]
        z[:] = self.a(x)
        return self.b(x)[:, :3] + v


class Steps(Block):
    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x):
        self.steps += 1
        return self.layer(x)


@trap("w21")
@two(Steps)
class ReadsCounter(nn.Module):
    def forward(self, x):
        return self.b(self.a(x)) * (self.a.steps / 10).clone()


class Average(Block):
    def __init__(self):
        super().__init__()
        self.register_buffer("m", torch.zeros(8))

    def forward(self, x):
        with torch.no_grad():
            self.m.mul_(0.9).add_(x.mean((0, 1)), alpha=0.1)
        return self.layer(x - self.m)


@trap("c1")
@two(linear, Average)
class AverageBeforeLayer(nn.Module):
    def forward(self, x):
        return self.a(x) + self.b(x)


class Scaled(Block):
    def __init__(self):
        super().__init__()
        self.g = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.layer(x * self.g)


@trap("c2")
@two(linear, Scaled)
class WeightBeforeLayer(nn.Module):
    def forward(self, x):
        return self.b(self.a(x))


@trap("c4")
class ViewOfView(TwoLayers):
    def forward(self, x):
        h = self.a(x).transpose(0, 1)
        y = self.b(x).transpose(0, 1)
        v = h[:, :2]
        v += 1
        return y[:, :2] + v


@trap("r1")
class WriteToConstant(TwoLayers):
    def forward(self, x):
        h = self.a(x)
        z = torch.zeros(x.shape, dtype=x.dtype).add_(h)
        return self.b(h) + z


@trap("r4")
class WriteToView(TwoLayers):
    def forward(self, x):
        h = self.a(x).transpose(0, 1)
        y = self.b(x).transpose(0, 1)
        h.relu_()
        return y + h


# Calls that hide what they do


@trap("c3")
class LayerUnderVmap(TwoLayers):
    def forward(self, x):
        return self.b(torch.vmap(self.a)(x))


@trap("c6")
class ClosureOfCheckpoint(ThreeLayers):
    def forward(self, x):
        skip, h = self.a(x), self.b(x)
        return checkpoint(lambda t: self.c(t) + skip, h, use_reentrant=False)


def through(function):
    """A model that calls ``function`` between its layers."""

    class Net(TwoLayers):
        def forward(self, x):
            h = function(self.a(x))
            return self.b(h) + h

    return Net


@torch.library.custom_op("traps::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


twice.register_fake(torch.empty_like)
twice.register_autograd(lambda ctx, grad: grad * 2)


def swish(x):
    return x * torch.sigmoid(x)


TRAPS |= {"r5": lambda: through(torch.jit.script(swish))(), "r6": through(twice)}
TRAPS["r7"] = through(torch.vmap(lambda t: t.tanh() * 2))


# Met in models of transformers and timm, and in random networks


class Routed(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.w = linear(), nn.Parameter(torch.randn(3, 8, 8))

    def forward(self, x):
        out, gates = torch.zeros_like(x), self.gate(x)
        for n in (gates[0, 0, :3] > 0).nonzero()[:, 0]:
            out.index_add_(0, torch.arange(len(x)), x @ self.w[n])
        return out


@trap("w26")
@two(Routed, Routed)
class LoopsOverNonzero(nn.Module):
    """The elements of an absent tensor decide how often a loop runs."""

    def forward(self, x):
        return x + self.b(x + self.a(x))


class Halves(Block):
    def forward(self, x):
        h = self.layer(x)
        out = h.new_empty(*h.shape[:-1], 16)
        out[..., :8].copy_(h)
        out[..., 8:].copy_(h * 2)
        return out[..., :8] + out[..., 8:]


@trap("r12")
@two(Halves, Halves)
class ViewsOfNewMemory(nn.Module):
    """A later stage writes to both halves of memory that each stage makes."""

    def forward(self, x):
        return self.b(self.a(x))


@trap("r11")
class DropoutOfTable(TwoLayers):
    """A module computes without values of the batch."""

    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.0)

    def forward(self, x):
        table = self.drop(torch.arange(8.0, dtype=x.dtype).sin()[None])
        return self.b(self.a(x)) + torch.gather(table.expand(x.shape[1], 8), 0, torch.zeros(1, 8, dtype=torch.int64))


@trap("c7")
class StridedByTensor(TwoLayers):
    """A size is a tensor, which meta does not accept."""

    def forward(self, x):
        h = self.a(x).contiguous()
        count = torch.div(h.shape[1], 2, rounding_mode="trunc")
        strided = h.as_strided((len(h), count + 1, 8), (h.stride(0), h.stride(1), 1))
        return self.b(h) + strided.sum(1, keepdim=True)


class Table(Weight):
    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.zeros(1, 1))
        self.layer = linear()

    def forward(self, x):
        if self.table.shape[1] != x.shape[1]:
            self.table = torch.arange(float(x.shape[1]), dtype=x.dtype)[None]
        return self.layer(x * self.w) + self.table[..., None]


@trap("w24")
@two(Table, Table)
class TableAssignedAnew(nn.Module):
    """A forward puts another tensor in the place of a buffer."""

    def forward(self, x):
        return self.b(self.a(x))


class Inserts(TwoLayers):
    def forward(self, x):
        h = self.a(x)
        if len(h) > 2:
            out = torch.zeros_like(h)
            view = out[..., :6]
            out[:, 0] = self.b(h[:, 0])
            h = h + out + view.sum(-1, keepdim=True)
        return h


@trap("w25")
@two(Inserts, Inserts)
class NumberOfMemoryAgain(nn.Module):
    """Memory that another stage has written to is freed, and gets new contents."""

    def forward(self, x):
        return self.b(self.a(x) / 2)


@trap("w27")
class BufferOfTwoStages(ThreeLayers):
    """A layer that is left out decides which stage gives a buffer its value."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.ones(8))
        self.calls = -2

    def forward(self, x):
        self.calls += 1
        h = self.a(x)
        if self.calls % 3:
            h = self.b(h)
        h = h * self.mean
        self.mean = h.detach().mean((0, 1))
        return self.c(h)


class FirstOnes(nn.Module):
    """A layer whose caller sets how much of its result is wanted."""

    def __init__(self):
        super().__init__()
        self.layer, self.wanted = linear(), 8

    def forward(self, x):
        return self.layer(x)[:, : self.wanted]


@trap("w28", [normal(n, 6, 8) for n in (3, 2, 2, 2, 2)])
class SizeFromAnAttribute(ThreeLayers):
    """The size of a result changes while the arguments stay the same."""

    def __init__(self):
        super().__init__()
        self.b, self.calls = FirstOnes(), 0

    def forward(self, x):
        self.calls += 1
        self.b.wanted = 3 + self.calls % 2
        return self.c(self.b(self.a(x))).sum(1)


@trap("w29", [normal(n, 6, 8) for n in (3, 2, 4, 2)])
class PythonDrawsForSmallBatches(ThreeLayers):
    """A scale that Python draws in some forwards only, the same on all stages."""

    def forward(self, x):
        h = self.b(self.a(x))
        return self.c(h * (1 + random.random()) if len(x) == 2 else h)


class Nested(TwoLayers):
    def forward(self, x):
        return checkpoint(self.b, self.a(x).tanh(), use_reentrant=False)


@trap("c8")
@two(Nested)
class CheckpointInCheckpoint(nn.Module):
    def forward(self, x):
        return self.b(checkpoint(self.a, x, use_reentrant=False))


# Part of the refusal at some cut; all others are equal at every cut.
REFUSED = {
    **dict.fromkeys(["c3", "r5", "r7"], "was made by a call which cannot be followed, like a scripted function"),
    "c6": "'add' runs inside torch.utils.checkpoint, which has one stage",
    "c8": "'a.b' runs inside torch.utils.checkpoint, which has one stage",
    "w25": "computes 'div' with a tensor [2, 5, 8] of 'a', which it lacks",
    "w27": "depends on the path that a micro-batch takes|'mean' was computed by another stage in this micro-batch",
    "w18b": "writes values of a parameter that another stage holds to a tensor of this one",
}
MUST_BE_EQUAL = ["w1", "w2", "w6", "w7", "w8", "w15", "w20", "w21", "c1"]
DEFAULT_BATCHES = [normal(3, 6, 8), normal(2, 5, 8), normal(4, 6, 8), normal(3, 4, 8)]


def build_of(name):
    def build():
        torch.manual_seed(0)
        return TRAPS[name]().double()

    return build


def verdicts_of(name):
    """Compare where a run would cut in two, and at every cut into two and three stages of one recording."""
    batches = BATCHES.get(name) or DEFAULT_BATCHES
    seed_all(0)
    try:
        chain = Chain(build_of(name)(), recorded_of(batches))
    except PartitionError as error:
        return [Verdict("refused", str(error))]
    num_units = len(chain.units)
    cuts = [c for K in (1, 2) for c in itertools.combinations(range(1, num_units), K)]
    sizes = [[b - a for a, b in itertools.pairwise([0, *cut, num_units])] for cut in cuts]
    return [compare(build_of(name), batches, cut, chain=chain) for cut in (2, *sizes)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", TRAPS)
def test_a_trap_is_equal_or_refused_by_name(name):
    found = verdicts_of(name)
    assert [v for v in found if v.kind not in ("equal", "close", "refused")] == []
    refusals = [v.text for v in found if v.kind == "refused"]
    assert [text for text in refusals if not any(one in text for one in REFUSED.get(name, "none").split("|"))] == []
    assert bool(refusals) == (name in REFUSED)


def test_what_must_be_equal_is():
    assert not {*MUST_BE_EQUAL} & {*REFUSED}
    assert len(TRAPS) == 44


class SetOnce(SizeFromAnAttribute):
    """As in models of transformers with labels, whose first forward sets the problem_type of all layers."""

    def forward(self, x):
        out = self.c(self.b(self.a(x)))
        self.b.kind = "text"
        return out.sum(1)


@pytest.mark.parametrize(("build", "varies"), [(SetOnce, False), (SizeFromAnAttribute, True)])
def test_shapes_are_computed_anew_only_where_they_may_change(build, varies):
    """Each takes a millisecond of every micro-batch in which the layer is skipped."""
    chain = Chain(build().double(), DEFAULT_BATCHES[:2], granularity="layer")
    (planned,) = chain.plan([1] * len(chain.units)).modes[True].root.modules["b"]
    assert planned.varies is varies
