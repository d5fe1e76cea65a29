"""What a forward may ask while it is read with two real batches, and what is refused, with the line."""

import copy
import gc
import math
import random
import types

import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from adl_dist.errors import PartitionError
from adl_dist.partition import check_same_chain, linearise
from tests.support.cut_model import assert_pieces_equal, pieces_everywhere, read


def rows(num):
    return torch.randn(num, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(num))


class Net(nn.Module):
    """float64[B, 4] to float64[B, 4]; a forward uses some of its layers, buffers and hidden state."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))
        self.block = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
        self.norm, self.memory = nn.BatchNorm1d(4), nn.LSTM(4, 4, batch_first=True)
        self.register_buffer("mean", torch.randn(4))
        self.register_buffer("calls", torch.zeros(()))
        self.count, self.config, self.loose = [0], types.SimpleNamespace(calls=0), [nn.Linear(4, 4)]
        self.numpys, self.pythons, self.torchs = np.random.default_rng(0), random.Random(0), torch.Generator()


def net(forward):
    torch.manual_seed(0)
    return type(forward.__name__, (Net,), {"forward": forward})().double()


class Asking:
    def whether_it_is_a_tensor(self, x):
        h = self.a(x)
        h = self.b(h) if isinstance(h, Tensor) and torch.is_tensor(h) else self.c(h)
        return self.c(h) if isinstance(x.shape[0], int) and isinstance(self.a.weight, nn.Parameter) else h

    def for_attributes(self, x):
        h = self.a(x)
        return self.b(h) if hasattr(h, "anything") or not hasattr(h, "softmax") else self.c(torch.tanh(h))

    def for_containers(self, x):
        out, state = self.memory(self.a(x)[:, None])
        return self.c(out[:, 0] + state[0][0] if isinstance(state, tuple) and len(state) == 2 else out[:, 0])

    def for_sizes(self, x):
        rows, columns = x.shape
        assert columns == 4
        assert rows > 0
        if x.dtype != torch.float64 or len(x.shape) > 2:
            x = x.float()
        h = self.a(x).view(*x.shape[:-1], 2, int(x.shape[-1]) // 2).reshape(*x.shape[:1], -1)
        for step in range(x.shape[1]):
            h = torch.tanh(h) + step / math.sqrt(x.shape[1])
        return self.c(self.b(h) + torch.arange(x.shape[1], device=x.device)) + torch.finfo(x.dtype).eps

    def for_parts(self, x):
        first, second = (torch.tanh(part) for part in self.a(x).chunk(2, -1))
        total = sum(part for part in self.b(x).split(2, dim=1))
        return self.c(torch.cat([first + total, second * total], dim=1))

    def for_a_device_of_no_other_kind(self, x):
        if x.device.type == "mps" or x.device != self.a.weight.device:
            return x
        return self.b(torch.tanh(self.a(x)))

    def whether_none(self, x):
        h, no_weights = nn.functional.multi_head_attention_forward, None
        out = self.norm(self.a(x)) if no_weights is None and h is not None else x
        return self.b(out) if x.grad is None else out

    def for_its_own_parameters(self, x):
        penalty = sum(parameter.square().sum() for parameter in self.b.parameters())
        return self.c(torch.tanh(self.b(self.a(x)))) * penalty

    def for_buffers_by_name(self, x):
        mean, h = dict(self.named_buffers())["mean"], self.b(self.a(x))
        if self.training:
            mean.mul_(0.9).add_(h.detach().mean(0) * 0.1)
        return self.c(torch.tanh(h - mean)) + self._buffers["mean"]

    def for_a_buffer_to_count_in(self, x):
        if self.training:
            self.calls += 1
        return self.c(self.b(torch.tanh(self.a(x))) / (1 + self.calls))

    def for_keys_and_texts(self, x):
        h = self.a(x) * {4: 0.5, 5: 2.0}[x.shape[1]]
        return self.c(torch.tanh(h)) * {torch.float64: 1.5}[x.dtype] * len(f"{x.dtype}, {x.shape[1:]}")

    def for_a_place_to_write_to(self, x):
        h = self.a(x * 1)
        h[:, 0] = 1.0
        y = torch.tanh(self.b(h)) * 1
        y[:, 1:] += 1
        return self.c(y)


ASKING = {name: forward for name, forward in vars(Asking).items() if not name.startswith("_")}


@pytest.mark.parametrize("name", ASKING)
def test_a_forward_may_ask_what_is_the_same_for_any_batch(name):
    model = net(ASKING[name])
    state = {key: value.clone() for key, value in model.state_dict().items()}
    streams = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    chain = read(model, rows)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), streams[0])
    assert random.getstate() == streams[1]
    assert (np.random.get_state()[1] == streams[2]).all()
    assert len(assert_pieces_equal(model, chain, rows(5))) > 1


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:FutureWarning")
def test_a_layer_of_torchscript_is_taken_over():
    model = net(lambda self, x: self.c(self.scripted(self.a(x))))
    model.scripted = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.Tanh())).double()
    first, second, third = pieces_everywhere(read(model, rows))
    assert torch.equal(third(second(first(rows(5)))), model(rows(5)))


class Refused:
    def caught(self, x):
        h = self.a(x)
        try:
            h = self.b(h) if h.sum() > 0 else 2 * h
        except Exception:
            h = self.c(h)
        return torch.tanh(h)

    def caught_without_values(self, x):
        h = self.a(x)
        try:
            h = self.b(h) if h.shape[0] > 1 else 2 * h
        except Exception:
            h = self.c(h)
        return torch.tanh(h)

    def numpys_generator(self, x):
        return self.b(self.a(x)) if self.numpys.random() < 0.5 else self.c(self.a(x))

    def pythons_generator(self, x):
        return self.b(self.a(x)) if self.pythons.random() < 0.5 else self.c(self.a(x))

    def torchs_generator(self, x):
        return self.b(self.a(x)) if torch.rand((), generator=self.torchs) < 0.5 else self.c(self.a(x))

    def counter_in_a_list(self, x):
        self.count[0] += 1
        return self.b(self.a(x)) / self.count[0]

    def counter_in_a_config(self, x):
        self.config.calls += 1
        return self.b(self.a(x)) / self.config.calls

    def number_of_samples(self, x):
        return self.b(self.a(x)) if x.shape[0] % 2 else self.c(self.a(x))

    def as_a_number(self, x):
        return self.b(self.a(x)) * int(x.shape[0])

    def value_as_a_number(self, x):
        return self.b(self.a(x)) * float(x.sum().item())

    def device(self, x):
        return self.b(self.a(x)) if x.is_cuda else self.c(self.a(x))

    def loose_module(self, x):
        return self.b(self.loose[0](self.a(x)))

    def attribute_of_a_value(self, x):
        h = self.a(x)
        h.requires_grad = True
        return self.b(h)

    def kept_elsewhere(self, x):
        with torch.autograd.graph.save_on_cpu():
            h = self.b(self.a(x))
        return self.c(h)

    def left_by_a_hook(self, x):
        self.a.register_forward_hook(lambda module, args, out: setattr(self.config, "kept", out))
        h = self.b(self.a(x))
        return self.c(h + self.config.kept)

    def checkpointed_lambda(self, x):
        return self.c(checkpoint(lambda h: self.block(h), self.a(x), use_reentrant=False))


VALUES = "the values of a tensor would be decided once and for all"
MESSAGES = {
    "caught": rf"h = self.b\(h\) if h.sum\(\) > 0 else 2 \* h: a condition on {VALUES}",
    "numpys_generator": r"forward changes numpys, which a cut model would not",
    "pythons_generator": r"forward changes pythons, which a cut model",
    "torchs_generator": r"forward changes torchs, which a cut model",
    "counter_in_a_list": r"forward changes count.*, which a cut model",
    "counter_in_a_config": r"forward changes config.calls, which a cut model",
    "number_of_samples": r"if x.shape\[0\] % 2.*is another for batches of 1 \(False and True\)",
    "as_a_number": r"int\(\) of it is another for batches of other sizes \(2 and 4\)",
    "value_as_a_number": r"float\(x.sum\(\).item\(\)\): float\(\) of it depends on the values of tensors",
    "device": r"if x.is_cuda.*is another on another device",
    "loose_module": r"self.loose\[0\].*a Linear is called that is not registered: hold it in an nn.ModuleList",
    "attribute_of_a_value": r"h.requires_grad = True: sets the attribute 'requires_grad' of a value",
    "kept_elsewhere": r"saved_tensors_hooks do, .* would not be read",
    "left_by_a_hook": r"self.config.kept\).*must match.*while it is read, not when it runs: what a layer or",
    "checkpointed_lambda": r"checkpoint\(lambda.*a function is handed over that cannot be read.*module itself",
}


@pytest.mark.parametrize("name", MESSAGES)
def test_what_would_be_decided_once_and_for_all_is_refused(name):
    model = net(vars(Refused)[name])
    numpys, pythons = model.numpys.bit_generator.state, model.pythons.getstate()
    with pytest.raises(PartitionError, match=MESSAGES[name]):
        read(model, rows)
    assert model.count == [0]
    assert model.config.calls == 0
    assert model.numpys.bit_generator.state == numpys
    assert model.pythons.getstate() == pythons


def test_a_refusal_that_the_forward_catches_stays_one():
    with pytest.raises(PartitionError, match=r"h.shape\[0\] > 1.*its value, which is not known"):
        linearise(net(Refused.caught_without_values), granularity="layer")


def test_without_values_an_activation_is_a_tensor():
    units = linearise(net(lambda self, x: self.b(h) if isinstance(h := self.a(x), Tensor) else h)).units
    assert units == ["a", "b"]


class Checkpointed:
    def module(self, x):
        return self.c(torch.tanh(checkpoint(self.block, torch.tanh(self.a(x)), use_reentrant=False)))

    def module_of_torchs_old_kind(self, x):
        return self.c(torch.tanh(torch.utils.checkpoint.checkpoint(self.block, self.a(x), use_reentrant=True)))

    def with_running_statistics(self, x):
        return self.c(checkpoint(self.norm, self.a(x), use_reentrant=False))


@pytest.mark.parametrize("name", [name for name in vars(Checkpointed) if not name.startswith("_")])
def test_a_checkpointed_module_is_one_unit_and_recomputes(name):
    model, calls = net(vars(Checkpointed)[name]), []
    chain = read(model, rows)
    assert sum("checkpoint" in unit for unit in chain.units) == 1
    watched = model.norm if name.startswith("with") else model.block[1]
    pieces = assert_pieces_equal(model, chain, rows(5))
    watched.register_forward_pre_hook(lambda *_: calls.append(1))
    out = rows(5)
    for piece in pieces:
        out = piece.train()(out)
    out.sum().backward()
    assert len(calls) == 2  # forward, and again in the backward


def test_a_checkpointed_method_is_one_unit():
    class Part(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

        def half(self, x):
            return torch.tanh(self.inner(x))

        def forward(self, x):
            return self.other(checkpoint(self.half, x, use_reentrant=False))

    model = nn.Sequential(nn.Linear(4, 4), Part(), nn.Linear(4, 4)).double()
    chain = read(model, rows)
    assert chain.units == ["0", "1.checkpoint", "1.other", "2"]
    # Its units are one method of a module that holds both layers, so that no cut goes between them.
    assert len(assert_pieces_equal(model, chain, rows(5))) == 3


def test_a_wrapper_is_not_sent_from_layer_to_block_and_back():
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.b(x) if x.sum() > 0 else self.a(x)

    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Inner()

        def forward(self, x):
            return self.inner(x)

    with pytest.raises(PartitionError, match=r"x.sum\(\) > 0.*\(inner\)") as refusal:
        read(Wrapper().double(), rows)
    assert "granularity=block" not in str(refusal.value)
    model = nn.Sequential(nn.Linear(4, 4), Inner(), nn.Linear(4, 4)).double()
    with pytest.raises(PartitionError, match=r"\(1\).*use partition.granularity=block.*3 units"):
        read(model, rows)


def test_long_reasons_end_at_a_word():
    class Long(nn.Module):
        def forward(self, x):
            raise ValueError("word " * 100)

    with pytest.raises(PartitionError, match=r"word \.\.\.; hide"):
        read(Long(), rows)


def test_what_a_layer_moves_is_put_back_and_not_refused():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.calls, self.rng = 0, random.Random(0)
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x):
            self.calls += 1
            self.seen += 1
            return F.dropout(x, 0.1) * self.rng.random() + random.random()

    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(Layer(), nn.Linear(4, 4))).double()
    state = model[1][0].rng.getstate()
    assert read(model, rows).units == ["0", "1.0", "1.1"]
    assert (model[1][0].calls, float(model[1][0].seen)) == (0, 0.0)
    assert model[1][0].rng.getstate() == state


def test_what_was_computed_while_reading_is_let_go_of():
    """At once: a graph that waits for Python's collector would hold a first version of the weights in training."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    gc.disable()
    try:
        chain = linearise(model, granularity="layer", samples=(torch.randn(3, 4), torch.randn(4, 4)))
        assert [p._use_count() for p in model.parameters()] == [1] * 4
    finally:
        gc.enable()
    assert len(chain.units) == 3


