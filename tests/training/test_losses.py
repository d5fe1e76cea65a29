"""Losses: any M gives the gradient of the whole group, whatever a loss averages over; batch losses; refusals."""

import copy
import functools
import json

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset, default_collate

import adl_dist
from adl_dist.cli.config import instantiate
from adl_dist.cli.config.compose import compose_run
from adl_dist.errors import ConfigError, DataError
from adl_dist.losses import ModelLoss
from adl_dist.seeds import stream_seed
from adl_dist.stage.heads import build_gradient_network, build_head
from tests.support.commands import assert_same
from tests.support.equations import assert_close
from tests.support.oracle import train_by_the_equations, train_greedily
from tests.support.runs import toy_trainer
from tests.support.slices import cut
from tests.support.synthetic import ByHand, train_by_synthetic_gradients
from tests.support.values import QUIET, SILENT

C, T = 4, 5
MICRO_BATCH, M, NUM = 3, 4, 32  # groups of 12, 12 and 8 samples; the last micro-batch holds 2
LR, MOMENTUM, DECAY, EPOCHS = 0.3, 0.9, 1e-2, 2
WEIGHT = torch.linspace(0.1, 1.9, C, dtype=torch.float64)
PAD = -1
BALANCES = {1: [6], 2: [2, 4], 3: [2, 2, 2]}
sgd = functools.partial(torch.optim.SGD, lr=LR, momentum=MOMENTUM, weight_decay=DECAY)


def net(tokens=False):
    torch.manual_seed(0)
    last = [nn.Linear(8, C * T), nn.Unflatten(1, (C, T))] if tokens else [nn.Linear(8, C)]
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), *last, nn.LogSoftmax(dim=1)).double()


def data(ignored=None, tokens=False, num=NUM, seed=1):
    """The targets of the second micro-batch are all ignored, and so is a third of the others."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num, 6, generator=generator, dtype=torch.float64)
    shape = (num, T) if tokens else (num,)
    y = torch.randint(C, shape, generator=generator)
    if ignored is not None:
        y[torch.rand(shape, generator=generator) < 0.3] = ignored
        y[MICRO_BATCH : 2 * MICRO_BATCH] = ignored
    return TensorDataset(x, y)


def masked_mean(out, target):
    """A user's own loss for tokens that are padded: NaN where there is nothing but padding."""
    losses = F.nll_loss(out, target.clamp(min=0), reduction="none")
    mask = target != PAD
    return (losses * mask).sum() / mask.sum()


masked_mean.num_terms = lambda target: (target != PAD).sum()
of_cross_entropy = functools.partial(F.cross_entropy, weight=WEIGHT, ignore_index=3, label_smoothing=0.1)

# Each with a loss, the ignored target, whether targets are tokens, and by hand the number that the loss divides by.
CASES = {
    "class weights": (nn.CrossEntropyLoss(weight=WEIGHT), None, False, lambda y: WEIGHT[y].sum()),
    "ignored classes": (nn.CrossEntropyLoss(ignore_index=-1), -1, False, lambda y: (y != -1).sum()),
    "an ignored class": (nn.CrossEntropyLoss(ignore_index=2), 2, False, lambda y: (y != 2).sum()),
    "tokens": (nn.CrossEntropyLoss(), -100, True, lambda y: (y != -100).sum()),
    "weights of tokens": (nn.NLLLoss(weight=WEIGHT), -100, True, lambda y: WEIGHT[y[y >= 0]].sum()),
    "a partial function": (of_cross_entropy, 3, False, lambda y: WEIGHT[y[y != 3]].sum()),
    "a loss of one's own": (masked_mean, PAD, True, lambda y: (y != PAD).sum()),
}


def trainer_of(loss_fn, tokens, K, M, method="bp", options=None):
    *first, last = BALANCES[K]  # with tokens there is one more unit
    more = {"dtype": torch.float64, "optimizer": sgd, "timeout_seconds": 30, "balance": [*first, last + tokens]}
    # A copy: the trainer moves a loss to the dtype of the run.
    return toy_trainer(K, M, method, options, model=net(tokens), loss_fn=copy.deepcopy(loss_fn), **more)


