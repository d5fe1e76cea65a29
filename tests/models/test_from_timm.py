"""Networks of timm by name; those that do not exist are refused. tests/partition/test_cuts.py cuts them."""

import pytest
import torch

from adl_dist.cli.config.compose import compose_run
from adl_dist.cli.config.instantiate import build_model
from adl_dist.errors import ConfigError
from adl_dist.models import timm_model

pytest.importorskip("timm")


def test_classes_are_those_of_the_data_and_nothing_is_downloaded():
    overrides = ["model=timm", "model.name=resnet10t", "data=synthetic", "data.num_classes=5"]
    model = build_model(compose_run(overrides)[0])
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 5)


def test_without_timm_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "timm", None)
    with pytest.raises(ConfigError, match=r"needs the package timm .*pip install timm"):
        timm_model("resnet10t")
