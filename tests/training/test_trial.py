"""What is found out of a model, the loss and the data before the first update, on real samples, and what is refused."""

import functools
import threading
from collections import OrderedDict
from dataclasses import dataclass

import pytest
import torch
from adl_dist.training.trial.cut_values import share_memory
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import register_pytree_node
from torch.utils.data import TensorDataset

import adl_dist
from adl_dist.errors import ConfigError, PartitionError
from adl_dist.schedule import Pipeline
from adl_dist.stage import Precision, TrainSpec, in_dtype
from adl_dist.training.arguments import check_layers
from adl_dist.training.options import PartitionSpec
from adl_dist.training.partitioned_model import Measuring, PartitionedModel
from adl_dist.training.trial import samples
from adl_dist.training.trial.trial import Trial
from tests.support.runs import sgd, toy_trainer
from tests.support.toys import FixedImages, batch_norm_net
from tests.support.values import SILENT

WIDTH, CLASSES = 6, 5


def data(num_samples=16, target=None):
    generator = torch.Generator().manual_seed(0)
    classes = torch.randint(CLASSES, (num_samples,), generator=generator)
    return TensorDataset(torch.randn(num_samples, WIDTH, generator=generator), classes if target is None else target)


def images(num_samples=16):
    return TensorDataset(torch.randn(num_samples, 3, 8, 8), torch.randint(CLASSES, (num_samples,)))


def fit(*units, K=2, train=None, batch_size=8, max_updates=1, **of_trainer):
    """Fit, mostly for an update only; return the trainer."""
    model = nn.Sequential(*units) if len(units) != 1 else units[0]
    trainer = toy_trainer(K, 2, model=model, **of_trainer)
    trainer.fit(train or data(), epochs=1, batch_size=batch_size, max_updates=max_updates, monitoring=SILENT)
    return trainer


def layer():
    return nn.Linear(WIDTH, WIDTH)


def last():
    return nn.Linear(WIDTH, CLASSES)


