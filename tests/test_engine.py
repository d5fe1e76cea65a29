"""The engine under thousands of interleavings, with symbols in place of tensors: exact, and fast enough for so many."""

import random
import weakref
from collections import deque
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

from adl_dist import engine
from adl_dist.engine import StageContext
from adl_dist.errors import PartitionError
from adl_dist.schedule import METHODS, Pipeline, Segment, interleave, method, training_work
from adl_dist.schedule.interleaving import downstream_first
from adl_dist.stage import Stage
from adl_dist.stage.calls import StageInfo
from adl_dist.training.edges import edges_of
from tests.support.runs import sgd
from tests.support.tiers import slow
from tests.support.values import spec_of


class Queue:
    """A channel of symbols."""

    def __init__(self):
        self.waiting = deque()

    def open(self, sizes, order=None, *, training):
        if order is not None:  # by the receiver
            self.order = deque(order)

    def send(self, micro_batch, symbols):
        self.waiting.append((micro_batch, symbols))

    def recv(self, micro_batch):
        got, symbols = self.waiting.popleft()
        assert got == micro_batch == self.order.popleft()
        return symbols

    def drain(self):
        pass


@dataclass
class SymbolicStage:
    """Computes with hashes: two runs agree if and only if every value was made from the same values."""

    index: int
    is_last: bool
    has_loss: bool
    delay: int
    weights: int = 0
    older: list = field(default_factory=list)
    used: int | None = None
    gradient_head: "SymbolicHead | None" = None
    gradient: tuple = ()
    closed: tuple = ()
    in_flight: dict = field(default_factory=dict)
    deferrable: dict = field(default_factory=dict)

    def use_weights(self, num_updates):
        self.used = num_updates

    def forward(self, b, acts, target, *, keep_graph):
        weights = self.weights if self.used is None else [*self.older, self.weights][self.used]
        self.in_flight[b] = (acts, target, weights if keep_graph else None)
        assert len(self.in_flight) <= self.delay + 1
        return () if self.is_last else (hash((weights, acts)),)

    def wait_for_device(self):
        pass

    def recompute(self, b):
        acts, target, weights = self.in_flight[b]
        assert weights is None
        self.in_flight[b] = (acts, target, self.weights)

    def backward(self, b, grads):
        kept = self.in_flight.pop(b)
        assert kept[2] is not None
        self.gradient += (hash((kept, grads)),)
        return (hash((grads, kept)),)

    def backward_input(self, b, grads, *, completes):
        self.deferrable[b] = grads, self.in_flight.pop(b)
        return (hash(self.deferrable[b]),)

    def backward_weight(self, b, *, completes):
        grads, kept = self.deferrable.pop(b)
        self.gradient += (hash((kept, grads)),)
        if completes:
            self.closed = self.gradient

    def finish_group(self, arrived, leaving):
        self.closed = self.gradient  # the decision that goes upstream may depend on the whole group
        return (hash((leaving, self.gradient)),)

    def update(self):
        assert self.closed == self.gradient
        self.older.append(self.weights)
        self.weights, self.gradient = hash((self.weights, self.gradient)), ()


@dataclass
class SymbolicHead:
    """The head of a symbolic stage: what it returns depends on all that it has learned so far."""

    delay: int
    weights: int = 0
    gradient: tuple = ()
    awaited: dict = field(default_factory=dict)

    def predict(self, b, outs, target, *, weight):
        self.awaited[b] = (outs, target, weight)
        assert len(self.awaited) <= self.delay + 1
        return (hash((self.weights, outs, target, weight)),)

    def learn(self, b, grads):
        self.gradient += (hash((self.weights, self.awaited.pop(b), grads)),)

    def update(self):
        self.weights, self.gradient = hash((self.weights, self.gradient)), ()


