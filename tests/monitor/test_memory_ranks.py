"""Predicted memory of a stage against what torch's allocator hands out in its process."""

import sys
from unittest.mock import patch

import pytest
import torch
from torch import nn

import adl_dist
from adl_dist.data import synthetic
from adl_dist.models import cifar_resnet18
from adl_dist.partition import linearise
from adl_dist.partition.measure import measure
from adl_dist.partition.predict import predict
from adl_dist.schedule import Pipeline, method
from tests.support.ranks import run_ranks
from tests.support.runs import toy_trainer
from tests.support.tiers import slow

pytestmark = pytest.mark.ranks

MICRO_BATCH, M = 4, 4
LOSS = nn.CrossEntropyLoss()


def model():
    torch.manual_seed(0)
    return cifar_resnet18()


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def peaks(sizes, name):
    cut = {"balance": sizes, "granularity": "layer"}
    trainer = toy_trainer(len(sizes), M, name, model=model(), loss_fn=LOSS, optimizer=sgd, **cut)
    data, _ = synthetic(num_samples=4 * MICRO_BATCH * M, num_validation=1)
    monitoring = adl_dist.Monitoring(quiet=True, memory=True)
    summary = trainer.fit(data, epochs=1, batch_size=MICRO_BATCH * M, monitoring=monitoring)
    return [stage["peak_tensor_bytes"] for stage in summary["stages"]]


@pytest.fixture(scope="module")
def profile():
    net = model()
    with patch.object(sys.modules["adl_dist.partition.measure"], "SECONDS", 0.0):  # the times do not matter
        return measure(
            net,
            linearise(net, granularity="layer"),
            input_=torch.randn(MICRO_BATCH, 3, 32, 32),
            target=torch.zeros(MICRO_BATCH, dtype=torch.long),
            loss_fn=LOSS,
            optimizer=sgd,
            of={"micro_batch_size": MICRO_BATCH},
        )


@pytest.mark.parametrize(("name", "K"), [("adl", 4), slow("gpipe", 2)])
def test_each_stage_holds_what_was_predicted_within_10_percent(name, K, profile):
    """Of ResNet-18, cut evenly."""
    first, more = divmod(len(profile.units), K)
    sizes = [first + (k < more) for k in range(K)]
    expected = predict(profile, Pipeline(method(name, accumulation_steps=M), K), sizes=sizes).balance.stage_bytes
    measured, *same = run_ranks(K, peaks, sizes, name, timeout_seconds=100)
    assert all(other == measured for other in same)
    print(name, expected, measured, [m / e for m, e in zip(measured, expected, strict=True)])
    for stage in range(K):
        assert measured[stage] == pytest.approx(expected[stage], rel=0.1), (measured, expected)
