"""``evaluate``, ``export`` and ``report``: what they print and write of a run, also of a script's."""

import json
import shutil

import pytest
import safetensors.torch
import torch
import yaml
from torch import nn

import adl_dist.models
from adl_dist.checkpoint import layout, tensor_files
from adl_dist.cli.trained import OF_TRANSFORMERS
from tests.support.commands import assert_same, in_process, shows, words
from tests.support.recorded import recorded_run
from tests.support.runs import toy_trainer
from tests.support.toys import FixedImages, batch_norm_net
from tests.support.values import QUIET

RUN = [f"data._target_={__name__}.datasets", f"model._target_={__name__}.net", "train.epochs=1", "train.batch_size=8"]
ONE = ["runtime.processes=false", "partition.num_stages=1", "runtime.tensorboard=false"]
OF_SCRIPT = ("model._target_=tests.support.toys.batch_norm_net", f"data._target_={__name__}.images")


def net(width=8):
    return nn.Sequential(nn.Flatten(), nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, 3))


def datasets(num_samples=24, seed=0):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(num_samples, 4, generator=generator)
    data = torch.utils.data.TensorDataset(images, torch.randint(3, (num_samples,), generator=generator))
    return data, data


def images():
    return FixedImages(16), FixedImages(16)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("trained") / "run"
    assert in_process("train", f"run_dir={run_dir}", *RUN, *ONE).code == 0
    return run_dir


def test_data_of_other_settings_are_evaluated_and_no_others(run):
    own, fewer, others = (in_process("evaluate", str(run), *w) for w in ([], ["data.num_samples=5"], ["data.seed=1"]))
    assert [", 24 samples" in own.out, ", 5 samples" in fewer.out, ", 24 samples" in others.out] == [True] * 3
    assert own.out != others.out
    refusal = in_process("evaluate", str(run), "data.size=5").refusal()
    shows(refusal, ["there is no key 'data.size' in the data of this run, which takes num_samples, seed"])
    refusal = in_process("evaluate", str(run), "model=resnet8").refusal()
    shows(refusal, ["model=resnet8: ", " has a model, data and a loss of its own; give data.KEY=VALUE only"])
    refusal = in_process("evaluate", str(run), "ema=true").refusal()
    shows(refusal, ["holds no moving average of the weights: its run had none, or no update yet; omit ema=true"])


def test_a_safetensors_export_is_written_one_tensor_at_a_time(run, tmp_path, monkeypatch):
    out, read, read_at_once = tmp_path / "model.safetensors", tensor_files.read, []
    monkeypatch.setattr(tensor_files, "read", lambda tensors: (read_at_once.append(len(tensors)), read(tensors))[1])
    assert in_process("export", f"run_dir={run}", f"out={out}").code == 0
    model = net()
    model.load_state_dict(safetensors.torch.load_file(out))
    assert read_at_once == [1] * len(model.state_dict())
    safetensors.torch.save_file(model.state_dict(), tmp_path / "theirs", metadata={"format": "pt"})
    assert out.read_bytes() == (tmp_path / "theirs").read_bytes()
    assert in_process("export", f"run_dir={run}", f"out={tmp_path / 'model.pt'}").code == 0
    assert [*torch.load(tmp_path / "model.pt")] == [*model.state_dict()]


