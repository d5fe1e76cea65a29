"""What stands in for a GPU on a CPU: tensors that say they are on one, and events that are done when they are told."""

import threading
import time

import torch


class OnGpu(torch.Tensor):
    """A tensor of the CPU that says it is on a GPU."""

    is_cuda = True


def on_gpu(tensor):
    return tensor.as_subclass(OnGpu)


class Event:
    """An event of a GPU. The clock of the GPU is that of the host, and ``lag`` seconds late."""

    def __init__(self, *, lag=0.0):
        self._is_done, self._lag = threading.Event(), lag
        self.recorded = time.perf_counter()
        self.num_waits = 0

    def finish(self):
        self._is_done.set()

    def query(self):
        return self._is_done.is_set()

    def synchronize(self):
        self.num_waits += 1
        assert self._is_done.wait(20), "the test did not finish the copy"

    def elapsed_time(self, end):
        return 1e3 * (end.recorded + end._lag - self.recorded)
