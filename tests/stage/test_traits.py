"""What the trial has found out about a stage decides what its backward sees, sends and expects."""

import copy
import random
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from adl_dist.errors import ConfigError, PartitionError
from adl_dist.schedule import Pipeline, method
from adl_dist.stage import Stage, TrainSpec
from adl_dist.stage.traits import StageTraits, Structure, joined
from adl_dist.transport.spec import Specs, TensorSpec
from tests.support.values import spec_of

X = torch.linspace(-1, 1, 12, dtype=torch.float64).view(4, 3)
adam = partial(torch.optim.AdamW, lr=0.1, weight_decay=0.5)


class Checkpointed(nn.Module):
    """Computes its layers again in the backward."""

    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, x):
        return checkpoint(self.layers, x, use_reentrant=False)


def layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)).double()


def stage_of(module, spec=None, *, index=1, **traits):
    stage = Stage(module, index, spec or spec_of(3, adam), traits=StageTraits(**traits))
    stage.begin(0, training=True)
    return stage


def trained(stage, *, delay=2, updates=4):
    """Delayed by ``delay`` micro-batches, one of them to an update; return what went upstream, and the parameters."""
    sent = []
    for tick in range(updates + delay):
        stage.forward(tick, (X + tick,), None)
        if tick >= delay:
            sent += stage.backward(tick - delay, (X,))
            stage.update()
    return [*sent, *(p.detach() for p in stage.module.parameters())]


# --- The weights of the forward ----------------------------------------------------------------------------------


def test_a_checkpointed_stage_trains_as_one_that_keeps_all():
    plain, again = stage_of(layers()), stage_of(Checkpointed(layers()), recomputes=True)
    assert all(map(torch.equal, trained(again), trained(plain)))


def test_a_checkpointed_stage_of_two_versions_trains_alike():
    spec = TrainSpec(pipeline=Pipeline(method("2bw", accumulation_steps=4), 3), loss_fn=nn.MSELoss(), optimizer=adam)

    def values(module, **traits):
        stage = stage_of(module, spec, index=2, **traits)
        stage.use_weights(0)
        stage.head = None
        for b in range(2):
            stage.forward(b, (X,), X)
            stage.backward(b, (torch.ones((), dtype=X.dtype),))
        stage.update()
        for b in range(2, 4):
            stage.forward(b, (X,), X)  # with the version before
        newest = [p.detach().clone() for p in stage.module.parameters()]
        for b in range(2, 4):
            stage.backward(b, (torch.ones((), dtype=X.dtype),))
        assert all(map(torch.equal, newest, stage.module.parameters())), "the newest weights are in place in between"
        stage.update()
        return [p.detach() for p in stage.module.parameters()]

    assert all(map(torch.equal, values(Checkpointed(layers()), recomputes=True), values(layers())))


def test_present_weights_for_a_stage_that_recomputes_are_refused():
    with pytest.raises(ConfigError, match=r"stage 1 computes again in its backward.*use method\.weights=stash"):
        stage_of(layers(), spec_of(3, adam, weights="latest"), recomputes=True)
    stage_of(layers(), spec_of(3, adam, weights="latest"), index=2, recomputes=True)  # whose delay is 0


# --- One Parameter object for ever -------------------------------------------------------------------------------


class Held(nn.Module):
    """Reaches its weight by a plain list alone, which no walk over modules sees."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), 0.5, dtype=torch.float64))
        self.aliases = [self.weight]

    def forward(self, x):
        return x * self.aliases[0]


class Direct(Held):
    def forward(self, x):
        return x * self.weight


def test_a_reference_in_a_plain_list_is_trained_as_well():
    assert all(map(torch.equal, trained(stage_of(Held())), trained(stage_of(Direct()))))


def test_a_gradient_hook_works_at_every_update():
    module, mask = layers(), torch.tensor([[1.0], [0.0], [1.0]], dtype=torch.float64)
    before = module[0].weight.detach().clone()
    module[0].weight.register_hook(lambda grad: grad * mask)
    trained(stage_of(module, spec_of(3, partial(torch.optim.SGD, lr=0.1))))
    assert (module[0].weight != before).any(dim=1).tolist() == [True, False, True]


def test_an_accumulation_hook_meets_the_parameter_itself():
    module, seen = layers(), []
    module[0].weight.register_post_accumulate_grad_hook(lambda tensor: seen.append(tensor is module[0].weight))
    trained(stage_of(module))
    assert seen == [True] * 4


def test_a_hook_that_reads_the_weight_sees_that_of_the_forward():
    """As with a penalty whose gradient is added by a hook."""
    module, seen = layers(), []
    module[2].bias.register_hook(lambda grad: seen.append(module[2].bias.detach().clone()))
    stage = stage_of(module)
    before = module[2].bias.detach().clone()
    trained(stage, updates=3)
    assert all(torch.equal(value, before) for value in seen[:3]), "all three forwards came before the first update"


def test_memory_that_two_tensors_share_is_refused():
    module = layers()
    module[2].weight = nn.Parameter(module[0].weight.data)
    with pytest.raises(ConfigError, match=r"stage 1: '[02]\.weight' and '[02]\.weight' share memory"):
        stage_of(module)
    bp = TrainSpec(pipeline=Pipeline(method("bp"), 3), loss_fn=nn.MSELoss(), optimizer=adam)
    stage_of(module, bp)


# --- No gradient stays no gradient -------------------------------------------------------------------------------


class Uses(nn.Module):
    """Of two acts, the gradient of the second is cut off."""

    def __init__(self, *, detach=True):
        super().__init__()
        self.layer, self.detach = layers(), detach

    def forward(self, pair):
        first, second = pair
        return self.layer(first) + (second.detach() if self.detach else second)


def test_an_act_without_a_gradient_sends_none_upstream():
    stage = stage_of(Uses(), needs_grad=[True, True], gets_grad=[True, False])
    stage.forward(0, (X, X), None)
    assert [grad.shape for grad in stage.backward(0, (X,))] == [X.shape]


class Splits(nn.Module):
    """Two values from two parameters."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3).double(), nn.Linear(3, 3).double()

    def forward(self, x):
        return self.first(x), self.second(x)


