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

import adl_dist
from adl_dist.checkpoint.run_dir import log_to
from adl_dist.errors import AdlError, CallbackError, ConfigError, DataError, PartitionError
from adl_dist.report.recorder import tag_of
from adl_dist.training.arguments import check_layers
from tests.support.commands import assert_same, shows
from tests.support.runs import toy_trainer
from tests.support.toys import FixedImages, batch_norm_net
from tests.support.values import SILENT, values

DATA = FixedImages(12)


def fit(trainer, data=DATA, **options):
    trainer.fit(data, **{"epochs": 1, "batch_size": 4, "monitoring": SILENT, **options})
    return trainer


def notes_of(model, **options):
    return fit(toy_trainer(1, 1, "bp", model=model, verify=False, **options))._partitioned.notes


class MeanOfLength(nn.Module):
    def forward(self, x):
        return x.mean(1)


def flat(*between, outputs=5):
    return nn.Sequential(nn.Flatten(), nn.Linear(72, 72), *between, nn.Linear(72, outputs))


split, latest = adl_dist.method("adl", split_backward=True), adl_dist.method("adl", weights="latest")
has_number, has_rows, fails, front_frozen, watched = (flat(nn.Linear(72, 72)) for _ in range(5))
has_number.register_state_dict_post_hook(lambda module, state, *_: state.update(scale=2))
has_rows.insert(2, nn.Unflatten(1, (2, 36))).insert(3, nn.Linear(36, 36)).insert(4, nn.Flatten())
fails[2].register_full_backward_hook(lambda *_: 1 / 0)
front_frozen[1].requires_grad_(False)
watched[2].weight = watched[1].weight
watched[1].weight.register_hook(lambda grad: grad)
REGRESSION = {"model": flat(outputs=1), "loss_fn": nn.MSELoss(), "data": [(torch.ones(2, 6, 6), torch.ones(1))] * 8}
MADE = [
    ({"model": [nn.Linear(2, 2)]}, "expected a torch.nn.Module, got a list; of layers make"),
    ({"model": torch.compile(flat())}, r"one function since torch.compile.* Precision\(compile=True\)"),
    ({"model": nn.LazyLinear(2)}, "weight of the model has no shape yet; run"),
    ({"model": has_number}, "of the model has 'scale', which is no tensor; keep it"),
    ({"loss_fn": nn.MSELoss}, "takes .output, target.*, got the class MSELoss"),
    ({"optimizer": torch.optim.SGD(flat().parameters())}, "already; .* like optimizer=lambda parameters"),
    ({"optimizer": "sgd"}, "expected a callable that takes parameters, got a str"),
    ({"method": 3}, r"expected adl_dist.method\(NAME, ...\) or a name, got a int"),
    ({"seed": -1}, "seed must be at least 0, got -1"),
    ({"num_stages": "2"}, "'2': expected a whole number, got a str"),
    ({"ema": 1.0}, "ema must be above 0 and below 1, like 0.999"),
    ({"init_skip": ["a"]}, "init_skip leaves out tensors of init_from; it needs"),
    ({"metrics": ["top5"] * 2}, "the name 'top5' is taken; give"),
    ({"metrics": ["f1"]}, "there is no 'f1'; use accuracy, top5"),
    ({"one_per_stage": True}, "was started plainly: start it with torchrun --nproc-per-node=2"),
    ({"device": "gpu"}, "device='gpu': expected 'cpu' or 'cuda'"),
    ({"device": "cuda:1"}, "takes the GPU of its local rank, here cuda:0"),
    ({"balance": "auto", "speeds": [1]}, r"speeds=\[1\]\) must have one number per stage, 2, got 1"),
    ({"dtype": torch.bfloat16}, "dtype=bfloat16 is not supported; expected"),
    ({"autocast": torch.float16}, "float16'. is not supported; use bfloat16"),
    ({"autocast": "bfloat16", "dtype": torch.float64}, "lowers float32 only, but dtype=float64"),
    ({"deterministic": True, "cudnn_benchmark": True}, "chooses its kernels by how fast they just were"),
    ({"compile": True, "method": split}, "makes one piece of .*, which .*split.* would divide"),
    ({"autocast": "bfloat16", "method": latest}, "may keep what was computed from those of its forward"),
]


