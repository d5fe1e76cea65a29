"""Stages as CUDA graphs, on a GPU: the values of stages without them. ``make test-gpu``; skipped without a GPU."""

import pytest
import torch
from torch import nn

from adl_dist.errors import ConfigError
from tests.gpu.test_gpu import TOLERANCE, assert_close, train, train_as_a_rank
from tests.support.commands import assert_same
from tests.support.ranks import run_ranks
from tests.support.toys import batch_norm_net

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(180),
]


def graphed(K, *, of_trainer=None, **options):
    return train(K, "cuda", of_trainer={"cuda_graphs": True, **(of_trainer or {})}, **options)


@pytest.mark.parametrize("name", ["adl", "fdg", "ddg", "bp", "gpipe", "1f1b", "pipedream", "paci"])
def test_graphs_on_a_gpu_change_no_bit_of_any_method(name):
    """Kernels are those that give the same bits each time."""
    assert_same(graphed(3, name=name), train(3, "cuda", name=name))


def test_graphs_on_a_gpu_equal_the_cpu():
    assert_close(graphed(4), train(4, "cpu"))


def test_a_replayed_dropout_draws_the_usual_numbers():
    assert_same(graphed(3, dropout=0.3), train(3, "cuda", dropout=0.3))


@pytest.mark.parametrize(
    "options",
    [
        {"of_trainer": {"channels_last": True, "clip_norm": 0.3}},
        {"of_trainer": {"non_finite": "skip"}},
        {"dtype": torch.float32, "of_trainer": {"autocast": torch.bfloat16}},
        {"mitigation": ["discount", "delay_compensation"]},
    ],
    ids=["clipped channels_last", "skip", "autocast", "mitigated"],
)
def test_graphs_on_a_gpu_change_no_bit_of_an_option(options):
    assert_same(graphed(3, **options), train(3, "cuda", **options))


@pytest.mark.parametrize("K", [2, 3])
def test_a_graph_of_all_stages_on_a_gpu_changes_no_bit(K):
    ticked = train(K, "cuda", of_trainer={"cuda_graphs": "tick"}, name="adl")
    assert_same(ticked, train(K, "cuda", name="adl"))


def test_two_ranks_with_graphs_on_one_gpu_equal_one_process():
    expected, options = train(2, "cuda", dropout=0.3), {"dropout": 0.3, "of_trainer": {"cuda_graphs": True}}
    for state in run_ranks(2, train_as_a_rank, 2, True, options, timeout_seconds=110):
        assert_close(state, expected, tolerance=TOLERANCE)


class OnTheHost(nn.Module):
    """Works with a tensor of the host in each forward."""

    def forward(self, x):
        return x + torch.arange(x.shape[-1]).to(x.device)


def test_work_with_tensors_of_the_host_is_refused(monkeypatch):
    def net(**options):
        model = batch_norm_net(**options)
        model[3] = OnTheHost()
        return model

    monkeypatch.setattr("tests.gpu.test_gpu.batch_norm_net", net)
    with pytest.raises(ConfigError, match="takes a tensor that is not on cuda"):
        graphed(2)
