"""Every odd model in stages is equal to the uncut one, or refused by one line, as verdicts.txt says."""

import pytest

from tests.adversarial.table import MODELS
from tests.adversarial.verdicts import STAGES, expected, is_as, verdict_of
from tests.support.tiers import slow

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch, about what it has deprecated
EXPECTED = expected()


@pytest.mark.parametrize("K", [pytest.param(K) if max(STAGES) == K else slow(K) for K in STAGES])
@pytest.mark.parametrize("name", MODELS)
def test_an_odd_model_is_equal_or_refused(name, K):
    kind, text = EXPECTED.get((name, K), ("equal", ""))
    found = verdict_of(name, K)
    assert is_as(found, kind, text), f"{found.kind}: {found.text}; expected {kind}: {text}"


def test_verdicts_are_of_models_that_there_are():
    assert {name for name, _ in EXPECTED} <= {*MODELS}
    assert len(MODELS) > 200