def test_transformers_loads_the_folder_of_a_run_of_its_model(run, tmp_path, monkeypatch):
    """With the names, the values and the settings that were trained."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=11, num_key_value_heads=2, **sizes)
    node = {"_target_": OF_TRANSFORMERS, "task": "causal-lm", "config": str(tmp_path / "config")}
    config.save_pretrained(tmp_path / "config")
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    monkeypatch.setattr(adl_dist.models, "hf_model", lambda **options: model, raising=False)
    run = shutil.copytree(run, tmp_path / "run")
    (path,) = (run / "checkpoints").iterdir()
    _put_in_place(path, model)
    settings = yaml.safe_load((run / "config.yaml").read_text())
    (run / "config.yaml").write_text(yaml.safe_dump({**settings, "model": node}))
    outcome = in_process("export", f"run_dir={run}", f"out={tmp_path / 'exported'}")
    assert (outcome.code, outcome.err) == (0, "")
    assert "from_pretrained" in outcome.out
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    ids = torch.arange(6)[None]
    assert torch.equal(loaded(ids).logits, model.eval()(ids).logits)
    assert sorted(each.name for each in (tmp_path / "exported").iterdir()) == ["config.json", "model.safetensors"]


def _put_in_place(path, model):
    """Make of a checkpoint one that holds the weights of ``model``."""
    manifest = layout.read_manifest(path)
    (name,) = [name for name in manifest["files"] if name.startswith("model-")]
    (path / name).unlink()
    (path / layout.MANIFEST).unlink()
    manifest["files"] |= tensor_files.write(path, {name: tensor_files.Shard(model.state_dict())})
    text = {key: value for key, value in manifest.items() if key != "sha256"}
    (path / layout.MANIFEST).write_text(json.dumps({**text, "sha256": layout._checksum(text)}))


def test_runs_of_scripts_are_exported_and_evaluated(tmp_path):
    """The loss is that which the script's own run ended with."""
    trainer = toy_trainer(2, 2, metrics=["top5"])
    data, run_dir = FixedImages(16), tmp_path / "run"
    summary = trainer.fit(data, val_dataset=data, epochs=1, batch_size=8, run_dir=run_dir, monitoring=QUIET)
    for out, of_script in (("model.pt", ()), ("model.safetensors", (OF_SCRIPT[0], "train.metrics=[top5]"))):
        assert in_process("export", str(run_dir), f"out={tmp_path / out}", *of_script).code == 0
    assert_same(trainer.full_state_dict(), torch.load(tmp_path / "model.pt"))
    assert_same(trainer.full_state_dict(), safetensors.torch.load_file(tmp_path / "model.safetensors"))
    outcome = in_process("export", str(run_dir), f"out={tmp_path / 'folder'}")
    shows(outcome.refusal(), ["written as a folder", "model.load_state_dict", "save_pretrained"])
    assert not (tmp_path / "folder").exists()
    shows(in_process("export", str(run_dir), f"out={tmp_path}/m.onnx").refusal(), ["a state_dict; give a name like"])
    shows(in_process("report", str(run_dir), f"out={tmp_path}").refusal(), ["is a folder; name the file, like out="])
    refusal = in_process("evaluate", str(run_dir)).refusal()
    shows(refusal, ["is the run of a script", "add model._target_=MODULE.FUNCTION"])
    refusal = in_process("evaluate", str(run_dir), OF_SCRIPT[0], "data.num_workers=0").refusal()
    shows(refusal, ["its data is not known here; add data._target_=MODULE.NAME"])
    shown = in_process("evaluate", str(run_dir), *OF_SCRIPT).out
    shows(shown, [f"validation loss {summary['validation_loss']:.4f}", "validation top5"])
    shown = in_process("evaluate", str(run_dir), *OF_SCRIPT, "train.metrics=[perplexity]").out
    assert ("validation perplexity" in shown, "top5" in shown) == (True, False)


def test_a_scripts_run_is_not_evaluated_by_another_loss(tmp_path):
    """The value is that of the plain model."""
    trainer, data, run_dir = toy_trainer(2, 2, loss_fn=nn.MultiMarginLoss()), FixedImages(16), str(tmp_path / "run")
    trainer.fit(data, epochs=1, batch_size=8, run_dir=run_dir, monitoring=QUIET)
    refusal = in_process("evaluate", run_dir, *OF_SCRIPT).refusal()
    shows(refusal, ["torch.nn.modules.loss.MultiMarginLoss", "add loss._target_=MODULE.NAME"])
    model = batch_norm_net()
    model.load_state_dict(trainer.full_state_dict())
    with torch.no_grad():
        loss = nn.MultiMarginLoss()(model.eval()(data.images), torch.tensor(data.labels))
    shown = in_process("evaluate", run_dir, *OF_SCRIPT, "loss._target_=torch.nn.MultiMarginLoss").out
    shows(shown, [f"validation loss {loss:.4f}"])


