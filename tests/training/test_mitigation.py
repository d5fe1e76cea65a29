"""Mitigations of staleness, against their equations in float64 to 1e-12."""

import functools
import random

import pytest
import torch

from tests.support.equations import assert_close, differ, modules_by_the_equations, modules_of
from tests.support.mitigated import ADAM_DECAY, BETAS, DECAY, EPS, MU, Mitigated
from tests.support.runs import SPOILT, SPOILT_PAIRS, nan_inputs, train, trained, warm_up
from tests.support.tiers import covering
from tests.support.toys import FixedImages, batch_norm_net

RATES = {"sgd": 0.05, "nesterov": 0.05, "plain": 0.3, "adamw": 0.01}
OPTIMIZERS = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.05, momentum=MU, weight_decay=DECAY),
    "nesterov": functools.partial(torch.optim.SGD, lr=0.05, momentum=MU, weight_decay=DECAY, nesterov=True),
    "plain": functools.partial(torch.optim.SGD, lr=0.3, weight_decay=DECAY),
    "adamw": functools.partial(torch.optim.AdamW, lr=0.01, betas=BETAS, eps=EPS, weight_decay=ADAM_DECAY),
}
# The names of the options of each row, in the oracle and in a method.
KEYS = {
    ("discount", "power"): "discount_power",
    ("discount", "updates"): "discount_updates",
    ("predict", "horizon"): "predict_horizon",
    ("predict", "source"): "predict_from",
    ("nesterov", "gamma"): "nesterov_gamma",
    ("error_feedback", "c"): "error_feedback_coefficient",
    ("error_feedback", "lag"): "error_feedback_lag",
    ("delay_compensation", "lambda"): "delay_compensation_lambda",
}
GEOMETRIC, MOMENTUM = {"horizon": "geometric"}, {"source": "momentum"}
STRONG = {"delay_compensation": {"lambda": 2.0}}
# What is chosen, and with which optimizers.
ROWS = {
    "discount": ({"discount": {}}, ["sgd", "adamw"]),
    "fading discount": ({"discount": {"power": 1.0, "updates": 7}}, ["sgd"]),
    "spike": ({"spike": {}}, ["sgd", "nesterov"]),
    "predict": ({"predict": {}}, ["sgd", "nesterov", "plain", "adamw"]),
    "predict geometric": ({"predict": GEOMETRIC}, ["sgd", "adamw"]),
    "predict from momentum": ({"predict": MOMENTUM}, ["sgd", "nesterov", "adamw"]),
    "nesterov": ({"nesterov": {}}, ["plain"]),
    "error feedback": ({"error_feedback": {}}, ["sgd", "adamw"]),
    "error feedback of the paper": ({"error_feedback": {"lag": 1, "c": 0.7}}, ["sgd", "adamw"]),
    "delay compensation": (STRONG, ["sgd", "adamw"]),
    "discount and predict": ({"discount": {}, "predict": {}}, ["sgd", "adamw"]),
    "discount and fading predict": ({"discount": {"updates": 5}, "predict": MOMENTUM}, ["sgd", "adamw"]),
    "discount and nesterov": ({"discount": {}, "nesterov": {"gamma": 0.8}}, ["plain"]),
    "predict and spike": ({"predict": {}, "spike": {}}, ["sgd", "nesterov"]),
    "predict and error feedback": ({"predict": {}, "error_feedback": {}}, ["sgd", "adamw"]),
    "nesterov and delay compensation": ({"nesterov": {"gamma": 0.7}, **STRONG}, ["plain"]),
    "all that fits": ({"discount": {}, "spike": {}, "predict": {}, **STRONG}, ["sgd"]),
}
POLICIES = ["stash", "latest", "recompute", "2bw"]


def options_of(rows):
    named = {KEYS[row, key]: value for row, options in rows.items() for key, value in options.items()}
    return {"mitigation": [*rows], **named}


def delays_of(seed, K, M):
    """Random ones, of which the first makes stage 0 more than one update late."""
    draw = random.Random(seed)
    first, *others = sorted((draw.randrange(7) for _ in range(K)), reverse=True)
    return [first + M + 1, *others]


def rate_of(kind, s):
    return RATES[kind] * warm_up(s)


def by_the_equations(K, M, delays, weights, kind, rows, *, factors=(1.0, 1.0, 1.0, 1.0), **options):
    taus = [1.0] * K if weights == "2bw" else [d / M for d in delays]

    def versions(k, module):
        return Mitigated(
            module, tau=taus[k - 1], kind=kind, rate_of=lambda s: factors[k - 1] * rate_of(kind, s), rows=rows
        )

    return modules_by_the_equations(modules_of(K), M, delays, weights, versions=versions, **options)


def run(K, M, delays, weights, kind, rows, *, factors=None, **options):
    method = {"delay": delays, "weights": weights, "lr_factors": factors, **options_of(rows)}
    return train(K, M, torch.float64, options=method, optimizer=OPTIMIZERS[kind], **options)[0]