@pytest.mark.parametrize(("given", "message"), MADE)
def test_a_wrong_argument_of_a_trainer_is_refused(given, message):
    plain = {"model": flat(), "loss_fn": nn.CrossEntropyLoss(), "optimizer": torch.optim.SGD, "num_stages": 2}
    with pytest.raises(ConfigError, match=message):
        adl_dist.Trainer(**plain | values(**given))


FITTED = [
    ({"data": None}, "the training dataset is None on the rank that feeds"),
    ({"monitoring": adl_dist.Monitoring(memory=True)}, "a process, but 2 stages share 1; start"),
    ({"options": {"mitigation": ["spike"]}, "optimizer": torch.optim.AdamW}, "SGD with momentum, got AdamW with mom"),
    ({**REGRESSION, "metrics": ["top5"]}, r"top5 need outputs .*, got \[4, 1\] and \[4, 1\]"),
    ({"loss_fn": lambda out, _: out.mul_(2).sum()}, "stage 1: the loss writes to the model's output"),
    ({"model": flat().append(nn.Flatten(0))}, "expected an output of the model whose first dimension"),
    ({"model": fails}, "uncut model fails in its backward: ZeroDivision"),
    ({"model": watched, "balance": ["2"]}, "several stages and has a hook on its gradient"),
    ({"method": "dgl", "batch_size": 1}, "a single sample, which BatchNorm in .*mlp_sr.* cannot normalise"),
    ({**REGRESSION, "method": "dni", "options": {"head_sees_target": True}}, "learn the class of each sample, but"),
    ({"method": "dgl", "model": flat()}, r"convolves images, but stage 0 sends on features \['B', 72"),
    ({"method": "dgl", "model": has_rows, "balance": ["4"]}, r"expected one tensor .*, got \['B', 2, 36\]: choose"),
    ({"method": "dni", "model": front_frozen, "balance": ["2"]}, "but none of real numbers comes back for it"),
]


@pytest.mark.parametrize(("given", "message"), FITTED)
def test_what_cannot_be_trained_is_refused_by_fit(given, message):
    of_fit = {name: given[name] for name in given.keys() & {"data", "monitoring", "batch_size"}}
    trainer = toy_trainer(**{name: given[name] for name in given.keys() - of_fit})
    with pytest.raises(AdlError, match=message):
        fit(trainer, **of_fit)


def test_a_fit_unlike_the_first_needs_a_new_trainer():
    trainer = fit(toy_trainer(2, model=front_frozen))
    trainer._partitioned._model = None  # as where a process has its stage only
    with pytest.raises(ConfigError, match="another shape or dtype than those that the model was cut with; make a new"):
        fit(trainer, REGRESSION["data"])
    trainer._partitioned.modules[0].requires_grad_(True)
    with pytest.raises(ConfigError, match="takes a gradient now, but did not when the model was cut, and stages"):
        fit(trainer)


def test_a_trainer_inside_of_autocast_is_refused():
    with torch.autocast("cpu"), pytest.raises(ConfigError, match=r"used inside torch\.autocast, which remembers"):
        fit(toy_trainer(2))


def test_a_batch_norm_over_all_processes_is_refused():
    with pytest.raises(ConfigError, match="'0' of the model is a SyncBatchNorm: it averages over all processes, but"):
        check_layers(nn.Sequential(nn.SyncBatchNorm(3)), distributed=True)


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
    with pytest.raises(DataError, match=r"has 6 outputs, .* or use TokenCrossEntropy if the last dimension of the"):
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
            for nested in (toy_trainer(1), trainer):
                with pytest.raises(ConfigError) as told:
                    fit(nested)
                refused.append(str(told.value))

    fit(trainer := toy_trainer(2), callbacks=[Nested()])
    shows(refused[0], ["while another trainer of this process trains"])
    shows(refused[1], ["Trainer.fit is called while Trainer.fit of the same trainer runs"])


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


@pytest.mark.filterwarnings("ignore:.*deprecated")  # in favour of the one that is a parametrization
def test_a_line_that_a_refusal_names_is_the_users():
    model = nn.Sequential(nn.Flatten(), *(nn.utils.spectral_norm(nn.Linear(n, 5)) for n in (72, 5)))
    with pytest.raises(PartitionError, match=r"^\S+/test_first_mistakes.py:\d+: stage 0: writes values"):
        fit(toy_trainer(2, model=model, balance="even"), epochs=1)


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
