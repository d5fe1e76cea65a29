"""What crosses a cut, what each stage computes for itself, and what must stay on one stage."""

import math
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from adl_dist.errors import PartitionError
from adl_dist.models import resnet
from adl_dist.partition import cut, even_sizes, linearise
from adl_dist.partition.module_state import tensors_reached
from tests.support.cut_model import assert_pieces_equal, places_of, read

WORDS, LENGTH, WIDTH, HEADS = 17, 8, 16, 2


def rows(num):
    return torch.randn(num, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(num))


def tokens(num):
    return torch.randint(0, WORDS, (num, LENGTH), generator=torch.Generator().manual_seed(num))


class RootMeanSquare(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def angles(positions, width):
    frequencies = 1.0 / 10000 ** (torch.arange(0, width, 2, dtype=torch.float64) / width)
    return torch.cat([torch.outer(positions, frequencies)] * 2, dim=-1)


class Rotary(nn.Module):
    """Asks its input for nothing but length, dtype and device."""

    def __init__(self, width):
        super().__init__()
        self.register_buffer("inverse", 1.0 / 10000 ** (torch.arange(0, width, 2) / width))

    def forward(self, x):
        places = torch.outer(torch.arange(x.shape[1], device=x.device).to(self.inverse), self.inverse)
        both = torch.cat([places, places], dim=-1)
        return both.cos().to(x.dtype), both.sin().to(x.dtype)


class Peeking(Rotary):
    """Its result is the same for every batch so far, but may be another for one with other values."""

    def forward(self, x):
        cos, sin = super().forward(x)
        return (cos, sin) if not x.isnan().any() else (sin, cos)


def rotated(x, cos, sin):
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-right, left], dim=-1) * sin


