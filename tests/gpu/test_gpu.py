"""The same values on a GPU as on the CPU, whatever method and transport, and training that waits for no copy.

`make test-gpu`; skipped without a GPU.
"""

import functools
import os
import time

import pytest
import torch

from adl_dist.errors import DivergedError
from adl_dist.schedule import METHODS
from adl_dist.stage import Stage, StepStats
from adl_dist.transport.staging import send_from_gpu, to_device, to_host
from tests.support import equations, runs
from tests.support.commands import assert_same
from tests.support.ranks import run_ranks
from tests.support.runs import nan_inputs
from tests.support.toys import FixedImages, batch_norm_net
from tests.support.values import QUIET, spec_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

# float64 on both sides: the sums of a GPU kernel come in another order, which costs a few last digits per update.
TOLERANCE = 1e-9
# In bfloat16 a last digit of a sum can tip a rounding of 2**-9. That the bits are equal the CPU's tests show.
LOWERED = 1e-2
assert_close = functools.partial(equations.assert_close, tolerance=TOLERANCE)
sgd = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def trained(K, device, *, name="adl", dropout=0.0, dtype=torch.float64, epochs=2, of_trainer=None, **options):
    of_trainer = {"device": device, "timeout_seconds": 60, "dtype": dtype, "deterministic": True, **(of_trainer or {})}
    trainer = runs.toy_trainer(K, 2, name, options, model=batch_norm_net(dropout=dropout), optimizer=sgd, **of_trainer)
    data = FixedImages(32, dtype=dtype)
    summary = trainer.fit(data, epochs=epochs, batch_size=6, val_dataset=data, monitoring=QUIET)
    return trainer.full_state_dict(), summary


def train(K, device, **options):
    return trained(K, device, **options)[0]


def train_as_a_rank(K, shares_one_gpu, options):
    """On one GPU of several, too: the processes then share it, and go through pinned host memory."""
    if shares_one_gpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = "0"
    return train(K, "cuda", **options)


@pytest.mark.parametrize("K", [1, 2, 4])
def test_all_stages_on_one_gpu_equal_the_cpu(K):
    assert_close(train(K, "cuda"), train(K, "cpu"))


# dgl's MLP heads normalise over samples, which turns rounding into more than rounding on micro-batches of 3.
VARIANTS = [
    *((name, {}) for name in METHODS if name not in ("adl", "dgl")),
    ("dgl", {"head": "cnn"}),
    ("adl", {"weights": "latest"}),
    ("adl", {"weights": "recompute"}),
    ("gpipe", {"recompute": "except_last"}),
]


@pytest.mark.parametrize(("name", "options"), VARIANTS, ids=[" ".join([n, *map(str, o.values())]) for n, o in VARIANTS])
def test_every_method_on_one_gpu_equals_the_cpu(name, options):
    assert_close(train(3, "cuda", name=name, **options), train(3, "cpu", name=name, **options))


def test_recomputation_on_the_gpu_replays_dropout():
    replayed = train(3, "cuda", dropout=0.3, name="gpipe", recompute="always")
    assert_same(replayed, train(3, "cuda", dropout=0.3, name="gpipe"))


def test_dropout_on_the_gpu_is_repeated_bit_for_bit():
    assert_same(train(2, "cuda", dropout=0.3), train(2, "cuda", dropout=0.3))


ACROSS = [
    ({}, TOLERANCE),
    ({"dropout": 0.3, "of_trainer": {"channels_last": True}}, TOLERANCE),
    ({"dtype": torch.float32, "of_trainer": {"codec": "bf16"}}, LOWERED),
    ({"dtype": torch.float32, "of_trainer": {"autocast": torch.bfloat16}}, LOWERED),
]


NCCL = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices: NCCL")


@pytest.mark.parametrize("shares_one_gpu", [True, pytest.param(False, marks=NCCL)], ids=["one GPU", "a GPU each"])
@pytest.mark.parametrize(("options", "tolerance"), ACROSS, ids=["plain", "channels_last", "narrow wire", "autocast"])
def test_processes_on_gpus_equal_one_with_all_stages(options, tolerance, shares_one_gpu):
    K = 2 if shares_one_gpu else min(4, torch.cuda.device_count())
    expected = train(K, "cuda", **options)
    for state in run_ranks(K, train_as_a_rank, K, shares_one_gpu, options, timeout_seconds=110):
        assert_close(state, expected, tolerance=tolerance)


