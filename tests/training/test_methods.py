"""Every method against its own equations, in float64 to 1e-12, and what the papers say of it."""

import functools

import pytest
import torch
from torch import nn

from adl_dist.schedule import METHODS, Pipeline, method
from adl_dist.seeds import stream_seed
from adl_dist.stage.heads import Pool, build_head
from tests.support.commands import assert_same
from tests.support.equations import EQUATIONS, assert_close, by_the_equations, differ, micro_batches, modules_of, run
from tests.support.oracle import train_greedily
from tests.support.runs import EPOCHS, LR, MOMENTUM, WEIGHT_DECAY, toy_trainer, train, warm_up, warm_up_schedule
from tests.support.tiers import covering, grid
from tests.support.toys import NUM_CLASSES, FixedImages, batch_norm_net
from tests.support.values import QUIET

# --- Each method's own equations ---------------------------------------------------------------------------

# (method, K, M), of which M is enough for 2bw; the runs of three stages are those of other tests below, too.
SIZES = [(name, 3, 2) for name in EQUATIONS if name != "adl"]
SIZES += [(name, 4, 4) for name in ("2bw", "dsp", "gpipe")]


def test_every_method_has_its_equations_here():
    assert EQUATIONS.keys() | {"dgl", "dni"} == METHODS.keys()


@pytest.mark.parametrize(("name", "K", "M"), grid(EQUATIONS, range(1, 5), range(1, 5), default=SIZES))
def test_a_method_follows_its_equations_to_1e_12(name, K, M):
    """Uneven last micro-batch, uneven last group, BatchNorm, momentum, weight decay, another rate at each update."""
    delays, weights = EQUATIONS[name]
    if weights == "2bw" and M < K - 1:
        pytest.skip("2bw needs M of at least the delay of stage 0")
    assert_close(run(K, M, name), by_the_equations(K, M, delays(K), weights))


WEIGHTS = ["stash", "latest", "recompute"]
DELAYS = [[5, 3, 0], [2, 2, 1], [0, 0, 0]]
HALF = [(w, d, (1, 3)[(i + j) % 2]) for i, w in enumerate(WEIGHTS) for j, d in enumerate(DELAYS)]


@pytest.mark.parametrize(("weights", "delay", "M"), grid(WEIGHTS, DELAYS, [1, 3], default=HALF))
def test_any_delays_with_any_weights_follow_the_equations(delay, weights, M):
    assert_close(run(3, M, "adl", delay=delay, weights=weights), by_the_equations(3, M, delay, weights))


FACTORS = [2.0, 1.0, 0.5]


def factored(k, s):
    return LR * warm_up(s) * FACTORS[k - 1]


# (K, M, method, its options, the delays, more arguments of the equations).
OPTIONS = {
    "longer queues of dsp": (3, 1, "dsp", {"activation_queue": 2, "gradient_queue": 1}, [6, 3, 0], {}),
    "queues of each hop of dsp": (3, 1, "dsp", {"activation_queue": [2, 1], "gradient_queue": [1, 3]}, [7, 4, 0], {}),
    "backward first": (4, 1, "adl", {"order": "backward_first"}, [5, 3, 1, 0], {}),
    "backward first, M of 4": (4, 4, "adl", {"order": "backward_first"}, [5, 3, 1, 0], {}),
    "sum of gradients": (3, 4, "adl", {"reduction": "sum"}, [4, 2, 0], {"reduction": "sum"}),
    "rate factors": (3, 1, "fr", {"lr_factors": FACTORS}, [2, 1, 0], {"lr_of": factored}),
    **{
        f"shrunk {name} {K}": (K, 1, name, {"gradient_shrink": 0.5}, EQUATIONS[name][0](K), {"shrink": 0.5})
        for name, K in (("fdg", 3), ("ddg", 4), ("fr", 2))
    },
}


@pytest.mark.parametrize("case", OPTIONS)
def test_a_methods_options_follow_their_equations(case):
    K, M, name, options, delays, of_equations = OPTIONS[case]
    assert list(Pipeline(method(name, accumulation_steps=M, **options), K).delays) == delays
    got = run(K, M, name, **options)
    assert_close(got, by_the_equations(K, M, delays, EQUATIONS[name][1], **of_equations))
    plain = by_the_equations(K, M, EQUATIONS[name][0](K), EQUATIONS[name][1])
    assert differ(got, plain) > 1e-3, "they change much"


