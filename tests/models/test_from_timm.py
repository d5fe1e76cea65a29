"""Networks of timm: cut between any two units they are what they were; what cannot be taken is refused."""

import pytest
import torch

from adl_dist.cli.config.compose import compose_run
from adl_dist.cli.config.instantiate import build_model
from adl_dist.errors import ConfigError
from adl_dist.models import timm_model
from adl_dist.partition import cut
from tests.support.tiers import slow

pytest.importorskip("timm")
CLASSES = 3
# Each with what makes it small; all see images of 64 x 64.
NETWORKS = [
    ("vit_tiny_patch16_224", {"img_size": 64, "depth": 2}),
    ("convnext_atto", {"depths": (1, 1, 1, 1)}),
    slow("deit_tiny_patch16_224", {"img_size": 64}),
    slow("swin_tiny_patch4_window7_224", {"img_size": 64}),
    slow("mixer_s32_224", {"img_size": 64}),
    slow("resnet10t", {}),
    slow("regnetx_002", {}),
    slow("efficientnet_b0", {}),
    slow("mobilenetv3_small_050", {}),
    slow("densenet121", {}),
]


@pytest.mark.parametrize(("name", "options"), NETWORKS)
def test_a_network_of_timm_computes_the_same_in_four_stages(name, options):
    torch.manual_seed(0)
    model, images = timm_model(name, CLASSES, **options), torch.randn(4, 3, 64, 64)
    stages = cut(model, num_stages=4, samples=(images[:2], images))
    names = [key for stage in stages for key in stage.state_dict()]
    assert sorted(names) == sorted(model.state_dict())
    found = images
    for module in (model, *stages):
        module.eval()
    for stage in stages:
        found = stage(found)
    assert torch.equal(found, model(images))


def test_classes_are_those_of_the_data_and_nothing_is_downloaded():
    overrides = ["model=timm", "model.name=resnet10t", "data=synthetic", "data.num_classes=5"]
    model = build_model(compose_run(overrides)[0])
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 5)


def test_a_network_that_cannot_be_taken_is_refused():
    for name, options, why in [
        ("resnet9999", {}, "not one of timm's .* networks; did you mean resnet"),
        ("resnet10t", {"foo": 1}, r"refuses .*model.foo=1: TypeError.*'foo'"),
        ("resnet10t", {"pretrained": True}, "use model.download=true .* or model.checkpoint_path=FILE"),
        ("resnet10t", {"num_classes": 0}, "num_classes must be at least 1"),
    ]:
        with pytest.raises(ConfigError, match=why) as refused:
            timm_model(name, **options)
        assert "\n" not in str(refused.value)


def test_without_timm_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "timm", None)
    with pytest.raises(ConfigError, match=r"needs the package timm .*pip install adl_dist\[hf\]"):
        timm_model("resnet10t")
