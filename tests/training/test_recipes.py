"""Recipes of users, each against a plain loop of torch or a library's own figure."""

import fnmatch
import re
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset, default_collate

import adl_dist
from adl_dist import Callback, CheckpointPolicy, Loading
from adl_dist.errors import ConfigError
from adl_dist.losses import ModelLoss
from tests.support.runs import toy_trainer
from tests.support.values import SILENT

DTYPE, NUM, BATCH, STEPS, CLASSES = torch.float64, 24, 8, 2, 3
sgd = partial(torch.optim.SGD, lr=0.3, momentum=0.9)


class Net(nn.Module):
    """Three layers, and the loss of the targets that are not -1, if there are targets."""

    def __init__(self, reduction="mean"):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.head = nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, CLASSES)
        self.reduction = reduction

    def forward(self, x, targets=None):
        logits = self.head(self.second(self.first(x).tanh()).tanh())
        if targets is None:
            return logits
        return logits, F.cross_entropy(logits, targets, ignore_index=-1, reduction=self.reduction)


def samples(num=NUM, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num, 5, generator=generator, dtype=DTYPE)
    return x, x[:, :CLASSES].argmax(1)


class WithTargets(TensorDataset):
    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return (x, y), y


class Losses(Callback):
    def __init__(self):
        self.train, self.validation = [], []

    def on_update(self, now):
        self.train.append(now.metrics["train_loss"])

    def on_epoch(self, now):
        self.validation.append((now.update, now.metrics.get("validation_loss")))


def fitted(K, train, validation, method="1f1b", *, model=None, loss_fn="model", **of_fit):
    """Train two epochs in order; return the trainer, the losses and the summary."""
    trainer = toy_trainer(K, STEPS, method, model=model or Net(), loss_fn=loss_fn, optimizer=sgd, dtype=DTYPE)
    seen = Losses()
    how = {"epochs": 2, "batch_size": BATCH, "shuffle": False, "monitoring": SILENT, "callbacks": [seen], **of_fit}
    return trainer, seen, trainer.fit(train, val_dataset=validation, **how)