# --- Synchronous methods -----------------------------------------------------------------------------------


def test_synchronous_methods_reach_the_same_weights():
    """All but GPipe, which goes backward in reverse, add gradients in one order, hence to the bit."""
    bp = run(3, 2, "bp")
    assert_same(run(1, 2, "bp"), bp)
    for name in ("1f1b", "zbh1", "zbh2", "interleaved"):
        assert_same(run(3, 2, name), bp)
    assert_close(run(3, 2, "gpipe"), bp)


def awkward_net():
    """Stages whose first unit overwrites its input, and one that reads what an earlier one wrote into a buffer."""
    torch.manual_seed(3)
    activation = nn.LeakyReLU(0.5, inplace=True)
    view = nn.Sequential(nn.Flatten(0, 1), activation, nn.Unflatten(0, (-1, 2)))
    spectral = nn.utils.parametrizations.spectral_norm(nn.Conv2d(2, 2, 3, padding=1, bias=False))
    first, *rest = batch_norm_net(dropout=0.3)
    return nn.Sequential(activation, spectral, view, first, nn.Conv2d(4, 4, 1), nn.Dropout(0.4, inplace=True), *rest)


def test_recomputation_changes_nothing_in_gpipe():
    """A replay meets the input and the buffers of the forward, and its dropout."""
    runs = []
    for options in ({"recompute": "always"}, {}):
        trainer = toy_trainer(3, 3, "gpipe", options, model=awkward_net(), balance=[2, 3, 7])
        trainer.fit(FixedImages(18), epochs=2, batch_size=9, monitoring=QUIET)
        runs.append(trainer.full_state_dict())
    assert_same(*runs)


# --- Limits in which methods coincide ----------------------------------------------------------------------


by_bp = functools.cache(functools.partial(train, dtype=torch.float32, method="bp"))


@pytest.mark.parametrize("name", ["adl", "dsp", "interleaved", "dgl", "dni"])
def test_one_stage_is_plain_sgd_with_accumulation_bit_for_bit(name):
    assert_same(train(1, 3, torch.float32, method=name)[0], by_bp(1, 3)[0])


def test_2bw_is_sgd_delayed_by_one_update_whatever_the_cut():
    """W(t+1) = W(t) - lr * gradient at W(t-1), on the uncut network (PipeDream-2BW, section 3.1)."""
    expected = by_the_equations(1, 2, [2], "stash")  # one module whose every gradient is one update old
    for K in (1, 3):
        assert_close(run(K, 2, "2bw"), expected)
    assert_close(run(3, 2, "adl", weights="2bw", delay="minimal"), expected)


# --- Parity with the authors' codes ------------------------------------------------------------------------


# Slot, counted from 0, in which module k (counted from 1) of K makes update s: the slot of its backward of the
# group's last batch b = (s+1)M - 1, which is t - 2K + k + 1 in lock step, and t - (K-k) where the forward is locked.
SLOTS = {
    "adl": lambda k, K, b: b + 2 * K - k - 1,
    "fr": lambda k, K, b: b + K - k,
    # p = 2, q = 1: batch b arrives 2(k-1) slots later and comes back 3(K-k) slots after that.
    "dsp": lambda k, K, b: b + 2 * (k - 1) + 3 * (K - k),
    # Mode B: module k < K steps in the slot of its backward, module K at the start of the next.
    "backward first": lambda k, K, b: b + 2 * K - k - 1 + (k == K),
}