class By(nn.Module):
    """Computes by a function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def test_all_ranks_get_the_samples_of_rank_0_however_large(monkeypatch):
    monkeypatch.setattr(samples, "PART_BYTES", 100)
    store = torch.distributed.HashStore()
    inputs, targets = torch.randn(5, 3, 4, dtype=torch.float64), torch.arange(5)
    sent = samples.share(store, samples.Samples.of(inputs, targets, trains=True, sizes=[9, 1, 2, 1]), rank=0, size=2)
    got = samples.share(store, None, rank=1, size=2)
    for ours, theirs in zip(sent.pair, got.pair, strict=True):
        assert all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(ours, theirs, strict=True))
    assert torch.equal(torch.cat([batch.target for batch in got.pair]), torch.tensor([0, 1, 2, 3, 4, 0]))
    assert got[1:3] == (True, (1, 3))


# --- What crosses a cut ----------------------------------------------------------------------------------------

CROSS = {
    "nested": (lambda x: (x, (x + 1, [x * 2])), lambda t: t[0] + t[1][0] * t[1][1][0]),
    "a list of one": (lambda x: [x], lambda t: t[0]),
    "a dictionary": (lambda x: {"x": x, "scale": 3, "none": None}, lambda d: d["x"] * d["scale"]),
}


@pytest.mark.parametrize(("packs", "unpacks"), CROSS.values(), ids=CROSS)
def test_containers_that_cross_a_cut_arrive_as_they_were(packs, unpacks):
    def states(K):
        torch.manual_seed(0)
        trainer = fit(layer(), By(packs), By(unpacks), last(), K=K, method="bp")
        return trainer.full_state_dict()

    uncut, cut_up = states(1), states(2)
    assert all(torch.equal(cut_up[name], uncut[name]) for name in uncut)


NO_BATCH = {
    "another first dimension": lambda x: torch.stack([x, x]),
    "always three": lambda x: (x, torch.ones(3, WIDTH)),
    "a number that changes": lambda x: (x, len(x)),
    "an object": lambda x: (x, object()),
    "sometimes None": lambda x: (x, x if len(x) == 2 else None),
}


@pytest.mark.parametrize("packs", NO_BATCH.values(), ids=NO_BATCH)
def test_a_cut_where_no_batch_crosses_is_not_chosen_and_not_made(packs):
    units = [layer(), By(packs), By(lambda t: t[0]), last()]
    if packs is NO_BATCH["another first dimension"]:
        units[2] = By(lambda t: t.sum(0))
    assert fit(*units)._partitioned.sizes == [1, 3]
    with pytest.raises(PartitionError, match=r"cannot be cut after 1: .* would cross it.*; choose another"):
        fit(*units, balance=[2, 2])
    with pytest.raises(PartitionError, match=r"has 2 place\(s\) where it can be cut; .* would cross it"):
        fit(*units, K=4)


def test_an_input_that_cannot_be_zero_is_taken_from_the_data():
    class Inverts(nn.Module):
        def forward(self, x):
            return x @ torch.linalg.inv(x.T @ x + 1e-3 * x.abs().max() * torch.eye(WIDTH))

    fit(Inverts(), layer(), last())


# --- What is trained -------------------------------------------------------------------------------------------


def frozen():
    return layer().requires_grad_(False)


@pytest.mark.parametrize("K", [1, 2])
def test_nothing_to_train_is_refused_but_can_be_evaluated(K):
    for units in ([frozen(), frozen()], [layer(), By(torch.detach)]):
        with pytest.raises(ConfigError, match="there is nothing to train: the loss depends on no parameter"):
            fit(*units, K=K)
        assert "validation_loss" in toy_trainer(K, 1, model=nn.Sequential(*units)).evaluate(data(), batch_size=4)


def test_targets_of_8_bits_without_a_sign_are_no_minus_100():
    """Which 156 would be equal to."""

    def loss(output, target):
        return (output - target / 255).square().mean()

    pixels = torch.full((16, WIDTH), 156, dtype=torch.uint8)
    fit(layer(), layer(), train=data(target=pixels), loss_fn=loss)


def test_another_kind_of_targets_in_a_later_call_is_refused():
    class Two(nn.Module):
        def forward(self, output, target):
            return F.cross_entropy(output, target[0] if isinstance(target, tuple) else target)

    trainer = toy_trainer(2, 1, model=nn.Sequential(layer(), last()), loss_fn=Two())
    trainer.evaluate(data(), batch_size=4)
    pairs = [(x, (y, y)) for x, y in data()]
    with pytest.raises(ConfigError, match="targets of this call are one tensor, and were several in the first"):
        trainer.evaluate(pairs, batch_size=4)


def test_classes_that_are_bools_are_refused():
    with pytest.raises(ConfigError, match=r"the loss gets float32\[B, 5\] and bool\[B\] and fails on it: .* got Bool"):
        fit(layer(), last(), train=data(target=torch.arange(16) > 7))


@dataclass
class Logits:
    """An output that torch cannot look into."""

    logits: torch.Tensor


class Named(OrderedDict):
    """A dictionary whose entries are attributes, too, as transformers' outputs are."""

    def __getattr__(self, name):
        return self[name]


@dataclass
class Scores(Named):
    logits: torch.Tensor | None = None
    hidden: torch.Tensor | None = None

    def __post_init__(self):
        self.update({key: value for key, value in vars(self).items() if value is not None})


register_pytree_node(
    Scores, lambda one: ([*one.values()], [*one]), lambda v, keys: Scores(**dict(zip(keys, v, strict=True)))
)


