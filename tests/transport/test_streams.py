"""Copies on streams of their own carry the right values, and training waits for no more than it must."""

import pytest
import torch

from tests.support.toys import batch_norm_net
from tests.support.values import spec_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def slowly(value):
    """A tensor that is ``value`` only when a long computation before it is done."""
    x = torch.zeros(4096, 4096, device="cuda")
    for _ in range(20):
        x = x @ x
    return x[:1024] + value


def test_what_is_still_being_computed_is_copied_out_right():
    from adl_dist.transport.staging import to_host

    copies = [to_host(slowly(value)) for value in range(8)]  # the tensors themselves are freed at once
    for value, host in enumerate(copies):
        assert host.is_pinned()
        assert bool((host == value).all())


def test_a_pinned_buffer_is_not_used_before_it_was_copied_in():
    from adl_dist.transport.staging import to_device

    device, tensors = torch.device("cuda", torch.cuda.current_device()), []
    for value in range(32):
        busy = slowly(0)
        tensors.append(to_device(torch.full((1 << 20,), float(value), pin_memory=True), device))
        del busy
    for value, tensor in enumerate(tensors):
        assert bool((tensor == value).all())


def test_forward_backward_and_update_never_wait_for_the_gpu():
    from adl_dist.stage import Stage, StepStats

    device = torch.device("cuda", torch.cuda.current_device())
    stage = Stage(
        batch_norm_net().to(device),
        0,
        spec_of(1, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
        device=device,
    )
    stage.begin(0, training=True)
    images = [torch.randn(4, 2, 6, 6, device=device) for _ in range(8)]
    target = torch.zeros(4, dtype=torch.long, device=device)
    one = torch.ones((), device=device)
    try:
        for b, image in enumerate(images):
            if b == 2:  # the first ones make optimizer state and choose kernels
                torch.cuda.set_sync_debug_mode("error")
            stage.forward(b, (image,), target)
            stage.finish_group((one,), stage.backward(b, (one,)))
            stage.update()
            stage.tally = StepStats()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    stage.faults.check()
