"""Trains one case with the product and with the oracle, and says in one letter what came of it."""

import re
import types
from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

import adl_dist
from tests.adversarial.cases import EPOCHS, STAGES, batches, dataset
from tests.adversarial.oracle import Uncut, delays_of
from tests.support.values import SILENT, values

TOLERANCE = 1e-10  # relative to the largest element of a tensor
# Both sides are nothing but the rounding of numbers near 1 that cancel, like the mean of what BatchNorm returns.
ZERO = 4 * torch.finfo(torch.float64).eps
BEGINS = {1: [], 2: [3], 3: [1, 3], 5: [1, 2, 3, 5]}  # units of a chain, where a model that draws is cut


@dataclass(frozen=True)
class Outcome:
    """``=`` equal, ``R`` refused, ``x`` anything else; and a text."""

    letter: str
    text: str = ""


class Recorded:
    """A loss that remembers what it was called with and what it gave."""

    def __init__(self, loss_fn, *, is_replayed=False):
        self.loss_fn = loss_fn
        # The product undoes what a replay leaves in a loss; it does not look into modules of Python.
        self.kept = types.ModuleType("kept") if is_replayed else types.SimpleNamespace()
        self.kept.losses, self.kept.outputs = [], []

    def __call__(self, output, target):
        loss = self.loss_fn(output, target)
        if not torch.is_grad_enabled():
            self.kept.outputs.append(output)
        elif isinstance(loss, torch.Tensor):
            self.kept.losses.append(loss.detach().clone())
        return loss


@dataclass(frozen=True)
class Trained:
    """What a run left: weights and buffers, the losses of its micro-batches, what it gave at the last evaluation."""

    state: dict
    losses: list
    outputs: list
    validation: float
    owner: dict


def slow_start(update):
    return 0.4 + 0.05 * update


def lr_schedule(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, slow_start)


def trainer_of(
    case,
    K,
    M,
    granularity="block",
    *,
    method="adl",
    recompute=None,
    model=None,
    loss_fn=None,
    of_method=None,
    **options,
):
    of_method = {**(of_method or {}), **({"recompute": recompute} if recompute else {})}
    where = {"balance": [str(unit) for unit in BEGINS[K]]} if case.random and K > 1 else {}
    return adl_dist.Trainer(
        case.model() if model is None else model,
        loss_fn=loss_fn or case.loss,
        optimizer=case.optimizer,
        method=adl_dist.method(method, accumulation_steps=M, **of_method),
        num_stages=K,
        lr_schedule=lr_schedule,
        **values(
            **{"threads": 1, "dtype": torch.float64, "granularity": granularity, "timeout_seconds": 30},
            pick_next=min,  # every stage runs as far ahead as it can, as processes do
            **{**where, **case.run, **options},
        ),
    )


def fit(trainer, case, M, *, epochs=EPOCHS, validates=True, **options):
    return trainer.fit(
        dataset(case.data, case.counts[0], 1),
        epochs=epochs,
        batch_size=case.size * M,
        val_dataset=dataset(case.data, case.counts[1], 2) if validates else None,
        shuffle=False,
        monitoring=SILENT,
        **options,
    )


