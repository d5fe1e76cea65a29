"""What ``state_dict()`` returns is saved and restored, and nothing else; a run of version 0.3.8 continues."""

import json
from functools import partial

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import nn

import adl_dist
from adl_dist.checkpoint import layout, state, tensor_files
from adl_dist.checkpoint.tensor_files import Shard
from adl_dist.errors import ConfigError
from adl_dist.stage import Stage
from tests.support.commands import assert_same
from tests.support.runs import toy_trainer
from tests.support.saved import saved
from tests.support.toys import FixedImages, batch_norm_net
from tests.support.values import SILENT, spec_of


class Counts(nn.Module):
    """Scales by the number of its forwards in training, which is extra state."""

    def __init__(self):
        super().__init__()
        self.calls, self.as_tensor = 0, False

    def forward(self, h):
        self.calls += self.training
        return h * (1 + 0.1 * self.calls)

    def get_extra_state(self):
        return torch.tensor(self.calls) if self.as_tensor else {"calls": self.calls, "seen": (self.calls, None)}

    def set_extra_state(self, state):
        self.calls = int(state) if self.as_tensor else state["calls"]


class Running(nn.Module):
    """Divides the loss by a running mean, a buffer, and counts its calls in extra state."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.ones(()))
        self.calls = 0

    def forward(self, output, target):
        loss = nn.functional.cross_entropy(output, target)
        self.calls += 1
        self.mean.mul_(0.9).add_(loss.detach(), alpha=0.1)
        return loss / self.mean.clone() * (1 + 1 / self.calls)

    def get_extra_state(self):
        return self.calls

    def set_extra_state(self, state):
        self.calls = state


class NoModule:
    """Counts its calls, and has the two methods of a module."""

    def __init__(self):
        self.calls = 0

    def __call__(self, output, target):
        self.calls += 1
        return nn.functional.cross_entropy(output, target) * (1 + 0.1 * self.calls)

    def state_dict(self):
        return {"calls": self.calls}

    def load_state_dict(self, state):
        self.calls = state["calls"]


def trainer_of(K=2, *, model=None, **options):
    return toy_trainer(K, 2, model=model or batch_norm_net(), **options)


def fit(trainer, run_dir, epochs, **options):
    trainer.fit(FixedImages(20), epochs=epochs, batch_size=8, run_dir=run_dir, **{"monitoring": SILENT, **options})
    return trainer.full_state_dict()


def counting(*, as_tensor=True):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(72, 8), Counts(), nn.Linear(8, 5))
    model[2].as_tensor = as_tensor
    return model


class CountsAround(Counts):
    """Has extra state, lies on two stages, and holds a module without tensors that has some, too."""

    def __init__(self):
        super().__init__()
        self.first, self.counts, self.second = nn.Linear(72, 8), Counts(), nn.Linear(8, 5)
        self.as_tensor = self.counts.as_tensor = True

    def forward(self, x):
        return super().forward(self.second(self.counts(self.first(x.flatten(1)))))


def test_extra_state_of_a_module_on_any_stage_is_restored(tmp_path):
    def model():
        torch.manual_seed(0)
        return CountsAround()

    whole = fit(trainer_of(model=(trained := model())), None, 2)
    assert trained.calls == trained.counts.calls == int(whole["_extra_state"]) == int(whole["counts._extra_state"]) > 0
    fit(trainer_of(model=model()), tmp_path, 1)
    assert_same(fit(trainer_of(model=model()), tmp_path, 2), whole)
    trainer_of(1, model=(loaded := model())).load_checkpoint(tmp_path)
    assert loaded.calls == trained.calls


class Tables(nn.Module):
    """Two stages compute with its buffers, of which one counts forwards."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(72, 8), nn.Linear(8, 5)
        self.register_buffer("table", torch.rand(8, generator=torch.Generator().manual_seed(seed)))
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.steps += 1
        scale = self.table * (1 + self.steps / 100)
        return self.second(self.first(x.flatten(1)) * scale) * scale[:5]


def test_buffers_that_two_stages_use_are_restored_on_both(tmp_path):
    def trainer(seed):
        return trainer_of(2, model=Tables(seed), balance=["second"])

    whole = fit(trainer(0), None, 2)
    fit(trainer(0), tmp_path, 1)
    assert_same(fit(trainer(1), tmp_path, 2), whole)


def test_extra_state_of_any_kind_is_restored(tmp_path):
    stages = [Stage(counting(as_tensor=False), 0, spec_of(1, partial(torch.optim.SGD, lr=0.1))) for _ in range(2)]
    stages[0].module[2].calls = 5
    path = saved(tmp_path, 1, state.state_of([stages[0]], 1))
    state.load(path, [stages[1]])
    assert stages[1].module[2].calls == 5


def test_extra_state_that_cannot_be_saved_is_refused():
    model = counting()
    model[2].get_extra_state = lambda: {1, 2}
    with pytest.raises(ConfigError, match=r"state_dict\(\) of the model cannot be saved: 2._extra_state is a set"):
        trainer_of(1, model=model)


