"""The baselines of a bench train as they should: the same weights as our own gpipe, so that none is crippled."""

import functools
import itertools
import os
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from adl_dist.baselines.diloco import OuterStep
from adl_dist.baselines.loop import Training, joined, replicated, train_alone
from adl_dist.baselines.pipelining import train_stage
from adl_dist.distributed.parent_process import RENDEZVOUS_FOLDER
from adl_dist.partition import Chain, checked_sizes
from tests.support.equations import assert_close
from tests.support.ranks import run_ranks
from tests.support.runs import BALANCE, sgd, toy_trainer
from tests.support.tiers import slow
from tests.support.toys import NUM_CLASSES, FixedImages, batch_norm_net
from tests.support.values import QUIET

pytestmark = pytest.mark.ranks

M, MICRO_BATCH, NUM_UPDATES = 4, 5, 3
BATCH = M * MICRO_BATCH
CPU = torch.device("cpu")


def batches(size, *, begin=0, step=None, channels_last=True):
    """Batches of ``size``, the first of which begins at ``begin``, each ``step`` after the one before."""
    data, step = FixedImages(NUM_UPDATES * BATCH, dtype=torch.float64), step or size
    images = data.images.contiguous(memory_format=torch.channels_last) if channels_last else data.images
    labels = torch.tensor(data.labels)
    for at in range(begin, len(data), step):
        yield images[at : at + size], labels[at : at + size]


halved = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)


def training(module, *, micro_batches):
    optimizer = sgd(module.parameters())
    what = {"num_updates": NUM_UPDATES, "micro_batches": micro_batches, "loss_fn": nn.CrossEntropyLoss()}
    return Training(device=CPU, optimizer=optimizer, lr_schedule=halved(optimizer), **what)


