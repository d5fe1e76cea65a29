"""How the processes of a run join and end, what they leave of a user's own, and which of them prints an error."""

import functools
import math
import os
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from adl_dist.control.messages import Finish, Report
from adl_dist.control.rpc import JobEndpoint
from adl_dist.distributed import world
from adl_dist.distributed.device import message_backend
from adl_dist.distributed.world import connect, disconnect
from tests.support.commands import assert_same
from tests.support.ranks import run_ranks
from tests.support.runs import MICRO_BATCH, NUM_SAMPLES, trained

pytestmark = pytest.mark.ranks

UPDATES = math.ceil(math.ceil(NUM_SAMPLES / MICRO_BATCH) / 2)  # of an epoch with M = 2


def test_after_an_error_edges_are_given_up_once_and_first(monkeypatch):
    """To destroy a group of NCCL waits for what is under way on it."""
    did = []
    here = replace(world.single_process(torch.device("cpu")), size=2)
    monkeypatch.setattr(world, "_world", here)
    monkeypatch.setattr(world, "abort", lambda edges: did.append("abort"))
    monkeypatch.setattr(world.rpc, "shutdown", lambda graceful: did.append("rpc"))
    monkeypatch.setattr(world, "_has_group", lambda: True)
    monkeypatch.setattr(dist, "destroy_process_group", lambda group: did.append("destroy"))
    here.abort_edges()  # by a thread of RPC, when rank 0 has ended the job
    disconnect(in_order=False)
    assert did == ["abort", "rpc", "destroy"]


def test_a_gpu_that_failed_fails_in_the_end_without_a_word(monkeypatch):
    """What CUDA says of a failed kernel it says to every later call: it must not take the place of the cause."""

    def destroy(group):
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(world, "_world", replace(world.single_process(torch.device("cpu")), size=2))
    monkeypatch.setattr(world.rpc, "shutdown", lambda graceful: None)
    monkeypatch.setattr(world, "_has_group", lambda: True)
    monkeypatch.setattr(dist, "destroy_process_group", destroy)
    disconnect(in_order=False)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("mine", "other", "has_nccl", "agreed"),
    [
        ("GPU-1", "nccl  GPU-2", True, "nccl"),
        ("GPU-1", "nccl  GPU-1", True, "gloo"),
        ("GPU-1", "", True, "gloo"),
        ("GPU-1", "nccl b GPU-1", True, "nccl"),
        ("GPU-1", "-  GPU-2", True, "gloo"),
        ("GPU-1", "-  GPU-1", False, "gloo"),
    ],
)
def test_ranks_use_nccl_if_each_has_a_gpu_of_its_own(rank, mine, other, has_nccl, agreed, monkeypatch):
    monkeypatch.setattr(dist, "is_nccl_available", lambda: has_nccl)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid=mine))
    monkeypatch.delenv("NCCL_HOSTID", raising=False)
    store = dist.HashStore()
    store.set(f"gpu/{1 - rank}", other)
    assert message_backend(torch.device("cuda"), rank, 2, store) == agreed


def group_of_the_users_own(folder, ends_first):
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    assert len(connect(2, device_type="cpu", timeout_seconds=20).edges) == 3
    total = torch.tensor([rank + 1.0])
    if ends_first:
        dist.destroy_process_group()
    disconnect()
    if not ends_first:
        dist.all_reduce(total)
        dist.destroy_process_group()
    return total.item()


@pytest.mark.parametrize(("ends_first", "totals"), [(False, [3.0, 3.0]), (True, [1.0, 2.0])])
def test_a_users_process_group_stays_his_and_may_end_before_ours(ends_first, totals, tmp_path):
    assert run_ranks(2, group_of_the_users_own, tmp_path, ends_first) == totals


def trains_and_ends_with_late_messages():
    """Rank 0 answers the results of rank 1 late, the end reaches rank 1 late, and rank 2 has ended before that."""
    rank, take = int(os.environ["RANK"]), JobEndpoint.take

    @functools.wraps(take)
    def take_late(self, message):
        is_end, is_of_1 = isinstance(message, Finish), isinstance(message, Report) and message.rank == 1
        time.sleep(0.5 if rank == 1 and is_end else 0.0)
        take(self, message)
        if rank == 0 and is_of_1 and message.results is not None:
            time.sleep(1.5)
        elif rank == 2 and is_end:
            time.sleep(60.0)

    JobEndpoint.take = take_late
    return trained(3, 2, torch.float32, epochs=1)[1]["updates"]  # without a word at the end, as of multiprocessing


def test_rank_0_may_end_before_another_has_its_results():
    assert run_ranks(3, trains_and_ends_with_late_messages) == [UPDATES] * 3


def _trains_twice_around_a_group_of_its_own(folder):
    """With the checks of torch for debugging, which wrap each group."""
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    trainer, _ = trained(2, 2, torch.float64)
    dist.init_process_group("gloo", init_method=f"file://{folder}/own", rank=trainer.rank, world_size=2)
    own = dist.GroupMember.WORLD
    total = torch.full((1,), trainer.rank + 1.0)
    dist.all_reduce(total)
    state = trainer.full_state_dict()
    dist.all_reduce(total)
    assert dist.GroupMember.WORLD is own
    dist.destroy_process_group()
    disconnect()
    return state, total.item()


def test_a_script_may_make_its_own_group_after_a_training(tmp_path):
    expected = trained(2, 2, torch.float64)[0].full_state_dict()
    for state, total in run_ranks(2, _trains_twice_around_a_group_of_its_own, tmp_path):
        assert total == 6.0  # (1 + 2) on each, and summed again
        assert_same(state, expected)
