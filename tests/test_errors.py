"""What is said of errors that were not raised on purpose."""

import pytest
import torch

from adl_dist.control.messages import Failure
from adl_dist.errors import describe, in_one_line

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


class Unprintable(Exception):
    exit_code = "one"  # as other libraries have it

    def __str__(self):
        raise LookupError


def test_an_error_without_a_text_is_told_and_sent():
    said = "Unprintable: its text cannot be made, because of a LookupError"
    assert in_one_line(Unprintable()) == said
    failure = Failure.of(Unprintable(), 3)
    assert failure.text.startswith(f"rank 3: unexpected {said}")
    assert failure.exit_code == 1