def work_of(chosen, K, group_sizes):
    sizes = {"num_samples": sum(group_sizes), "accumulation_steps": chosen.micro_batches_per_update}
    segment = Segment(epoch=0, first_update=0, micro_batch_size=1, **sizes)
    assert segment.group_sizes == group_sizes
    return training_work(Pipeline(chosen, K), segment, stages=range(K))


def final_weights(chosen, K, group_sizes, pick_next):
    num_micro_batches, work = sum(group_sizes), work_of(chosen, K, group_sizes)
    contexts, shares = {}, [f"share {b}" for b in range(num_micro_batches)]
    for k, delay in enumerate(Pipeline(chosen, K).delays):
        stage = SymbolicStage(k, k == K - 1, k == K - 1 or chosen.spec.local_losses, delay)
        stage.gradient_head = SymbolicHead(chosen.head_delay)
        contexts[k] = StageContext(stage, loss_grads=shares)
    for what, source, to in edges_of(Pipeline(chosen, K)):
        contexts[source].senders[what] = contexts[to].receivers[what] = Queue()
    contexts[0].batches = iter([(f"input {b}", f"target {b}") for b in range(num_micro_batches)])
    for k, context in contexts.items():
        context.open(work[k], training=True)
    engine.run(interleave([work[k].actions for k in range(K)], pick_next=pick_next), contexts)
    for context in contexts.values():
        assert not context.stage.in_flight, "the stash is empty at the end"
        assert not context.stage.gradient_head.awaited
        assert all(not end.waiting for end in (*context.receivers.values(), *context.senders.values()))
    return [(context.stage.weights, context.stage.gradient_head.weights) for context in contexts.values()]


@pytest.mark.parametrize("per_size", [25, slow(250)])
def test_random_interleavings_give_the_same_values(per_size):
    """1,000 interleavings by default, 10,000 in make test-slow, over 40 sizes drawn at random."""
    draw = random.Random(0)
    for _ in range(40):
        K, M = draw.randint(2, 6), draw.randint(1, 4)
        adl, group_sizes = method("adl", accumulation_steps=M), [M] * draw.randint(0, 4) + [draw.randint(1, M)]
        expected = final_weights(adl, K, group_sizes, downstream_first)
        for seed in range(per_size):
            found = final_weights(adl, K, group_sizes, random.Random(seed).choice)
            assert found == expected, f"K={K} {group_sizes} seed={seed}"


def test_each_action_is_a_range_of_a_running_torch_profiler():
    adl = method("adl", accumulation_steps=2)
    with torch.profiler.profile() as profiled:
        final_weights(adl, 2, [2], random.Random(0).choice)
    expected = [f"stage {k}: {action}" for k, work in work_of(adl, 2, [2]).items() for action in work.actions]
    assert sorted(event.key for event in profiled.key_averages()) == sorted(expected)


OTHERS = [(name, {}) for name in METHODS if name != "adl"] + [
    ("gpipe", {"recompute": "except_last"}),
    ("adl", {"weights": "recompute"}),
    ("adl", {"order": "backward_first"}),
    ("dsp", {"activation_queue": 2}),
    ("dni", {"head_delay": 0}),
    ("dni", {"head_delay": 7, "head_sees_target": True}),
]


@pytest.mark.parametrize(("name", "options"), OTHERS, ids=[" ".join([n, *map(str, o.values())]) for n, o in OTHERS])
def test_every_method_gives_the_same_values_in_any_order(name, options):
    chosen = method(name, **{"accumulation_steps": 3, **options})
    expected = final_weights(chosen, 4, [3, 3, 3, 1], random.Random(0).choice)
    for seed in range(40):
        assert final_weights(chosen, 4, [3, 3, 3, 1], random.Random(seed).choice) == expected, f"seed={seed}"


# --- One stage, by hand ------------------------------------------------------------------------------------


X = torch.ones(1, 2, 5, 5, dtype=torch.float64)


