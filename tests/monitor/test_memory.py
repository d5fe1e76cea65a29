"""For how long the memory of a stage is measured, and what is written down of it."""

from types import SimpleNamespace

import torch

from adl_dist.monitor import memory
from adl_dist.monitor.memory import MemoryMeter

NOTHING = SimpleNamespace(named_parameters=lambda: [], module=None, head=None, optimizer=None)  # a stage


def test_allocations_alone_are_written_down(monkeypatch):
    """An operator that ends behind the profiler, as messages do, would be written into memory that is a tensor's."""
    names = []

    class Told(memory.profile):
        def stop(self):
            super().stop()
            names.extend(event.name() for event in self.profiler.kineto_results.events())

    monkeypatch.setattr(memory, "profile", Told)
    meter = MemoryMeter(torch.device("cpu"), num_updates=1)
    with meter.segment(NOTHING):
        torch.ones(1000).mul(2.0)
        meter.count_update()
    assert meter.peak_bytes >= 8000
    assert set(names) == {"[memory]"}
    with torch.profiler.profile() as after:
        torch.ones(1000)
    assert "aten::ones" in {event.key for event in after.key_averages()}, "others see operators again"


def test_an_early_end_of_a_first_segment_settles_no_peak():
    meter = MemoryMeter(torch.device("cpu"), num_updates=3)
    peaks = []
    for kib in ([1], [512, 2], [4096]):  # held at each update of a segment
        with meter.segment(NOTHING):
            for size in kib:
                torch.zeros(size * 1024, dtype=torch.uint8)
                meter.count_update()
        peaks.append(meter.peak_bytes)
    assert peaks[0] < 2 * 1024 <= 512 * 1024 <= peaks[1] < 4096 * 1024
    assert peaks[2] == peaks[1], "it looks at the first updates only"