def fitted(name, *, K=1, M=M, micro_batch=MICRO_BATCH, method="bp", options=None, **of_fit):
    loss_fn, ignored, tokens, _ = CASES[name]
    trainer = trainer_of(loss_fn, tokens, K, M, method, options)
    of_fit = {"epochs": EPOCHS, "monitoring": QUIET, "val_dataset": data(ignored, tokens, num=10, seed=2), **of_fit}
    summary = trainer.fit(data(ignored, tokens), batch_size=micro_batch * M, shuffle=False, **of_fit)
    return trainer.full_state_dict(), summary


def by_torch(name):
    """The weights after plain training on whole groups, the loss of each, and the figures of the validation."""
    loss_fn, ignored, tokens, _ = CASES[name]
    model = net(tokens)
    optimizer, losses = sgd(model.parameters()), []
    x, y = data(ignored, tokens).tensors
    for inputs, targets in [*zip(x.split(M * MICRO_BATCH), y.split(M * MICRO_BATCH), strict=True)] * EPOCHS:
        loss = loss_fn(model(inputs), targets)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    x, y = data(ignored, tokens, num=10, seed=2).tensors
    with torch.no_grad():
        out = model(x)
    hits = (out.argmax(1) == y)[y != (-100 if ignored is None else ignored)]
    figures = {"validation_loss": loss_fn(out, y).item(), "validation_accuracy": hits.double().mean().item()}
    return model.state_dict(), losses, figures


@pytest.mark.parametrize("name", CASES)
def test_any_m_gives_the_gradient_of_the_whole_group(name):
    expected, _, figures = by_torch(name)
    for K, steps, size in ((1, 4, 3), (2, 2, 6)):
        state, summary = fitted(name, K=K, M=steps, micro_batch=size)
        assert_close(state, expected)
        for figure, value in figures.items():
            if figure in summary or name != "a loss of one's own":  # of that nothing says where the classes stand
                assert summary[figure] == pytest.approx(value, rel=1e-12), (K, steps)


def for_oracle(name, K):
    """The modules, the epochs, and the arguments that all equations take; a loss of nothing is 0 there."""
    loss_fn, ignored, tokens, num_terms = CASES[name]

    def loss_of_some(out, target):
        return loss_fn(out, target) if num_terms(target) else (out * 0).sum()

    *first, last = BALANCES[K]
    x, y = data(ignored, tokens).tensors
    epochs = [list(zip(x.split(MICRO_BATCH), y.split(MICRO_BATCH), strict=True))] * EPOCHS
    of_sgd = {"lr": [LR] * 3 * EPOCHS, "momentum": MOMENTUM, "weight_decay": DECAY}
    counts = {"M": M, "loss_fn": loss_of_some, "num_terms": lambda y: float(num_terms(y))}
    return cut(net(tokens), num_stages=K, balance=[*first, last + tokens]), epochs, counts | of_sgd


# What the methods do between a loss and its backward: nothing, wait for others, replay it.
DELAYED = {"delay": [5, 3]}
REPLAYED = {"delay": [4, 2], "weights": "recompute"}
METHODS = [
    ("class weights", "adl", {}, {}),
    ("ignored classes", "adl", REPLAYED, {"delays": [4, 2], "weights": "recompute"}),
    ("tokens", "adl", DELAYED, {"delays": [5, 3]}),
    ("weights of tokens", "adl", REPLAYED, {"delays": [4, 2], "weights": "recompute"}),
    ("ignored classes", "adl", {"reduction": "sum"}, {"reduction": "sum"}),
]


@pytest.mark.parametrize(("name", "method", "options", "of_equations"), METHODS)
def test_methods_follow_their_equations_with_these_weights(name, method, options, of_equations):
    modules, epochs, arguments = for_oracle(name, 2)
    expected = train_by_the_equations(modules, epochs, **of_equations, **arguments)
    assert_close(fitted(name, K=2, method=method, options=options)[0], expected)


