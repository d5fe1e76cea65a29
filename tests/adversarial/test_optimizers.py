"""Odd optimizers: each trains as the equations say, or is refused by name before the first update.

What is right comes from one uncut model in plain torch (oracle.py); at K = 1, M = 1 to the bit.
"""

import pytest

from tests.adversarial import table
from tests.adversarial.cases import STAGES
from tests.adversarial.harness import outcome, variant
from tests.support.tiers import covering

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch, about what it has deprecated
REFUSED = {"lbfgs", "sharpness", "not_an_optimizer"}


@pytest.mark.parametrize("name", covering(table.OPTIMIZERS, table.DEFAULT_OPTIMIZERS))
def test_an_odd_optimizer_trains_rightly_or_is_refused(name):
    found = {K: outcome(table.OPTIMIZERS[name], K) for K in STAGES}
    expected = "R" if name in REFUSED else "="
    assert {K: it for K, it in found.items() if it.letter != expected} == {}


def test_a_wrong_result_is_seen():
    """The comparison itself: half the learning rate, or one update less, is not equal."""
    case = table.MODELS["lora"]
    assert outcome(case, 2).letter == "="
    assert outcome(variant(case, count=lambda target: 1.0), 2).letter == "x"  # the smaller micro-batch counts too much