class ReadsBefore(nn.Module):
    """Computes with a running mean before its layer moves it."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)

    def forward(self, x):
        x = self.first(x)
        before = self.norm.running_mean * 1.0
        return self.last(self.norm(x)) - before


def test_a_buffer_is_read_before_a_layer_moves_it():
    torch.manual_seed(0)
    model, x = ReadsBefore(), torch.randn(3, 4)
    chain = linearise(model, granularity="layer", samples=(torch.randn(2, 4), torch.randn(4, 4)))
    whole = copy.deepcopy(model)
    (piece,) = chain.pieces([len(chain.units)])
    assert torch.equal(piece(x), whole(x))


class AsksForDtype(nn.Module):
    """As attention does, which fills what is masked with the least number there is; and walks through a tensor."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        x = self.first(x)
        x = x.masked_fill(x > 9, torch.finfo(x.dtype).min) * {torch.float32: 1.0}.get(x.dtype, 2.0)
        rows = [x[:, n] for n in range(len(x[0, :2]))]
        return self.last(x + sum(rows).unsqueeze(1))


def test_questions_about_a_dtype_do_not_depend_on_a_length():
    model, of_lengths = AsksForDtype(), [tuple(torch.randn(n, length, 4) for n in (2, 4)) for length in (3, 5, 6)]
    chain = linearise(model, granularity="layer", samples=of_lengths[0], varies=True)
    for samples in of_lengths[1:]:
        check_same_chain(chain, model, samples, granularity="layer")
    assert not [unit for unit in chain.units if "len" in unit or "lambda" in unit]
    x = torch.randn(3, 7, 4)
    (piece,) = chain.pieces([len(chain.units)])
    assert torch.equal(piece(x), model(x))
