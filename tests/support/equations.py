"""The toy net of runs.py by the equations of each method, and the comparisons of two states."""

import functools

import torch
from torch import nn

from adl_dist.partition import cut
from tests.support.oracle import train_by_the_equations
from tests.support.runs import BALANCE, EPOCHS, LR, MICRO_BATCH, MOMENTUM, NUM_SAMPLES, WEIGHT_DECAY, warm_up
from tests.support.toys import FixedImages, batch_norm_net


def decoupled(K):
    return [2 * (K - k) for k in range(1, K + 1)]


def minimal(K):
    return [K - k for k in range(1, K + 1)]


def at_once(K):
    return [0] * K


# What the equations of each method say: the delay of each module and the weights of the backward.
EQUATIONS = {
    **dict.fromkeys(("bp", "gpipe", "1f1b"), (at_once, "stash")),
    **dict.fromkeys(("adl", "fdg"), (decoupled, "stash")),
    **dict.fromkeys(("ddg", "pipedream"), (minimal, "stash")),
    **{"dsp": (decoupled, "recompute"), "fr": (minimal, "recompute"), "2bw": (minimal, "2bw")},
    "paci": (minimal, "latest"),
}


def modules_of(K):
    modules = cut(batch_norm_net().double(), num_stages=K, balance=BALANCE[K])
    return modules if K > 1 else [batch_norm_net().double()]


@functools.cache
def micro_batches(size=MICRO_BATCH, num_samples=NUM_SAMPLES, dtype=torch.float64):
    data = FixedImages(num_samples, dtype=dtype)
    return [(data.images[i : i + size], torch.tensor(data.labels[i : i + size])) for i in range(0, num_samples, size)]


def by_the_equations(
    K, M, delays, weights, *, epochs=EPOCHS, lr=None, modules=None, dtype=torch.float64, loss_fn=None, **options
):
    return train_by_the_equations(
        modules or modules_of(K),
        [micro_batches(dtype=dtype)] * epochs,
        M=M,
        loss_fn=loss_fn or nn.CrossEntropyLoss(),
        lr=lr or [LR * warm_up(s) for s in range(epochs * 11)],
        momentum=MOMENTUM,
        weight_decay=WEIGHT_DECAY,
        delays=delays,
        weights=weights,
        **options,
    )


def assert_close(got, expected, tolerance=1e-12):
    assert got.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(got[name], expected[name], rtol=tolerance, atol=tolerance, msg=name)


def assert_same_bits(got, expected):
    assert got.keys() == expected.keys()
    for name in expected:
        assert torch.equal(got[name], expected[name]), name
