"""Losses that average over something else than samples: any M gives the gradient of the whole group."""

import copy
import functools
import json

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Subset, TensorDataset

import adl_dist
from adl_dist.errors import ConfigError, DataError, DivergedError
from adl_dist.seeds import stream_seed
from adl_dist.stage.heads import build_gradient_network, build_head
from tests.support.equations import assert_close
from tests.support.oracle import train_by_the_equations, train_greedily
from tests.support.ranks import run_ranks
from tests.support.runs import toy_trainer
from tests.support.slices import cut
from tests.support.synthetic import ByHand, train_by_synthetic_gradients
from tests.support.values import QUIET, SILENT

C, T = 4, 5
MICRO_BATCH, M, NUM = 3, 4, 32  # groups of 12, 12 and 8 samples; the last micro-batch holds 2
LR, MOMENTUM, DECAY, EPOCHS = 0.3, 0.9, 1e-2, 3
WEIGHT = torch.linspace(0.1, 1.9, C, dtype=torch.float64)
PAD = -1
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
    """What a user would write for tokens that are padded: NaN where there is nothing but padding."""
    losses = F.nll_loss(out, target.clamp(min=0), reduction="none")
    mask = target != PAD
    return (losses * mask).sum() / mask.sum()


masked_mean.num_terms = lambda target: (target != PAD).sum()

TOKENS = {"tokens": True}
# Each with a loss, what is ignored in the data, what the data and the net are, and by hand what the loss divides by.
CASES = {
    "class weights": (nn.CrossEntropyLoss(weight=WEIGHT), None, {}, lambda y: WEIGHT[y].sum()),
    "ignored classes": (nn.CrossEntropyLoss(ignore_index=-1), -1, {}, lambda y: (y != -1).sum()),
    "an ignored class": (nn.CrossEntropyLoss(ignore_index=2), 2, {}, lambda y: (y != 2).sum()),
    "tokens": (nn.CrossEntropyLoss(), -100, TOKENS, lambda y: (y != -100).sum()),
    "weights of tokens": (nn.NLLLoss(weight=WEIGHT), -100, TOKENS, lambda y: WEIGHT[y[y >= 0]].sum()),
    "a partial function": (
        functools.partial(F.cross_entropy, weight=WEIGHT, ignore_index=3, label_smoothing=0.1),
        3,
        {},
        lambda y: WEIGHT[y[y != 3]].sum(),
    ),
    "a loss of one's own": (masked_mean, PAD, TOKENS, lambda y: (y != PAD).sum()),
}


BALANCES = {1: [6], 2: [2, 4], 3: [2, 2, 2]}


def balance_of(K, of_data):
    *first, last = BALANCES[K]
    return [*first, last + len(of_data)]  # with tokens there is one more unit


def trainer_of(loss_fn, of_data, K, M, method="bp", options=None):
    # A copy: the trainer moves a loss to the dtype of the run.
    model, balance, loss_fn = net(**of_data), balance_of(K, of_data), copy.deepcopy(loss_fn)
    more = {"dtype": torch.float64, "optimizer": sgd, "timeout_seconds": 30}
    return toy_trainer(K, M, method, options, model=model, loss_fn=loss_fn, balance=balance, **more)


def fitted(loss_fn, ignored, of_data, *, K=1, M=M, micro_batch=MICRO_BATCH, method="bp", options=None, **of_fit):
    trainer = trainer_of(loss_fn, of_data, K, M, method, options)
    of_fit = {"epochs": EPOCHS, "monitoring": QUIET, "val_dataset": data(ignored, **of_data, num=10, seed=2), **of_fit}
    summary = trainer.fit(data(ignored, **of_data), batch_size=micro_batch * M, shuffle=False, **of_fit)
    return trainer.full_state_dict(), summary


def by_torch(loss_fn, ignored, of_data):
    """The weights after plain training on whole groups, the loss of each, and what the validation gives."""
    model = net(**of_data)
    optimizer, losses = sgd(model.parameters()), []
    x, y = data(ignored, **of_data).tensors
    for _ in range(EPOCHS):
        for start in range(0, NUM, M * MICRO_BATCH):
            group = slice(start, start + M * MICRO_BATCH)
            loss = loss_fn(model(x[group]), y[group])
            losses.append(loss.item())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    x, y = data(ignored, **of_data, num=10, seed=2).tensors
    with torch.no_grad():
        out = model(x)
    counts = y != (-100 if ignored is None else ignored)
    figures = {
        "validation_loss": loss_fn(out, y).item(),
        "validation_accuracy": (out.argmax(1) == y)[counts].double().mean().item(),
    }
    return model.state_dict(), losses, figures


