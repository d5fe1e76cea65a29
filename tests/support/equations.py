"""The toy net of runs.py by the equations of each method, and the comparisons of two states."""

import functools

import torch
from torch import nn

from tests.support.oracle import train_by_the_equations
from tests.support.runs import (
    BALANCE,
    EPOCHS,
    LR,
    MICRO_BATCH,
    MOMENTUM,
    NUM_SAMPLES,
    WEIGHT_DECAY,
    train,
    warm_up,
    warm_up_schedule,
)
from tests.support.slices import cut
from tests.support.toys import FixedImages, batch_norm_net


def decoupled(K):
    return [2 * (K - k) for k in range(1, K + 1)]


def minimal(K):
    return [K - k for k in range(1, K + 1)]


def at_once(K):
    return [0] * K


# What the equations of each method say: the delay of each module and the weights of the backward.
EQUATIONS = {
    **dict.fromkeys(("bp", "gpipe", "1f1b", "zbh1", "zbh2", "interleaved"), (at_once, "stash")),
    **dict.fromkeys(("adl", "fdg"), (decoupled, "stash")),
    **dict.fromkeys(("ddg", "pipedream"), (minimal, "stash")),
    **{"dsp": (decoupled, "recompute"), "fr": (minimal, "recompute"), "2bw": (minimal, "2bw")},
    "paci": (minimal, "latest"),
}


def remembered(function):
    """Return ``function`` with its results kept by its arguments, which may be lists."""
    results = {}

    @functools.wraps(function)
    def of(*arguments, **options):
        key = repr((arguments, sorted(options.items())))
        if key not in results:
            # With the arguments, so that no other function gets the address of one of them, by which it is printed.
            results[key] = function(*arguments, **options), arguments, options
        return results[key][0]

    return of


@remembered
def run(K, M, name, **options):
    """Return the weights of the toy net after a run in float64 by the method called ``name``; do not write to them."""
    return train(K, M, torch.float64, method=name, options=options)[0]


def modules_of(K):
    modules = cut(batch_norm_net().double(), num_stages=K, balance=BALANCE[K])
    return modules if K > 1 else [batch_norm_net().double()]


@functools.cache
def micro_batches(size=MICRO_BATCH, num_samples=NUM_SAMPLES, dtype=torch.float64):
    data = FixedImages(num_samples, dtype=dtype)
    return [(data.images[i : i + size], torch.tensor(data.labels[i : i + size])) for i in range(0, num_samples, size)]


@remembered
def by_the_equations(K, M, delays, weights, **options):
    """Return the weights of the toy net by the equations; do not write to them."""
    return modules_by_the_equations(modules_of(K), M, delays, weights, **options)


def modules_by_the_equations(
    modules, M, delays, weights, *, epochs=EPOCHS, lr=None, dtype=torch.float64, loss_fn=None, **options
):
    lr = lr or [LR * warm_up(s) for s in range(epochs * 11)]
    of_sgd = {"lr": lr, "momentum": MOMENTUM, "weight_decay": WEIGHT_DECAY}
    of_method = {"M": M, "delays": delays, "weights": weights, **options}
    batches, loss_fn = [micro_batches(dtype=dtype)] * epochs, loss_fn or nn.CrossEntropyLoss()
    return train_by_the_equations(modules, batches, loss_fn=loss_fn, **of_sgd, **of_method)


def plain_loop(
    model, optimizer, *, M, dtype=torch.float64, clip_norm=None, after_step=lambda: None, in_reverse=False, norms=None
):
    """Train ``model`` in the loop of every torch tutorial, with accumulation, as runs do; return its state.

    ``in_reverse``: the backwards of a group begin with the last one. ``norms`` takes those of the whole gradient.
    """
    schedule, batches, loss_fn = warm_up_schedule(optimizer), micro_batches(dtype=dtype), nn.CrossEntropyLoss()
    for _ in range(EPOCHS):
        for start in range(0, len(batches), M):
            group = batches[start : start + M]
            losses = [(loss_fn(model(x), target), len(target)) for x, target in group]
            for loss, size in reversed(losses) if in_reverse else losses:
                share = size / sum(len(t) for _, t in group)
                loss.backward(torch.tensor(share, dtype=dtype))
            if clip_norm is not None:
                norm = nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
                if norms is not None:
                    norms.append(norm.item())
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            after_step()
    return model.state_dict()


def differ(a, b):
    """Return the largest difference of two states."""
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def assert_close(got, expected, tolerance=1e-12):
    assert got.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(got[name], expected[name], rtol=tolerance, atol=tolerance, msg=name)
