"""What users give by mistake, or without a thought: it is refused, or said in a line what becomes of it."""

import sys

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import adl_dist
from adl_dist.errors import ConfigError, DataError
from tests.support.commands import as_command
from tests.support.runs import toy_trainer
from tests.support.toys import FixedImages, batch_norm_net
from tests.support.values import SILENT

DATA = FixedImages(12)


def fit(trainer, data=DATA, **options):
    trainer.fit(data, **{"epochs": 1, "batch_size": 4, "monitoring": SILENT, **options})
    return trainer


def notes_of(model, **options):
    return fit(toy_trainer(1, 1, "bp", model=model, verify=False, **options))._partitioned.notes


def test_a_data_loader_is_no_dataset():
    """Its batches would count as samples."""
    with pytest.raises(DataError, match=r"got a DataLoader, whose batches would count as samples; give its dataset"):
        fit(toy_trainer(1), DataLoader(DATA, batch_size=2))


def test_a_compiled_model_is_not_cut():
    model = torch.compile(batch_norm_net())
    with pytest.raises(ConfigError, match=r"one function since torch.compile.* Precision\(compile=True\)"):
        adl_dist.Trainer(model, loss_fn=nn.CrossEntropyLoss(), optimizer=torch.optim.SGD, num_stages=2)


def test_numbers_that_lose_digits_are_told(capfd):
    (note,) = notes_of(batch_norm_net().double())
    assert note.startswith("'0.0.weight' and ")
    assert "become float32, in which the run computes, and lose digits" in note
    (note,) = notes_of(batch_norm_net().bfloat16())
    assert "become float32, in which weights are kept and updated" in note
    assert notes_of(batch_norm_net()) == []
    assert "warning" not in capfd.readouterr().err
    fit(toy_trainer(1), FixedImages(12, dtype=torch.float64), epochs=2)
    told = "the training dataset has float64 numbers, which become float32"
    assert capfd.readouterr().err.count(told) == 1


class KeepsEval(nn.Sequential):
    """Its second layer stays in eval mode, as its user wants."""

    def train(self, mode=True):
        super().train(mode)
        self[1].eval()
        return self


def test_modes_that_training_changes_are_told():
    model = batch_norm_net()
    model[1].eval()
    (note,) = notes_of(model)
    assert note.startswith("'1' and ")
    assert "is in eval mode, but training puts all modules in train mode" in note
    frozen = KeepsEval(*batch_norm_net()).train()
    assert notes_of(frozen) == []
    assert not any(module.training for module in frozen[1].modules())
    assert notes_of(batch_norm_net().eval()) == [], "a model that was evaluated"


class Tempered(nn.CrossEntropyLoss):
    """Divides outputs by a temperature that its user wants to be trained."""

    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(()))

    def forward(self, output, target):
        return super().forward(output / self.temperature, target)


def test_a_loss_that_nothing_trains_is_told():
    (note,) = notes_of(batch_norm_net(), loss_fn=(loss := Tempered()))
    assert note.startswith("'temperature' of the loss takes a gradient, but no optimizer trains a loss")
    assert loss.temperature.item() == 1.0
    assert notes_of(batch_norm_net(), loss_fn=loss.requires_grad_(False)) == []


class TakesGradients(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(72, 5)

    def forward(self, x):
        x = x.flatten(1).requires_grad_()
        return self.layer(x) + torch.autograd.grad(self.layer(x).sum(), x, create_graph=True)[0][:, :5]


def test_a_forward_that_takes_gradients_is_told_of_evaluation():
    with pytest.raises(ConfigError, match=r"in evaluation no gradients are recorded: .* torch.enable_grad\(\)"):
        fit(toy_trainer(1, model=TakesGradients()))


UNGUARDED = """
from functools import partial
import torch, adl_dist
from torch import nn
data = torch.utils.data.TensorDataset(torch.randn(8, 6), torch.randint(3, (8,)))
sgd = partial(torch.optim.SGD, lr=0.1)
trainer = adl_dist.Trainer(nn.Linear(6, 3), loss_fn=nn.CrossEntropyLoss(), optimizer=sgd, num_stages=1)
trainer.fit(data, epochs=1, batch_size=4, num_workers=1)
"""


def test_a_script_without_a_guard_that_loads_is_refused(tmp_path):
    """The loading processes import it, and would train, too."""
    (tmp_path / "unguarded.py").write_text(UNGUARDED)
    done = as_command(sys.executable, str(tmp_path / "unguarded.py"))
    assert done.code == 1
    last = done.err.strip().splitlines()[-1]
    assert "these processes import unguarded.py, which does its work at once" in last
    assert "if __name__ == '__main__'" in last
