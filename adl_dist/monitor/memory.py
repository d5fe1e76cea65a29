"""The peak memory of a process, and of its stage's tensors.

Only torch's profiler sees every allocation, including those inside an operation and a backward. Its records grow
without bound, so it only runs for the first updates of a run. On a GPU the allocator itself keeps count.
"""

import contextlib
import os
import resource
import sys
from collections.abc import Iterator
from itertools import accumulate
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch._C._autograd import _enable_record_function
from torch.profiler import ProfilerActivity, profile

from adl_dist.schedule import Pipeline
from adl_dist.stage import Stage


class MemoryMeter:
    """A meter of the peak memory of tensors in a process of one stage."""

    def __init__(self, device: torch.device, num_updates: int) -> None:
        self._device, self._num_updates, self._num_seen = device, num_updates, 0
        self._is_on_gpu = device.type == "cuda"
        self._peak_bytes: int | None = None
        self._profiler: profile | None = None

    @classmethod
    def of(cls, pipeline: Pipeline, device: torch.device) -> "MemoryMeter":
        """Return a meter that runs until some updates after the pipeline is full."""
        return cls(device, 2 * (pipeline.round_trip // pipeline.micro_batches_per_update) + 6)

    @property
    def peak_bytes(self) -> int | None:
        """The peak of live tensors in bytes, or None before it is measured."""
        return int(torch.cuda.max_memory_allocated(self._device)) if self._is_on_gpu else self._peak_bytes

    @contextlib.contextmanager
    def segment(self, stage: Stage) -> Iterator[None]:
        """Measure the block's memory peak on a CPU, in a run's first updates."""
        try:
            if self._num_seen < self._num_updates and not self._is_on_gpu:
                self._start(stage)
            yield
            self._finish()
        finally:
            self._stop()

    def count_update(self) -> None:
        """Count an update, and stop after the last measured one."""
        self._num_seen += 1
        if self._num_seen == self._num_updates:
            self._finish()

    def _start(self, stage: Stage) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or it reports a missing GPU as an error
        self._profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True)
        self._profiler.start()
        # Only allocations, no operators. A message under way, or a call over RPC, counts as an operator that ends at
        # its arrival, and torch 2.15 then writes the time into the memory of the profiler, even of one that was stopped
        # meanwhile: into any tensor that has that memory now.
        _enable_record_function(False)
        # It would not see the end of earlier allocations. The values stay, and nothing else uses the tensors now.
        owned: list[Any] = [parameter for learner in stage.learners for _, parameter in learner.named_parameters()]
        owned += [buffer for module in filter(None, (stage.module, stage.head)) for buffer in module.buffers()]
        for optimizer in (learner.optimizer for learner in stage.learners if learner.optimizer is not None):
            owned += [value for state in optimizer.state.values() for value in state.values()]
        for tensor in filter(torch.is_tensor, owned):
            tensor.data = tensor.data.clone()

    def _finish(self) -> None:
        if self._profiler is None:
            return
        profiler: Any = self._profiler.profiler
        self._stop()
        events = profiler.kineto_results.events()
        changes = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
        changes.sort(key=itemgetter(0))
        # Now, because torch 2.15 crashes over them at the end of the interpreter.
        del events
        profiler.kineto_results = None
        peak = max(accumulate((num_bytes for _, num_bytes in changes), initial=0))
        self._peak_bytes = max(self._peak_bytes or 0, peak)

    def _stop(self) -> None:
        if self._profiler is not None:
            profiler, self._profiler = self._profiler, None
            _enable_record_function(True)
            profiler.stop()


def peak_memory() -> dict[str, int]:
    """Return this process's peaks in bytes, as in ``summary.json``.

    ``peak_memory_bytes`` is the resident memory or, if the process computes on a GPU, the memory allocated there. On a
    GPU ``peak_active_bytes`` includes freed memory that another stream may still use, and ``peak_reserved_bytes`` all
    memory that the allocator has taken from the driver.
    """
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        statistics = torch.cuda.memory_stats()
        peaks = {name: int(statistics[f"{name}_bytes.all.peak"]) for name in ("active", "reserved")}
        allocated = {"peak_memory_bytes": int(torch.cuda.max_memory_allocated())}
        return allocated | {f"peak_{name}_bytes": num_bytes for name, num_bytes in peaks.items()}
    # getrusage is the second choice: it starts from the peak of the parent process.
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return {"peak_memory_bytes": int(line.split()[1]) * 1024}
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage counts KiB, but bytes on macOS
    return {"peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
