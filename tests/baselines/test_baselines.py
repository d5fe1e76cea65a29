"""The baselines of a bench train as they should: the same weights as our own gpipe, so that none is crippled."""

import functools
import os

import pytest
import torch
from torch import nn

from adl_dist.baselines.loop import Training, joined, replicated, train_alone
from adl_dist.baselines.pipelining import stages_of, train_stages
from adl_dist.distributed.parent_process import RENDEZVOUS_FOLDER
from adl_dist.partition import cut
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


def joined_by(K, name):
    rank, rendezvous = int(os.environ["RANK"]), f"file://{os.environ[RENDEZVOUS_FOLDER]}/{name}"
    return joined(rank, K, device=CPU, rendezvous=rendezvous, timeout_seconds=30)


def staged(num_ranks, num_stages, schedule, channels_last):
    own = stages_of(schedule, int(os.environ["RANK"]), num_ranks, num_stages)
    pieces = cut(batch_norm_net().double(), num_stages=num_stages, balance=BALANCE[num_stages])
    mine = batches(BATCH, channels_last=channels_last) if 0 in own else None
    options = {"overwrites": {k: [False] for k in own}, "target": torch.empty(BATCH, dtype=torch.long)}
    options |= {"schedule": schedule, "num_stages": num_stages, "channels_last": channels_last}
    modules = {k: pieces[k] for k in own}
    with joined_by(num_ranks, "pipe"):
        train_stages(modules, mine, training(nn.ModuleList(modules.values()), micro_batches=M), **options)
    return {name: tensor for module in modules.values() for name, tensor in module.state_dict().items()}


def plain_net():
    """Without BatchNorm, whose statistics are those of a replica's share of the batch."""
    torch.manual_seed(0)
    conv = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.Tanh())
    return nn.Sequential(conv, nn.Flatten(), nn.Linear(4 * 6 * 6, NUM_CLASSES)).double()


def one_replica(K):
    model, share = plain_net(), BATCH // K
    with joined_by(K, "ddp"):
        mine = batches(share, begin=int(os.environ["RANK"]) * share, step=BATCH)
        train_alone(replicated(model, CPU), mine, training(model, micro_batches=1))
    return model.state_dict()


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
    ("num_ranks", "num_stages", "schedule", "channels_last"),
    [
        (2, 2, "gpipe", True), (3, 3, "1f1b", True), slow(2, 2, "1f1b", False),
        (2, 4, "interleaved", True), (2, 4, "interleaved-zb", True), (2, 4, "zbv", True),
    ],
)  # fmt: skip
def test_torchs_pipelining_ends_in_the_weights_of_our_gpipe(num_ranks, num_stages, schedule, channels_last, expected):
    stages = run_ranks(num_ranks, staged, num_ranks, num_stages, schedule, channels_last)
    assert_close({name: tensor for stage in stages for name, tensor in stage.items()}, expected)


def test_replicas_end_in_the_weights_of_the_plain_loop():
    whole = alone(plain_net(), micro_batches=1)
    for replica in run_ranks(2, one_replica, 2):
        assert_close(replica, whole)
