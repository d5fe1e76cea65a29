"""Odd models and optimizers, stopped and resumed: the same bits as without the stop, or refused at the start."""

from dataclasses import replace

import pytest
import torch

from adl_dist import AdlError
from tests.adversarial import table
from tests.adversarial.cases import EPOCHS, NUM_SAMPLES, NUM_VALIDATION, batches
from tests.adversarial.harness import (
    Outcome,
    Trained,
    differences,
    fit,
    frozen_copy,
    lr_schedule,
    oracle_of,
    owner_of,
    refusal,
    tensors_of,
    train,
    trainer_of,
)
from tests.adversarial.oracle import delays_of
from tests.adversarial.verdicts import expected
from tests.support.tiers import covering

pytestmark = pytest.mark.filterwarnings("ignore")


def updates_per_epoch(case, M):
    return -(-case.counts[0] // (case.size * M))


def resumed(case, K, M, folder, *, then=None, stop=None):
    """Train for one epoch, or ``stop`` updates; resume with a new model and trainer, on ``then`` stages."""
    model = case.model()
    before = frozen_copy(model)
    try:
        first = trainer_of(case, K, M, model=model)
        fit(first, case, M, run_dir=folder, max_updates=stop or updates_per_epoch(case, M))
    except AdlError as error:
        return refusal(case, error, before, model)
    except Exception as error:
        return Outcome("x", f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
    torch.manual_seed(12345)  # a new process would have another stream
    trainer = trainer_of(case, then or K, M)
    summary = fit(trainer, case, M, run_dir=folder)
    assert summary["updates"] == EPOCHS * updates_per_epoch(case, M)
    owners = [owner_of(first), owner_of(trainer)]
    return Trained(tensors_of(trainer), [], [], summary["validation_loss"], owners)


def letter(found, right):
    if isinstance(found, Outcome):
        return found
    found = replace(found, losses=right.losses, outputs=right.outputs)
    wrong = differences(found, right, exact=True)
    return Outcome("x", "; ".join(wrong[:3])) if wrong else Outcome("=")


# Their state is not in what state_dict() returns, so a resume begins without it.
UNSAVED = {
    *("lookahead", "counting", "two_in_one", "step_hook"),
    *("own_generator", "counter", "counter_in_list", "unsaved_buffer", "remembers_the_last"),
}
OPTIMIZERS = [name for name in table.OPTIMIZERS if name not in UNSAVED]
RESUMES = ["schedule_free", "prodigy", "shampoo", "nadam"]


@pytest.mark.parametrize("name", covering(OPTIMIZERS, [*RESUMES, "nadamw", "muon", "muon_partly_frozen"]))
@pytest.mark.parametrize("K", [2])
def test_an_odd_optimizer_resumes_or_is_refused(name, K, tmp_path):
    case = table.OPTIMIZERS[name]
    found = resumed(case, K, 2, tmp_path / "run")
    found = letter(found, train(case, K, 2)) if isinstance(found, Trained) else found
    assert found.letter == "=" if name in RESUMES else found.letter in "=R", found.text


VERDICTS = expected()
TRAINED = [name for name in table.MODELS if (name, 2) not in VERDICTS and name not in UNSAVED]


@pytest.mark.parametrize("name", covering(TRAINED, ["memory_bank", "dropout_path", "hands_on_pair"]))
def test_an_odd_model_resumes_or_is_refused(name, tmp_path):
    case = table.MODELS[name]
    found = resumed(case, 2, 2, tmp_path / "run")
    found = letter(found, train(case, 2, 2)) if isinstance(found, Trained) else found
    assert found.letter in "=R", found.text


MOVED_BY_EVALUATION = {"whitening"}  # and a stop evaluates once more
WITHIN = [name for name in TRAINED if name not in MOVED_BY_EVALUATION]


@pytest.mark.parametrize("name", covering(WITHIN, ["spectral_norm"]))
def test_an_odd_model_resumes_within_an_epoch(name, tmp_path):
    """With one stage nothing is in flight, so that a stop anywhere changes nothing."""
    case = table.MODELS[name]
    found = resumed(case, 1, 2, tmp_path / "run", stop=updates_per_epoch(case, 2) - 1)
    found = letter(found, train(case, 1, 2)) if isinstance(found, Trained) else found
    assert found.letter in "=R", found.text


def on_other_stages(case, K, then, M, owners):
    """One epoch as K stages, the others as ``then``, by the oracle."""
    uncut = oracle_of(case, K, M, owners[0])
    for epoch in range(EPOCHS):
        if epoch == 1:
            uncut.cut_again(owners[1], case.optimizer, delays_of("adl", then, M), lr_schedule)
        uncut.epoch(batches(case.data, NUM_SAMPLES, 1))
        uncut.evaluate(batches(case.data, NUM_VALIDATION, 2))
    return Trained(uncut.model.state_dict(), [], [], uncut.validation[-1], owners)


MOVED = [
    "argmax_in_the_middle",
    "memory_bank",
    "partly_frozen",
    "padding_mask",
    "gradient_mask",
    "pruned",
    "weight_norm",
]


@pytest.mark.parametrize("name", covering(MOVED, ["partly_frozen"]))
@pytest.mark.parametrize(("K", "then"), [(2, 3), (3, 1)])
def test_an_odd_model_goes_on_with_other_stages(name, K, then, tmp_path):
    case = table.MODELS[name]
    found = resumed(case, K, 1, tmp_path / "run", then=then)
    assert isinstance(found, Trained), found
    assert differences(found, on_other_stages(case, K, then, 1, found.owner)) == []
