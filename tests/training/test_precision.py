"""Mixed precision and torch.compile: their values."""

from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from adl_dist import Callback
from tests.support.commands import assert_same
from tests.support.equations import assert_close, differ, modules_by_the_equations
from tests.support.runs import BALANCE, toy_trainer, train, warm_up_schedule
from tests.support.slices import cut
from tests.support.toys import NUM_CLASSES, FixedImages, batch_norm_net
from tests.support.values import QUIET

LOWERED = {"autocast": torch.bfloat16}


# --- Autocast ----------------------------------------------------------------------------------------------


class Autocasted(nn.Sequential):
    """Children under torch's own autocast."""

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(x)


def loss_fn(out, target):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return nn.functional.cross_entropy(out, target)


@pytest.mark.parametrize(("K", "weights"), [(4, "stash"), (3, "recompute")])
def test_stages_under_autocast_equal_the_equations_bit_for_bit(K, weights):
    """No tolerance would do: a last digit decides how autocast rounds a weight to bfloat16, and then all digits differ.

    Both sides make the same roundings in the same order, so they agree on any CPU, whichever kernels it has.
    """
    parts = cut(batch_norm_net(), num_stages=K, balance=BALANCE[K])
    modules = [Autocasted(OrderedDict(part.named_children())) for part in parts]
    expected = modules_by_the_equations(modules, 2, None, weights, dtype=torch.float32, loss_fn=loss_fn)
    state, _ = train(K, 2, torch.float32, options={"weights": weights}, **LOWERED)
    plain, _ = train(K, 2, torch.float32, options={"weights": weights})
    assert_same(state, expected)
    assert differ(state, plain) > 0, "a cast in another place would show: without autocast they differ by 1e-2"


def test_bfloat16_crosses_the_cut_and_parameters_stay_float32():
    seen = {}
    model = batch_norm_net()
    model[3].register_forward_pre_hook(lambda _, given: seen.update(act=given[0].dtype))
    model[2].register_full_backward_pre_hook(lambda _, given: seen.update(grad=given[0].dtype))
    toy_trainer(M=4, model=model, **LOWERED).fit(FixedImages(8), epochs=1, batch_size=4, monitoring=QUIET)
    assert seen == {"act": torch.bfloat16, "grad": torch.bfloat16}
    assert {p.dtype for p in model.parameters()} == {torch.float32}


# --- torch.compile -----------------------------------------------------------------------------------------

# Dynamo looks at .grad of what it is given, and hides the warning in a way that "error" does not notice.
compiles = pytest.mark.filterwarnings("ignore:The .grad attribute")


@pytest.fixture
def traced_only(monkeypatch):
    """torch.compile without its slow half, the compiler: the same graphs, guards and autograd."""
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, options, **rest: compile_(f, backend="aot_eager", **rest))
    torch._dynamo.reset()
    counters.clear()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        yield
    torch._dynamo.reset()


def perceptron(dropout=0.0):
    """A network of few operations, each of which takes its time to be traced."""
    torch.manual_seed(0)
    first = nn.Sequential(nn.Flatten(), nn.Linear(72, 8))
    rest = [nn.Sequential(nn.BatchNorm1d(8), nn.Dropout(dropout), nn.Linear(8, 8)) for _ in range(2)]
    return nn.Sequential(first, *rest, nn.Linear(8, NUM_CLASSES))


class GraphCounts(Callback):
    def __init__(self):
        self.after_epochs = []

    def on_epoch(self, now):
        self.after_epochs.append(counters["stats"]["unique_graphs"])


@compiles
@torch._dynamo.config.patch(fail_on_recompile_limit_hit=True)
def test_modules_compiled_by_the_user_are_recorded_as_python():
    """Their compiler sees their own graphs only, and all train as without it."""
    plain, compiled, graphs = perceptron(), perceptron(), []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    for place in (1, 2):
        compiled[place] = torch.compile(compiled[place], backend=backend)
    states = []
    for model in (plain, compiled):
        trainer = toy_trainer(2, 2, model=model, balance="even")
        trainer.fit(FixedImages(8), epochs=1, batch_size=4, monitoring=QUIET)
        states.append({name.replace("_orig_mod.", ""): value for name, value in trainer.full_state_dict().items()})
    assert_same(*states)
    assert graphs, "in training they are compiled"


@compiles
@pytest.mark.usefixtures("traced_only")
@pytest.mark.parametrize(("method", "K", "M"), [("2bw", 2, 2)])
def test_no_weight_version_compiles_again(method, K, M):
    """Also with three stages in one process, whose code is the same."""

    def state(**options):
        options |= {"lr_schedule": warm_up_schedule, "dtype": torch.float64}
        trainer = toy_trainer(K, M, method, model=perceptron(0.3), **options)
        data, validation = (FixedImages(number, dtype=torch.float64) for number in (14, 10))
        counts = GraphCounts()
        trainer.fit(data, epochs=3, batch_size=3 * M, val_dataset=validation, monitoring=QUIET, callbacks=[counts])
        assert counts.after_epochs[1] == counts.after_epochs[2], "two epochs have met all sizes and modes"
        return trainer.full_state_dict()

    assert_close(state(compile=True), state())
    assert counters["stats"]["unique_graphs"] == 3 * 4, "three kinds of modules, two modes, two sizes, once for all"


@compiles
@pytest.mark.slow
def test_a_compiled_run_equals_the_plain_run_to_1e_5():
    """With the compiler itself, without samples left over: two graphs a module, or this would take a minute."""
    torch._dynamo.reset()
    counters.clear()
    states, losses = [], []
    for compiled in (False, True):
        model, data = perceptron(), FixedImages(32)
        trainer = toy_trainer(M=4, model=model, compile=compiled)
        summary = trainer.fit(data, epochs=3, batch_size=32, val_dataset=data, monitoring=QUIET)
        states.append(trainer.full_state_dict())
        losses.append(summary["validation_loss"])
    assert counters["stats"]["unique_graphs"] == 2 * 3, "equal modules of a stage share graphs"
    assert list(states[1]) == list(states[0]) == list(model.state_dict())
    assert_close(states[1], states[0], 1e-5)
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert all(module._compiled_call_impl is None for module in model.modules())
