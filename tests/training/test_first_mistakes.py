"""What users give by mistake, or without a thought: it is refused, or said in a line what becomes of it."""

import json
import logging
import math
import os
import re
import traceback
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

import adl_dist
from adl_dist.checkpoint.run_dir import log_to
from adl_dist.errors import CallbackError, ConfigError, DataError, PartitionError
from adl_dist.report.recorder import tag_of
from tests.support.commands import assert_same
from tests.support.runs import toy_trainer
from tests.support.toys import FixedImages, batch_norm_net
from tests.support.values import SILENT

DATA = FixedImages(12)


def fit(trainer, data=DATA, **options):
    trainer.fit(data, **{"epochs": 1, "batch_size": 4, "monitoring": SILENT, **options})
    return trainer


def notes_of(model, **options):
    return fit(toy_trainer(1, 1, "bp", model=model, verify=False, **options))._partitioned.notes


class MeanOfLength(nn.Module):
    def forward(self, x):
        return x.mean(1)


REFUSED = {
    "a loader": (DataLoader(DATA), r"DataLoader is not a torch Dataset .* of a DataLoader give the dataset"),
    "tensors": ((torch.zeros(8, 2), torch.zeros(8)), r"tuple is not a torch Dataset .* torch.utils.data.TensorDataset"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_dataset_is_refused(case):
    data, message = REFUSED[case]
    with pytest.raises(DataError, match=message):
        fit(toy_trainer(1), data)


def test_a_sampler_of_data_parallelism_is_refused():
    """Each rank would train on its part, and here on a half of the data."""
    with pytest.raises(ConfigError, match=r"DistributedSampler visits one of 2 parts of the data.*omit it"):
        adl_dist.Loading(sampler=DistributedSampler(DATA, num_replicas=2, rank=0))


def test_a_compiled_model_is_not_cut():
    model = torch.compile(batch_norm_net())
    with pytest.raises(ConfigError, match=r"one function since torch.compile.* Precision\(compile=True\)"):
        adl_dist.Trainer(model, loss_fn=nn.CrossEntropyLoss(), optimizer=torch.optim.SGD, num_stages=2)


def test_numbers_that_lose_digits_are_told(capfd):
    (note,) = notes_of(batch_norm_net().double())
    assert note.startswith("'0.0.weight' and ")
    assert "become float32, in which the run computes, and lose digits" in note
    assert notes_of(batch_norm_net()) == []
    assert notes_of(batch_norm_net(), dtype=torch.float64) == []
    (note,) = notes_of(batch_norm_net().bfloat16())
    assert note.endswith("of the model become float32, in which the run keeps weights, and take more memory")
    assert "warning" not in capfd.readouterr().err


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


@pytest.mark.parametrize("K", [2, 9])
def test_a_traceback_has_no_frames_of_ours(K):
    """A layer of another size, and more stages than units: the script's line, one wrapper, and torch's own frames."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(71 + (K > 2), 8), nn.ReLU(), nn.Linear(8, 5))
    told = r"fails on it in Linear\(in_features=71, out_features=8.*\): RuntimeError" if K == 2 else "needs 8 cuts"
    with pytest.raises((ConfigError, PartitionError), match=told) as raised:
        toy_trainer(K, model=model, balance="flops").fit(DATA, epochs=1, batch_size=4, monitoring=SILENT)
    error, frames = raised.value, []
    while error is not None:
        frames += [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
        error = error.__cause__
    assert [code.co_name for code in frames if "/adl_dist/" in code.co_filename.replace(os.getcwd(), "")] == ["alone"]


@pytest.mark.parametrize(("id_", "ids"), [(57, "6 to 57"), (-1, "-1 to 6")])
def test_an_id_without_a_row_is_told_with_those_beside_it(id_, ids):
    given = torch.arange(8)
    given[7] = id_
    net = nn.Sequential(nn.Embedding(50, 4), nn.Linear(4, 3))
    later = rf"a row for each id in the data\? Those of this micro-batch are {ids}$"
    at_start = r"fails on it in Embedding.* a row for each id in the data\?$"
    for order, error, message in ((given, DataError, later), (given.flip(0), ConfigError, at_start)):
        with pytest.raises(error, match=message):
            fit(toy_trainer(2, 2, model=net, balance=[1, 1]), [(i, 0) for i in order], shuffle=False)


@pytest.mark.parametrize("size", [None, 0, -1])
def test_an_evaluation_needs_a_size_of_its_micro_batches(size):
    message = "give evaluate a batch_size" if size is None else f"batch_size must be at least 1, got {size}"
    with pytest.raises(ConfigError, match=message):
        toy_trainer(2).evaluate(DATA, batch_size=size)


def test_classes_in_the_last_dimension_need_another_loss():
    texts = [(torch.arange(6), torch.full((6,), 20)) for _ in range(8)]
    with pytest.raises(
        DataError, match=r"has 6 outputs, .* or use TokenCrossEntropy if the last dimension of the outp"
    ):
        fit(toy_trainer(1, model=nn.Embedding(30, 30)), texts)


def test_a_length_that_begins_late_is_told_with_the_way_out():
    texts = [(torch.zeros(4 if i < 80 else 5, 2), 0) for i in range(88)]
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 3), MeanOfLength())
    with pytest.raises(PartitionError, match="only if the first samples, up to 64, have several: let them differ, pad"):
        fit(toy_trainer(2, model=model, balance=[2, 2]), texts, shuffle=False)


def test_inference_mode_around_a_training_changes_nothing():
    expected = fit(toy_trainer(2)).full_state_dict()
    trainer = toy_trainer(2)
    with torch.inference_mode():
        got = fit(trainer).full_state_dict()
    assert_same(got, expected)


def test_a_second_training_at_the_same_time_is_refused():
    """It would draw from the same random streams. Here it begins in a callback of the first."""
    refused = []

    class Nested(adl_dist.Callback):
        def on_start(self, now):
            try:
                fit(toy_trainer(1))
            except ConfigError as error:
                refused.append(str(error))

    fit(toy_trainer(2), callbacks=[Nested()])
    assert len(refused) == 1
    assert "while another trainer of this process trains" in refused[0]


@pytest.mark.parametrize("non_finite", ["stop", "skip"])
def test_validation_data_that_are_not_finite_lose_no_epoch(non_finite, tmp_path, capsys):
    bad = FixedImages(12)
    bad.images[5, 0] = math.nan
    trainer = toy_trainer(2, non_finite=non_finite)
    told = r"the validation loss is nan, because of micro-batch 1 of the validation data, which begins at sample 4"
    options = {"val_dataset": bad, "run_dir": tmp_path, "monitoring": adl_dist.Monitoring(tensorboard=False)}
    if non_finite == "stop":
        with pytest.raises(DataError, match=told):
            fit(trainer, **options)
    else:
        fit(trainer, **options)
        assert re.search(told, capsys.readouterr().err)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["update-00000003"]


def test_a_name_in_another_encoding_is_in_the_log(tmp_path):
    log_to(tmp_path / "rank0.log")
    (handler,) = (one for one in logging.getLogger("adl_dist").handlers if isinstance(one, logging.FileHandler))
    text = b"caf\xe9.png".decode("utf-8", "surrogateescape")
    handler.handle(logging.makeLogRecord({"msg": f"image {text}"}))  # past pytest-xdist, which cannot send it
    log_to(None)
    assert rb"image caf\udce9.png" in (tmp_path / "rank0.log").read_bytes()


def test_records_of_a_resumed_run_are_there_once(tmp_path):
    """Also those of an epoch that ended, and was lost before it was saved."""

    class Crash(adl_dist.Callback):
        def on_epoch(self, now):
            if now.epoch == 2:
                raise LookupError

    options = {"epochs": 3, "run_dir": tmp_path, "val_dataset": DATA}
    with pytest.raises(CallbackError):
        fit(toy_trainer(2), callbacks=[Crash()], **options)
    fit(toy_trainer(2), **options)
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    places = [(tag_of(record), record["update"]) for record in records]
    assert len(places) == len(set(places))
    assert [update for tag, update in places if tag == "train/loss"] == [*range(9)]
    assert [update for tag, update in places if tag == "process/peak_memory/0"] == [2, 5, 8]


class Injected(torch.autograd.Function):
    """Its input; adds ``amount`` to the gradient of ``weight``, whatever the loss is."""

    @staticmethod
    def forward(ctx, x, weight, amount):
        ctx.amount, ctx.shape = amount, weight.shape
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad, torch.full(ctx.shape, ctx.amount, dtype=grad.dtype), None


class Injecting(nn.Module):
    def __init__(self, amount):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.amount = nn.Linear(72, 5, dtype=torch.float64), amount

    def forward(self, x):
        return Injected.apply(self.layer(x.flatten(1)), self.layer.weight, self.amount)


@pytest.mark.parametrize("M", [1, 4])
def test_a_gradient_beside_the_loss_is_summed_over_micro_batches(M):
    """docs/contract.md says so, and names the factor 1/M."""
    images = FixedImages(8, dtype=torch.float64)

    def step(amount):
        model = Injecting(amount)
        trainer = toy_trainer(1, M, "gpipe", model=model, dtype=torch.float64, optimizer=partial(torch.optim.SGD, lr=1))
        fit(trainer, images, batch_size=8, shuffle=False)
        return model.layer.weight.detach()

    without = step(0.0)
    assert torch.allclose(without - step(0.5), torch.full((5, 72), 0.5 * M, dtype=torch.float64), atol=1e-12)
    assert torch.allclose(without - step(0.5 / M), torch.full((5, 72), 0.5, dtype=torch.float64), atol=1e-12)


def test_formats_may_be_given_by_name():
    assert adl_dist.Precision(autocast="bfloat16") == adl_dist.Precision(autocast=torch.bfloat16)
