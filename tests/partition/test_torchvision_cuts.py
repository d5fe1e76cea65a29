"""Networks of torchvision, cut inside of their blocks: one of each family; by ``make test-zoo`` all, in two dtypes."""

import gc
import time

import pytest
import torch
from torchvision import models

from tests.support.cut_steps import WITH_HEADS, assert_the_cut_network_equals_the_uncut_one
from tests.support.tiers import slow

FAMILIES = [
    *("efficientnet_b0", "googlenet with heads", "mnasnet0_5", "mobilenet_v3_small", "resnet18", "shufflenet_v2_x0_5"),
    *("squeezenet1_1", "swin_t", slow("densenet121"), slow("regnet_y_400mf"), slow("vit_b_32")),
]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_cut_network_computes_the_bits_of_the_uncut_one(name, tmp_path):
    assert_the_cut_network_equals_the_uncut_one(name, torch.float32, tmp_path)


@pytest.mark.zoo
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", [*models.list_models(module=models), *WITH_HEADS])
def test_each_network_computes_its_bits_when_it_is_cut(name, tmp_path, capsys):
    """In both dtypes; prints a row of the table in docs/results/torchvision.md."""
    row = {}
    for dtype in (torch.float32, torch.float64):
        start = time.perf_counter()
        row |= assert_the_cut_network_equals_the_uncut_one(name, dtype, tmp_path)
        row[str(dtype).removeprefix("torch.")] += f", {time.perf_counter() - start:.0f} s"
        gc.collect()  # graphs hold cycles, and the next network may need the memory
    with capsys.disabled():
        print(f"\n| {' | '.join(map(str, row.values()))} |")