def test_a_parameter_without_a_gradient_is_left_alone():
    """Its optimizer would decay it, and count a step, for a gradient of zeros."""
    module = Splits()
    before = copy.deepcopy(module.second.state_dict())
    stage = stage_of(module, out_needs_grad=[True, True], out_gets_grad=[True, False])
    stage.forward(0, (X,), None)
    stage.backward(0, (X,))
    stage.update()
    assert all(torch.equal(before[name], value) for name, value in module.second.state_dict().items())
    assert module.first.weight in stage.optimizer.state
    assert module.second.weight not in stage.optimizer.state


@pytest.mark.parametrize(("gets", "got"), [([True, True], "1 of 2 got no gradient"), ([False, False], "0 of 2 got a")])
def test_a_gradient_that_is_there_only_sometimes_ends_the_run(gets, got):
    stage = stage_of(Uses(), needs_grad=[True, True], gets_grad=gets)
    stage.forward(3, (X, X), None)
    with pytest.raises(PartitionError, match=rf"stage 1: input {got}.* in micro-batch 3, unlike in the trial"):
        stage.backward(3, (X,))


def test_without_a_trial_each_act_must_get_a_gradient():
    stage = stage_of(Uses())
    stage.forward(0, (X, X), None)
    with pytest.raises(PartitionError, match="stage 1: input 1 of 2 got no gradient in micro-batch 0"):
        stage.backward(0, (X,))


def test_an_act_outside_of_the_graph_starts_none():
    """As in the uncut model, where an input of the data has no gradient."""
    stage = stage_of(Uses(detach=False), needs_grad=[True, False], gets_grad=[True, False])
    stage.forward(0, (X, X), None)
    assert len(stage.backward(0, (X,))) == 1


def test_an_output_that_joins_the_graph_only_later_ends_the_run():
    stage = stage_of(Splits(), out_needs_grad=[True, False], out_gets_grad=[True, False])
    with pytest.raises(PartitionError, match=r"stage 1: output 1 of 2 takes part in training in micro-batch 0"):
        stage.forward(0, (X,), None)


def test_both_ends_of_an_edge_agree_on_its_gradients():
    first, second = StageTraits(), StageTraits(needs_grad=[True, True], gets_grad=[False, True])
    traits = joined({0: first, 1: second})
    assert (traits[0].out_needs_grad, traits[0].out_gets_grad) == ([True, True], [False, True])
    assert traits[1] == second
    acts = Specs.always([TensorSpec((3,), "float32"), TensorSpec((4,), "float32")])
    gradients = acts.getting_gradients(traits[1].gets_grad).of_gradients()
    assert [spec.shape for spec in gradients.training] == [(4,)]
    assert acts.getting_gradients(None) == acts


# --- What it takes and returns -----------------------------------------------------------------------------------


class Nested(nn.Module):
    def forward(self, value):
        return {"sum": value["pair"][0] + value["pair"][1], "rest": [value["factor"], "text"]}


def test_containers_cross_a_cut_as_they_are():
    takes = Structure.of({"pair": (X, X), "factor": 2})
    returns = Structure.of({"sum": X, "rest": [2, "text"]})
    stage = stage_of(Nested(), takes=(takes, takes), returns=(returns, returns))
    (out,) = stage.forward(0, (X, X + 1), None)
    assert torch.equal(out, X + (X + 1))
    assert len(stage.backward(0, (X,))) == 2