def conv_stage(weights, *, frozen=False):
    torch.manual_seed(0)
    first, second = (nn.Conv2d(i, o, 3, padding=1, bias=False) for i, o in ((2, 3), (3, 2)))
    module = nn.Sequential(first, nn.ReLU(), second).double().requires_grad_(not frozen)
    return training_stage(module, 1, spec_of(3, lambda p: torch.optim.SGD(p, lr=0.5), weights=weights))


def training_stage(*of_stage, epoch=0, **options):
    stage = Stage(*of_stage, **options)
    stage.begin(epoch, training=True)
    return stage


@pytest.mark.parametrize("weights", ["stash", "latest", "recompute"])
def test_a_stage_whose_parameters_are_all_frozen_is_updated_too(weights):
    """Nothing of it changes, but micro-batches in flight hold its version."""
    stage = conv_stage(weights, frozen=True)
    before = [p.clone() for p in stage.module.parameters()]
    for b in range(2):
        stage.forward(b, (X,), None)
    stage.backward(0, (X,))
    stage.update()
    stage.backward(1, (X,))
    stage.update()
    assert stage.version == 2
    assert all(map(torch.equal, before, stage.module.parameters()))


def test_what_went_downstream_is_not_kept_for_the_backward():
    """No operator wants the output of a last convolution again; only the graph behind it is."""
    stage = conv_stage("stash")
    outs = []
    stage.module[2].register_forward_hook(lambda module, given, out: outs.append(weakref.ref(out)))
    stage.forward(0, (X,), None)
    assert [ref() for ref in outs] == [None]
    stage.backward(0, (X,))
    assert all(p.grad is not None for p in stage.module.parameters())


@pytest.mark.parametrize("weights", ["stash", "latest"])
def test_a_broken_off_segment_leaves_no_gradient_to_the_next(weights):
    def updated(stage):
        stage.begin(0, training=True)
        stage.forward(0, (X,), None)
        stage.backward(0, (X,))
        stage.update()
        return [p.detach().clone() for p in stage.module.parameters()]

    broken_off, fresh = conv_stage(weights), conv_stage(weights)
    for b in range(3):
        broken_off.forward(b, (X,), None)
    broken_off.backward(0, (X,))
    broken_off.update()
    broken_off.backward(1, (X,))  # on the version before
    fresh.module.load_state_dict(broken_off.module.state_dict())
    assert all(map(torch.equal, updated(broken_off), updated(fresh)))


def test_dropout_depends_on_seed_epoch_stage_and_micro_batch():
    def masks(seed, epoch, index):
        stage = training_stage(nn.Dropout(0.5), index, spec_of(index + 2, sgd, seed=seed), epoch=epoch)
        return [stage.forward(b, (torch.ones(1, 64),), None)[0] for b in range(2)]

    reference = masks(0, 0, 1)
    torch.rand(5)  # what others draw in between does not matter
    assert all(torch.equal(a, b) for a, b in zip(masks(0, 0, 1), reference, strict=True))
    for other in (masks(1, 0, 1), masks(0, 1, 1), masks(0, 0, 2)):
        assert not torch.equal(other[0], reference[0])
    assert not torch.equal(reference[0], reference[1])


class First(nn.Module):
    """Uses the first of two tensors only."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x, y):
        return x * self.weight


@pytest.mark.parametrize(
    ("info", "told"),
    [
        ({"gets_grad": (True, True)}, r"that reach it .* 0, \[True, False\] take .* but \[True, True\] did in the"),
        ({"out_needs_grad": (False,)}, r"that leave it .* 0, \[True\] take a gradient, but \[False\] did in the trial"),
    ],
)
def test_gradients_unlike_those_of_the_trial_are_refused(info, told):
    stage = training_stage(First(), 1, spec_of(3, sgd), info=StageInfo(**info))

    def train():
        stage.forward(0, (torch.ones(2, 3), torch.ones(2, 3)), None)
        stage.backward(0, (torch.ones(2, 3),))

    with pytest.raises(PartitionError, match=told):
        train()
