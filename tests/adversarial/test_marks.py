"""What the product runs besides the training (trial, measurement, replay, evaluation) leaves no mark on it."""

from dataclasses import replace

import pytest
import torch

import adl_dist
from tests.adversarial import table
from tests.adversarial.cases import NUM_VALIDATION, dataset
from tests.adversarial.harness import (
    TOLERANCE,
    Outcome,
    differences,
    expected,
    fit,
    frozen_copy,
    outcome,
    owner_of,
    train,
    trainer_of,
)
from tests.adversarial.verdicts import expected as verdicts
from tests.support.tiers import covering

pytestmark = pytest.mark.filterwarnings("ignore")

VERDICTS = verdicts()
# Models whose forward moves something, and some that read what they moved.
MOVING = [
    "own_generator", "counter", "counter_in_list", "steps_in_buffer", "unsaved_buffer", "memory_bank",
    "vector_quantiser", "fake_quant", "act_norm", "embedding_with_max_norm", "spectral_norm", "cumulative_norm",
    "instance_norm", "functional_norm", "whitening", "dropout_path",
]  # fmt: skip


def right(found, case, allowed="="):
    assert found.letter in allowed, f"{case.name}: {found.text}"


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", covering(MOVING, ["counter_in_list", "embedding_with_max_norm"]))
def test_measuring_the_costs_leaves_no_mark(name):
    """Without staleness it is all the same where a measured cut is."""
    case = table.MODELS[name]
    if case.random:
        pytest.skip("its oracle must know the cut")
    right(outcome(case, 2, method="1f1b", M=2, balance="auto", granularity="block"), case, "=R")


@pytest.mark.parametrize("name", covering(MOVING, ["memory_bank", "spectral_norm", "dropout_path", "own_generator"]))
def test_a_replayed_forward_is_the_first_one(name):
    """GPipe that keeps inputs only computes what GPipe does: nothing moves twice, nothing is read later."""
    if name == "counter_in_list":
        pytest.skip("nothing sees that it counts, so that its Python runs again")
    case = table.MODELS[name]
    found, kept = (train(case, 2, 3, method="gpipe", **options) for options in ({"recompute": "always"}, {}))
    assert differences(replace(found, losses=[]), replace(kept, losses=[]), exact=True) == []


@pytest.mark.parametrize("K", [1, 2])
@pytest.mark.parametrize("name", covering(MOVING, ["counter"]))
def test_an_evaluation_changes_no_training(name, K):
    """Called before, between and after; what a forward in evaluation moves, it may move."""
    case = table.MODELS[name]
    if name in ("whitening", "embedding_with_max_norm", "dropout_path"):
        pytest.skip("it moves in evaluation, too, or draws what all stages draw, which its oracle does not")
    model = case.model()
    before = frozen_copy(model)
    try:
        trainer = trainer_of(case, K, 1, model=model)
        first = trainer.evaluate(dataset(case.data, NUM_VALIDATION, 2), batch_size=2)["validation_loss"]
        assert [n for n, t in frozen_copy(model).items() if not torch.equal(t, before[n])] == []
        fit(trainer, case, 1)
    except adl_dist.AdlError as error:
        found = Outcome("R", str(error))
        assert (name, 2) in VERDICTS, found
        return
    should = expected(case, K, 1, owner_of(trainer))
    assert first != should.validation
    last = trainer.evaluate(dataset(case.data, NUM_VALIDATION, 2), batch_size=3)["validation_loss"]
    assert abs(last - should.validation) <= TOLERANCE * abs(should.validation)
