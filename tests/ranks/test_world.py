"""What the processes of a run agree on before there is anything to train, and what they leave of a user's own."""

import os

import pytest
import torch
import torch.distributed as dist

from adl_dist.errors import ConfigError
from adl_dist.runtime import device
from adl_dist.runtime.device import edge_backend
from adl_dist.runtime.world import connect, disconnect
from tests.support.ranks import run_ranks


@pytest.mark.parametrize(
    ("of_ranks", "agreed"), [(["nccl", "nccl"], "nccl"), (["nccl", "gloo"], "gloo"), (["gloo", "nccl"], "gloo")]
)
def test_edges_use_nccl_on_every_rank_or_on_none(of_ranks, agreed, monkeypatch):
    for rank in range(2):
        store = dist.HashStore()
        store.set(f"backend/{1 - rank}", of_ranks[1 - rank])
        monkeypatch.setattr(device, "_own_backend", lambda *args, own=of_ranks[rank]: own)
        assert edge_backend(torch.device("cpu"), rank, 2, store) == agreed


def test_a_process_group_of_the_users_own_without_the_cpu_is_refused_with_the_way_out(monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cuda:nccl")
    with pytest.raises(ConfigError, match=r"it is cuda:nccl.* init_process_group\('cpu:gloo,cuda:nccl'\)"):
        connect(2, device_type="cuda", timeout_seconds=1)


def group_of_the_users_own(folder, ends_first):
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    world = connect(2, device_type="cpu", timeout_seconds=20)
    assert len(world.edges) == 3
    if ends_first:
        dist.destroy_process_group()
    disconnect()
    if not ends_first:
        total = torch.tensor([rank + 1.0])
        dist.all_reduce(total)
        dist.destroy_process_group()
        return total.item()
    return None


@pytest.mark.parametrize("ends_first", [False, True])
def test_a_process_group_of_the_users_own_stays_his_and_may_end_before_ours(ends_first, tmp_path):
    assert run_ranks(2, group_of_the_users_own, tmp_path, ends_first) == [None if ends_first else 3.0] * 2
