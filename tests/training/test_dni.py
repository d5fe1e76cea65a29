"""Synthetic gradients (DNI): values against a second implementation."""

import functools

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from adl_dist.schedule import method
from adl_dist.seeds import stream_seed
from adl_dist.stage.heads import build_gradient_network
from tests.support.equations import assert_close, differ, micro_batches, modules_of
from tests.support.kill import records
from tests.support.runs import EPOCHS, LR, MOMENTUM, WEIGHT_DECAY, train, trained, warm_up
from tests.support.synthetic import ByHand, train_by_synthetic_gradients
from tests.support.tiers import grid
from tests.support.toys import NUM_CLASSES

LINEAR = {"head_layers": 0}  # BatchNorm of a head over 2 or 3 samples of one pixel would turn rounding into chaos


def heads_of(K, options):
    chosen = method("dni", **options)
    x = micro_batches()[0][0]
    for k, module in enumerate(modules_of(K)[:-1]):
        x = module(x)
        seed = stream_seed(0, "head", k)
        made = build_gradient_network(chosen, x.shape[1:], num_classes=NUM_CLASSES, seed=seed).double()
        yield ByHand(made.parameters(), chosen.head_layers, NUM_CLASSES if chosen.head_sees_target else 0)


def by_the_equations(K, M, options, **of_training):
    known = {"head_delay": "delay", "head_sees_target": "sees_target", "head_lr_factor": "head_lr_factor"}
    named = {known[name]: value for name, value in options.items() if name in known}
    lr = [LR * warm_up(s) for s in range(EPOCHS * 11)]
    of_sgd = {"lr": lr, "momentum": MOMENTUM, "weight_decay": WEIGHT_DECAY, "loss_fn": nn.CrossEntropyLoss()}
    heads = list(heads_of(K, options))
    return train_by_synthetic_gradients(
        modules_of(K), heads, [micro_batches()] * EPOCHS, M=M, **of_sgd, **named, **of_training
    )


def run(K, M, options, **of_trainer):
    return train(K, M, torch.float64, method="dni", options=options, **of_trainer)[0]


SIZES = [(2, 1), (3, 2), (4, 3)]


@pytest.mark.parametrize(("K", "M"), grid([2, 3, 4], [1, 2, 3], default=SIZES))
def test_dni_follows_its_equations_to_1e_12(K, M):
    """Uneven last micro-batch, uneven last group, BatchNorm, momentum, weight decay, another rate at each update."""
    assert_close(run(K, M, LINEAR), by_the_equations(K, M, LINEAR)[0])


OPTIONS = {
    "no delay": {**LINEAR, "head_delay": 0},
    "a longer delay than a group": {**LINEAR, "head_delay": 5},
    "a longer delay than an epoch": {**LINEAR, "head_delay": 40, "head_sees_target": True},
    "classes and hidden layers": {"head_layers": 2, "head_sees_target": True},
    "another rate": {**LINEAR, "head_lr_factor": 0.5},
}


@functools.cache
def of_linear_heads():
    return run(3, 2, LINEAR)


@pytest.mark.parametrize("case", OPTIONS)
def test_an_option_of_dni_follows_its_equations(case):
    options = OPTIONS[case]
    got = run(3, 2, options)
    assert_close(got, by_the_equations(3, 2, options)[0])
    assert differ(got, of_linear_heads()) > 1e-4, "and changes much"


def test_heads_end_as_their_equations_say(tmp_path):
    """Their last updates, which no stage sees any more, are in the checkpoint; the last stage predicts nothing."""
    trained(3, 2, torch.float64, method="dni", options=LINEAR, run_dir=tmp_path)
    found = [r for r in records(tmp_path) if r["name"] == "stage/prediction_error"]
    assert {r["stage"] for r in found} == {0, 1}
    assert not [r for r in records(tmp_path) if r["name"] == "stage/local_loss"]
    expected = by_the_equations(3, 2, LINEAR)[1]
    path = max((tmp_path / "checkpoints").glob("update-*"))
    for k, head in enumerate(expected):
        found = load_file(path / f"heads-0000{k + 1}-of-00003.safetensors")
        assert [name.partition(":")[0] for name in found] == [f"head{k}"] * len(head)
        for tensor, wanted in zip((found[name] for name in sorted(found, reverse=True)), head.values(), strict=True):
            torch.testing.assert_close(tensor, wanted, rtol=1e-12, atol=1e-12)


def test_a_sum_of_gradients_and_clipping_follow_the_equations():
    clipped = by_the_equations(3, 2, LINEAR, clip_norm=0.05, reduction="sum")[0]
    assert_close(run(3, 2, {**LINEAR, "reduction": "sum"}, clip_norm=0.05), clipped)
    assert differ(clipped, by_the_equations(3, 2, LINEAR, reduction="sum")[0]) > 1e-3
