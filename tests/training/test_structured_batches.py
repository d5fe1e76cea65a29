"""Several inputs, by place and by name, and lengths that change: the equations, for any cut and any M."""

import functools
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from adl_dist import Loading
from adl_dist.batch import rows_of
from adl_dist.errors import ConfigError, DataError
from adl_dist.losses import TokenCrossEntropy
from adl_dist.partition import Chain, even_sizes
from tests.support.coded import crossing
from tests.support.equations import EQUATIONS, assert_close
from tests.support.oracle import train_by_the_equations
from tests.support.runs import toy_trainer
from tests.support.sentences import IGNORED, Masked, Sentences, by_names, encoder, padded, sentence
from tests.support.values import QUIET, SILENT

LR, MOMENTUM, DECAY, EPOCHS, MICRO_BATCH, NUM = 0.2, 0.9, 1e-2, 2, 3, 20
LOSS = nn.CrossEntropyLoss()
sgd = functools.partial(torch.optim.SGD, lr=LR, momentum=MOMENTUM, weight_decay=DECAY)

# Each with the dataset, what collates it, and in which order its input names the model's arguments.
DATA = {
    "names": (functools.partial(Masked, named=True), None),
    "lengths": (Sentences, padded),
    "lengths by names": (Sentences, by_names),
}


def batches(dataset, collate_fn, size):
    """Each micro-batch as ((ids, mask), target)."""
    made = []
    for start in range(0, len(dataset), size):
        samples = [dataset[index] for index in range(start, min(start + size, len(dataset)))]
        if collate_fn is None:
            input_, target = torch.utils.data.default_collate(samples)
        else:
            input_, target = collate_fn(samples)
        ids, mask = (input_["ids"], input_["mask"]) if isinstance(input_, dict) else input_
        made.append(((ids, mask), target))
    return made


def fitted(name, K, M, method="adl", *, loss_fn=LOSS, codec="none", **options):
    make, collate_fn = DATA[name]
    more = {"dtype": torch.float64, "optimizer": sgd, "granularity": "block", "balance": "even", "codec": codec}
    trainer = toy_trainer(K, M, method, options, model=encoder(), loss_fn=loss_fn, **more)
    how = {"loading": Loading(collate_fn=collate_fn), "val_dataset": make(10, 100), "monitoring": QUIET}
    summary = trainer.fit(make(NUM), epochs=EPOCHS, batch_size=MICRO_BATCH * M, shuffle=False, **how)
    return trainer.full_state_dict(), summary


def modules(K):
    whole = [of for of, _ in batches(Masked(6), None, 2)[:1] + batches(Masked(6), None, 4)[:1]]
    one = [whole[0], whole[1], rows_of(whole[0], (slice(None), slice(5)))]
    model = encoder().double()
    chain = Chain(model, one, granularity="block")
    sizes = even_sizes(chain, K)
    return [_Called(stage) for stage in chain.stages(model, chain.plan(sizes), sizes, range(K))]


class _Called(nn.Module):
    """A stage as a module of the equations, which has one argument."""

    def __init__(self, stage):
        super().__init__()
        vars(self).update(_modules=stage._modules, _parameters=stage._parameters, _buffers=stage._buffers, _run=stage)

    def __deepcopy__(self, memo):  # it was made for one run of the equations
        return self

    def train(self, mode=True):
        self._run.train(mode)
        return super().train(mode)

    def forward(self, given):
        return self._run(*(given if isinstance(given, tuple) else given.tensors))


def loss_of_some(out, target):
    return LOSS(out, target) if (target != IGNORED).any() else (out * 0).sum()


def by_the_equations(name, K, M, method, **more):
    delays, weights = EQUATIONS[method]
    epochs = [batches(DATA[name][0](NUM), DATA[name][1], MICRO_BATCH)] * EPOCHS
    of_sgd = {"lr": [LR] * 99, "momentum": MOMENTUM, "weight_decay": DECAY}
    count = {"num_terms": lambda target: float((target != IGNORED).sum())}
    return train_by_the_equations(
        modules(K), epochs, M=M, loss_fn=loss_of_some, delays=delays(K), weights=weights, **of_sgd, **count, **more
    )