@pytest.mark.parametrize(("clock", "K", "M"), [("adl", 3, 2), ("fr", 3, 2), ("backward first", 4, 4)])
def test_the_slot_clock_gives_each_stage_the_rate_of_its_update(clock, K, M):
    name, options, listed = {
        "dsp": ("dsp", {"activation_queue": 2}, [6, 3, 0]),
        "backward first": ("adl", {"order": "backward_first"}, [5, 3, 1, 0]),
    }.get(clock) or (clock, {}, EQUATIONS[clock][0](K))

    def rate(k, s):
        return LR * warm_up(min(SLOTS[clock](k, K, (s + 1) * M - 1) // M, num_updates))

    num_updates = EPOCHS * -(-11 // M)  # the schedule ends with the run
    got = run(K, M, name, lr_clock="global", **options)
    assert_close(got, by_the_equations(K, M, listed, EQUATIONS[name][1], lr_of=rate))
    assert differ(got, by_the_equations(K, M, listed, EQUATIONS[name][1])) > 1e-6


def one_cycle(optimizer, total_updates):
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=total_updates + 1)


def test_the_slot_clock_does_not_run_past_a_fixed_schedule(tmp_path):
    """Nor does it where the run is read again at its end."""
    for _ in range(2):
        trainer = toy_trainer(3, 1, "adl", {"lr_clock": "global"}, lr_schedule=one_cycle)
        trainer.fit(FixedImages(9), epochs=2, batch_size=3, run_dir=tmp_path, monitoring=QUIET)


# --- Local losses ------------------------------------------------------------------------------------------


NUM_GREEDY, GREEDY_MICRO_BATCH = 70, 16  # BatchNorm over 2 or 3 features of an MLP would turn rounding into chaos


def heads_of(K, name):
    x = micro_batches()[0][0]
    for k, module in enumerate(modules_of(K)[:-1]):
        x = module(x)
        yield build_head(name, x.shape[1:], num_classes=NUM_CLASSES, seed=stream_seed(0, "head", k)).double()


def conv(c, size):
    return [nn.Conv2d(c, c, size, padding=size // 2, bias=False), nn.BatchNorm2d(c), nn.ReLU()]


def layer(n):
    return [nn.Linear(n, n), nn.BatchNorm1d(n), nn.ReLU()]


# DGL's code (auxillary_classifier2 with n_lin = 3 and 0, mlp_layers = 3, and its CNN), for 5 channels of 9x9 pixels.
HEADS = {
    "mlp_sr": [Pool(3), *conv(5, 1) * 3, Pool(2), nn.Flatten(), *layer(20) * 3],
    "mlp": [Pool(3), Pool(2), nn.Flatten(), *layer(20) * 3],
    "cnn": [*conv(5, 3) * 2, Pool(2), nn.BatchNorm2d(5), nn.Flatten()],
    "linear": [Pool(2), nn.Flatten()],
}


ON_FEATURES = {"mlp": [*layer(6) * 3, nn.Linear(6, 7)], "linear": [nn.Linear(6, 7)]}
LAYERS = [
    *(pytest.param(name, (5, 9, 9), [*layers, nn.Linear(20, 7)], id=name) for name, layers in HEADS.items()),
    *(pytest.param(name, (6,), layers, id=f"{name} on features") for name, layers in ON_FEATURES.items()),
]


@pytest.mark.parametrize(("name", "shape", "layers"), LAYERS)
def test_a_head_has_the_layers_of_its_paper(name, shape, layers):
    head = build_head(name, shape, num_classes=7, seed=1)
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
    trainer = toy_trainer(K, M, "dgl", options, lr_schedule=warm_up_schedule, dtype=torch.float64)
    data = FixedImages(NUM_GREEDY, dtype=torch.float64)
    trainer.fit(data, epochs=2, batch_size=GREEDY_MICRO_BATCH * M, shuffle=False, monitoring=QUIET)
    return trainer.full_state_dict()


def greedily(K, M, head):
    heads, batches = [Outputs(h) for h in heads_of(K, head)], micro_batches(GREEDY_MICRO_BATCH, NUM_GREEDY)
    lr, of_sgd = [LR * warm_up(s) for s in range(EPOCHS * 11)], {"momentum": MOMENTUM, "weight_decay": WEIGHT_DECAY}
    options = {"M": M, "loss_fn": local_or_plain, "lr": lr, **of_sgd}
    return train_greedily(modules_of(K), heads, [batches] * 2, **options)[0]


OF_HEADS = [(3, 1, head) for head in ("mlp_sr", "mlp", "cnn", "linear", "predsim")]
OF_SIZES = [(K, M, "mlp") for K in (1, 2, 4) for M in (1, 3)]


@pytest.mark.parametrize(("K", "M", "head"), covering(OF_HEADS + OF_SIZES, [*OF_HEADS, (4, 3, "mlp")]))
def test_dgl_follows_its_equations(K, M, head):
    assert_close(greedy(K, M, head=head), greedily(K, M, head))