def alone(module, *, micro_batches):
    mine = training(module, micro_batches=micro_batches)
    train_alone(module, batches(BATCH // micro_batches), mine)
    assert len(mine.ends()) == NUM_UPDATES
    return module.state_dict()


NUMBERS = itertools.count()  # of the groups that a rank joins, one after another


def joined_by(K):
    rank, rendezvous = int(os.environ["RANK"]), f"file://{os.environ[RENDEZVOUS_FOLDER]}/group{next(NUMBERS)}"
    return joined(rank, K, device=CPU, rendezvous=rendezvous, timeout_seconds=30)


def staged(K, schedule, channels_last):
    rank = int(os.environ["RANK"])
    model = batch_norm_net().double()
    images = FixedImages(6, dtype=torch.float64).images
    chain = Chain(model, [images[:2], images[2:]])
    sizes = checked_sizes(chain, K, BALANCE[K])
    (stage,) = chain.stages(model, chain.plan(sizes), sizes, [rank])
    mine = batches(BATCH, channels_last=channels_last) if rank == 0 else None
    options = {"target": torch.empty(BATCH, dtype=torch.long), "schedule": schedule, "channels_last": channels_last}
    new_group, members = dist.new_group, []
    dist.new_group = lambda *ranks, **options: members.append(ranks) or new_group(*ranks, **options)
    with joined_by(K):
        train_stage(stage, mine, training(stage, micro_batches=M), **options)
    # Next to NCCL, to make a group of some ranks may wait for ever in those that are no members.
    assert all(ranks == () for ranks in members), members
    return stage.state_dict()


def plain_net():
    """Without BatchNorm, whose statistics are those of a replica's share of the batch."""
    torch.manual_seed(0)
    conv = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.Tanh())
    return nn.Sequential(conv, nn.Flatten(), nn.Linear(4 * 6 * 6, NUM_CLASSES)).double()


def one_replica(K):
    model, share = plain_net(), BATCH // K
    with joined_by(K):
        mine = batches(share, begin=int(os.environ["RANK"]) * share, step=BATCH)
        train_alone(replicated(model, CPU), mine, training(model, micro_batches=1))
    return model.state_dict()


def one_of_diloco(K, inner_updates, lr, momentum, num_updates):
    """A replica on its own shard: its weights at the end, the common ones, and its BatchNorm statistics."""
    model = batch_norm_net().double()
    share = BATCH // K
    with joined_by(K):
        outer = OuterStep(model, inner_updates=inner_updates, lr=lr, momentum=momentum)
        mine = batches(share, begin=int(os.environ["RANK"]) * share, step=BATCH)
        train_alone(model, mine, replace(training(model, micro_batches=1), num_updates=num_updates, after_step=outer))
        own = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        with outer.common_weights():
            common = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        assert_close(model.state_dict(), own)
    return own, common, outer.last


JOBS = {
    "ddp": (one_replica,),
    "average": (one_of_diloco, 1, 1.0, 0.0, 1),  # updates between two exchanges, outer rate and momentum, updates
    "nesterov": (one_of_diloco, 1, 0.7, 0.9, 1),
    "apart": (one_of_diloco, 2, 0.7, 0.9, 3),
}


def all_jobs():
    return {name: function(2, *arguments) for name, (function, *arguments) in JOBS.items()}


@pytest.fixture(scope="module")
def by_two():
    """What each of two ranks returns, by job."""
    ranks = run_ranks(2, all_jobs, timeout_seconds=120.0)
    return {name: [rank[name] for rank in ranks] for name in JOBS}


@pytest.fixture(scope="module")
def expected():
    """What our own gpipe makes of the same batches, weights and BatchNorm statistics."""
    trainer = toy_trainer(2, M, "gpipe", lr_schedule=halved, dtype=torch.float64)
    data = FixedImages(NUM_UPDATES * BATCH, dtype=torch.float64)
    trainer.fit(data, epochs=1, batch_size=BATCH, shuffle=False, monitoring=QUIET)
    return trainer.full_state_dict()


def test_the_plain_loop_ends_in_the_weights_of_our_gpipe(expected):
    assert_close(alone(batch_norm_net().double(), micro_batches=M), expected)


@pytest.mark.parametrize(
    ("K", "schedule", "channels_last"),
    [(2, "gpipe", True), (3, "1f1b", True), slow(2, "1f1b", False), (3, "zb", True)],
)
def test_torchs_pipelining_ends_in_the_weights_of_our_gpipe(K, schedule, channels_last, expected):
    stages = run_ranks(K, staged, K, schedule, channels_last)
    assert_close({name: tensor for stage in stages for name, tensor in stage.items()}, expected)


def test_replicas_end_in_the_weights_of_the_plain_loop(by_two):
    expected = alone(plain_net(), micro_batches=1)
    for replica in by_two["ddp"]:
        assert_close(replica, expected)


def test_diloco_without_momentum_and_with_h_of_1_is_averaging(by_two):
    """H = 1, outer rate 1, no momentum: the weights are the mean of what each replica makes of its own share."""

    def one_step(rank):
        model = batch_norm_net().double()
        steps = replace(training(model, micro_batches=1), num_updates=1)
        train_alone(model, batches(BATCH // 2, begin=rank * BATCH // 2, step=BATCH), steps)
        return model.state_dict()

    of_each = [one_step(rank) for rank in range(2)]
    mean = {name: (a + of_each[1][name]) / 2 if a.is_floating_point() else a for name, a in of_each[0].items()}
    for own, common, last in by_two["average"]:
        assert last == 1
        assert_close(own, mean)
        assert_close(common, mean)


def test_dilocos_outer_step_is_nesterovs_on_the_displacement(by_two):
    """One cycle of one update: v <- mu v + d; w <- w - lr (d + mu v), where d is how far the mean has come."""
    begin = batch_norm_net().double().state_dict()
    (own, _, _), (other, _, _) = by_two["nesterov"]
    for name, _ in batch_norm_net().named_parameters():
        d = begin[name] - by_two["average"][0][0][name]
        assert torch.allclose(own[name], begin[name] - 0.7 * (1 + 0.9) * d, atol=1e-12, rtol=0)
        assert torch.equal(own[name], other[name])


def test_between_two_exchanges_dilocos_replicas_differ(by_two):
    (own, common, last), (other, theirs, _) = by_two["apart"]
    assert last == 2
    assert_close(common, theirs)
    weight = next(name for name, _ in batch_norm_net().named_parameters())
    assert not torch.equal(own[weight], other[weight])
    assert not torch.equal(own[weight], common[weight])