CASES = [
    ("lengths", 3, 2, "adl"),
    ("lengths", 2, 1, "dsp"),
    ("names", 3, 3, "adl"),
    ("lengths by names", 2, 3, "adl"),
]


@pytest.mark.parametrize(("name", "K", "M", "method"), CASES)
def test_several_inputs_and_lengths_follow_the_equations(name, K, M, method):
    state, _ = fitted(name, K, M, method)
    assert_close(state, by_the_equations(name, K, M, method))


def test_any_m_and_cut_train_as_plain_torch_does():
    """Whole batches of 12, padded as one; padding is masked, so the length that it adds changes nothing."""
    model = encoder().double()
    optimizer = sgd(model.parameters())
    for (ids, mask), target in batches(Sentences(NUM), padded, MICRO_BATCH * 4) * EPOCHS:
        optimizer.zero_grad()
        LOSS(model(ids, mask), target).backward()
        optimizer.step()
    for K, M in ((1, 4), (3, 4)):
        state, summary = fitted("lengths", K, M, "gpipe" if K > 1 else "bp")
        assert_close(state, model.state_dict())
    model.eval()
    with torch.no_grad():
        ((ids, mask), target) = batches(Sentences(10, 100), padded, 10)[0]
        out = model(ids, mask)
    assert summary["validation_loss"] == pytest.approx(LOSS(out, target).item(), rel=1e-12)
    counts = target != IGNORED
    assert summary["validation_accuracy"] == pytest.approx((out.argmax(1) == target)[counts].double().mean().item())


class Misnamed(Masked):
    def __getitem__(self, index):
        (ids, mask), target = super().__getitem__(index)
        return {"ids": ids, "masks": mask}, target


def test_the_names_of_a_misfit_input_are_shown():
    with pytest.raises(ConfigError, match=r"gets int64\[.*\] as ids, masks and fails on it .* argument 'masks'"):
        toy_trainer(2, 2, model=encoder()).fit(Misnamed(NUM), epochs=1, batch_size=4, monitoring=SILENT)


class Pairs(Masked):
    """Targets in a dictionary."""

    def __getitem__(self, index):
        input_, target = super().__getitem__(index)
        return input_, {"words": target, "weight": torch.tensor(1.0 + index % 3)}


def weighted(out, target):
    """The mean over words, each with the weight of its sentence."""
    losses = nn.functional.cross_entropy(out, target["words"], reduction="none")
    weights = target["weight"][:, None] * (target["words"] != IGNORED)
    return (losses * weights).sum() / weights.sum()


DATA["pairs"] = (Pairs, None)
weighted.num_terms = lambda target: (target["weight"][:, None] * (target["words"] != IGNORED)).sum()


def test_a_target_of_several_tensors_reaches_the_loss_whole(monkeypatch):
    state, of_three = fitted("pairs", 3, 3, "gpipe", loss_fn=weighted)
    monkeypatch.setitem(globals(), "MICRO_BATCH", 9)
    expected, of_one = fitted("pairs", 1, 1, "bp", loss_fn=weighted)
    assert_close(state, expected)
    assert of_three["validation_loss"] == pytest.approx(of_one["validation_loss"], rel=1e-12)


class Alternating(Sentences):
    """Every second sentence is short, so that two together have always one length."""

    def __getitem__(self, index):
        return sentence(self.first + index, length=4 if index % 2 else 7)