@pytest.mark.parametrize("name", CASES)
def test_any_m_gives_the_gradient_of_the_whole_group(name):
    *case, _ = CASES[name]
    expected, _, figures = by_torch(*case)
    for K, steps, size in ((1, 4, 3), (1, 1, 12), (2, 2, 6)):
        state, summary = fitted(*case, K=K, M=steps, micro_batch=size)
        assert_close(state, expected)
        for figure, value in figures.items():
            if figure in summary or name != "a loss of one's own":  # of that it is not known where the classes stand
                assert summary[figure] == pytest.approx(value, rel=1e-12), (K, steps)


def micro_batches(dataset):
    x, y = dataset.tensors
    return list(zip(x.split(MICRO_BATCH), y.split(MICRO_BATCH), strict=True))


def for_oracle(loss_fn, ignored, of_data, num_terms):
    """The epochs, and the arguments that all equations take; a loss of nothing is 0 there."""

    def loss_of_some(out, target):
        return loss_fn(out, target) if num_terms(target) else (out * 0).sum()

    of_sgd = {"lr": [LR] * 3 * EPOCHS, "momentum": MOMENTUM, "weight_decay": DECAY}
    epochs = [micro_batches(data(ignored, **of_data))] * EPOCHS
    return epochs, {"M": M, "loss_fn": loss_of_some, "num_terms": lambda y: float(num_terms(y)), **of_sgd}


# What the methods do between a loss and its backward: nothing, waits for others, replays it.
METHODS = [("adl", {}, None, "stash"), ("gpipe", {}, [0, 0], "stash"), ("adl", {"delay": [5, 3]}, [5, 3], "stash"),
           ("adl", {"delay": [4, 2], "weights": "recompute"}, [4, 2], "recompute")]  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("method", "options", "delays", "weights"), METHODS)
def test_methods_follow_their_equations_with_these_weights(name, method, options, delays, weights):
    loss_fn, ignored, of_data, num_terms = CASES[name]
    modules = cut(net(**of_data), num_stages=2, balance=balance_of(2, of_data))
    epochs, arguments = for_oracle(loss_fn, ignored, of_data, num_terms)
    expected = train_by_the_equations(modules, epochs, delays=delays, weights=weights, **arguments)
    assert_close(fitted(loss_fn, ignored, of_data, K=2, method=method, options=options)[0], expected)


def test_a_sum_over_micro_batches_stays_one():
    loss_fn, ignored, of_data, num_terms = CASES["ignored classes"]
    modules = cut(net(), num_stages=2, balance=[2, 4])
    epochs, arguments = for_oracle(loss_fn, ignored, of_data, num_terms)
    expected = train_by_the_equations(modules, epochs, reduction="sum", **arguments)
    assert_close(fitted(loss_fn, ignored, {}, K=2, method="adl", options={"reduction": "sum"})[0], expected)


@pytest.mark.parametrize("name", ["class weights", "ignored classes"])
def test_local_losses_count_their_terms_too(name):
    loss_fn, ignored, of_data, num_terms = CASES[name]
    heads = [build_head("linear", (8,), num_classes=C, seed=stream_seed(0, "head", k)).double() for k in range(2)]
    modules = cut(net(), num_stages=3, balance=[2, 2, 2])
    epochs, arguments = for_oracle(loss_fn, ignored, of_data, num_terms)
    expected = train_greedily(modules, [head.classifier for head in heads], epochs, **arguments)[0]
    assert_close(fitted(loss_fn, ignored, {}, K=3, method="dgl", options={"head": "linear"})[0], expected)


@pytest.mark.parametrize("sees_target", [False, True])
@pytest.mark.parametrize("name", ["class weights", "ignored classes"])
def test_heads_of_gradients_learn_from_losses_that_count(name, sees_target):
    loss_fn, ignored, of_data, num_terms = CASES[name]
    options = {"head_layers": 0, "head_sees_target": sees_target}
    made = build_gradient_network(adl_dist.method("dni", **options), (8,), num_classes=C, seed=0)
    heads = [ByHand(made.double().parameters(), 0, C * sees_target) for _ in range(2)]
    modules = cut(net(), num_stages=3, balance=[2, 2, 2])
    epochs, arguments = for_oracle(loss_fn, ignored, of_data, num_terms)
    expected = train_by_synthetic_gradients(modules, heads, epochs, sees_target=sees_target, **arguments)[0]
    assert_close(fitted(loss_fn, ignored, {}, K=3, method="dni", options=options)[0], expected)


# --- Processes, stops, records -----------------------------------------------------------------------------

OF_RANKS = [(name, {}) for name in ("class weights", "tokens", "a loss of one's own")] + [
    ("ignored classes", {"method": "adl", "options": {"delay": [3, 3, 1]}}),
    ("ignored classes", {"method": "dgl", "options": {"head": "linear"}}),
    ("class weights", {"method": "dgl", "options": {"head": "linear"}, "M": 1}),
    ("ignored classes", {"method": "dni", "options": {"head_layers": 0, "head_sees_target": True}}),
    ("tokens", {"method": "gpipe", "options": {"recompute": "except_last"}}),
]


