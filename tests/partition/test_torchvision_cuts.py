"""One network of each family of torchvision, cut inside of its blocks; all of them, in float64 too: test_zoo.py."""

import pytest
import torch

from tests.support.cut_steps import assert_the_cut_network_equals_the_uncut_one
from tests.support.tiers import slow

FAMILIES = [
    *("densenet121", "efficientnet_b0", "googlenet with heads", "mnasnet0_5", "mobilenet_v3_small", "regnet_y_400mf"),
    *("resnet18", "shufflenet_v2_x0_5", "squeezenet1_1", "swin_t"),
    slow("vit_b_32"),  # 88 million parameters; swin_t has attention, too
]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_cut_network_computes_the_bits_of_the_uncut_one(name, tmp_path):
    assert_the_cut_network_equals_the_uncut_one(name, torch.float32, tmp_path)