def test_another_structure_than_in_the_trial_is_refused():
    returns = Structure.of({"sum": X, "rest": [3, "text"]})
    takes = Structure.of({"pair": (X, X), "factor": 2})
    stage = stage_of(Nested(), takes=(takes, takes), returns=(returns, returns))
    with pytest.raises(PartitionError) as failure:
        stage.forward(0, (X, X), None)
    assert "stage 1 returned {'sum': tensor, 'rest': [2, 'text']}, but {'sum': tensor, 'rest': [3, 'te" in str(
        failure.value
    )


def test_2bw_keeps_versions_of_the_last_stage_too():
    module = nn.Linear(3, 3)
    module.part = nn.Parameter(module.weight.detach()[0])
    with pytest.raises(ConfigError, match=r"stage 2: '(weight|part)' and '(part|weight)' share memory"):
        stage_of(module, spec_of(3, adam, weights="2bw", delay=(2, 1, 0), accumulation_steps=4), index=2)


class Overwriting(nn.Module):
    """Returns memory of its own."""

    def __init__(self):
        super().__init__()
        self.register_buffer("out", torch.zeros(4, 3, dtype=torch.float64))

    def forward(self, x):
        return self.out.copy_(x)


def test_what_is_on_its_way_in_evaluation_stays_as_it_is():
    stage = stage_of(Overwriting(), lies_in_stage=((), (True,)))
    stage.begin(0, training=False)
    outs = [stage.predict(b, (X + b,), None)[0] for b in range(2)]
    assert all(torch.equal(out, X + b) for b, out in enumerate(outs))


# --- Random streams ----------------------------------------------------------------------------------------------


class Draws(nn.Module):
    """One number of each global stream for each micro-batch."""

    def forward(self, x):
        return torch.stack([torch.rand(()), torch.tensor(random.random()), torch.tensor(np.random.rand())]) + 0 * x


def test_all_streams_depend_on_seed_and_micro_batch_alone():
    def drawn(seed, **traits):
        stage = stage_of(Draws(), spec_of(3, adam, seed=seed), **traits)
        return torch.stack([stage.forward(b, (torch.zeros(3),), None)[0] for b in range(3)])

    both = {"draws": frozenset({"python", "numpy"})}
    reference = drawn(0, **both)
    random.random(), np.random.rand()  # what others draw in between does not matter
    assert torch.equal(drawn(0, **both), reference)
    assert torch.equal(drawn(0)[:, 0], reference[:, 0]), "torch's draws are the same without the others"
    assert reference.unique().numel() == 9, "no two streams are alike"
    assert not torch.isin(drawn(1, **both), reference).any()


def test_a_message_is_rounded_by_its_place_in_the_epoch():
    stage = stage_of(nn.Linear(3, 3))
    seeds = [stage.rounding_seed(b) for b in range(4)]
    stage.begin(0, training=True, first_micro_batch=2)
    assert [stage.rounding_seed(b) for b in range(2)] == seeds[2:]


def test_a_replay_and_an_evaluation_repeat_the_draws():
    stage = stage_of(Draws(), draws=frozenset({"python", "numpy"}))
    (first,) = stage.forward(0, (torch.zeros(3),), None, keep_graph=False)
    outs = []
    stage.module.register_forward_hook(lambda module, given, out: outs.append(out.detach()))
    stage.recompute(0)
    assert torch.equal(outs[0], first)
    stage.begin(0, training=False)
    assert torch.equal(stage.predict(0, (torch.zeros(3),), None)[0], first)


# --- The optimizer -----------------------------------------------------------------------------------------------


def test_an_optimizer_of_other_parameters_is_refused():
    other = nn.Linear(3, 3)
    with pytest.raises(ConfigError, match=r"stage 1: the optimizer holds parameters that are not of this stage"):
        stage_of(layers(), spec_of(3, lambda p: adam([*p, *other.parameters()])))


def test_a_factory_that_fails_is_told_with_the_stage():
    def factory(parameters):
        raise ValueError("found a parameter with size [1]")

    with pytest.raises(ConfigError, match=r"stage 1: the optimizer fails: ValueError: found a parameter"):
        stage_of(layers(), spec_of(3, factory))


def test_a_factory_that_returns_no_optimizer_is_refused():
    with pytest.raises(ConfigError, match=r"stage 1: optimizer must return a torch\.optim\.Optimizer, got list"):
        stage_of(layers(), spec_of(3, list))


def test_a_frozen_stage_has_no_optimizer():
    stage = stage_of(layers().requires_grad_(False), spec_of(3, lambda p: adam(filter(lambda q: q.requires_grad, p))))
    assert stage.optimizer is None
    trained(stage)
