"""Skipping and clipping on a GPU: the decision of the host, the values of the CPU. `make test-gpu`."""

import pytest
import torch

from adl_dist.errors import DivergedError
from tests.support.runs import nan_inputs, train
from tests.training.test_gpu import assert_close

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("method", ["adl", "paci", "2bw", "fr"])
def test_a_gpu_skips_the_groups_that_the_cpu_skips(method):
    options = {"method": method, "plant": nan_inputs, "non_finite": "skip", "clip_norm": 0.3}
    (expected, on_cpu), (got, on_gpu) = (train(3, 2, torch.float64, device=d, **options) for d in ("cpu", "cuda"))
    assert_close(got, expected)
    assert on_gpu["skipped_updates"] == on_cpu["skipped_updates"] == 9


def test_a_fault_on_a_gpu_is_told_by_the_number_of_its_update():
    with pytest.raises(DivergedError, match=r"is nan at update 0 \(epoch 0\)"):
        train(3, 2, torch.float32, device="cuda", plant=nan_inputs)