def fit_all():
    return [fitted(*CASES[name][:3], **{"K": 3, "method": "adl", **options}) for name, options in OF_RANKS]


@pytest.mark.ranks
def test_processes_get_the_weights_of_one_process():
    by_rank, in_one_process = run_ranks(3, fit_all, timeout_seconds=100), fit_all()
    for of_rank in by_rank:
        for case, (state, summary), (expected, in_one) in zip(OF_RANKS, of_rank, in_one_process, strict=True):
            assert [n for n in expected if not torch.equal(state[n], expected[n])] == [], case
            for figure in ("validation_loss", "validation_accuracy"):
                assert summary.get(figure) == in_one.get(figure), case


@pytest.mark.parametrize("method", ["bp", "adl"])
def test_a_run_that_was_ended_in_mid_epoch_has_the_same_groups(method, tmp_path):
    case, of_run = CASES["tokens"][:3], {"K": 2, "method": method, "run_dir": tmp_path, "monitoring": SILENT}
    checkpoints = adl_dist.CheckpointPolicy(every_updates=1)
    fitted(*case, max_updates=4, checkpoints=checkpoints, **of_run)
    resumed, _ = fitted(*case, checkpoints=checkpoints, **of_run)
    if method == "bp":
        assert_close(resumed, by_torch(*case)[0])
    whole, _ = fitted(*case, checkpoints=checkpoints, **of_run | {"run_dir": tmp_path / "whole"})
    assert [name for name in whole if not torch.equal(whole[name], resumed[name])] == []


def records(folder, name):
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["name"] == name]


@pytest.mark.parametrize("name", ["tokens", "class weights", "ignored classes"])
def test_recorded_figures_are_those_of_the_whole_group(name, tmp_path, capsys):
    loss_fn, ignored, of_data, num_terms = CASES[name]
    _, losses, _ = by_torch(loss_fn, ignored, of_data)
    fitted(
        loss_fn,
        ignored,
        of_data,
        K=2,
        run_dir=tmp_path,
        monitoring=adl_dist.Monitoring(tensorboard=False),
        val_dataset=None,
    )
    written = records(tmp_path, "train/loss")
    assert [r["value"] for r in written] == pytest.approx(losses, rel=1e-12)
    _, y = data(ignored, **of_data).tensors
    of_groups = [num_terms(group).item() for group in y.split(M * MICRO_BATCH)] * EPOCHS
    assert [r["num_terms"] for r in written] == pytest.approx(of_groups, rel=1e-12)
    assert [r["num_samples"] for r in written] == [12, 12, 8] * EPOCHS
    right, judged = of_the_first_group(ignored, of_data)
    accuracy = records(tmp_path, "train/accuracy")[0]
    assert (accuracy["value"], accuracy["num_targets"]) == (right / judged, judged)
    epoch = sum(loss * n for loss, n in zip(losses[-3:], of_groups[-3:], strict=True)) / sum(of_groups[-3:])
    assert f"loss {epoch:.4f}" in capsys.readouterr().out.strip().splitlines()[-1]


def of_the_first_group(ignored, of_data):
    x, y = (tensor[: M * MICRO_BATCH] for tensor in data(ignored, **of_data).tensors)
    counts = y >= 0
    return ((net(**of_data)(x).argmax(1) == y) & counts).sum().item(), counts.sum().item()


def test_a_group_without_any_term_stops_as_in_torch():
    loss_fn, ignored, of_data, _ = CASES["ignored classes"]
    with pytest.raises(DivergedError, match="stage 1: the loss is nan at update 1 "):
        fitted(loss_fn, ignored, of_data, K=2, M=1)
    with pytest.raises(DivergedError, match="stage 0: the loss is nan at update 1 "):
        fitted(*CASES["a loss of one's own"][:3], K=1, M=1)


def test_a_validation_set_without_any_term_is_refused():
    empty = Subset(data(-1), range(MICRO_BATCH, 2 * MICRO_BATCH))
    told = "the validation data has 3 samples, but nothing that the loss averages over: it ignores all their targets"
    with pytest.raises(DataError, match=told):
        trainer_of(nn.CrossEntropyLoss(ignore_index=-1), {}, 2, 1).evaluate(empty, batch_size=2)


# --- What cannot be weighted right -------------------------------------------------------------------------


def written_by_hand(out, target):
    return F.cross_entropy(out, target)


