"""Networks drawn by a seed: skips, views, in-place operations, shared layers, branches without a gradient."""

import time
from collections import Counter

import pytest

from tests.adversarial.harness import outcome
from tests.adversarial.random_nets import pasteable, program
from tests.support.tiers import slow

pytestmark = pytest.mark.filterwarnings("ignore")
AT_A_TIME = 50


@pytest.mark.timeout(300)
@pytest.mark.parametrize("first", [0, *(slow(first) for first in range(AT_A_TIME, 2000, AT_A_TIME))])
def test_random_networks_are_right_or_refused(first, record_property):
    seeds = range(first, first + (AT_A_TIME if first else 30))
    began, letters = time.process_time(), Counter()
    for seed in seeds:
        source, case, how = program(seed)
        found = outcome(case, how["K"], how["granularity"], M=how["M"], method=how["method"])
        letters[found.letter] += 1
        assert found.letter in "=R-", f"seed {seed}, {how}: {found.text}\n\n{pasteable(source, case, how)}"
    seconds = (time.process_time() - began) / len(seeds)
    record_property("measured", f"seeds {seeds}: {dict(letters)}, {seconds:.2f} s each")
    assert letters["="] > len(seeds) / 2, f"most networks must train, not be refused: {letters}"
