"""How the processes of a run join, what they leave of a user's own, and that each may end when it is done."""

import functools
import math
import os
import time

import pytest
import torch
import torch.distributed as dist

from adl_dist.control.messages import Finish, Report
from adl_dist.control.rpc import JobEndpoint
from adl_dist.distributed.device import edge_backend
from adl_dist.distributed.world import connect, disconnect
from adl_dist.errors import ChannelError, ConfigError
from adl_dist.training import shape_inference
from tests.support.ranks import run_ranks
from tests.support.runs import MICRO_BATCH, NUM_SAMPLES, trained
from tests.support.tiers import slow

pytestmark = pytest.mark.ranks

UPDATES = math.ceil(math.ceil(NUM_SAMPLES / MICRO_BATCH) / 2)  # of an epoch with M = 2


@pytest.mark.parametrize(
    ("of_ranks", "agreed"), [(["nccl", "nccl"], "nccl"), (["nccl", "gloo"], "gloo"), (["gloo", "nccl"], "gloo")]
)
def test_edges_use_nccl_on_every_rank_or_on_none(of_ranks, agreed, monkeypatch):
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    for rank in range(2):
        store = dist.HashStore()
        store.set(f"backend/{1 - rank}", of_ranks[1 - rank])
        num_gpus = 2 if of_ranks[rank] == "nccl" else 1  # two ranks share it
        monkeypatch.setattr(torch.cuda, "device_count", lambda num_gpus=num_gpus: num_gpus)
        assert edge_backend(torch.device("cuda"), rank, 2, store) == agreed


def test_a_users_process_group_without_the_cpu_is_refused(monkeypatch):
    """A process group of the user's own without the CPU is refused with the way out."""
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cuda:nccl")
    with pytest.raises(ConfigError, match=r"it is cuda:nccl.* init_process_group\('cpu:gloo,cuda:nccl'\)"):
        connect(2, device_type="cuda", timeout_seconds=1)


def test_a_store_that_ended_with_rank_0_is_one_line():
    """A store that has ended with rank 0 is reported in one line and covers no error of this rank's own."""

    class Ended(dist.HashStore):
        def set(self, key, value):
            raise dist.DistNetworkError("Broken pipe")

    with pytest.raises(ChannelError, match=r"^no word from rank 0 at start-up; its own log, .* says why$"):
        shape_inference.check_consistent(Ended(), 1, 2, {"seed": 0})
    with pytest.raises(ConfigError, match="of its own"), shape_inference.propagate_errors(Ended(), stages=[1], rank=1):
        raise ConfigError("of its own")


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
def test_a_users_process_group_stays_his_and_may_end_before_ours(ends_first, tmp_path):
    assert run_ranks(2, group_of_the_users_own, tmp_path, ends_first) == [None if ends_first else 3.0] * 2


def trains_and_ends(planted):
    """Without a word to the others, as processes of ``multiprocessing`` do."""
    planted(int(os.environ["RANK"]))
    _, summary = trained(3, 2, torch.float32, epochs=1)
    return summary["updates"]


def plant(*, before=0.0, after=0.0, is_meant):
    """Have an endpoint take its time with the messages that are meant."""
    take = JobEndpoint.take

    @functools.wraps(take)
    def slow(self, message):
        time.sleep(before if is_meant(message) else 0.0)
        take(self, message)
        time.sleep(after if is_meant(message) else 0.0)

    JobEndpoint.take = slow


def rank_0_answers_late(rank):
    if rank == 0:
        plant(after=3.0, is_meant=lambda told: isinstance(told, Report) and told.rank == 1 and told.results is not None)


def rank_2_ends_before_rank_1_is_told(rank):
    rank_0_answers_late(rank)
    if rank > 0:
        late = {"before": 1.0} if rank == 1 else {"after": 60.0}
        plant(**late, is_meant=lambda told: isinstance(told, Finish))


@pytest.mark.parametrize("planted", [slow(rank_0_answers_late), rank_2_ends_before_rank_1_is_told])
def test_rank_0_may_end_before_another_has_its_results(planted):
    assert run_ranks(3, trains_and_ends, planted) == [UPDATES] * 3
