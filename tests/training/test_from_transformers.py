"""Networks of transformers through the trainer: the equations, plain training, and processes, for any cut."""

import functools

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from adl_dist.batch import rows_of
from adl_dist.losses import TokenCrossEntropy
from adl_dist.training.lazy_weights import prepare_weights
from tests.support.commands import assert_same
from tests.support.equations import assert_close, differ
from tests.support.runs import toy_trainer
from tests.support.values import QUIET

pytest.importorskip("transformers")
from adl_dist.models.from_transformers import build, hf_model
from tests.support.hf_models import CLASSES, FAMILIES, hf_input, hf_net

LR, MOMENTUM, EPOCHS, MICRO_BATCH, NUM, M = 0.1, 0.9, 2, 2, 15, 2
sgd = functools.partial(torch.optim.SGD, lr=LR, momentum=MOMENTUM)
LOSSES = {"gpt2": TokenCrossEntropy(), "bert": nn.CrossEntropyLoss()}
SIZES = {  # of blocks; a weight of GPT-2 is on the first and the last stage
    "bert": {1: [7], 2: [2, 5], 4: [1, 1, 2, 3]},
    "gpt2": {1: [8], 2: [4, 4], 4: [3, 1, 2, 2]},
}


class Texts(Dataset):
    """Tokens with the next ones as targets, of which some are ignored; or with mask, token types and a class."""

    def __init__(self, family):
        self.given = hf_input(family, NUM, masked=family == "bert")

    def __len__(self):
        return NUM

    def __getitem__(self, index):
        one = rows_of(self.given, index)
        if isinstance(one, dict):
            return one, torch.tensor(index % CLASSES)
        target = one.roll(-1)
        target[torch.arange(len(target)) % 3 == index % 4] = -100
        return one, target


def larger(model):
    """With weights of 0.02 a network of this size passes nothing on."""
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(10.0 if p.ndim > 1 else 1.0)
    return model


def batches(family, size):
    data = Texts(family)
    samples = [data[index] for index in range(NUM)]
    return [torch.utils.data.default_collate(samples[start : start + size]) for start in range(0, NUM, size)]


def trained(family, K, method, *, dtype=torch.float64):
    of_trainer = {"optimizer": sgd, "dtype": dtype, "balance": SIZES[family][K]}
    trainer = toy_trainer(K, M, method, model=larger(hf_net(family)), loss_fn=LOSSES[family], **of_trainer)
    data = Texts(family)
    how = {"epochs": EPOCHS, "batch_size": MICRO_BATCH * M, "shuffle": False, "monitoring": QUIET}
    summary = trainer.fit(data, val_dataset=data, **how)
    return trainer.full_state_dict(), summary


def plain(family):
    """Whole batches in a loop of torch's own."""
    model = larger(hf_net(family)).double()
    optimizer = sgd(model.parameters())
    for given, target in batches(family, MICRO_BATCH * M) * EPOCHS:
        optimizer.zero_grad()
        LOSSES[family](model(**given) if isinstance(given, dict) else model(given), target).backward()
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize(("family", "K"), [("gpt2", 1), ("gpt2", 4), ("bert", 2)])
def test_without_delays_a_cut_network_trains_as_plain_torch(family, K):
    state, _ = trained(family, K, "gpipe" if K > 1 else "bp")
    assert_close(state, plain(family))
    assert differ(state, larger(hf_net(family)).double().state_dict()) > 1e-2


LAZY = {"llama": False, "gemma": True, "gpt2": True, "vit": False, "distilbert": False}  # and whether they are tied


def saved(family, folder, *, tied):
    """A folder as save_pretrained makes it, in several files."""
    config, task, *_ = FAMILIES[family]
    settings = config()
    settings.tie_word_embeddings = tied
    torch.manual_seed(0)
    build(settings, task).save_pretrained(folder, max_shard_size="2KB")
    return folder


@pytest.mark.parametrize("family", LAZY)
def test_weights_read_lazily_are_those_of_from_pretrained(family, tmp_path):
    """Tables that are in no file, too; those of ViT have other names there."""
    folder, task = saved(family, tmp_path / family, tied=LAZY[family]), FAMILIES[family][1]
    whole = hf_model(str(folder), task)
    with torch.device("meta"):
        lazy = hf_model(str(folder), task)
    prepare_weights(lazy, None, 0).make(lazy)
    assert_same(lazy.state_dict(), whole.state_dict())
    assert_same(dict(lazy.named_buffers()), dict(whole.named_buffers()))
