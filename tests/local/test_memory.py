"""For how long the memory of a stage is measured."""

from types import SimpleNamespace

import torch

from adl_dist.runtime.memory import MemoryMeter
from adl_dist.schedule import Action, Op


def test_a_first_segment_that_ends_early_does_not_settle_the_peak():
    meter = MemoryMeter(torch.device("cpu"), num_updates=3)
    stage = SimpleNamespace(named_parameters=lambda: [], module=None, head=None, optimizer=None)
    peaks = []
    for kib in ([1], [512, 2], [4096]):  # held at each update of a segment
        order = iter([(0, Action(Op.UPDATE, number)) for number in range(len(kib))])
        for (_, _), size in zip(meter.measured(order, stage), kib, strict=True):
            torch.zeros(size * 1024, dtype=torch.uint8)
        meter.stop()
        peaks.append(meter.peak_bytes)
    assert peaks[0] < 2 * 1024 <= 512 * 1024 <= peaks[1] < 4096 * 1024
    assert peaks[2] == peaks[1], "it looks at the first updates only"