CASES = [
    (name, kind, weights)
    for name, (rows, kinds) in ROWS.items()
    for kind in kinds
    for weights in POLICIES
    if not (weights == "2bw" and (rows.keys() & {"predict", "nesterov"} or rows.keys() == {"discount"}))
    and not (weights in ("latest", "recompute") and "delay_compensation" in rows)
]


@pytest.mark.parametrize(
    ("name", "kind", "weights"),
    covering(CASES, [c for i, c in enumerate(CASES) if c[1:] == (ROWS[c[0]][1][-1], "stash") or i % 29 == 0]),
)
def test_a_mitigation_follows_its_equations_to_1e_12(name, kind, weights):
    """Random delays, uneven groups, BatchNorm, decay, another rate at each update."""
    seed = CASES.index((name, kind, weights))
    K, M = 2 + seed % 3, 1 + seed // 3 % 4
    delays = delays_of(seed, K, M)
    if weights == "2bw":
        delays = sorted((min(d, M) for d in delays), reverse=True)
    case = K, M, delays, weights, kind, ROWS[name][0]
    expected = by_the_equations(*case)
    assert_close(run(*case), expected)
    assert differ(expected, by_the_equations(*case[:-1], {})) > 1e-6, "it changes something"


@pytest.mark.parametrize("name", ["discount and fading predict", "predict and spike"])
def test_prediction_knows_all_factors_of_the_learning_rate(name):
    rows, (kind, *_) = ROWS[name]
    case, factors = (3, 1, [6, 4, 0], "stash", kind, rows), [2.0, 0.5, 1.0]
    assert_close(run(*case, factors=factors), by_the_equations(*case, factors=factors))


CLIPPED = ["predict and spike", "predict and error feedback", "nesterov and delay compensation"]


@pytest.mark.parametrize(("name", "weights"), [*zip(CLIPPED, ["latest", "stash", "stash"], strict=True)])
def test_clipping_and_skipped_updates_leave_the_histories_right(name, weights):
    """A skipped update is none: the displacement and the updates before it stay the last ones."""
    rows, (kind, *_) = ROWS[name]
    case = 3, 2, [5, 3, 1], weights, kind, rows
    got = run(*case, clip_norm=0.3, non_finite="skip", plant=nan_inputs)
    expected = by_the_equations(*case, clip_norm=0.3, skipped=SPOILT_PAIRS, unseen=SPOILT)
    assert_close(got, expected)
    assert differ(expected, by_the_equations(*case, skipped=SPOILT_PAIRS, unseen=SPOILT)) > 1e-3, "the norm is high"


# --- Synchronous at first -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "weights"),
    [("predict and error feedback", "latest"), ("discount and nesterov", "recompute"), ("error feedback", "2bw")],
)  # fmt: skip
def test_the_first_epochs_flush_and_then_staleness_begins(name, weights):
    rows, (kind, *_) = ROWS[name]
    delays = [2, 1, 0] if weights == "2bw" else [5, 3, 0]
    got = train(
        3, 2, torch.float64, options={"delay": delays, "weights": weights, "flush_epochs": 1, **options_of(rows)},
        optimizer=OPTIMIZERS[kind],
    )[0]  # fmt: skip
    assert_close(got, by_the_equations(3, 2, delays, weights, kind, rows, flush_epochs=1))
    assert differ(got, by_the_equations(3, 2, delays, weights, kind, rows)) > 1e-6


# --- What stays as it is -------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", ["stash", "latest"])
def test_evaluation_and_saved_weights_are_the_optimizers_own(weights):
    """Not those ahead, which forwards see."""
    options = {"delay": [6, 4, 0], "weights": weights, **options_of({"predict": {}})}
    trainer, summary = trained(3, 1, torch.float64, options=options, optimizer=OPTIMIZERS["sgd"])
    data, net = FixedImages(10, seed=1, dtype=torch.float64), batch_norm_net().double()
    net.load_state_dict(trainer.full_state_dict())
    net.eval()
    loss = torch.nn.functional.cross_entropy(net(data.images), torch.tensor(data.labels)).item()
    assert summary["validation_loss"] == pytest.approx(loss, rel=1e-12)


def test_sparse_gradients_are_mitigated_like_dense_ones():
    class Bag(torch.nn.Module):
        def __init__(self, sparse):
            super().__init__()
            self.embed = torch.nn.Embedding(9, 6, sparse=sparse)

        def forward(self, x):
            return self.embed(x.flatten(1).mul(2).long().abs() % 9).mean(1)

    def trained_with(sparse):
        torch.manual_seed(0)
        model = torch.nn.Sequential(Bag(sparse), torch.nn.Tanh(), torch.nn.Linear(6, 5))
        options = {"delay": [3, 0], **options_of({"spike": {}, **STRONG})}
        optimizer = functools.partial(torch.optim.SGD, lr=0.1, momentum=MU)
        more = {"model": lambda: model, "balance": [2, 1], "granularity": "block"}
        return train(2, 1, torch.float64, options=options, optimizer=optimizer, **more)[0]

    assert_close(trained_with(sparse=True), trained_with(sparse=False))