class LlamaBlock(nn.Module):
    def __init__(self, rotary):
        super().__init__()
        self.before, self.between, self.rotary = RootMeanSquare(), RootMeanSquare(), rotary
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate, self.up = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x, cos=None, sin=None):
        B, T, C = x.shape
        assert C % HEADS == 0
        q, k, v = (t.view(B, T, HEADS, -1).transpose(1, 2) for t in self.qkv(self.before(x)).chunk(3, -1))
        if self.rotary is not None:
            cos, sin = self.rotary(x)
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(h.transpose(1, 2).reshape(B, T, C))
        h = self.between(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    """``tables``: where cos and sin come from."""

    def __init__(self, tables):
        super().__init__()
        torch.manual_seed(0)
        self.tables, self.block_size = tables, 32
        self.embedding = nn.Embedding(WORDS, WIDTH)
        table = angles(torch.arange(32.0, dtype=torch.float64), WIDTH // HEADS)
        self.register_buffer("cos", table.cos())
        self.register_buffer("sin", table.sin(), persistent=False)
        self.rotary = (Peeking if tables == "peeking" else Rotary)(WIDTH // HEADS)
        self.blocks = nn.ModuleList(LlamaBlock(self.rotary if tables == "shared" else None) for _ in range(4))
        self.norm, self.head = RootMeanSquare(), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids):
        length = ids.shape[1]
        assert length <= self.block_size
        x = self.embedding(ids)
        tables = ()
        if self.tables == "buffers":
            tables = self.cos[:length], self.sin[:length]
        elif self.tables != "shared":
            tables = self.rotary(x)
        for block in self.blocks:
            x = block(x, *tables)
        return self.head(self.norm(x))


@pytest.mark.parametrize("granularity", ["layer", "block"])
@pytest.mark.parametrize("tables", ["buffers", "module", "shared"])
def test_tables_of_positions_do_not_keep_a_llama_together(tables, granularity):
    """Each stage computes its own; only the first that holds a buffer has it in its state."""
    model = Llama(tables).double()
    chain = read(model, tokens, granularity=granularity)
    sizes = even_sizes(chain, 4)
    assert max(sizes) - min(sizes) <= 1
    pieces = assert_pieces_equal(model, chain, tokens(5))
    assert len(pieces) >= len(chain.units) - 2
    halves = chain.pieces(even_sizes(chain, 2))
    crossing = halves[0](tokens(5))
    sent = [tensor for tensor in (crossing if isinstance(crossing, tuple) else [crossing]) if tensor.numel()]
    assert all(tensor.shape[:2] == (5, LENGTH) for tensor in sent) or granularity == "layer"
    buffer = "cos" if tables == "buffers" else "rotary.inverse"
    if tables != "shared" or granularity == "layer":
        assert all(buffer in dict(half.named_buffers()) for half in halves)
    assert sum(buffer in half.state_dict() for half in halves) == 1


def test_a_module_that_looks_at_values_is_not_computed_again():
    chain = read(Llama("peeking").double(), tokens, granularity="block")
    assert places_of(chain) == [1, 6, 7]
    assert "[8, 8] would cross it, whose first dimension is not the batch" in chain.forbidden[3]
    with pytest.raises(PartitionError, match=r"cannot be cut after blocks.1: 'getitem.*choose another"):
        cut(Llama("peeking").double(), num_stages=2, balance=["blocks.2"], samples=(tokens(3), tokens(4)))


class GPTBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.register_buffer("causal", torch.tril(torch.ones(32, 32)).view(1, 1, 32, 32))
        self.mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = (t.view(B, T, HEADS, C // HEADS).transpose(1, 2) for t in self.qkv(self.norm(x)).split(C, dim=2))
        weights = q @ k.transpose(-2, -1) * (1.0 / math.sqrt(k.size(-1)))
        weights = weights.masked_fill(self.causal[:, :, :T, :T] == 0, float("-inf")).softmax(dim=-1)
        return x + self.mlp((weights @ v).transpose(1, 2).contiguous().view(B, T, C))


class GPT(nn.Module):
    def __init__(self, *, tied):
        super().__init__()
        torch.manual_seed(0)
        parts = {"wte": nn.Embedding(WORDS, WIDTH), "wpe": nn.Embedding(32, WIDTH), "h": nn.ModuleList()}
        self.transformer, self.block_size = nn.ModuleDict(parts), 32
        self.transformer.h.extend(GPTBlock() for _ in range(4))
        self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.lm_head.weight = self.transformer.wte.weight

    def forward(self, ids, targets=None):
        _, length = ids.size()
        assert length <= self.block_size, f"a sequence of {length}"
        x = self.transformer.wte(ids) + self.transformer.wpe(torch.arange(length, device=ids.device))
        for block in self.transformer.h:
            x = block(x)
        return self.lm_head(x) if targets is None else None


@pytest.mark.parametrize("granularity", ["layer", "block"])
def test_a_gpt_as_it_is_written_is_cut_between_its_blocks(granularity):
    model = GPT(tied=False).double()
    chain = read(model, tokens, granularity=granularity)
    assert chain.units[:4] == ["transformer.wte", "arange", "transformer.wpe", "add"]
    assert chain.forbidden == {
        2: "'transformer_wpe': a tensor [8, 16] would cross it, whose first dimension is not the batch",
    }
    assert len(assert_pieces_equal(model, chain, tokens(5))) == len(chain.units) - 1


def test_a_tied_gpt_is_refused_by_the_name_of_what_is_tied():
    model, samples = GPT(tied=True).double(), (tokens(3), tokens(4))
    with pytest.raises(PartitionError, match=r"0 place.*'transformer.wte.weight' and 'lm_head.weight' are one and the"):
        cut(model, num_stages=2, samples=samples)
    with pytest.raises(PartitionError, match=r"there is no unit or block 'h.2'; near it are transformer.h.2;"):
        cut(GPT(tied=False).double(), num_stages=2, balance=["h.2"], samples=samples)


class Both(NamedTuple):
    main: torch.Tensor
    rest: dict


class Nesting(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        h = torch.tanh(self.inner(x))
        return {"a": h, "b": [h + 1, (x, 2)], "c": Both(main=h * 2, rest={"only": h - 1})}


class Reading(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, value):
        (more, (x, two)), pair = value["b"], value["c"]
        return [self.inner(value["a"] + more) * two + x, {"rest": pair.rest["only"] * pair.main}]


class OneOfAList(nn.Module):
    def forward(self, value):
        h, rest = value
        return [torch.tanh(h) * rest["rest"]]


class Ending(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, value):
        return {"out": self.inner(value[0]), "other": (value[0],)}


class CallsThem(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([Nesting(), Reading(), OneOfAList(), Ending()])

    def forward(self, x):
        for part in self.parts:
            x = part(x)
        return x


@pytest.mark.parametrize("make", [CallsThem, lambda: nn.Sequential(Nesting(), Reading(), OneOfAList(), Ending())])
def test_containers_cross_cuts_as_they_are(make):
    torch.manual_seed(0)
    model = make().double()
    assert len(assert_pieces_equal(model, read(model, rows, granularity="block"), rows(5))) == 4


class Split(nn.Module):
    """A list of parts crosses together with another value, and a list of one."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        parts = self.a(x).chunk(2, dim=1)
        y = self.b(torch.cat([parts[0], parts[0]], dim=1))
        return self.c(torch.tanh(y)) + torch.cat(parts[:1] * 2, dim=1)


def test_a_list_crosses_beside_a_tensor():
    model = Split().double()
    pieces = assert_pieces_equal(model, read(model, rows), rows(5))
    assert any(isinstance(value, tuple) for value in pieces[1](pieces[0](rows(5))))


class InAList(nn.Module):
    def __init__(self, owner):
        super().__init__()
        self.own, self.tied = nn.Linear(4, 4), [owner]

    def forward(self, x):
        return self.own(x) @ self.tied[0].weight.T


class InAClosure(nn.Module):
    def __init__(self, owner):
        super().__init__()
        self.own, self.weight_of_owner = nn.Linear(4, 4), lambda: owner.weight

    def forward(self, x):
        return self.own(x) @ self.weight_of_owner().T


@pytest.mark.parametrize("samples", [(rows(3), rows(4)), None])
@pytest.mark.parametrize("make", ["sequential", "traced"])
@pytest.mark.parametrize("hiding", [InAList, InAClosure])
def test_a_tie_that_is_not_registered_forbids_cuts(hiding, make, samples):
    first = nn.Linear(4, 4)
    model = nn.Sequential(first, nn.Tanh(), hiding(first), nn.Linear(4, 4)).double()
    if make == "traced":
        model.__class__ = type("Traced", (nn.Sequential,), {"train": train})
    chain = linearise(model, samples=samples)
    assert places_of(chain) == [3]
    assert "'0.weight'" in chain.forbidden[1]


def train(self, mode=True):
    return nn.Module.train(self, mode)


@pytest.mark.parametrize("samples", [(rows(3), rows(4)), None])
def test_a_reference_to_the_whole_model_ties_nothing(samples):
    class Child(nn.Module):
        def __init__(self, parent):
            super().__init__()
            self.parent, self.inner = [parent], nn.Linear(4, 4)

        def forward(self, x):
            return torch.tanh(self.inner(x))

    model = nn.Sequential()
    model.extend(Child(model) for _ in range(3))
    assert linearise(model.double(), samples=samples).forbidden == {}


def test_a_model_that_its_children_refer_to_is_walked_once():
    class Parent(nn.Sequential):
        walks = 0

        def named_modules(self, *args, **kwargs):
            type(self).walks += 1
            return super().named_modules(*args, **kwargs)

    model = Parent(*(nn.Linear(4, 4) for _ in range(5)))
    for child in model:
        child.parent = [model]
    assert len([*tensors_reached(model)]) == 10
    assert Parent.walks == 1


def test_a_shared_buffer_that_a_forward_moves_ties_its_users():
    class Counting(nn.Module):
        def __init__(self, counter):
            super().__init__()
            self.counter, self.inner = counter, nn.Linear(4, 4)

        def forward(self, x):
            self.counter += 1
            return self.inner(x) / self.counter

    counter = torch.zeros((), dtype=torch.float64)
    model = nn.Sequential(*(Counting(nn.Buffer(counter)) for _ in range(2)), nn.Linear(4, 4)).double()
    model[1].counter = model[0].counter
    chain = read(model, rows, granularity="block")
    assert places_of(chain) == [2]
    assert "'0.counter' and '1.counter' are one and the same tensor" in chain.forbidden[0]


@pytest.mark.parametrize("granularity", ["block", "layer"])
def test_a_write_into_a_view_ties_no_units(granularity):
    """What an InstanceNorm returns is a view; a write to it moves the history of what it is a view of."""
    layers = [nn.Conv2d(4, 4, 1), nn.InstanceNorm2d(4, affine=True), nn.LeakyReLU(inplace=True), nn.Conv2d(4, 4, 1)]
    chain = read(
        nn.Sequential(*layers).double(),
        lambda size: rows(size)[:, :, None, None].expand(-1, -1, 3, 3),
        granularity=granularity,
    )
    assert places_of(chain) == [1, 2, 3]


@pytest.mark.parametrize("samples", [(rows(3), rows(4)), None])
@pytest.mark.parametrize("make", ["sequential", "traced"])
@pytest.mark.parametrize("kind", [nn.Parameter, nn.Buffer])
def test_memory_that_parameters_share_ties_their_units(kind, make, samples):
    """As processes of their own two stages would each have a copy, and train it apart."""

    class Reads(nn.Module):
        def __init__(self, mirror):
            super().__init__()
            self.mirror, self.own = kind(mirror), nn.Linear(4, 4)

        def forward(self, x):
            return self.own(x) @ self.mirror

    first = nn.Linear(4, 4).double()
    units = [first, nn.Tanh(), Reads(first.weight.detach().t()).double(), nn.Linear(4, 4).double()]
    model = nn.Sequential(*units)
    if make == "traced":
        model.__class__ = type("Traced", (nn.Sequential,), {"train": train})
    chain = linearise(model, samples=samples)
    assert places_of(chain) == [3]
    assert "'0.weight' and '2.mirror' share memory" in chain.forbidden[1]


OURS = ("adopt", "unit_names", "_forwards", "_unlike", "_unit_names", "graph", "code", "acts", "model", "held", "meta")


@pytest.mark.parametrize("granularity", ["layer", "block"])
@pytest.mark.parametrize("name", OURS)
def test_modules_and_parameters_may_have_any_name(name, granularity):
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.add_module(name, nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
            self.parts = nn.ModuleDict({name: nn.Linear(4, 4)})
            self.parts.register_parameter(f"{name}_", nn.Parameter(torch.ones(4)))

        def forward(self, x):
            x = getattr(self, name)(x)
            return torch.tanh(self.parts[name](x)) * getattr(self.parts, f"{name}_")

    model = Named().double()
    assert len(assert_pieces_equal(model, read(model, rows, granularity=granularity), rows(5))) > 2


def test_values_change_neither_units_nor_where_a_resnet_is_cut():
    model = resnet.cifar_resnet(20)
    images = [torch.randn(num, 3, 16, 16) for num in (3, 4)]
    for granularity in ("layer", "block"):
        chain, before = (linearise(model, granularity=granularity, samples=s) for s in (tuple(images), None))
        assert (chain.units, chain.forbidden) == (before.units, before.forbidden)
