"""Losses that are no mean over samples, declared by loss.reduction=batch: a micro-batch weighs n_b / n_group."""

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import adl_dist
from adl_dist.cli.config import instantiate
from adl_dist.cli.config.compose import compose_run
from adl_dist.errors import ConfigError
from tests.support.equations import assert_close
from tests.support.runs import toy_trainer
from tests.support.values import SILENT

C, MICRO_BATCH, M, NUM, EPOCHS = 4, 3, 4, 32, 2  # groups of 12, 12 and 8 samples; the last micro-batch holds 2
sgd = functools.partial(torch.optim.SGD, lr=0.3, momentum=0.9)


class Routed(nn.Module):
    """Two experts and, next to the output, how unevenly the router uses them in the micro-batch."""

    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(6, 2), nn.ModuleList(nn.Linear(6, 8) for _ in range(2))
        self.head = nn.Linear(8, C)

    def forward(self, x):
        share = self.router(x).softmax(1)
        h = sum(share[:, k : k + 1] * expert(x) for k, expert in enumerate(self.experts))
        return self.head(torch.tanh(h)), share.mean(0).square().sum()


def plain():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, C))


def with_the_term(out, target):
    return F.cross_entropy(out[0], target) + 0.5 * out[1]


def contrastive(out, target):
    return F.cross_entropy(out @ out.T, torch.arange(len(out)))


CASES = {
    "a router's term": (Routed, with_the_term),
    "contrastive": (plain, contrastive),
    "ignored targets": (plain, nn.CrossEntropyLoss(ignore_index=1)),
    "a marked target": (plain, nn.CrossEntropyLoss()),
}


def model_of(name):
    torch.manual_seed(0)
    return CASES[name][0]().double()


def data_of(name):
    generator = torch.Generator().manual_seed(1)
    y = torch.randint(C, (NUM,), generator=generator)
    if name == "a marked target":
        y[4] = -100
    return TensorDataset(torch.randn(NUM, 6, generator=generator, dtype=torch.float64), y)


def trainer_of(name, K, **options):
    more = {"loss_reduction": "batch", "dtype": torch.float64, "balance": "even", **options}
    return toy_trainer(K, M, "gpipe", model=model_of(name), loss_fn=CASES[name][1], optimizer=sgd, **more)


def fitted(name, K, **options):
    trainer = trainer_of(name, K, **options)
    data = data_of(name)
    how = {"batch_size": M * MICRO_BATCH, "shuffle": False, "monitoring": SILENT}
    summary = trainer.fit(data, epochs=EPOCHS, val_dataset=data, **how)
    return trainer.full_state_dict(), summary


def by_torch(name):
    """The weights and the validation loss of plain training: of a group the mean by samples, not by micro-batches."""
    model, loss_fn, (x, y) = model_of(name), CASES[name][1], data_of(name).tensors
    optimizer = sgd(model.parameters())
    for _ in range(EPOCHS):
        for inputs, targets in zip(x.split(M * MICRO_BATCH), y.split(M * MICRO_BATCH), strict=True):
            for one, target in zip(inputs.split(MICRO_BATCH), targets.split(MICRO_BATCH), strict=True):
                (loss_fn(model(one), target) * (len(one) / len(inputs))).backward()
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        parts = zip(x.split(MICRO_BATCH), y.split(MICRO_BATCH), strict=True)
        validation = sum(float(loss_fn(model(one), target)) * len(one) for one, target in parts) / NUM
    return model.state_dict(), validation


@pytest.mark.parametrize("K", [1, 2, 3])
@pytest.mark.parametrize("name", CASES)
def test_a_micro_batch_weighs_as_many_samples_as_it_has(name, K):
    (state, summary), (expected, validation) = fitted(name, K), by_torch(name)
    assert_close(state, expected)
    assert summary["validation_loss"] == pytest.approx(validation, rel=1e-12)


@pytest.mark.parametrize("name", ["a router's term", "contrastive"])
def test_without_the_declaration_the_error_names_it(name):
    with pytest.raises(ConfigError, match=r"the loss is no mean over the samples: .*loss\.reduction=batch"):
        fitted(name, 2, loss_reduction="mean")


def test_with_one_micro_batch_nothing_needs_to_be_declared():
    for reduction in ("batch", "mean"):
        trainer = toy_trainer(
            2, 1, "gpipe", model=plain(), loss_fn=contrastive, loss_reduction=reduction, balance="even"
        )
        trainer.fit(data_of("contrastive"), epochs=1, batch_size=MICRO_BATCH, shuffle=False, monitoring=SILENT)


def test_another_reduction_is_refused():
    with pytest.raises(ConfigError, match="loss_reduction must be mean or batch, got 'batches'"):
        trainer_of("contrastive", 1, loss_reduction="batches")


@pytest.mark.parametrize(
    ("target", "reduction"),
    [("torch.nn.CrossEntropyLoss", "batch"), ("torch.nn.functional.cross_entropy", "batch"),
     ("tests.support.user_code.cross_entropy", "batch"), ("torch.nn.CrossEntropyLoss", "mean")],
)  # fmt: skip
def test_the_command_line_declares_it_for_any_loss(target, reduction):
    config, _ = compose_run([f"loss._target_={target}", f"loss.reduction={reduction}"])
    instantiate.check_targets(config)
    spec = instantiate.train_spec(config)
    assert spec.loss_reduction == reduction
    output, classes = torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 0])
    assert spec.loss_fn(output, classes) == F.cross_entropy(output, classes)


def test_a_run_is_recognised_by_what_it_declares(tmp_path):
    how = {"epochs": 1, "batch_size": M * MICRO_BATCH, "monitoring": SILENT, "run_dir": tmp_path}
    trainer_of("ignored targets", 1).fit(data_of("ignored targets"), **how)
    with pytest.raises(adl_dist.AdlError, match="loss_reduction"):
        trainer_of("ignored targets", 1, loss_reduction="mean").fit(data_of("ignored targets"), **how)
