"""Stages through torch.compile: the values of the plain run, as few graphs as can be, no trace left in the model."""

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import adl_dist
from adl_dist.errors import ConfigError
from tests.support.runs import train, trainer_of
from tests.support.toys import NUM_CLASSES, FixedImages
from tests.support.values import QUIET

# Dynamo looks at .grad of what it is given, and hides the warning in a way that "error" does not notice.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute")


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


# With 33, 33 and 18 updates. A stage needs a graph for training and one for evaluation, each with the usual number of
# samples and with what is left over; where it replays, the forward to be replayed takes two more.
RUNS = [("adl", 4, 1, 4), ("dsp", 2, 1, 6), ("2bw", 2, 2, 4)]


@pytest.mark.usefixtures("traced_only")
@pytest.mark.parametrize(("method", "K", "M", "per_stage"), RUNS, ids=[name for name, *_ in RUNS])
def test_no_weight_version_compiles_anew(method, K, M, per_stage):
    """Also with four stages in one process, whose code is the same."""
    plain, _ = train(K, M, torch.float64, method=method, dropout=0.3)
    compiled, _ = train(K, M, torch.float64, method=method, dropout=0.3, compile=True)
    assert list(compiled) == list(plain)
    for name in plain:
        torch.testing.assert_close(compiled[name], plain[name], rtol=1e-12, atol=1e-12, msg=name)
    assert K * 4 <= counters["stats"]["unique_graphs"] <= K * per_stage


def perceptron(seed=0):
    torch.manual_seed(seed)
    stages = [nn.Flatten(), nn.Linear(72, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, NUM_CLASSES)]
    return nn.Sequential(*stages)


@pytest.mark.slow
def test_a_compiled_run_equals_the_plain_run_to_1e_5():
    """With the compiler itself, without samples left over: two graphs a stage, or this would take a minute."""
    torch._dynamo.reset()
    counters.clear()
    states, losses = [], []
    for compiled in (False, True):
        model = perceptron()
        trainer = trainer_of(model, compile=compiled)
        data = FixedImages(32)
        summary = trainer.fit(data, epochs=3, batch_size=32, val_dataset=data, monitoring=QUIET)
        states.append(trainer.full_state_dict())
        losses.append(summary["validation_loss"])
    assert counters["stats"]["unique_graphs"] == 2 * 2
    assert list(states[1]) == list(states[0]) == list(model.state_dict())
    for name, expected in states[0].items():
        torch.testing.assert_close(states[1][name], expected, rtol=1e-5, atol=1e-5, msg=name)
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert all(module._compiled_call_impl is None for module in model.modules())


def test_present_weights_in_a_compiled_backward_are_refused():
    with pytest.raises(ConfigError, match=r"runtime\.compile a graph may keep what was computed from those of its"):
        trainer_of(perceptron(), compile=True, method=adl_dist.method("adl", weights="latest"))