def test_local_losses_count_their_terms_too():
    heads = [build_head("linear", (8,), num_classes=C, seed=stream_seed(0, "head", k)).double() for k in range(2)]
    modules, epochs, arguments = for_oracle("ignored classes", 3)
    expected = train_greedily(modules, [head.classifier for head in heads], epochs, **arguments)[0]
    assert_close(fitted("ignored classes", K=3, method="dgl", options={"head": "linear"})[0], expected)


class WithLoss(nn.Module):
    """Returns the loss of one's own next to the outputs."""

    def __init__(self):
        super().__init__()
        self.net = net(tokens=True)

    def forward(self, x, y):
        out = self.net(x)
        return out, masked_mean(out, y)


def with_targets(samples):
    x, y = default_collate(samples)
    return (x, y), y


@pytest.mark.parametrize(("method", "K"), [("bp", 1), ("bp", 2), ("1f1b", 2), ("zbh1", 2), ("adl", 2)])
def test_a_nan_loss_of_the_model_where_nothing_counts_is_unused(method, K):
    """Nor is its gradient, which is NaN as well."""
    expected, _, figures = by_torch("a loss of one's own")
    if method == "adl":
        modules, epochs, arguments = for_oracle("a loss of one's own", K)
        expected = train_by_the_equations(modules, epochs, **arguments)
    how = {"dtype": torch.float64, "optimizer": sgd, "balance": ["net.2"][: K - 1] or "even", "model": WithLoss()}
    trainer = toy_trainer(K, M, method, loss_fn=ModelLoss(masked_mean.num_terms), **how)
    how = {"batch_size": M * MICRO_BATCH, "shuffle": False, "monitoring": SILENT, "epochs": EPOCHS}
    how |= {"loading": adl_dist.Loading(collate_fn=with_targets), "val_dataset": data(PAD, tokens=True, num=10, seed=2)}
    summary = trainer.fit(data(PAD, tokens=True), **how)
    assert_close({name.removeprefix("net."): p for name, p in trainer.full_state_dict().items()}, expected)
    if method != "adl":
        assert summary["validation_loss"] == pytest.approx(figures["validation_loss"], rel=1e-12)


def test_heads_of_gradients_learn_from_losses_that_count():
    options = {"head_layers": 0, "head_sees_target": True}
    made = build_gradient_network(adl_dist.method("dni", **options), (8,), num_classes=C, seed=0)
    heads = [ByHand(made.double().parameters(), 0, C) for _ in range(2)]
    modules, epochs, arguments = for_oracle("ignored classes", 3)
    expected = train_by_synthetic_gradients(modules, heads, epochs, sees_target=True, **arguments)[0]
    assert_close(fitted("ignored classes", K=3, method="dni", options=options)[0], expected)


def test_a_run_that_was_ended_in_mid_epoch_has_the_same_groups(tmp_path):
    checkpoints = adl_dist.CheckpointPolicy(every_updates=1)
    of_run = {"K": 2, "method": "adl", "monitoring": SILENT, "checkpoints": checkpoints}
    fitted("tokens", max_updates=4, run_dir=tmp_path / "run", **of_run)
    resumed, _ = fitted("tokens", run_dir=tmp_path / "run", **of_run)
    assert_same(resumed, fitted("tokens", run_dir=tmp_path / "whole", **of_run)[0])