class WithLoss(nn.Module):
    """A model that returns its loss."""

    def __init__(self):
        super().__init__()
        self.inner = batch_norm_net()

    def forward(self, images, labels):
        scores = self.inner(images)
        return scores, nn.functional.cross_entropy(scores, labels)


class WithLabels(FixedImages):
    def __getitem__(self, index):
        image, label = super().__getitem__(index)
        return (image, label), label


def labelled():
    return WithLabels(16), WithLabels(16)


def test_a_scripts_run_by_the_loss_of_its_model_names_it(tmp_path):
    (data, _), run_dir = labelled(), str(tmp_path / "run")
    trainer = toy_trainer(2, 2, model=WithLoss(), loss_fn="model")
    how = {"epochs": 1, "batch_size": 8, "run_dir": run_dir, "monitoring": QUIET}
    summary = trainer.fit(data, val_dataset=data, **how)
    of_script = (f"model._target_={__name__}.WithLoss", f"data._target_={__name__}.labelled")
    refusal = in_process("evaluate", run_dir, *of_script).refusal()
    shows(refusal, ["adl_dist.losses.ModelLoss; add loss._target_=MODULE.NAME", "num_terms, otherwise loss=model"])
    shown = in_process("evaluate", run_dir, *of_script, "loss=model").out
    shows(shown, [f"validation loss {summary['validation_loss']:.4f}"])


def test_class_weights_of_a_script_are_asked_for_and_loaded(tmp_path):
    data, run_dir = FixedImages(16), str(tmp_path / "run")
    weights = torch.arange(1.0, 1 + max(data.labels) + 1)
    trainer = toy_trainer(2, 2, loss_fn=nn.CrossEntropyLoss(weight=weights))
    how = {"epochs": 1, "batch_size": 8, "run_dir": run_dir, "monitoring": QUIET}
    summary = trainer.fit(data, val_dataset=data, **how)
    refusal = in_process("evaluate", run_dir, *OF_SCRIPT).refusal()
    shows(refusal, ["CrossEntropyLoss with weight; add loss._target_=MODULE.NAME"])
    other = toy_trainer(1, 1, loss_fn=nn.CrossEntropyLoss(weight=torch.ones_like(weights)))
    other.load_checkpoint(run_dir)
    assert other.evaluate(data, batch_size=4)["validation_loss"] == pytest.approx(summary["validation_loss"], rel=1e-6)


def test_report_writes_into_the_run_folder_to_out_or_above(tmp_path):
    runs = [recorded_run(tmp_path / name) for name in "ab"]
    for arguments, place in (
        ([str(runs[0])], runs[0] / "report.html"),
        ([f"run_dir={runs[0]}", f"out={tmp_path}/b.html"], tmp_path / "b.html"),
        ([*map(str, runs)], tmp_path / "report.html"),
        ([str(tmp_path), f"out={tmp_path}/c.html"], tmp_path / "c.html"),
    ):
        done = in_process("report", *arguments)
        assert (done.code, done.err) == (0, "")
        shows(done.out, [f"written: {place};"])
        assert place.read_text().startswith("<!DOCTYPE html>")


def test_run_ends_with_a_page_and_the_timeline_in_it(tmp_path, monkeypatch):
    """Also in a folder with a space in its name, which the next command gets in quotes, and in the home folder."""
    monkeypatch.setenv("HOME", str(tmp_path))
    run = tmp_path / "my run"
    done = in_process(*words("'~/my run'", "runtime.report=true", "data.num_samples=160", "train.batch_size=8"))
    assert done.code == 0, done
    shows(done.out, ["report           ~/my run/report.html", "adl-dist export run_dir='~/my run' out=model.pt"])
    shows(in_process("status", "run_dir=~/my run").out, [f"training in {run}; the last one there ended"])
    page = (run / "report.html").read_text()
    shows(page, ["Measured in", "by the schedule, if messages took no time"])
    assert "Cannot be shown" not in page
