"""What is said of errors that were not raised on purpose."""

import pytest
import torch

from adl_dist.errors import describe

WITHOUT_MEMORY = [
    MemoryError(),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried to"),
    OSError(12, "Cannot allocate memory"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
]


@pytest.mark.parametrize(
    "error", WITHOUT_MEMORY, ids=[type(error).__name__ + str(error)[:9] for error in WITHOUT_MEMORY]
)
def test_what_needs_less_memory_is_told_where_there_is_none_left(error):
    assert describe(error).startswith(f"no memory left: {type(error).__name__}")
    assert "accumulation_steps" in describe(error)


def test_another_error_is_told_as_it_is():
    assert describe(KeyError("memory")).startswith("unexpected KeyError: 'memory'; ")
