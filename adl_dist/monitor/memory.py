"""What a process holds at most, and what of it are tensors of its stage: those that torch's allocator has handed out.

Only torch's profiler sees every allocation, also those inside of an operation and of a backward. It writes each of them
down, which grows without bound; so it looks at the first updates of a run and is then stopped. On a GPU the allocator
itself keeps count.
"""

import contextlib
import os
import resource
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._C._autograd import _enable_record_function
from torch.profiler import ProfilerActivity, profile

from adl_dist.schedule import Action, Op, Pipeline
from adl_dist.stage import Stage


@dataclass
class MemoryMeter:
    """Of the one stage of a process.

    Attributes:
        device: of the stage.
        num_updates: for which it looks on a CPU; enough that the pipeline is full.
    """

    device: torch.device
    num_updates: int
    _peak_bytes: int | None = None
    _profiler: profile | None = None
    _num_seen: int = 0

    @classmethod
    def of(cls, pipeline: Pipeline, device: torch.device) -> "MemoryMeter":
        """Build one that looks until the pipeline is full, and for some updates more."""
        return cls(device, 2 * (pipeline.delays[0] // pipeline.micro_batches_per_update) + 6)

    @property
    def peak_bytes(self) -> int | None:
        """The most bytes of tensors that were alive at a time; None: not measured yet."""
        return int(torch.cuda.max_memory_allocated(self.device)) if self._is_on_gpu else self._peak_bytes

    def measured(self, order: Iterable[tuple[int, Action]], stage: Stage) -> Iterator[tuple[int, Action]]:
        """Hand ``order`` through; look at the first updates of a run, in one segment or several."""
        order = iter(order)
        if self._num_seen < self.num_updates and not self._is_on_gpu:
            self._start(stage)
            for k, action in order:
                yield k, action
                self._num_seen += action.op is Op.UPDATE
                if self._num_seen == self.num_updates:
                    break
            self._peak_bytes = max(self._peak_bytes or 0, self._finish())
        yield from order

    def stop(self) -> None:
        """Stop looking, whatever has happened; of a segment that failed no peak is known."""
        if self._profiler is not None:
            profiler, self._profiler = self._profiler, None
            _enable_record_function(True)
            profiler.stop()

    @property
    def _is_on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def _start(self, stage: Stage) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it says that it has found no GPU, as an error
        self._profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True)
        self._profiler.start()
        # Allocations alone, no operators. A message under way, or a call over RPC, counts as an operator that ends when
        # it has arrived, and torch 2.15 then writes down the time, also where a profiler that was stopped meanwhile has
        # had its memory: into whatever tensor lies there now.
        _enable_record_function(False)
        # It would not see go what was there before it. All values stay, and nothing else uses these tensors now.
        for tensor in _owned(stage):
            tensor.data = tensor.data.clone()

    def _finish(self) -> int:
        assert self._profiler is not None
        profiler = self._profiler.profiler
        self.stop()
        assert profiler is not None
        assert profiler.kineto_results is not None
        events: Any = profiler.kineto_results.events()
        changes = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
        changes.sort(key=lambda change: int(change[0]))
        # Now, not when the interpreter ends: there torch 2.15 crashes over them.
        del events
        profiler.kineto_results = None
        return max(accumulate((int(num_bytes) for _, num_bytes in changes), initial=0))


def _owned(stage: Stage) -> Iterator[Tensor]:
    """What a stage keeps between segments: parameters, buffers, the optimizer's state."""
    yield from (parameter for _, parameter in stage.named_parameters())
    for module in filter(None, (stage.module, stage.head)):
        yield from module.buffers()
    for kept in stage.optimizer.state.values() if stage.optimizer else ():
        yield from (value for value in kept.values() if isinstance(value, Tensor))


def forget_peak(device: torch.device) -> None:
    """Have a GPU count its peak from now on: to measure the model, or a run before, may have taken more."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory_bytes() -> int:
    """The most this process has held: resident in memory, or on the GPU if it computes there, since the run began."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return int(torch.cuda.max_memory_allocated())
    # Not getrusage where it can be avoided: what it tells begins with what the process that started this one held.
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage counts KiB, but bytes on macOS
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
