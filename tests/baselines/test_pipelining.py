"""GPipe and 1F1B against PyTorch's own pipelining runtime, on the same stages and the same processes."""

import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

import adl_dist
from adl_dist.distributed.parent_process import RENDEZVOUS_FOLDER
from adl_dist.partition import cut
from adl_dist.schedule import method
from tests.support.ranks import run_ranks
from tests.support.runs import BALANCE
from tests.support.tiers import slow
from tests.support.toys import FixedImages, batch_norm_net
from tests.support.values import QUIET

pytestmark = pytest.mark.ranks

M, MICRO_BATCH = 4, 5
OPTIONS = [("gpipe", {}), ("gpipe", {"recompute": "except_last"}), ("1f1b", {}), ("bp", {})]


def one_step_of_ours(K):
    """The gradients of all methods, read off the weights after one step of rate 1."""
    before = dict(batch_norm_net().double().named_parameters())
    told = []
    for name, options in OPTIONS:
        trainer = adl_dist.Trainer(
            batch_norm_net().double(),
            loss_fn=nn.CrossEntropyLoss(),
            optimizer=lambda p: torch.optim.SGD(p, lr=1.0),
            method=method(name, accumulation_steps=M, **options),
            num_stages=K,
            partition=adl_dist.PartitionSpec(balance=BALANCE[K]),
            precision=adl_dist.Precision(dtype=torch.float64),
            processes=adl_dist.ProcessOptions(threads=1, timeout_seconds=30),
        )
        data = FixedImages(M * MICRO_BATCH, dtype=torch.float64)
        trainer.fit(data, epochs=1, batch_size=M * MICRO_BATCH, shuffle=False, monitoring=QUIET)
        after = trainer.full_state_dict()
        told.append({n: (before[n] - after[n]).detach() for n in before})
    return told


def one_step_of_theirs(K):
    """The gradients of this rank's stage after one step of PyTorch's schedules."""
    rank, store = int(os.environ["RANK"]), f"{os.environ[RENDEZVOUS_FOLDER]}/theirs"
    dist.init_process_group("gloo", store=dist.FileStore(store, K), rank=rank, world_size=K)
    data = FixedImages(M * MICRO_BATCH, dtype=torch.float64)
    told = []
    for schedule in (ScheduleGPipe, Schedule1F1B):
        module = cut(batch_norm_net().double(), num_stages=K, balance=BALANCE[K])[rank]
        stage = PipelineStage(module, rank, K, torch.device("cpu"))
        run = schedule(stage, n_microbatches=M, loss_fn=nn.CrossEntropyLoss())
        run.step(
            *([data.images] if rank == 0 else []),
            **({"target": torch.tensor(data.labels)} if rank == K - 1 else {}),
        )
        told.append({n: p.grad for n, p in module.named_parameters()})
    dist.barrier()
    dist.destroy_process_group()
    return told


@pytest.mark.parametrize("K", [slow(2), 3])
def test_synchronous_methods_give_the_gradients_of_torchs(K):
    """GPipe and 1F1B and BP give the gradients of torch.distributed.pipelining."""
    theirs = run_ranks(K, one_step_of_theirs, K, timeout_seconds=60)
    for ours in run_ranks(K, one_step_of_ours, K, timeout_seconds=60)[0]:
        for of_rank in theirs:
            for expected in of_rank:
                for name, gradient in expected.items():
                    torch.testing.assert_close(ours[name], gradient, rtol=1e-12, atol=1e-12, msg=name)
    seen = {name for of_rank in theirs for name in of_rank[0]}
    assert seen == {name for name, _ in batch_norm_net().named_parameters()}