def test_micro_batches_of_one_sample_have_lengths_of_their_own():
    how = {"loading": Loading(collate_fn=padded), "monitoring": QUIET, "shuffle": False, "epochs": 1, "batch_size": 4}
    states = []
    for K, M in ((2, 4), (1, 1)):
        torch.manual_seed(0)
        trainer = toy_trainer(K, M, "bp", model=encoder(), loss_fn=LOSS, optimizer=sgd, dtype=torch.float64)
        trainer.fit(Alternating(8, 3), **how)
        states.append(trainer.full_state_dict())
    assert_close(*states)


class Renamed(Masked):
    """The later samples have another key in place of one."""

    def __getitem__(self, index):
        input_, target = super().__getitem__(index)
        return (input_ if index < 12 else {"words": input_["ids"], "mask": input_["mask"]}), target


def test_samples_with_other_keys_are_refused_in_mid_training():
    trainer = toy_trainer(1, 2, "bp", model=encoder(), loss_fn=LOSS, optimizer=sgd, dtype=torch.float64)
    with pytest.raises(DataError, match="let all samples have the same tuples, or dictionaries with the same keys"):
        trainer.fit(Renamed(NUM, named=True), epochs=1, batch_size=6, shuffle=False, monitoring=QUIET)


def by_hand(out, target):
    return nn.functional.cross_entropy(out, target, ignore_index=0)


def padded_by_0(samples):
    input_, target = padded(samples)
    return input_, target.clamp(min=0)


def test_a_loss_of_padded_words_that_counts_no_terms_is_refused():
    for dataset in (Sentences(NUM, 3), Alternating(NUM, 3)):
        trainer = toy_trainer(2, 2, model=encoder(), loss_fn=by_hand, optimizer=sgd, dtype=torch.float64)
        with pytest.raises(ConfigError, match=r"the loss is no mean over the samples: of 2 .*num_terms\(target\)"):
            trainer.fit(dataset, epochs=1, batch_size=6, loading=Loading(collate_fn=padded_by_0), monitoring=QUIET)


def sum_and_count(out, target):
    return nn.functional.cross_entropy(out, target, reduction="sum"), (target != IGNORED).sum()


def test_coded_lengths_with_a_sum_and_a_count_follow_equations():
    """Blocks are of one sample, so what one becomes does not depend on the length of others."""
    expected = by_the_equations("lengths", 3, 2, "adl", crossing=functools.partial(crossing, "int4", "int4"))
    state, summary = fitted("lengths", 3, 2, loss_fn=sum_and_count, codec="int4")
    assert_close(state, expected)
    mean = fitted("lengths", 3, 2, codec="int4")[1]["validation_loss"]
    assert summary["validation_loss"] == pytest.approx(mean, rel=1e-12)


@dataclass
class Scores:
    """An output that torch's pytrees do not know."""

    logits: Tensor
    features: Tensor


class Padded(nn.Module):
    """An encoder of torch, which in evaluation drops what is padded, if nothing keeps it from that."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.first, self.layers, self.last = nn.Embedding(9, 8), nn.TransformerEncoder(layer, 3), nn.Linear(8, 9)

    def forward(self, ids):
        return self.last(self.layers(self.first(ids), src_key_padding_mask=ids == 0))


class Named(Padded):
    """Returns its scores as models of transformers do."""

    def forward(self, ids):
        out = super().forward(ids)
        return Scores(out, out)


@pytest.mark.filterwarnings("ignore:.*nested tensors")
def test_an_encoder_with_padding_is_evaluated_as_one_stage_does():
    ids = torch.randint(1, 9, (12, 5), generator=torch.Generator().manual_seed(0))
    ids[::2, 3:] = 0
    losses = []
    for K, kind in ((1, Padded), (3, Named)):
        options = {"optimizer": sgd, "dtype": torch.float64, "loss_fn": TokenCrossEntropy()}
        trainer = toy_trainer(K, 2, "gpipe" if K > 1 else "bp", model=kind(), **options)
        data = TensorDataset(ids, ids)
        summary = trainer.fit(data, epochs=1, batch_size=4, shuffle=False, val_dataset=data, monitoring=SILENT)
        losses.append(summary["validation_loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-12)
