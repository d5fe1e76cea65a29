"""A long run holds no more at its end than in its middle. Skipped unless asked for: `make test-long`."""

import os
import resource
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import Subset

import adl_dist
from adl_dist import engine
from adl_dist.schedule import Op, Pipeline, max_pending_of
from tests.support.ranks import run_ranks
from tests.support.runs import toy_trainer
from tests.support.toys import FixedImages
from tests.support.values import SILENT

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

NUM_MICRO_BATCHES, M, MICRO_BATCH, K = 20_000, 4, 2, 2
EVERY = 100  # micro-batches
# KiB of resident memory per 1,000 micro-batches. A list that gets a number for each of them would take 40.
MOST_GROWTH = 16.0


def train_and_watch(run_dir, epochs):
    """Returns resident KiB at every ``EVERY``-th micro-batch, and the most sends that were under way on one edge."""
    resident, pending = [], [0]
    page, step = resource.getpagesize() // 1024, engine.step

    def watched(action, context):
        step(action, context)
        if action.op is Op.BACKWARD and action.number % EVERY == 0:
            resident.append(int(Path("/proc/self/statm").read_text().split()[1]) * page)
        pending[0] = max(pending[0], *(len(sender._pending) for sender in context.senders.values()))

    engine.step = watched
    data = Subset(FixedImages(64), [sample % 64 for sample in range(NUM_MICRO_BATCHES * MICRO_BATCH // epochs)])
    length = {"epochs": epochs, "batch_size": M * MICRO_BATCH, "checkpoints": adl_dist.CheckpointPolicy(every_epochs=0)}
    trainer = toy_trainer(K, M, optimizer=lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9))
    trainer.fit(data, **length, run_dir=run_dir, monitoring=SILENT)
    return resident, pending[0]


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads resident memory from Linux's /proc")
@pytest.mark.parametrize("epochs", [1, 10])
def test_20000_micro_batches_take_no_more_memory_than_10000(epochs, tmp_path, record_property):
    for k, (resident, pending) in enumerate(run_ranks(K, train_and_watch, tmp_path, epochs, timeout_seconds=800)):
        assert len(resident) == NUM_MICRO_BATCHES // EVERY
        second_half = resident[len(resident) // 2 :]
        slope, _ = np.polyfit(np.arange(len(second_half)) * EVERY / 1000, second_half, 1)
        told = f"stage {k}, {epochs} epochs: {slope:+.2f} KiB per 1,000 micro-batches, at the end {resident[-1]:,} KiB"
        record_property("measured", f"{told}, at most {pending} sends under way on one edge")
        assert slope < MOST_GROWTH, (told, second_half)
        assert pending <= max(max_pending_of(Pipeline(adl_dist.method("adl", accumulation_steps=M), K)).values())