def test_under_autocast_a_cut_changes_nothing():
    """A synchronous pipeline of three stages against the uncut model, on the same kernels."""
    options = {"dtype": torch.float32, "of_trainer": {"autocast": torch.bfloat16}}
    assert_close(train(3, "cuda", name="gpipe", **options), train(1, "cuda", name="bp", **options), tolerance=LOWERED)


@pytest.mark.filterwarnings("ignore:The .grad attribute", "ignore:TensorFloat32 tensor cores")
def test_compiled_stages_equal_plain_ones_to_a_ten_thousandth():
    options = {"dtype": torch.float32, "epochs": 1}
    plain = train(2, "cuda", **options)
    assert_close(train(2, "cuda", of_trainer={"compile": True}, **options), plain, tolerance=1e-4)


def test_peak_memory_is_that_of_the_gpu():
    torch.cuda.reset_peak_memory_stats()
    _, summary = trained(2, "cuda")
    (process,) = summary["processes"]
    allocated, active, reserved = (process[f"peak_{name}_bytes"] for name in ("memory", "active", "reserved"))
    assert 0 < allocated <= torch.cuda.max_memory_allocated()
    assert allocated <= active <= reserved


def test_what_was_held_before_a_run_is_not_of_its_peak():
    torch.zeros(1 << 30, dtype=torch.uint8, device="cuda")
    _, summary = trained(2, "cuda")
    assert summary["processes"][0]["peak_memory_bytes"] < 1 << 30


@pytest.mark.parametrize("method", ["adl", "paci", "2bw", "fr"])
def test_a_gpu_skips_the_groups_that_the_cpu_skips(method):
    options = {"method": method, "plant": nan_inputs, "non_finite": "skip", "clip_norm": 0.3}
    (expected, on_cpu), (got, on_gpu) = (runs.train(3, 2, torch.float64, device=d, **options) for d in ("cpu", "cuda"))
    assert_close(got, expected)
    assert on_gpu["skipped_updates"] == on_cpu["skipped_updates"] > 0


def test_a_fault_on_a_gpu_is_told_by_the_number_of_its_update():
    with pytest.raises(DivergedError, match=r"is nan at update 0 \(epoch 1\)"):
        runs.train(3, 2, torch.float32, device="cuda", plant=nan_inputs)


def slowly(value):
    """A tensor that is ``value`` only when a long computation before it is done."""
    x = torch.zeros(4096, 4096, device="cuda")
    for _ in range(20):
        x = x @ x
    return x[:1024] + value


def test_what_is_still_being_computed_is_copied_out_right():
    tensors = [slowly(value) for value in range(8)]
    for value, (host, copied) in enumerate([to_host(tensor) for tensor in tensors]):
        assert host.is_pinned()
        copied.synchronize()
        assert bool((host == value).all())


def test_the_host_does_not_wait_for_what_it_sends():
    to_host(slowly(0))[1].synchronize()  # the first product and the first buffers take longer
    begin, waits, seen = time.perf_counter(), [], []
    for value in range(8):
        tensor = slowly(value)
        host, copied = to_host(tensor)
        waits.append(send_from_gpu(tensor, host, copied, lambda host: functools.partial(seen.append, host.clone())))
        del tensor  # is kept until it has left
    launched = time.perf_counter() - begin
    for value, wait in enumerate(waits):
        wait()
        assert bool((seen[value] == value).all())
    assert launched < 0.5 * (time.perf_counter() - begin)


def test_a_pinned_buffer_is_not_used_before_it_was_copied_in():
    device, tensors = torch.device("cuda", torch.cuda.current_device()), []
    for value in range(32):
        busy = slowly(0)
        tensors.append(to_device(torch.full((1 << 20,), float(value), pin_memory=True), device))
        del busy
    for value, tensor in enumerate(tensors):
        assert bool((tensor == value).all())


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_forward_backward_and_update_never_wait_for_the_gpu():
    device = torch.device("cuda", torch.cuda.current_device())
    stage = Stage(batch_norm_net().to(device), 0, spec_of(1, sgd), device=device)
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
