"""Random networks at every cut: equal to the uncut model, or refused; never wrong, and never another error."""

import itertools
import random
from collections import Counter

import pytest

from tests.support.random_networks import random_network
from tests.support.staged import compare, loss_of

pytestmark = pytest.mark.filterwarnings("ignore")
NUM_DEFAULT, NUM_SEEDS, AT_A_TIME = 40, 1000, 50
MOST_REFUSED = 0.1


def compared(case, cut):
    """Return the verdict; another exception is a failure that shows the network."""
    try:
        found = compare(case.build, case.batches, cut, loss=loss_of)
    except Exception as error:
        raise AssertionError(f"seed {case.seed}, cut {cut}:\n{case.source}") from error
    assert found.kind in ("equal", "close", "refused"), f"seed {case.seed}, cut {cut}: {found}\n{case.source}"
    return found


def every_cut(num_units, rng):
    """Return the sizes of two stages at every cut, and of three at one drawn pair for each."""
    cuts = [(stop,) for stop in range(1, num_units)]
    pairs = list(itertools.combinations(range(1, num_units), 2))
    cuts += rng.sample(pairs, min(len(pairs), num_units))
    return [[b - a for a, b in itertools.pairwise([0, *cut, num_units])] for cut in cuts]


@pytest.mark.parametrize("first", range(0, NUM_DEFAULT, 10))
def test_random_networks_are_equal_or_refused(first):
    for seed in range(first, first + 10):
        case = random_network(seed)
        for K in (2, 3):
            compared(case, K)


@pytest.mark.zoo
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("first", range(0, NUM_SEEDS, AT_A_TIME))
def test_random_networks_are_equal_or_refused_at_every_cut(first, record_property):
    """A network counts as refused if no cut into two stages can be made."""
    kinds, refused = Counter(), 0
    for seed in range(first, first + AT_A_TIME):
        case = random_network(seed)
        found = compared(case, 2)
        refused += found.kind == "refused"
        for sizes in every_cut(len(found.units), random.Random(seed)):
            kinds[compared(case, sizes).kind] += 1
    record_property("verdicts", f"{dict(kinds)}; {refused} networks refused")
    assert refused <= MOST_REFUSED * AT_A_TIME