def train(case, K, M, granularity="block", **options):
    """Train with the product, all stages in this process."""
    loss_fn = Recorded(case.loss, is_replayed=bool(options.get("recompute")))
    trainer = trainer_of(case, K, M, granularity, loss_fn=loss_fn, **options)
    summary = fit(trainer, case, M)
    num_train, num_val = (-(-n // case.size) for n in case.counts)
    state = {name: tensor.clone() for name, tensor in tensors_of(trainer).items()}
    losses, outputs = loss_fn.kept.losses[-EPOCHS * num_train :], loss_fn.kept.outputs[-num_val:]
    return Trained(state, losses, outputs, summary["validation_loss"], owner_of(trainer))


def tensors_of(trainer):
    """The full state_dict without what modules add to it (``get_extra_state``)."""
    return {name: t for name, t in trainer.full_state_dict().items() if isinstance(t, torch.Tensor)}


def oracle_of(case, K, M, owner, *, method="adl", model=None, lr_schedule=lr_schedule):
    """The uncut model (``model``, or a new one), to be trained as K stages would, of which ``owner`` tells."""
    model = case.model() if model is None else model
    return Uncut(
        model, owner, case.optimizer, case.loss,
        delays=delays_of(method, K, M), M=M, lr_schedule=lr_schedule, count=case.count,
        begins=BEGINS[K] if case.random else None,
    )  # fmt: skip


def expected(case, K, M, owner, **options):
    """Train with the oracle."""
    uncut = oracle_of(case, K, M, owner, **options)
    training, validation = (batches(case.data, n, seed, case.size) for n, seed in zip(case.counts, (1, 2), strict=True))
    for _ in range(EPOCHS):
        uncut.epoch(training)
        uncut.outputs.clear()
        uncut.evaluate(validation)
    state = {name: t.detach() for name, t in uncut.model.state_dict().items() if isinstance(t, torch.Tensor)}
    return Trained(state, uncut.losses, uncut.outputs, uncut.validation[-1], owner)


def owner_of(trainer):
    """The stage of each parameter and buffer by name, once the trainer has cut its model."""
    return {name: k for k, stage in trainer._partitioned.modules.items() for name in stage.state_dict()}


def outcome(case, K, granularity="block", *, method="adl", M=None, **options):
    """Train both ways and compare. A refusal must be an AdlError that leaves the user's model as it was."""
    M = M or STAGES[K]
    model = case.model()
    before = frozen_copy(model)
    try:
        found = train(case, K, M, granularity, method=method, model=model, **options)
    except adl_dist.AdlError as error:
        return refusal(case, error, before, model)
    except Exception as error:
        return Outcome("x", f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
    if case.random == "other":
        again = train(case, K, M, granularity, method=method, **options)
        return verdict(differences(found, again, exact=True), found, before)
    try:
        # The product calls the loss more often: it looks now and then whether that is a mean.
        right, found = replace(expected(case, K, M, found.owner, method=method), losses=[]), replace(found, losses=[])
    except AssertionError as error:  # trained, though the cut tears a parameter in two
        return Outcome("x", f"trained with {error}")
    return verdict(
        differences(found, right, exact=K == 1 and M == 1 and not case.run, ignores=case.ignores), found, before
    )


def refusal(case, error, before, model):
    text = " ".join(str(error).split())
    if error.exit_code != 2 or "unexpected" in text or "Traceback" in text:
        return Outcome("x", f"{type(error).__name__}: {text[:400]}")
    if moved := [name for name, t in frozen_copy(model).items() if not torch.equal(t, before[name])]:
        return Outcome("x", f"refused after {moved[:3]} had changed: {text}")
    if not re.search(case.word, text):
        return Outcome("x", f"refused without the word {case.word!r}: {text}")
    return Outcome("R", text)


def refused(run, model, word):
    """``run`` raises an AdlError of the user's kind, with the word, before a weight of ``model`` has moved."""
    before = frozen_copy(model)
    with pytest.raises(adl_dist.AdlError, match=word) as error:
        run()
    assert error.value.exit_code == 2
    assert "unexpected" not in str(error.value)
    assert [name for name, t in frozen_copy(model).items() if not torch.equal(t, before[name])] == []


def verdict(wrong, found, before):
    if wrong:
        return Outcome("x", "; ".join(wrong[:4]))
    # By name: one that began as ones may have moved, and another one stayed.
    still = [name for name, t in before.items() if name in found.state and t.equal(found.state[name])]
    return Outcome("x", "no weight has moved") if len(still) == len(before) else Outcome("=")


def frozen_copy(model):
    """Parameters that hold numbers, as they are now."""
    lazy = nn.parameter.UninitializedTensorMixin
    return {name: p.detach().clone() for name, p in model.named_parameters() if not isinstance(p, lazy)}


def differences(found, right, *, exact=False, ignores=""):
    """Describe where two runs differ by more than rounding, or at all."""
    if found.state.keys() != right.state.keys():
        return [f"names: {sorted(found.state.keys() ^ right.state.keys())}"]
    pairs = [(name, found.state[name], t) for name, t in right.state.items()]
    if right.losses:
        pairs.append(("losses", torch.stack(found.losses), torch.stack(right.losses)))
    both = zip(found.outputs, right.outputs, strict=True)
    pairs += [("outputs", a, b) for x, y in both for a, b in zip(leaves(x), leaves(y), strict=True)]
    if ignores:
        pairs = [pair for pair in pairs if pair[0] != "outputs" and not re.search(ignores, pair[0])]
    wrong = [f"{name}: {how}" for name, a, b in pairs if (how := difference(a, b, exact))]
    if not ignores and abs(found.validation - right.validation) > TOLERANCE * abs(right.validation):
        wrong.append(f"validation loss {found.validation} instead of {right.validation}")
    return wrong


def unlike(state, right):
    """Where two state_dicts differ by more than rounding."""
    assert state.keys() == right.keys()
    return [f"{name}: {how}" for name, t in right.items() if (how := difference(state[name], t))]


def difference(a, b, exact=False):
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"{a.dtype} {list(a.shape)} instead of {b.dtype} {list(b.shape)}"
    a, b = a.to_dense(), b.to_dense()
    if torch.equal(a, b):
        return ""
    if not a.numel() or not (a.is_floating_point() or a.is_complex()):
        return "other values"
    if not exact and max(float(a.abs().max()), float(b.abs().max())) <= ZERO:
        return ""
    off = float((a - b).abs().max()) / max(float(b.abs().max()), 1e-6)
    return "" if not exact and off <= TOLERANCE else f"{off:.1e} off"


def leaves(output):
    return [t for t in torch.utils._pytree.tree_leaves(output) if isinstance(t, torch.Tensor)]


def variant(case, **changes):
    return replace(case, **changes)