SMOOTH, SUM = (functools.partial(F.cross_entropy, **how) for how in ({"label_smoothing": 0.1}, {"reduction": "sum"}))
IGNORES = r"training dataset: micro-batch \d of epoch . has target -100, which the loss ignores.*loss.ignore_index=-1"
MAY_IGNORE = r"target -100, which torch's losses ignore; .* give the loss a num_terms\(target\)"
REFUSED = [
    (nn.CrossEntropyLoss(), {"ignored": -100}, DataError, IGNORES),
    (SMOOTH, {"ignored": -100}, DataError, IGNORES),
    (written_by_hand, {"ignored": -100}, DataError, MAY_IGNORE),
    (written_by_hand, {"ignored": -100, **TOKENS}, DataError, MAY_IGNORE),
    (SUM, {}, ConfigError, "the loss is a sum"),
]


@pytest.mark.parametrize(("loss_fn", "of_data", "error", "told"), REFUSED)
def test_what_would_be_weighted_wrong_is_refused(loss_fn, of_data, error, told):
    trainer = trainer_of(loss_fn, TOKENS if "tokens" in of_data else {}, 2, M)
    with pytest.raises(error, match=told):
        trainer.fit(data(**of_data), epochs=1, batch_size=12, monitoring=QUIET)


def test_a_class_that_a_token_cannot_have_is_refused():
    bad = data(-100, tokens=True)
    bad.tensors[1][20, 1] = C
    trainer = trainer_of(nn.CrossEntropyLoss(), TOKENS, 2, M)
    with pytest.raises(DataError, match=r"micro-batch 6 of epoch . has target 4, but the model has 4 outputs"):
        trainer.fit(bad, epochs=1, batch_size=12, shuffle=False, monitoring=QUIET)


def test_a_num_terms_that_fails_does_so_before_the_first_update(monkeypatch):
    monkeypatch.setattr(masked_mean, "num_terms", lambda target: target.nothing)
    with pytest.raises(ConfigError, match=r"num_terms fails on int64.2, 5.: AttributeError"):
        fitted(*CASES["a loss of one's own"][:3], K=2)


class WithPenalty(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net()

    def forward(self, x):
        return self.net(x), 0.5


def test_a_number_may_stand_with_outputs_all_ignored():
    def with_penalty(out, target):
        return masked_mean(out[0], target)

    with_penalty.num_terms = masked_mean.num_terms
    states = []
    for model, loss_fn in ((nn.Sequential(WithPenalty()), with_penalty), (net(), masked_mean)):
        trainer = toy_trainer(1, M, model=model, loss_fn=loss_fn, dtype=torch.float64)
        trainer.fit(data(PAD), epochs=1, batch_size=M * MICRO_BATCH, monitoring=SILENT)
        trainer.evaluate(data(PAD), batch_size=MICRO_BATCH)
        states.append([*trainer.full_state_dict().values()])
    for one, other in zip(*states, strict=True):
        torch.testing.assert_close(one, other)


def test_a_loss_that_is_no_mean_may_evaluate_but_not_train():
    trainer = toy_trainer(2, M, model=net(), loss_fn=functools.partial(weighted, weight=WEIGHT), dtype=torch.float64)
    trainer.evaluate(data(seed=2), batch_size=MICRO_BATCH)
    with pytest.raises(ConfigError, match="the loss is no mean over the samples"):
        trainer.fit(data(num=24, seed=2), epochs=1, batch_size=M * MICRO_BATCH, monitoring=SILENT)


def weighted(out, target, weight):
    """A loss of the user's own that does not say what it averages over."""
    return F.nll_loss(out, target, weight)


class Branches(nn.Module):
    """Returns two outputs; the loss uses the first one only."""

    def __init__(self):
        super().__init__()
        self.net, self.unused = net(), net()

    def forward(self, x):
        return self.net(x[0]), self.unused(x[1])


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        return self.first(x), self.second(x)


@pytest.mark.parametrize("K", [1, 2])
def test_an_output_that_the_loss_ignores_gets_no_gradient(K):
    def of_first(out, target):
        return masked_mean(out[0], target)

    of_first.num_terms = masked_mean.num_terms
    model = nn.Sequential(Twice(), Branches()).double()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer = toy_trainer(K, M, model=model, loss_fn=of_first, optimizer=sgd, dtype=torch.float64)
    trainer.fit(data(PAD), epochs=1, batch_size=M * MICRO_BATCH, shuffle=False, monitoring=SILENT)
    moved = {name for name, weights in trainer.full_state_dict().items() if not torch.equal(weights, before[name])}
    assert moved == {name for name in before if not name.startswith(("0.second", "1.unused"))}


def test_validation_of_which_all_is_ignored_is_told_as_that():
    trainer = trainer_of(nn.NLLLoss(ignore_index=-1), {}, 2, 2)
    nothing = data(num=5)
    nothing.tensors[1].fill_(-1)
    said = r"the validation data has 5 samples, but nothing that the loss averages over: it ignores all their targets"
    with pytest.raises(DataError, match=said):
        trainer.fit(data(-1), val_dataset=nothing, epochs=1, batch_size=6, monitoring=SILENT)