def test_recorded_figures_are_those_of_the_whole_group(tmp_path, capsys):
    _, losses, _ = by_torch("tokens")
    loud = adl_dist.Monitoring(tensorboard=False)
    fitted("tokens", K=2, run_dir=tmp_path, monitoring=loud, val_dataset=None)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    written = [line for line in lines if line["name"] == "train/loss"]
    assert [r["value"] for r in written] == pytest.approx(losses, rel=1e-12)
    x, y = data(-100, tokens=True).tensors
    of_groups = [(group != -100).sum().item() for group in y.split(M * MICRO_BATCH)] * EPOCHS
    assert [r["num_terms"] for r in written] == of_groups
    assert [r["num_samples"] for r in written] == [12, 12, 8] * EPOCHS
    right, judged = (net(tokens=True)(x[:12]).argmax(1) == y[:12]).sum().item(), of_groups[0]
    accuracy = next(line for line in lines if line["name"] == "train/accuracy")
    assert (accuracy["value"], accuracy["num_targets"]) == (right / judged, judged)
    epoch = sum(loss * n for loss, n in zip(losses[-3:], of_groups[-3:], strict=True)) / sum(of_groups[-3:])
    assert f"loss {epoch:.4f}" in capsys.readouterr().out.strip().splitlines()[-1]


# --- A loss of the micro-batch, by loss.reduction=batch -----------------------------------------------------------


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


def routed():
    torch.manual_seed(0)
    return Routed().double()


def with_the_term(out, target):
    return F.cross_entropy(out[0], target) + 0.5 * out[1]


def contrastive(out, target):
    return F.cross_entropy(out @ out.T, torch.arange(len(out)))


BATCH_LOSSES = {
    "a router's term": (routed, with_the_term, None),
    "contrastive": (net, contrastive, None),
    "ignored targets": (net, nn.CrossEntropyLoss(ignore_index=-1), -1),
}


def fitted_by_batch(name, K, M=M, loss_reduction="batch"):
    build, loss_fn, ignored = BATCH_LOSSES[name]
    options = {"loss_reduction": loss_reduction, "dtype": torch.float64, "balance": "even", "optimizer": sgd}
    trainer = toy_trainer(K, M, "gpipe", model=build(), loss_fn=loss_fn, **options)
    how = {"batch_size": M * MICRO_BATCH, "shuffle": False, "monitoring": SILENT, "epochs": EPOCHS}
    if ignored is not None:
        how["val_dataset"] = TensorDataset(*(t[6:15] for t in data(ignored).tensors))
    summary = trainer.fit(TensorDataset(*(t[6:] for t in data(ignored).tensors)), **how)
    return trainer.full_state_dict(), summary


@pytest.mark.parametrize(("name", "K"), [("a router's term", 3), ("contrastive", 2), ("ignored targets", 3)])
def test_a_micro_batch_weighs_as_many_samples_as_it_has(name, K):
    build, loss_fn, ignored = BATCH_LOSSES[name]
    model = build()
    optimizer = sgd(model.parameters())
    x, y = (t[6:] for t in data(ignored).tensors)
    for inputs, targets in [*zip(x.split(M * MICRO_BATCH), y.split(M * MICRO_BATCH), strict=True)] * EPOCHS:
        for one, target in zip(inputs.split(MICRO_BATCH), targets.split(MICRO_BATCH), strict=True):
            (loss_fn(model(one), target) * (len(one) / len(inputs))).backward()
        optimizer.step()
        optimizer.zero_grad()
    state, summary = fitted_by_batch(name, K)
    assert_close(state, model.state_dict())
    if ignored is not None:
        with torch.no_grad():
            parts = zip(x[:9].split(MICRO_BATCH), y[:9].split(MICRO_BATCH), strict=True)
            validation = sum(float(loss_fn(model(one), target)) for one, target in parts) / 3
        assert summary["validation_loss"] == pytest.approx(validation, rel=1e-12)


def test_a_loss_that_is_no_mean_names_the_declaration():
    for name in ("a router's term", "contrastive"):
        with pytest.raises(ConfigError, match=r"the loss is no mean over the samples: .*loss_reduction='batch'"):
            fitted_by_batch(name, 2, loss_reduction="mean")
    fitted_by_batch("contrastive", 2, M=1, loss_reduction="mean")
    with pytest.raises(ConfigError, match="loss_reduction must be mean or batch, got 'batches'"):
        fitted_by_batch("contrastive", 1, loss_reduction="batches")