class Returns(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.first, self.last, self.kind = layer(), last(), kind

    def forward(self, x):
        return self.kind(self.last(self.first(x)))


@pytest.mark.parametrize("K", [1, 2])
def test_an_output_that_cannot_be_looked_into_is_refused(K):
    with pytest.raises(ConfigError, match="the model returns a Logits without a tensor that can be seen; expected"):
        fit(Returns(Logits), K=K, loss_fn=lambda out, target: F.cross_entropy(out.logits, target))


@pytest.mark.parametrize("K", [1, 2])
def test_an_output_with_named_entries_keeps_its_class(K):
    fit(Returns(Scores), K=K, loss_fn=lambda out, target: F.cross_entropy(out.logits, target))


def test_a_unit_that_is_compiled_in_place_is_one_unit():
    block = nn.Sequential(layer(), layer())
    block.compile(backend="eager")
    trainer = fit(layer(), block, last(), partition=PartitionSpec(granularity="layer", balance=[2, 1]))
    assert len(trainer.full_state_dict()) == 8


def test_layers_that_average_over_processes_are_refused():
    model = nn.Sequential(layer(), nn.SyncBatchNorm(WIDTH))
    with pytest.raises(ConfigError, match=r"'1' of the model is a SyncBatchNorm: .*; use BatchNorm"):
        check_layers(model, distributed=True)
    check_layers(model, distributed=False)


def test_no_tensor_on_meta_shares_memory_with_all_others():
    first, second = torch.empty(2, 4, device="meta"), torch.empty(2, 4, device="meta")
    assert share_memory([first, second], [], []) == [False, False]
    assert share_memory([first, first.view(4, 2)], [], []) == [True, True]
    assert share_memory([first[:1]], [first], [True]) == [True]


def test_after_an_evaluation_nothing_to_train_is_still_refused():
    trainer = toy_trainer(2, 1, model=nn.Sequential(frozen(), frozen()))
    trainer.evaluate(data(), batch_size=4)
    with pytest.raises(ConfigError, match="there is nothing to train"):
        trainer.fit(data(), epochs=1, batch_size=4, monitoring=SILENT)


@pytest.mark.parametrize("K", [1, 2])
def test_a_last_micro_batch_that_is_too_small_is_told_at_once(K):
    normalised = nn.Sequential(layer(), nn.BatchNorm1d(WIDTH), last())
    told = r"holds 1 sample, and stage \d .* more than 1 value per channel.* another train.batch_size"
    with pytest.raises(ConfigError, match=told):
        fit(normalised, K=K, train=data(9), max_updates=None)
    fit(normalised, K=K, train=data(9), max_updates=1)  # never gets there
    fit(normalised, K=K, train=data(10), max_updates=None)


@pytest.mark.parametrize("K", [1, 2])
def test_complex_parameters_keep_their_imaginary_parts(K):
    class Complex(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.full((WIDTH, WIDTH), 1 + 2j, dtype=torch.complex64))
            self.register_buffer("phase", torch.tensor(1j))

        def forward(self, x):
            return (x.to(self.weight.dtype) @ self.weight * self.phase).abs()

    still = functools.partial(torch.optim.SGD, lr=0.0)
    state = fit(Complex(), layer(), last(), K=K, optimizer=still).full_state_dict()
    assert state["0.weight"].tolist() == torch.full((WIDTH, WIDTH), 1 + 2j).tolist()
    assert state["0.phase"].item() == 1j
    double = in_dtype(nn.ModuleList([Complex(), layer()]), torch.float64)
    assert {t.dtype for t in double.state_dict().values()} == {torch.complex128, torch.float64}


# --- The loss --------------------------------------------------------------------------------------------------

LOSSES = {
    "a number of Python": (lambda out, y: F.cross_entropy(out, y).item(), "the loss returned a float"),
    "a tuple": (lambda out, y: (F.cross_entropy(out, y), 1, 2), "the loss returned a tuple"),
    "nothing": (lambda out, y: None, "the loss returned None"),
    "one for each sample": (functools.partial(F.cross_entropy, reduction="none"), r"the loss has shape \[2\]"),
    "a mistake": (lambda out, y: out["logits"], "the loss gets float32.* and fails on it: IndexError"),
}


@pytest.mark.parametrize("balance", ["even", "auto"])
@pytest.mark.parametrize(("loss_fn", "told"), LOSSES.values(), ids=LOSSES)
def test_a_loss_that_is_none_is_refused_in_one_line(loss_fn, told, balance):
    with pytest.raises(ConfigError, match=told) as refused:
        fit(layer(), layer(), last(), loss_fn=loss_fn, balance=balance)
    assert "stage 1" in str(refused.value)


def test_a_loss_may_take_what_is_no_tensor():
    def of_logits(out, target):
        return F.cross_entropy(out["logits"], target) + 0 * out["norm"]

    fit(layer(), layer(), last(), By(lambda x: {"logits": x, "norm": x.norm()}), loss_fn=of_logits)


# --- The memory format -----------------------------------------------------------------------------------------


def views():
    """A net that runs in the plain memory format only."""
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), By(lambda x: x.view(len(x), -1)), nn.Linear(256, 8), nn.ReLU(), nn.Linear(8, 5)
    )


