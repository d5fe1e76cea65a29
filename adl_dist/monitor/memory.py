"""The peak memory of a process, and of its stage's tensors: those that torch's allocator has handed out.

Only torch's profiler sees every allocation, also those inside an operation and a backward. It records each of them,
which grows without bound; so it runs for the first updates of a run and is then stopped. On a GPU the allocator itself
keeps count.
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
    """The peak of the tensors of a process that has one stage, on a CPU over the first ``num_updates``."""

    def __init__(self, device: torch.device, num_updates: int) -> None:
        self._device, self._num_updates, self._num_seen = device, num_updates, 0
        self._is_on_gpu = device.type == "cuda"
        self._peak_bytes: int | None = None
        self._profiler: profile | None = None

    @classmethod
    def of(cls, pipeline: Pipeline, device: torch.device) -> "MemoryMeter":
        """Return a meter that runs until the pipeline is full, and for some updates more."""
        return cls(device, 2 * (pipeline.round_trip // pipeline.micro_batches_per_update) + 6)

    @property
    def peak_bytes(self) -> int | None:
        """Return the most bytes of tensors that were alive at a time; None: not measured yet."""
        return int(torch.cuda.max_memory_allocated(self._device)) if self._is_on_gpu else self._peak_bytes

    @contextlib.contextmanager
    def segment(self, stage: Stage) -> Iterator[None]:
        """Measure while inside, if the first updates of the run are not done; if it fails, no peak is known."""
        try:
            if self._num_seen < self._num_updates and not self._is_on_gpu:
                self._start(stage)
            yield
            self._finish()
        finally:
            self._stop()

    def count_update(self) -> None:
        """Note that an update is done; after the last that is measured, stop."""
        self._num_seen += 1
        if self._num_seen == self._num_updates:
            self._finish()

    def _start(self, stage: Stage) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it reports as an error that there is no GPU
        self._profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True)
        self._profiler.start()
        # Allocations alone, no operators. A message under way, or a call over RPC, counts as an operator that ends when
        # it has arrived, and torch 2.15 then writes the time into the memory of the profiler, even of one that was
        # stopped meanwhile: into whatever tensor has that memory now.
        _enable_record_function(False)
        # It would not see the end of what was there before it. The values stay, and nothing else uses the tensors now.
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
        # Now, not when the interpreter ends: there torch 2.15 crashes over them.
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
    """Return the most bytes that this process has held since the run began, under the names of ``summary.json``.

    ``peak_memory_bytes`` are resident, or on a GPU, if it computes there, allocated. These understate what a GPU holds:
    ``peak_active_bytes`` has also what was freed while another stream may still use it, and ``peak_reserved_bytes`` all
    that the allocator has taken from the driver.
    """
    found = {"peak_memory_bytes": peak_memory_bytes()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        statistics = torch.cuda.memory_stats()
        for name in ("active", "reserved"):
            found[f"peak_{name}_bytes"] = int(statistics[f"{name}_bytes.all.peak"])
    return found


def peak_memory_bytes() -> int:
    """Return the most this process has held: resident, or on the GPU if it computes there, since the run began."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return int(torch.cuda.max_memory_allocated())
    # Not getrusage where it can be avoided: it starts from what the parent process held.
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage counts KiB, but bytes on macOS
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