@pytest.mark.parametrize(
    ("target", "reduction"),
    [("tests.support.user_code.cross_entropy", "batch"), ("torch.nn.CrossEntropyLoss", "mean")],
)
def test_the_command_line_declares_it_for_any_loss(target, reduction):
    config, _ = compose_run([f"loss._target_={target}", f"loss.reduction={reduction}"])
    instantiate.check_targets(config)
    spec = instantiate.train_spec(config)
    assert spec.loss_reduction == reduction
    output, classes = torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 0])
    assert spec.loss_fn(output, classes) == F.cross_entropy(output, classes)


def test_class_weights_are_a_list_on_the_command_line():
    config, _ = compose_run(["loss.weight=[1,2.5]"])
    output, classes = torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 1])
    expected = F.cross_entropy(output, classes, weight=torch.tensor([1, 2.5]))
    assert instantiate.train_spec(config).loss_fn(output, classes) == expected


# --- Losses that write, or train nothing --------------------------------------------------------------------------


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        return self.first(x), self.second(x)


class Branches(nn.Module):
    """Returns two outputs; the loss uses the first one only."""

    def __init__(self):
        super().__init__()
        self.net, self.unused = net(), net()

    def forward(self, x):
        return self.net(x[0]), self.unused(x[1])


def test_an_output_that_the_loss_ignores_gets_no_gradient():
    def of_first(out, target):
        return masked_mean(out[0], target)

    of_first.num_terms = masked_mean.num_terms
    model = nn.Sequential(Twice(), Branches()).double()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer = toy_trainer(2, M, model=model, loss_fn=of_first, optimizer=sgd, dtype=torch.float64)
    trainer.fit(data(PAD), epochs=1, batch_size=M * MICRO_BATCH, shuffle=False, monitoring=SILENT)
    moved = {name for name, weights in trainer.full_state_dict().items() if not torch.equal(weights, before[name])}
    assert moved == {name for name in before if not name.startswith(("0.second", "1.unused"))}


class Flattened(nn.Module):
    """Returns the logits and something of all samples, like the router of transformers."""

    def __init__(self):
        super().__init__()
        self.net = net()

    def forward(self, x):
        out = self.net(x)
        return out, out.flatten()


def test_outputs_that_cannot_be_joined_need_a_declaration():
    def of_first(out, target):
        return F.cross_entropy(out[0], target)

    how = {"model": Flattened().double(), "loss_fn": of_first, "optimizer": sgd, "dtype": torch.float64}
    fit = {"epochs": 1, "batch_size": M * MICRO_BATCH, "monitoring": SILENT}
    with pytest.raises(ConfigError, match=r"cannot be joined along the batch, .*loss_reduction='batch'"):
        toy_trainer(2, M, **how).fit(data(None), **fit)
    toy_trainer(2, M, **how, loss_reduction="batch").fit(data(None), **fit)


IGNORES = (
    r"training dataset: micro-batch \d of epoch . has target -100, which .*loss.ignore_index=-1.*num_terms\(target\)"
    r".*losses.ModelLoss\(num_terms=...\)"
)
REFUSED = {
    "ignored": (nn.CrossEntropyLoss(), -100, False, DataError, IGNORES),
    "smoothed": (functools.partial(F.cross_entropy, label_smoothing=0.1), -100, False, DataError, IGNORES),
    "a sum": (functools.partial(F.cross_entropy, reduction="sum"), None, False, ConfigError, "the loss is a sum"),
    "no graph": (lambda out, target: F.cross_entropy(out.detach(), target), None, False, ConfigError, "gradient|train"),
    "a class": (nn.CrossEntropyLoss(), C, True, DataError, r"micro-batch \d of epoch . has target 4, but .* 4 outputs"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_loss_that_would_be_weighted_wrong_is_refused(case):
    loss_fn, ignored, tokens, error, told = REFUSED[case]
    with pytest.raises(error, match=told):
        trainer_of(loss_fn, tokens, 2, M).fit(data(ignored, tokens), epochs=1, batch_size=12, monitoring=QUIET)
