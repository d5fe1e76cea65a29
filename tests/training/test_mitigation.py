"""What is done about staleness, against its equations in float64 to 1e-12, and on a loss whose dynamics are known."""

import functools
import random

import pytest
import torch

import adl_dist
from adl_dist.errors import ConfigError
from adl_dist.schedule import Pipeline
from tests.support.commands import assert_same
from tests.support.equations import EQUATIONS, assert_close, differ, modules_by_the_equations, modules_of
from tests.support.mitigated import ADAM_DECAY, BETAS, DECAY, EPS, MU, Mitigated
from tests.support.runs import SPOILT, SPOILT_PAIRS, nan_inputs, train, warm_up
from tests.support.tiers import covering

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
    "predict geometric from momentum": ({"predict": GEOMETRIC | MOMENTUM}, ["sgd", "adamw"]),
    "nesterov": ({"nesterov": {}}, ["plain"]),
    "faster nesterov": ({"nesterov": {"gamma": 0.7}}, ["plain"]),
    "error feedback": ({"error_feedback": {}}, ["sgd", "adamw"]),
    "error feedback of the paper": ({"error_feedback": {"lag": 1, "c": 0.7}}, ["sgd", "adamw"]),
    "delay compensation": (STRONG, ["sgd", "adamw"]),
    "discount and predict": ({"discount": {}, "predict": {}}, ["sgd", "adamw"]),
    "discount and fading predict": ({"discount": {"updates": 5}, "predict": MOMENTUM}, ["sgd", "adamw"]),
    "discount and nesterov": ({"discount": {}, "nesterov": {"gamma": 0.8}}, ["plain"]),
    "predict and spike": ({"predict": {}, "spike": {}}, ["sgd", "nesterov"]),
    "predict from momentum and spike": ({"predict": MOMENTUM, "spike": {}}, ["sgd"]),
    "predict and error feedback": ({"predict": {}, "error_feedback": {}}, ["sgd", "adamw"]),
    "predict and delay compensation": ({"predict": {}, **STRONG}, ["sgd"]),
    "nesterov and delay compensation": ({"nesterov": {"gamma": 0.7}, **STRONG}, ["plain"]),
    "error feedback and delay compensation": ({"error_feedback": {}, **STRONG}, ["sgd"]),
    "all that fits": ({"discount": {}, "spike": {}, "predict": {}, **STRONG}, ["sgd"]),
}
POLICIES = ["stash", "latest", "recompute", "2bw"]


def options_of(rows):
    named = {KEYS[row, key]: value for row, options in rows.items() for key, value in options.items()}
    return {"mitigation": [*rows], **named}


def delays_of(seed, K):
    draw = random.Random(seed)
    return sorted((draw.randrange(7) for _ in range(K)), reverse=True)


def rate_of(kind, s):
    return RATES[kind] * warm_up(s)


def by_the_equations(K, M, delays, weights, kind, rows, **options):
    taus = [1.0] * K if weights == "2bw" else [d / M for d in delays]

    def versions(k, module):
        return Mitigated(module, tau=taus[k - 1], kind=kind, rate_of=functools.partial(rate_of, kind), rows=rows)

    return modules_by_the_equations(modules_of(K), M, delays, weights, versions=versions, **options)


def run(K, M, delays, weights, kind, rows, **options):
    method = {"delay": delays, "weights": weights, **options_of(rows)}
    return train(K, M, torch.float64, options=method, optimizer=OPTIMIZERS[kind], **options)[0]


def defined(rows, weights):
    return weights in ("stash", "2bw") or ("delay_compensation" not in rows)


CASES = [
    (name, kind, weights)
    for name, (rows, kinds) in ROWS.items()
    for kind in kinds
    for weights in POLICIES
    if not (weights == "2bw" and rows.keys() & {"predict", "nesterov"})
    and not (weights in ("latest", "recompute") and "delay_compensation" in rows)
]
BY_DEFAULT = [case for i, case in enumerate(CASES) if case[2] == "stash" or (case[2] == "latest" and i % 2)]


@pytest.mark.parametrize(("name", "kind", "weights"), CASES)
def test_a_mitigation_follows_its_equations_to_1e_12(name, kind, weights):
    """Random delays, uneven groups, BatchNorm, decay, another rate at each update."""
    seed = CASES.index((name, kind, weights))
    K, M = 2 + seed % 3, 1 + seed // 3 % 4
    delays = delays_of(seed, K)
    if weights == "2bw":
        delays = sorted((min(d, M) for d in delays), reverse=True)
    case = K, M, delays, weights, kind, ROWS[name][0]
    assert_close(run(*case), by_the_equations(*case))
