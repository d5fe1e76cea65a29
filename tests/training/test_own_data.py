"""A user's collate_fn, sampler and iterable dataset: what they decide, and the same again after a resume."""

import contextlib
import functools

import pytest
import torch
from torch import nn
from torch.utils.data import RandomSampler, SubsetRandomSampler, TensorDataset, WeightedRandomSampler

import adl_dist
from adl_dist import Loading
from adl_dist.data import Loader
from adl_dist.data.stream import Stream
from adl_dist.errors import AdlError, ConfigError, DataError
from tests.support.runs import toy_trainer
from tests.support.sentences import Resumable, Streamed, encoder, padded, sentence
from tests.support.values import QUIET

sgd = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def trained(dataset, *, K=2, M=2, loading=None, **of_fit):
    more = {"dtype": torch.float64, "optimizer": sgd, "balance": "even", "verify": False}
    trainer = toy_trainer(K, M, model=encoder(dropout=0.1), loss_fn=nn.CrossEntropyLoss(), **more)
    of_fit = {"epochs": 2, "monitoring": QUIET, **of_fit}
    trainer.fit(dataset, batch_size=4, loading=loading or Loading(collate_fn=padded), **of_fit)
    return trainer.full_state_dict()


def are_equal(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("make", [Streamed, Resumable])
def test_an_iterable_is_resumed_in_mid_epoch_to_the_bit(make, tmp_path):
    whole = trained(make(), run_dir=tmp_path / "whole", checkpoints=adl_dist.CheckpointPolicy(every_updates=2))
    parts = {"run_dir": tmp_path / "parts", "checkpoints": adl_dist.CheckpointPolicy(every_updates=2)}
    for updates in (2, 7):
        trained(make(), max_updates=updates, **parts)
    Resumable.made = 0
    assert are_equal(trained(make(), **parts), whole)
    assert Resumable.made < 20 + 12 + 4, "what was read before is not read again"


class GoesOn(Streamed):
    """Goes on where it is, and begins again only after its last sample."""

    def __init__(self):
        super().__init__()
        self.read = []

    def __iter__(self):
        while self.start < self.num:
            self.start += 1
            self.read.append(self.start)
            yield sentence(self.start)
        self.start = 0

    def state_dict(self):
        return {"start": self.start}

    def load_state_dict(self, state):
        self.start = state["start"]


@pytest.mark.parametrize("K", [1, 2])
def test_the_trial_takes_no_sample_of_an_iterable_away(K):
    dataset = GoesOn()
    trained(dataset, K=K)
    assert dataset.read[-40:] == [*range(1, 21)] * 2


def test_a_trial_that_fails_puts_the_dataset_back():
    dataset = GoesOn()
    stream = Stream(dataset, 0)
    with contextlib.suppress(KeyError), stream.put_back():
        stream.begin(0, 0)
        stream.next()
        raise KeyError
    assert dataset.start == 0
    stream.begin(0, 1)
    stream.next()
    assert dataset.read == [1, 1, 2]


def test_the_samples_of_an_iterable_do_not_depend_on_m_or_k():
    batches = [[*loader_of(Streamed()).batches(1, sizes)] for sizes in ([4, 4], [8], [1] * 8)]
    padding = [[(x[0], 9 - x[0].shape[1]) for x, _ in of] for of in batches]
    ids = [torch.cat([nn.functional.pad(x, (0, missing)) for x, missing in of]) for of in padding]
    assert all(torch.equal(ids[0], of) for of in ids)


def loader_of(dataset, **loading):
    return Loader(dataset, seed=0, shuffle=True, loading=Loading(**{"collate_fn": padded, **loading}))


NUMBERS = TensorDataset(torch.arange(10.0), torch.arange(10))


@pytest.mark.parametrize(
    "sampler",
    [
        WeightedRandomSampler([0.0, *[1.0] * 9], 6),
        RandomSampler(range(10), replacement=True, num_samples=6),
        RandomSampler(range(10), num_samples=6, generator=torch.Generator()),
        SubsetRandomSampler([1, 3, 5, 7, 9, 2]),
    ],
)
def test_a_sampler_decides_what_is_visited_alike_each_time(sampler):
    def visited(epoch, sizes, first_sample=0):
        loader = loader_of(NUMBERS, sampler=sampler, collate_fn=None)
        return torch.cat([y for _, y in loader.batches(epoch, sizes, first_sample=first_sample)]).tolist()

    torch.manual_seed(5)
    whole = visited(1, [2, 2, 2])
    other = visited(0, [6])
    assert 0 not in whole if not isinstance(sampler, RandomSampler) else len(whole) == 6
    assert (visited(1, [6]), visited(1, [2], first_sample=4)) == (whole, whole[4:])
    assert whole != other  # an epoch of its own
    assert torch.rand(()) == torch.rand(
        (), generator=torch.Generator().manual_seed(5)
    )  # the caller's stream is as before


class Faulty(Streamed):
    """Fails in the method that ``where`` names."""

    def __init__(self, where):
        super().__init__()
        self.where = where

    def _fail(self, where):
        if self.where == where:
            raise FileNotFoundError("no shard")

    def set_epoch(self, epoch):
        self._fail("set_epoch")

    def __iter__(self):
        self._fail("iter")
        return super().__iter__()

    def state_dict(self):
        self._fail("state_dict")
        return {}

    def load_state_dict(self, state):
        pass


@pytest.mark.parametrize("where", ["set_epoch", "iter", "state_dict"])
def test_what_an_iterable_raises_anywhere_is_one_line(where, tmp_path):
    with pytest.raises(AdlError, match=r"training dataset: Faulty.* raised FileNotFoundError: no shard at") as refused:
        trained(Faulty(where), run_dir=tmp_path)
    assert "\n" not in str(refused.value)


def drawn(samples):
    return torch.rand(len(samples)), torch.tensor([target for _, target in samples])


def test_what_a_collate_fn_draws_depends_on_its_first_sample():
    loader = Loader(NUMBERS, seed=0, shuffle=False, loading=Loading(collate_fn=drawn))
    whole, rest = [x for x, _ in loader.batches(0, [5, 5])], [x for x, _ in loader.batches(0, [5], first_sample=5)]
    assert not torch.equal(*whole)
    assert torch.equal(whole[1], rest[0])


def first_of(dataset, num_workers=0, **loading):
    loader = Loader(dataset, seed=0, shuffle=False, num_workers=num_workers, loading=Loading(**loading))
    return next(loader.batches(0, [loader.num_samples]))


Short = type("Short", (list,), {"__len__": lambda self: 8})
HALF = {"sampler": torch.utils.data.DistributedSampler(NUMBERS, 2, 0)}
ONE, LAMBDA = {(1.0, 0)}, {"collate_fn": lambda samples: 0, "num_workers": 1}
REFUSED = [
    (torch.utils.data.DataLoader(NUMBERS), {}, "DataLoader is not a torch Dataset .* of a DataLoader give the dataset"),
    ((torch.zeros(8, 2), torch.zeros(8)), {}, "tuple is not a torch Dataset .* torch.utils.data.TensorDataset"),
    (NUMBERS, HALF, "DistributedSampler visits one of 2 parts of the data, .*omit it"),
    (ONE, {"num_workers": 2}, "set is iterable, and 2 processes that load would each read all of it"),
    (ONE, {"sampler": [0]}, "set is iterable and has an order of its own"),
    (ONE, {"samples_per_epoch": 2}, "set ended after 1 samples of epoch 1, fewer than its"),
    (iter(ONE), {}, "does not say how many samples an epoch has"),
    (iter(ONE), {"samples_per_epoch": 1}, "set_iterator is an iterator, which can be read once only"),
    (NUMBERS, {"sampler": [[0, 1]] * 9}, "list yields list, expected indices"),
    (NUMBERS, {"sampler": Short([1, 2])}, "Short yields 2 indices in epoch 1, expected 8"),
    (NUMBERS, {"sampler": iter([1])}, "expected a torch Sampler, with __iter__ and __len__"),
    (NUMBERS, {"persistent_workers": 1}, "workers must be true or false"),
    (NUMBERS, {"samples_per_epoch": 0}, "must be a whole number of at least 1, got 0"),
    (NUMBERS, {"samples_per_epoch": 11}, "10 samples, fewer than samples_per_epoch=11"),
    (NUMBERS, LAMBDA, "collate_fn cannot be sent to the processes"),
    (NUMBERS, {"collate_fn": lambda _: (torch.ones(3), 0)}, "3.; its first dimension must be the samples"),
    ([({"a b": 1.0}, 0)], {}, r"an input whose keys are names of arguments, got \['a b'\]"),
]


@pytest.mark.parametrize(("dataset", "given", "message"), REFUSED)
def test_what_cannot_be_loaded_is_refused(dataset, given, message):
    with pytest.raises((ConfigError, DataError), match=message):
        first_of(dataset, **given)