def plain_losses(batches, loss_of, validation_of, model=None, every=NUM // BATCH):
    """The losses of updates, and of ``validation_of`` the model after ``every`` updates."""
    model = (model or Net()).double()
    optimizer, train, validation = sgd(model.parameters()), [], []
    for update, batch in enumerate(batches, start=1):
        optimizer.zero_grad()
        loss = loss_of(model, *batch)
        loss.backward()
        optimizer.step()
        train.append(loss.item())
        if update % every == 0:
            with torch.no_grad():
                validation.append((update, validation_of(model)))
    return train, validation


def in_batches(x, y, epochs=2):
    return [*zip(x.split(BATCH), y.split(BATCH), strict=True)] * epochs


def own_loss(model, x, y):
    return model(x, y)[1]


def assert_close(seen, expected):
    assert seen.train == pytest.approx(expected[0], rel=1e-12)
    assert [update for update, _ in seen.validation] == [update for update, _ in expected[1]]
    assert [loss for _, loss in seen.validation] == pytest.approx([loss for _, loss in expected[1]], rel=1e-12)


def test_terms_of_the_loss_of_the_model_are_counted():
    x, y = samples()
    y[::3], y[1] = -1, -1  # micro-batches of 2 and 3 terms
    loss_fn = ModelLoss(num_terms=lambda targets: (targets >= 0).sum())
    _, seen, _ = fitted(2, WithTargets(x, y), None, loss_fn=loss_fn)
    assert seen.train == pytest.approx(plain_losses(in_batches(x, y), own_loss, None, every=99)[0], rel=1e-12)


def test_a_loss_of_the_model_that_is_no_mean_is_refused():
    with pytest.raises(ConfigError, match=r"the loss is no mean over the samples.*loss_reduction='batch'"):
        fitted(2, WithTargets(*samples()), None, model=Net("sum"))
    with pytest.raises(ConfigError, match=r"expects a model that returns its loss.* 0 in its output"):
        fitted(2, TensorDataset(*samples()), None)


def mixed(samples):
    """Mixup with the order of the micro-batch reversed, and a share that it decides."""
    x, y = default_collate(samples)
    share = x.abs().mean().clamp(0.1, 0.4)
    return x.lerp(x.flip(0), share), soft(y).lerp(soft(y).flip(0), share)


def unmixed(samples):
    x, y = default_collate(samples)
    return x, soft(y)


def soft(y):
    return 0.1 / CLASSES + 0.9 * F.one_hot(y, CLASSES).to(DTYPE)


def test_mixup_trains_on_soft_targets_and_measures_classes():
    data, other, loss_fn = TensorDataset(*samples()), samples(10, seed=2), nn.CrossEntropyLoss()
    loading = Loading(collate_fn=mixed, val_collate_fn=unmixed)
    trainer, seen, summary = fitted(2, data, TensorDataset(*other), loss_fn=loss_fn, loading=loading)
    micro = [mixed([data[i] for i in range(first, first + 4)]) for first in range(0, NUM, 4)]
    batches = [tuple(map(torch.cat, zip(*micro[i : i + STEPS], strict=True))) for i in range(0, len(micro), STEPS)] * 2
    plain = Net()
    validate = lambda model: loss_fn(model(other[0]), soft(other[1])).item()  # noqa: E731
    assert_close(seen, plain_losses(batches, lambda model, x, y: loss_fn(model(x), y), validate, plain))
    right = (plain(other[0]).argmax(1) == other[1]).double().mean().item()
    assert summary["validation_accuracy"] == pytest.approx(right)
    assert trainer.evaluate(TensorDataset(*other)) == {k: v for k, v in summary.items() if k.startswith("validation")}


def test_a_new_head_keeps_its_own_values_on_old_weights(tmp_path):
    old, new, path = Net(), Net(), tmp_path / "old.pt"
    with torch.no_grad():
        for p in old.parameters():
            p.add_(1.0)
    old.head = nn.Linear(8, 7)
    torch.save(old.state_dict(), path)
    own = {name: value.clone() for name, value in new.state_dict().items()}
    make = partial(adl_dist.Trainer, new, loss_fn=nn.CrossEntropyLoss(), optimizer=sgd, init_from=path)
    state = make(init_skip=["head.*"]).full_state_dict()
    for name, value in state.items():
        assert torch.equal(value, own[name] if fnmatch.fnmatch(name, "head.*") else old.state_dict()[name])
    with pytest.raises(ConfigError, match=r"no tensor of the model or .* matches 'haed\.\*'; .* head.bias in the file"):
        make(init_skip=["haed.*"])
    with pytest.raises(adl_dist.CheckpointError, match=r"head\.weight is \[3, 8\] in this model"):
        make(init_skip=["second.*"])


def test_an_old_head_of_another_name_is_left_out(tmp_path):
    path, old = tmp_path / "old.pt", {n.replace("head.", "cls.old."): p + 1 for n, p in Net().state_dict().items()}
    torch.save(old | {"temperature": torch.ones(1)}, path)
    make = partial(adl_dist.Trainer, loss_fn=nn.CrossEntropyLoss(), optimizer=sgd, init_from=path)
    skip, own = [], Net().state_dict()
    for told, leaves_out in (
        (r"head\.weight is \[3, 8\] in this model and missing in the file", "head.*"),
        (r"cls\.old\.weight is missing in this model and \[3, 8\] in the file", "cls.old.*"),
        (r"temperature is missing in this model and \[1\] in the file", "temperature"),
    ):
        pattern = re.escape(f"the pattern {leaves_out} in init_skip leaves it out")
        with pytest.raises(adl_dist.CheckpointError, match=f"{told}.*; {pattern}"):
            make(Net(), init_skip=skip)
        skip.append(leaves_out)
    for name, value in make(Net(), init_skip=skip).full_state_dict().items():
        assert torch.equal(value, own[name] if name.startswith("head.") else own[name] + 1)


@pytest.mark.parametrize("K", [1, 3])
def test_evaluation_every_two_updates_is_that_of_a_plain_loop(K):
    (x, y), other = samples(5 * BATCH), samples(10, seed=2)
    _, seen, summary = fitted(K, WithTargets(x, y), WithTargets(*other), eval_every_updates=2)
    train, _ = plain_losses(in_batches(x, y), own_loss, None, every=99)
    _, validation = plain_losses(in_batches(x, y), own_loss, lambda m: own_loss(m, *other).item(), every=1)
    assert_close(seen, (train, [validation[update - 1] for update in (2, 4, 5, 7, 9, 10)]))
    assert summary["validation_loss"] == seen.validation[-1][1]
    assert 0 < summary["validation_accuracy"] <= 1


def test_evaluation_in_mid_epoch_empties_the_pipeline(tmp_path, capsys):
    data = WithTargets(*samples(5 * BATCH))
    more = {"monitoring": adl_dist.Monitoring(tensorboard=False, report=False), "run_dir": tmp_path / "a"}
    evaluated, *_ = fitted(2, data, data, "adl", eval_every_updates=2, **more)
    assert "note: eval_every_updates=2 empties the pipeline in mid-epoch" in capsys.readouterr().out
    policy = CheckpointPolicy(every_updates=2)
    saved, *_ = fitted(2, data, data, "adl", checkpoints=policy, run_dir=tmp_path / "b")
    plain, *_ = fitted(2, data, data, "adl")
    states = [one.full_state_dict() for one in (evaluated, saved, plain)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert not all(torch.equal(states[0][name], states[2][name]) for name in states[0])


def test_text_is_written_by_the_weights_of_each_checkpoint(tmp_path, capsys):
    model, probe = Net(), samples(3, seed=3)[0]
    write = lambda copy: f"wrote {copy(probe.float()).sum().item():.6f}"  # noqa: E731
    data, callback = WithTargets(*samples()), adl_dist.TextSamples(model, write)
    trainer, *_ = fitted(2, data, data, model=model, run_dir=tmp_path, callbacks=[callback])
    plain = Net()
    plain.load_state_dict(trainer.full_state_dict())
    lines = [line for line in capsys.readouterr().out.splitlines() if "wrote" in line]
    assert [line.split(":")[0] for line in lines] == ["update 3", "update 6"]
    assert lines[1].split()[-1] == f"{plain(probe.float()).sum().item():.6f}" != lines[0].split()[-1]
