"""Predicted memory of a stage against what torch's allocator hands out in its process."""

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import adl_dist
from adl_dist.data import synthetic
from adl_dist.models import cifar_resnet18
from adl_dist.partition import linearise
from adl_dist.partition.measure import measure
from adl_dist.partition.predict import predict
from adl_dist.schedule import method
from tests.support.ranks import run_ranks

MICRO_BATCH, M = 4, 4
LOSS = nn.CrossEntropyLoss()


def model():
    torch.manual_seed(0)
    return cifar_resnet18()


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def peak_of_a_rank(sizes, name):
    trainer = adl_dist.Trainer(
        model(),
        loss_fn=LOSS,
        optimizer=sgd,
        method=method(name, accumulation_steps=M),
        num_stages=2,
        balance=sizes,
        grain="layer",
    )
    data, _ = synthetic(num_samples=6 * MICRO_BATCH * M, num_validation=1)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        trainer.fit(data, epochs=1, batch_size=MICRO_BATCH * M, quiet=True)
    now = most = 0
    for event in seen.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    weights = sum(p.numel() * p.element_size() for m in trainer._placement.modules.values() for p in m.parameters())
    return most + weights  # which were there before


@pytest.mark.parametrize("name", ["adl", "gpipe"])
def test_each_stage_holds_what_was_predicted_within_15_percent(name):
    net = model()
    chain = linearise(net, grain="layer")
    told = measure(
        net,
        chain,
        input_=torch.randn(MICRO_BATCH, 3, 32, 32),
        target=torch.zeros(MICRO_BATCH, dtype=torch.long),
        loss_fn=LOSS,
        optimizer=sgd,
        of={"micro_batch_size": MICRO_BATCH},
    )
    sizes = [len(chain.units) // 2, len(chain.units) - len(chain.units) // 2]
    expected = predict(told, method(name, accumulation_steps=M), num_stages=2, sizes=sizes).balance.stage_bytes
    measured = run_ranks(2, peak_of_a_rank, sizes, name)
    print(name, expected, measured, [m / e for m, e in zip(measured, expected, strict=True)])
    for stage in (0, 1):
        assert measured[stage] == pytest.approx(expected[stage], rel=0.15), (measured, expected)
