"""Every classification network of torchvision, cut inside of its blocks. Skipped unless asked for: `make test-zoo`."""

import gc
import time

import pytest
import torch
from torchvision import models

from tests.support.cut_steps import WITH_HEADS, assert_the_cut_network_equals_the_uncut_one

pytestmark = [pytest.mark.zoo, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("name", [*models.list_models(module=models), *WITH_HEADS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_a_cut_network_computes_the_bits_of_the_uncut_one(name, dtype, tmp_path, record_property):
    start = time.perf_counter()
    told = assert_the_cut_network_equals_the_uncut_one(name, dtype, tmp_path)
    gc.collect()  # graphs hold cycles, and the next network may need the memory
    (verdict,) = (key for key in told if key.startswith("float"))
    told[verdict] += f", {time.perf_counter() - start:.0f} s"
    for what, value in told.items():
        record_property(what, value)