@pytest.mark.parametrize("kind", [Running, NoModule])
def test_the_state_of_a_loss_is_restored(kind, tmp_path):
    whole = fit(trainer_of(loss_fn=kind()), None, 3)
    for epochs in (1, 2):
        fit(trainer_of(loss_fn=kind()), tmp_path, epochs)
    assert_same(fit(trainer_of(loss_fn=kind()), tmp_path, 3), whole)


def copies(module, state, prefix, _):
    state[f"{prefix}weight"] = state[f"{prefix}weight"].clone()


def test_a_state_dict_of_copies_is_restored(tmp_path):
    def model():
        net = batch_norm_net()
        net[6][2].register_state_dict_post_hook(copies)
        return net

    whole = fit(trainer_of(model=model()), None, 2)
    fit(trainer_of(model=model()), tmp_path, 1)
    assert_same(fit(trainer_of(model=model()), tmp_path, 2), whole)
    (tmp_path / "start").mkdir()
    save_file(whole, tmp_path / "start" / "model.safetensors")
    assert_same(trainer_of(model=model(), init_from=tmp_path / "start").full_state_dict(), whole)


class Versioned(nn.Linear):
    """As torch documents it: weights of version 1 were ten times as large."""

    _version = 2

    def _load_from_state_dict(self, state, prefix, metadata, *others):
        if (metadata.get("version") or 1) < 2:
            state[f"{prefix}weight"] = state[f"{prefix}weight"] / 10
        super()._load_from_state_dict(state, prefix, metadata, *others)


def test_a_module_with_a_version_is_restored_as_it_was_saved(tmp_path):
    def trainer():
        torch.manual_seed(0)
        return trainer_of(model=nn.Sequential(nn.Flatten(), Versioned(72, 8), nn.Linear(8, 5)), verify=False)

    whole = fit(trainer(), None, 2)
    fit(trainer(), tmp_path, 1)
    assert_same(fit(trainer(), tmp_path, 2), whole)


# --- a run of version 0.3.8 -------------------------------------------------------------------------------------------


def as_version_0_3_8(run_dir):
    """Give the newest checkpoint, and config.yaml, the entries that version 0.3.8 wrote besides."""
    (path,) = layout.complete(run_dir / "checkpoints")
    manifest = json.loads((path / layout.MANIFEST).read_bytes())
    manifest["identity"]["constants"] = {"4.table": [6.0, 1.0, 2.0]}
    files = manifest.pop("files")
    del manifest["sha256"], manifest["format"]
    first = path / tensor_files.file_name(tensor_files.OPTIMIZER, 0, 2)
    values = {"dict": [["self.count", 3], ["hook.post0.hook.seen", {"tensor": "optimizer:0.seen"}]]}
    metadata = tensor_files.header(first)[1] | {
        "optimizer:0": json.dumps({"groups": [["0.0.weight"]], "values": values})
    }
    tensors = load_file(first) | {"optimizer:0.seen": torch.zeros(2)}
    del metadata["format"]
    first.unlink()
    texts = {"attribute:0.calls": "7", "loss:": json.dumps({"loss_fn.calls": 2})}
    buffers = Shard({"0.largest": torch.ones(2)}, texts)
    written = {first.name: Shard(tensors, metadata), "buffers-00001-of-00002.safetensors": buffers}
    layout.commit(path, manifest, files | tensor_files.write(path, written))
    config = yaml.safe_load((run_dir / "config.yaml").read_text())
    config["lr_schedule"] |= {"step_size": 3, "gamma": 0.5}
    config["loss"]["label_smoothing"] = 0.0
    (run_dir / "config.yaml").write_text(yaml.safe_dump(config))


def test_a_run_of_version_0_3_8_continues_without_the_rest(tmp_path, capsys):
    options = {
        "optimizer": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        "lr_schedule": lambda o: torch.optim.lr_scheduler.StepLR(o, 3, 0.5),
    }
    whole = fit(trainer_of(**options), None, 3)
    fit(trainer_of(**options), tmp_path, 1)
    as_version_0_3_8(tmp_path)
    loud = adl_dist.Monitoring(tensorboard=False, report=False)
    fit(trainer_of(3, **options), tmp_path, 1, monitoring=loud)  # another cut is no obstacle
    fit(trainer_of(**options), tmp_path, 2, monitoring=loud)
    noted = [line for line in capsys.readouterr().out.splitlines() if "not restored" in line]
    assert len(noted) == 2, "one line each time that it is read"
    names = "0.calls, 0.largest, 4.table and 3 more"
    assert f"values that no state_dict() returns, and these are not restored: {names};" in noted[1]
    assert_same(fit(trainer_of(**options), tmp_path, 3, monitoring=loud), whole)
    assert "not restored" not in capsys.readouterr().out