@pytest.mark.parametrize("K", [1, 2])
def test_channels_last_is_taken_where_the_model_allows_it(K, capsys):
    def fitted(model, channels_last):
        trainer = toy_trainer(K, 2, model=model, channels_last=channels_last)
        monitoring = adl_dist.Monitoring(tensorboard=False)
        trainer.fit(images(), epochs=1, batch_size=8, max_updates=1, monitoring=monitoring)
        return trainer._partitioned.modules[0]

    assert not fitted(views(), None)[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert capsys.readouterr().out.count("channels_last is off: the model runs in the plain memory format only\n") == 1
    flat = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5))
    assert fitted(flat, None)[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert "channels_last" not in capsys.readouterr().out
    with pytest.raises(
        ConfigError, match=r"runtime.channels_last=true: stage 0 .* runtime.channels_last=false, or null"
    ):
        fitted(views(), True)


def test_ranks_take_one_cut_measured_in_both_formats(monkeypatch):
    """A rank that has found that channels_last does not run waits for the cut that rank 0 measures without it."""
    measured, others_end = iter([[1, 4], [3, 2]]), threading.Event()

    def measure(*_):
        sizes = next(measured)
        others_end.wait(0.0 if sizes == [1, 4] else 0.5)
        return sizes, pipeline.delays

    def run(trial, stages, *, verify=False, is_final=True):
        if verify and trial.spec.precision.channels_last:
            raise PartitionError("it is another one in channels_last")
        return tried(trial, stages, verify=verify, is_final=is_final)

    tried = Trial.run
    monkeypatch.setattr(PartitionedModel, "_measured", measure)
    monkeypatch.setattr(Trial, "run", run)
    store = torch.distributed.HashStore()
    pipeline = Pipeline(adl_dist.method("adl"), 2)
    spec = TrainSpec(
        pipeline=pipeline, loss_fn=nn.CrossEntropyLoss(), optimizer=sgd, precision=Precision(channels_last=None)
    )
    data = samples.Samples.of(torch.randn(6, 3, 8, 8), torch.zeros(6, dtype=torch.long), trains=True)
    cuts = {}

    def settle(rank):
        balance = PartitionSpec(balance="auto", granularity="block")
        flat = [nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(144, 8), nn.Linear(8, 5)]
        partitioned = PartitionedModel(nn.Sequential(*flat), 2, balance, own=[rank])
        measuring = Measuring(None, 4, None) if rank == 0 else None
        partitioned.finalize(store, spec, data, device=torch.device("cpu"), measuring=measuring)
        cuts[rank] = partitioned.sizes
        if rank:
            others_end.set()

    ranks = [threading.Thread(target=settle, args=(rank,)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(30)
    assert cuts == {0: [3, 2], 1: [3, 2]}


# --- Calls in a row --------------------------------------------------------------------------------------------


def test_other_samples_in_a_later_call_are_tried_out_again():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5))
    trainer = toy_trainer(2, 2, model=model)
    trainer.fit(images(), epochs=1, batch_size=8, monitoring=SILENT)
    larger = TensorDataset(torch.randn(8, 3, 12, 12), torch.randint(CLASSES, (8,)))
    assert "validation_loss" in trainer.evaluate(larger, batch_size=4)
    with pytest.raises(ConfigError, match="fails on it"):
        trainer.evaluate(TensorDataset(torch.randn(8, 5, 12, 12), torch.zeros(8, dtype=torch.long)), batch_size=4)


def test_one_stage_trains_bit_for_bit_like_a_plain_loop():
    model, plain = batch_norm_net(), batch_norm_net()
    train = FixedImages(16)
    trainer = toy_trainer(1, 1, model=model, optimizer=sgd, balance="even")
    trainer.fit(train, epochs=1, batch_size=4, shuffle=False, monitoring=SILENT)
    optimizer = sgd(plain.parameters())
    for start in range(0, 16, 4):
        optimizer.zero_grad()
        F.cross_entropy(
            plain(train.images[start : start + 4]), torch.tensor(train.labels[start : start + 4])
        ).backward()
        optimizer.step()
    expected = plain.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in trainer.full_state_dict().items())
