"""Every method against its own equations, in float64 to 1e-12, and what the papers say of it."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import adl_dist
from adl_dist.schedule import METHODS, Op, Pipeline, Segment, method, training_work
from adl_dist.seeds import stream_seed
from adl_dist.stage import build_head
from tests.support.equations import (
    EQUATIONS,
    assert_close,
    assert_same_bits,
    by_the_equations,
    decoupled,
    micro_batches,
    minimal,
    modules_of,
)
from tests.support.oracle import train_greedily
from tests.support.runs import (
    BALANCE,
    EPOCHS,
    LR,
    MOMENTUM,
    WEIGHT_DECAY,
    sgd,
    train,
    warm_up,
    warm_up_schedule,
)
from tests.support.tiers import grid
from tests.support.toys import NUM_CLASSES, FixedImages, batch_norm_net
from tests.support.values import QUIET


def run(K, M, name, **options):
    state, _ = train(K, M, torch.float64, method=name, options=options)
    return state


def differ(a, b):
    return max(float((a[name] - b[name]).abs().max()) for name in a)


# --- Each method's own equations ---------------------------------------------------------------------------

BY_DEFAULT = [(1, 3), (2, 1), (3, 2), (4, 4)]  # (K, M): each size once, and M enough for 2bw
WEIGHTS = ["stash", "latest", "recompute"]
DELAYS = ["decoupled", "minimal", [5, 3, 0], [2, 2, 1], [0, 0, 0]]


def test_every_method_has_its_equations_here():
    assert EQUATIONS.keys() | {"dgl"} == METHODS.keys()


@pytest.mark.parametrize(
    ("name", "K", "M"),
    grid(EQUATIONS, range(1, 5), range(1, 5), default=[(n, *k) for n in EQUATIONS for k in BY_DEFAULT]),
)
def test_a_method_follows_its_equations_to_1e_12(name, K, M):
    """Uneven last micro-batch, uneven last group, BatchNorm, momentum, weight decay, another rate at each update."""
    delays, weights = EQUATIONS[name]
    if weights == "2bw" and M < K - 1:
        pytest.skip("2bw needs M of at least the delay of stage 0")
    assert_close(run(K, M, name), by_the_equations(K, M, delays(K), weights))


@pytest.mark.parametrize(
    ("weights", "delay", "M"),
    grid(
        WEIGHTS,
        DELAYS,
        [1, 3],
        default=[(w, d, (1, 3)[(i + j) % 2]) for i, w in enumerate(WEIGHTS) for j, d in enumerate(DELAYS)],
    ),
)
def test_any_delays_with_any_weights_follow_the_equations(delay, weights, M):
    listed = {"decoupled": decoupled(3), "minimal": minimal(3)}.get(str(delay), delay)
    assert_close(run(3, M, "adl", delay=delay, weights=weights), by_the_equations(3, M, listed, weights))


@pytest.mark.parametrize(("p", "q", "expected"), [(1, 1, [4, 2, 0]), (2, 1, [6, 3, 0]), ([2, 1], [1, 3], [7, 4, 0])])
def test_the_queues_of_dsp_add_up_to_its_staleness(p, q, expected):
    chosen = method("dsp", activation_queue=p, gradient_queue=q)
    assert list(Pipeline(chosen, 3).delays) == expected
    got = run(3, 1, "dsp", activation_queue=p, gradient_queue=q)
    assert_close(got, by_the_equations(3, 1, expected, "recompute"))


@pytest.mark.parametrize(
    ("name", "K"), grid(["fdg", "ddg", "fr"], [2, 3, 4], default=[("fdg", 3), ("ddg", 4), ("fr", 2)])
)
def test_shrinking_follows_the_equations(name, K):
    delays, weights = EQUATIONS[name]
    got = run(K, 1, name, gradient_shrink=0.5)
    assert_close(got, by_the_equations(K, 1, delays(K), weights, shrink=0.5))
    assert differ(got, run(K, 1, name)) > 1e-3


@pytest.mark.parametrize("K", [2, 3, 4])
def test_the_first_gradient_is_shrunk_and_weight_decay_is_not(K):
    """The first gradient of stage k is shrunk by beta to the k-1-k and weight decay is not."""

    def first_step(beta, weight_decay):
        trainer = adl_dist.Trainer(
            batch_norm_net().double(),
            loss_fn=nn.CrossEntropyLoss(),
            optimizer=lambda p: torch.optim.SGD(p, lr=1.0, weight_decay=weight_decay),
            method=method("fdg", gradient_shrink=beta),
            num_stages=K,
            partition=adl_dist.PartitionSpec(balance=BALANCE[K]),
            precision=adl_dist.Precision(dtype=torch.float64),
        )
        trainer.fit(FixedImages(3, dtype=torch.float64), epochs=1, batch_size=3, monitoring=QUIET)
        after = trainer.full_state_dict()
        return {n: after[n] - w for n, w in batch_norm_net().double().named_parameters()}

    stage_of = {n: k for k, m in enumerate(modules_of(K)) for n, _ in m.named_parameters()}
    plain, shrunk = first_step(1.0, 0.0), first_step(0.5, 0.0)
    decayed, shrunk_decayed = first_step(1.0, 0.1), first_step(0.5, 0.1)
    for name, k in stage_of.items():
        torch.testing.assert_close(shrunk[name], plain[name] * 0.5 ** (K - 1 - k), rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(shrunk_decayed[name] - shrunk[name], decayed[name] - plain[name])


# --- Synchronous methods -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("K", "M"), grid([2, 4], [1, 3, 4], default=[(2, 3), (4, 4)]))
def test_bp_and_1f1b_and_gpipe_reach_the_same_weights(K, M):
    """BP and 1F1B add gradients in one order, hence to the bit; GPipe in reverse."""
    bp = run(K, M, "bp")
    assert_same_bits(run(K, M, "1f1b"), bp)
    assert_close(run(K, M, "gpipe"), bp)


def test_bp_across_stages_equals_one_stage_bit_for_bit():
    assert_same_bits(run(4, 3, "bp"), run(1, 3, "bp"))


@pytest.mark.parametrize("recompute", ["except_last", "always"])
def test_recomputation_changes_nothing_in_gpipe(recompute):
    expected, _ = train(3, 4, torch.float32, method="gpipe", dropout=0.3)
    got, _ = train(3, 4, torch.float32, method="gpipe", dropout=0.3, options={"recompute": recompute})
    assert_same_bits(got, expected)


def awkward_nets():
    """First units that overwrite their input, and one whose forward reads what an earlier one wrote into a buffer."""
    spectral = nn.utils.parametrizations.spectral_norm(nn.Conv2d(2, 2, 3, padding=1, bias=False))
    return {
        "activation in place": nn.LeakyReLU(0.5, inplace=True),
        "dropout in place": nn.Dropout(0.4, inplace=True),
        "a view, then in place": nn.Sequential(
            nn.Flatten(0, 1), nn.LeakyReLU(0.5, inplace=True), nn.Unflatten(0, (-1, 2))
        ),
        "spectral norm": spectral,
    }


@pytest.mark.parametrize("first", awkward_nets())
def test_a_replay_meets_the_input_and_buffers_of_the_forward(first):
    def state(recompute):
        torch.manual_seed(3)
        model = nn.Sequential(awkward_nets()[first], *batch_norm_net())
        trainer = adl_dist.Trainer(
            model,
            loss_fn=nn.CrossEntropyLoss(),
            optimizer=sgd,
            method=method("gpipe", accumulation_steps=3, recompute=recompute),
            num_stages=2,
        )
        trainer.fit(FixedImages(18), epochs=2, batch_size=9, monitoring=QUIET)
        return trainer.full_state_dict()

    assert_same_bits(state("always"), state("never"))


# --- Limits in which methods coincide ----------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n in METHODS if n != "2bw"])  # which is one update late for one stage, too
def test_one_stage_is_plain_sgd_with_accumulation_bit_for_bit(name):
    plain, _ = train(1, 3, torch.float32, method="bp")
    if name == "gpipe":
        assert_close(run(1, 3, name), run(1, 3, "bp"))  # backwards in reverse: another order of additions
    else:
        assert_same_bits(train(1, 3, torch.float32, method=name)[0], plain)


WITHOUT_DGL = [name for name in METHODS if name != "dgl"]


@pytest.mark.parametrize(
    ("name", "K"), grid(WITHOUT_DGL, [3, 4], default=[(n, 3 + i % 2) for i, n in enumerate(WITHOUT_DGL)])
)
def test_with_a_rate_of_zero_every_gradient_is_that_of_bp(name, K):
    """Staleness cannot matter if the weights stand still: momentum then holds the same sum of gradients as in BP."""

    def buffers_of(name):
        trainer = adl_dist.Trainer(
            batch_norm_net().double(),
            loss_fn=nn.CrossEntropyLoss(),
            optimizer=lambda p: torch.optim.SGD(p, lr=0.0, momentum=0.9),
            method=method(name, accumulation_steps=3),
            num_stages=K,
            partition=adl_dist.PartitionSpec(balance=BALANCE[K]),
            precision=adl_dist.Precision(dtype=torch.float64),
        )
        made = []
        make = trainer._spec.optimizer
        trainer._spec = replace(trainer._spec, optimizer=lambda p: made.append(make(p)) or made[-1])
        trainer.fit(FixedImages(20, dtype=torch.float64), epochs=2, batch_size=9, monitoring=QUIET)
        return [o.state[p]["momentum_buffer"] for o in made for g in o.param_groups for p in g["params"]]

    got, expected = buffers_of(name), buffers_of("bp")
    assert len(got) == len(expected) > 10
    assert max(float(e.abs().max()) for e in expected) > 1e-3
    for g, e in zip(got, expected, strict=True):
        torch.testing.assert_close(g, e, rtol=1e-12, atol=1e-12)


def test_2bw_is_sgd_delayed_by_one_update_whatever_the_cut():
    """W(t+1) = W(t) - lr * gradient at W(t-1), on the uncut network (PipeDream-2BW, section 3.1)."""
    expected = by_the_equations(1, 4, [4], "stash")  # one module whose every gradient is one update old
    for K in (1, 2, 3, 4):
        assert_close(run(K, 4, "2bw"), expected)
    assert_close(run(3, 4, "adl", weights="2bw", delay="decoupled"), expected)


def test_ddg_and_pipedream_differ_in_no_bit():
    assert_same_bits(run(4, 1, "ddg"), run(4, 1, "pipedream"))


def test_fdg_is_adl_with_one_micro_batch_per_update():
    assert_same_bits(run(4, 1, "fdg"), run(4, 1, "adl"))


@pytest.mark.parametrize("pair", [("adl", "paci"), ("ddg", "fr"), ("fdg", "ddg"), ("fdg", "dsp"), ("2bw", "adl")])
def test_methods_that_differ_reach_different_weights(pair):
    first, second = (run(3, 2, name) for name in pair)
    assert differ(first, second) > 1e-6


# --- Parity with the authors' codes ------------------------------------------------------------------------


@pytest.mark.parametrize("M", [1, 4])
def test_backward_first_has_each_delay_one_shorter(M):
    got = run(4, M, "adl", order="backward_first")
    assert_close(got, by_the_equations(4, M, [5, 3, 1, 0], "stash"))


def test_the_sum_of_gradients_follows_the_equations():
    assert_close(run(3, 4, "adl", reduction="sum"), by_the_equations(3, 4, decoupled(3), "stash", reduction="sum"))


def test_learning_rate_factors_follow_the_equations():
    got = run(3, 1, "fr", lr_factors=[2.0, 1.0, 0.5])
    assert_close(got, by_the_equations(3, 1, minimal(3), "recompute", lr_factors=[2.0, 1.0, 0.5]))


# Slot, counted from 0, in which module k (counted from 1) of K makes update s: the slot of its backward of the
# group's last batch b = (s+1)M - 1, which is t - 2K + k + 1 in lock step, and t - (K-k) where the forward is locked.
SLOTS = {
    "adl": lambda k, K, b: b + 2 * K - k - 1,
    "fdg": lambda k, K, b: b + 2 * K - k - 1,
    "ddg": lambda k, K, b: b + K - k,
    "fr": lambda k, K, b: b + K - k,
    # p = 2, q = 1: batch b arrives 2(k-1) slots later and comes back 3(K-k) slots after that.
    "dsp": lambda k, K, b: b + 2 * (k - 1) + 3 * (K - k),
}


@pytest.mark.parametrize(("name", "M"), grid(SLOTS, [1, 2], default=[(n, 1 + i % 2) for i, n in enumerate(SLOTS)]))
def test_the_slot_clock_gives_each_stage_the_rate_of_its_update(name, M):
    K, options = 3, {"activation_queue": 2} if name == "dsp" else {}
    delays, weights = EQUATIONS[name]
    listed = [6, 3, 0] if name == "dsp" else delays(K)

    def rate(k, s):
        return LR * warm_up(min(SLOTS[name](k, K, (s + 1) * M - 1) // M, num_updates))

    num_updates = EPOCHS * -(-11 // M)  # the schedule ends with the run
    got = run(K, M, name, lr_index="slot", **options)
    assert_close(got, by_the_equations(K, M, listed, weights, lr_of=rate))
    assert differ(got, run(K, M, name, **options)) > 1e-6


@pytest.mark.parametrize("M", [1, 4])
def test_the_slot_clock_of_backward_first_is_that_of_mode_b(M):
    """Module k < K steps in the slot of its backward, module K at the start of the next."""
    K = 4

    def rate(k, s):
        return LR * warm_up(min((SLOTS["adl"](k, K, (s + 1) * M - 1) + (k == K)) // M, num_updates))

    num_updates = EPOCHS * -(-11 // M)
    got = run(K, M, "adl", lr_index="slot", order="backward_first")
    assert_close(got, by_the_equations(K, M, [5, 3, 1, 0], "stash", lr_of=rate))


def test_the_slot_clock_does_not_run_past_a_fixed_schedule():
    def schedule(optimizer, total_updates):
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=total_updates + 1)

    trainer = trainer_of(3, "adl", schedule, accumulation_steps=1, lr_index="slot")
    trainer.fit(FixedImages(9), epochs=2, batch_size=3, monitoring=QUIET)


def test_learning_rate_factors_hold_whatever_the_schedule_sets():
    def schedule(optimizer, total_updates):
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=total_updates + 1)

    def state(factors):
        trainer = trainer_of(2, "fr", schedule, lr_factors=factors)
        trainer.fit(FixedImages(12), epochs=1, batch_size=3, monitoring=QUIET)
        return trainer.full_state_dict()

    assert differ(state([1.0, 1.0]), state([5.0, 1.0])) > 1e-4


# --- Local losses ------------------------------------------------------------------------------------------


def trainer_of(K, name, schedule, **options):
    return adl_dist.Trainer(
        batch_norm_net(),
        loss_fn=nn.CrossEntropyLoss(),
        optimizer=sgd,
        method=method(name, **options),
        num_stages=K,
        partition=adl_dist.PartitionSpec(balance=BALANCE[K]),
        lr_schedule=schedule,
    )


NUM_GREEDY, GREEDY_MICRO_BATCH = 70, 16  # BatchNorm over 2 or 3 features of an MLP would turn rounding into chaos


def heads_of(K, name):
    heads, x = [], micro_batches()[0][0]
    for k, module in enumerate(modules_of(K)[:-1]):
        x = module(x)
        seed = stream_seed(0, "head", k)
        heads.append(build_head(name, x.shape[1:], num_classes=NUM_CLASSES, seed=seed).double())
    return heads


def conv(c, size):
    return [nn.Conv2d(c, c, size, padding=size // 2, bias=False), nn.BatchNorm2d(c), nn.ReLU()]


def layer(n):
    return [nn.Linear(n, n), nn.BatchNorm1d(n), nn.ReLU()]


# DGL's code (auxillary_classifier2 with n_lin = 3 and 0, mlp_layers = 3, and its CNN), for 5 channels of 9x9 pixels.
HEADS = {
    "mlp_sr": [nn.AdaptiveAvgPool2d(3), *conv(5, 1) * 3, nn.AdaptiveAvgPool2d(2), nn.Flatten(), *layer(20) * 3],
    "mlp": [nn.AdaptiveAvgPool2d(3), nn.AdaptiveAvgPool2d(2), nn.Flatten(), *layer(20) * 3],
    "cnn": [*conv(5, 3) * 2, nn.AdaptiveAvgPool2d(2), nn.BatchNorm2d(5), nn.Flatten()],
    "linear": [nn.AdaptiveAvgPool2d(2), nn.Flatten()],
}


@pytest.mark.parametrize("name", HEADS)
def test_a_head_has_the_layers_of_its_paper(name):
    head = build_head(name, (5, 9, 9), num_classes=7, seed=1)
    leaves = [m for m in head.modules() if not list(m.children())]
    assert [str(m) for m in leaves] == [str(m) for m in [*HEADS[name], nn.Linear(20, 7)]]


@pytest.mark.parametrize(
    ("name", "layers"),
    [("mlp", [*layer(6) * 3, nn.Linear(6, 7)]), ("linear", [nn.Linear(6, 7)])],
)
def test_a_head_on_features_is_made_of_layers_alone(name, layers):
    head = build_head(name, (6,), num_classes=7, seed=1)
    assert [str(m) for m in head.modules() if not list(m.children())] == [str(m) for m in layers]


class Outputs(nn.Module):
    """The part of a head that has weights, as the oracle wants it: what the loss is taken of."""

    def __init__(self, head):
        super().__init__()
        self.parts = nn.ModuleList([head.classifier] + ([head.project] if hasattr(head, "project") else []))

    def forward(self, out):
        return [part(out) for part in self.parts]


def local_or_plain(outs, target):
    if isinstance(outs, torch.Tensor):
        return nn.functional.cross_entropy(outs, target)
    loss = nn.functional.cross_entropy(outs[0], target)
    if len(outs) == 1:
        return loss
    # Nokland and Eidnes 2019: 0.99 of the loss is how far the similarities of features are from those of targets.
    features = outs[1].flatten(2).std(dim=2)
    labels = torch.eye(NUM_CLASSES, dtype=torch.float64)[target]
    centred = [x - x.mean(dim=1, keepdim=True) for x in (features, labels)]
    unit = [c / (1e-8 + c.square().sum(dim=1, keepdim=True).sqrt()) for c in centred]
    of_features, of_labels = (torch.einsum("ac,bc->ab", u, u) for u in unit)
    return 0.01 * loss + 0.99 * (of_features - of_labels).square().mean()


def greedy(K, M, **options):
    trainer = adl_dist.Trainer(
        batch_norm_net().double(),
        loss_fn=nn.CrossEntropyLoss(),
        optimizer=sgd,
        method=method("dgl", accumulation_steps=M, **options),
        num_stages=K,
        partition=adl_dist.PartitionSpec(balance=BALANCE[K]),
        lr_schedule=warm_up_schedule,
        precision=adl_dist.Precision(dtype=torch.float64),
    )
    data = FixedImages(NUM_GREEDY, dtype=torch.float64)
    trainer.fit(data, epochs=2, batch_size=GREEDY_MICRO_BATCH * M, shuffle=False, monitoring=QUIET)
    return trainer.full_state_dict()


def greedily(K, M, head, sources=None):
    state, _ = train_greedily(
        modules_of(K),
        [Outputs(h) for h in heads_of(K, head)],
        [micro_batches(GREEDY_MICRO_BATCH, NUM_GREEDY)] * 2,
        M=M,
        loss_fn=local_or_plain,
        lr=[LR * warm_up(s) for s in range(EPOCHS * 11)],
        momentum=MOMENTUM,
        weight_decay=WEIGHT_DECAY,
        sources=sources,
    )
    return state


@pytest.mark.parametrize("head", ["mlp_sr", "mlp", "cnn", "linear", "predsim"])
def test_dgl_follows_its_equations_with_any_head(head):
    assert_close(greedy(3, 1, head=head), greedily(3, 1, head))


@pytest.mark.parametrize(("K", "M"), grid([1, 2, 4], [1, 3], default=[(1, 1), (2, 1), (4, 3)]))
def test_dgl_follows_its_equations(K, M):
    assert_close(greedy(K, M, head="mlp"), greedily(K, M, "mlp"))


@pytest.mark.parametrize(("size", "reuse"), [(1, None), (3, None), (4, 1)])
@pytest.mark.parametrize("M", [1, 2])
@pytest.mark.parametrize("K", [2, 3])
def test_dgl_with_replay_buffers_follows_its_equations(K, M, size, reuse):
    """Which input each step takes is told by the actions; the values then follow from the equations."""
    sources = []
    for epoch in range(2):
        segment = Segment(
            epoch=epoch,
            first_update=0,
            num_samples=NUM_GREEDY,
            micro_batch_size=GREEDY_MICRO_BATCH,
            accumulation_steps=M,
        )
        chosen = method("dgl", accumulation_steps=M, head="linear", buffer_size=size, buffer_reuse=reuse)
        seed = stream_seed(0, "turns", epoch, 0)
        work = training_work(Pipeline(chosen, K), segment, stages=range(K), seed=seed)
        sources.append({k + 1: [a.number for a in work[k].actions if a.op is Op.PICK] for k in range(1, K)})
    assert any(picked != list(range(5)) for of_epoch in sources for picked in of_epoch.values())
    assert_close(greedy(K, M, head="linear", buffer_size=size, buffer_reuse=reuse), greedily(K, M, "linear", sources))
