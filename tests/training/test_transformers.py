"""Transformers on tokens: the values of a cut run are those of the equations, of processes, and after a stop."""

import functools
import itertools
import math
from collections import OrderedDict

import numpy as np
import pytest
import torch
from torch import nn

from adl_dist.checkpoint.policy import CheckpointPolicy
from adl_dist.data.tokens import Windows, header_of
from adl_dist.losses import TokenCrossEntropy
from adl_dist.models import gpt, llama, vit
from adl_dist.partition import Chain
from tests.support.commands import assert_same
from tests.support.equations import assert_close, differ
from tests.support.oracle import train_by_the_equations
from tests.support.ranks import run_ranks
from tests.support.runs import toy_trainer
from tests.support.tiers import slow
from tests.support.values import QUIET

VOCAB, CONTEXT = 11, 6
MICRO_BATCH, NUM_SAMPLES, EPOCHS = 2, 19, 2  # ten micro-batches: no multiple of 3 or 4; the last one holds 1
LR, MOMENTUM = 0.2, 0.9
BALANCES = {1: [6], 2: [3, 3], 3: [2, 1, 3], 4: [1, 2, 2, 1]}  # of embedding, four layers and head
sgd = functools.partial(torch.optim.SGD, lr=LR, momentum=MOMENTUM)


def build_gpt(dropout=0.0):
    torch.manual_seed(0)
    return larger(gpt(VOCAB, CONTEXT, layers=4, heads=2, width=8, dropout=dropout))


def build_llama():
    torch.manual_seed(0)
    return larger(llama(VOCAB, CONTEXT, layers=4, heads=4, width=16, kv_heads=2, hidden=12))


def larger(model):
    """With weights of 0.02 a network of this size passes nothing on."""
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(10.0 if p.ndim > 1 else 1.0)
    return model


class Tokens(Windows):
    """Windows of a file, of which some targets are ignored, and with ``whole`` all those of the second micro-batch."""

    whole = False

    def __getitem__(self, index):
        input_, target = super().__getitem__(index)
        ignored = torch.arange(CONTEXT) % 3 == index % 4
        return input_, torch.where(ignored | (self.whole and index // MICRO_BATCH == 1), -100, target)


class TokensAndPadding(Tokens):
    whole = True


def write(path, num=NUM_SAMPLES, seed=0):
    ids = np.random.default_rng(seed).integers(VOCAB, size=num * (CONTEXT + 1)).astype(np.uint16)
    path.write_bytes(header_of("uint16", len(ids)) + ids.tobytes())
    return path


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return write(tmp_path_factory.mktemp("tokens") / "train.bin")


def data_of(file, M):
    return (TokensAndPadding if M > 1 else Tokens)(file, CONTEXT)


def trained(build, file, K, M, *, dtype=torch.float64, run_dir=None, method="adl", **of_fit):
    data = data_of(file, M)
    of_trainer = {"optimizer": sgd, "dtype": dtype, "balance": BALANCES[K]}
    trainer = toy_trainer(K, M, method, model=build(), loss_fn=TokenCrossEntropy(), **of_trainer)
    of_fit = {"epochs": EPOCHS, "shuffle": False, "monitoring": QUIET, **of_fit}
    summary = trainer.fit(data, batch_size=MICRO_BATCH * M, val_dataset=data, run_dir=run_dir, **of_fit)
    return trainer.full_state_dict(), summary


@functools.cache
def by_the_equations(build, file, K, M):
    model, data = build().double(), data_of(file, M)
    samples = [data[index] for index in range(len(data))]
    batches = [
        tuple(torch.stack(tensors) for tensors in zip(*samples[start : start + MICRO_BATCH], strict=True))
        for start in range(0, NUM_SAMPLES, MICRO_BATCH)
    ]
    bounds = itertools.pairwise(itertools.accumulate(BALANCES[K], initial=0))
    units = list(model.named_children())
    modules = [nn.Sequential(OrderedDict(units[start:stop])) for start, stop in bounds]
    loss_fn, num_updates = TokenCrossEntropy(), EPOCHS * math.ceil(len(batches) / M)
    return train_by_the_equations(
        modules, [batches] * EPOCHS, M=M, loss_fn=loss_fn, lr=[LR] * num_updates, momentum=MOMENTUM,
        num_terms=lambda target: (target != -100).sum().item(),
    )  # fmt: skip


@pytest.mark.parametrize(("build", "K", "M"), [(build_gpt, 2, 1), (build_llama, 4, 4)])
def test_transformers_follow_the_equations_to_1e_12(build, file, K, M):
    """With targets that are ignored, and groups that have no equal number of those that count."""
    state, _ = trained(build, file, K, M)
    expected = by_the_equations(build, file, K, M)
    assert_close(state, {name: expected[name] for name in build().state_dict()})  # without tables
    assert differ(state, build().double().state_dict()) > 1e-2


FLOAT32 = [(3, "adl"), (1, "dsp")]


def train_all(K, file):
    build = functools.partial(build_gpt, dropout=0.3)
    return [trained(build, file, K, M, dtype=torch.float32, method=method, shuffle=True) for M, method in FLOAT32]


@pytest.mark.ranks
@pytest.mark.parametrize("K", [2, slow(4)])
def test_k_processes_train_a_gpt_as_one_process_does(file, K):
    """Bit for bit, with dropout."""
    by_rank, in_one_process = run_ranks(K, train_all, K, file, timeout_seconds=110), train_all(K, file)
    for of_rank in by_rank:
        for (state, summary), (expected, in_one) in zip(of_rank, in_one_process, strict=True):
            assert_same(state, expected)
            for figure in ("validation_loss", "validation_accuracy", "validation_perplexity"):
                assert summary[figure] == in_one[figure]


def test_a_resumed_run_continues_with_the_tokens_that_come_next(file, tmp_path):
    """Bit for bit, in the midst of an epoch of shuffled windows, with dropout; the cut is in the same place."""
    build = functools.partial(build_gpt, dropout=0.3)
    policy = CheckpointPolicy(every_updates=2, background=False)
    of_fit = {"dtype": torch.float32, "shuffle": True, "checkpoints": policy}
    expected, _ = trained(build, file, 2, 3, run_dir=tmp_path / "whole", **of_fit)
    trained(build, file, 2, 3, run_dir=tmp_path / "run", max_updates=4, **of_fit)
    state, summary = trained(build, file, 2, 3, run_dir=tmp_path / "run", **of_fit)
    assert summary["updates"] == 8
    assert_same(state, expected)


@pytest.mark.parametrize("name", ["gpt", "llama", "vit"])
def test_a_transformer_can_be_cut_between_any_two_units(name):
    """Tables that all layers of a Llama read do not keep them on one stage."""
    if name == "vit":
        model, inputs = vit(image_size=8, layers=3, heads=2, width=8), torch.randn(4, 3, 8, 8)
    else:
        model, inputs = {"gpt": build_gpt, "llama": build_llama}[name](), torch.randint(VOCAB, (4, CONTEXT))
    chain = Chain(model, [inputs[:2], inputs])
    assert len(chain.block_names) >= 5
    assert len(chain.units) >= 20
    for first in range(1, len(chain.units)):
        chain.plan([first, len(chain.units) - first])
