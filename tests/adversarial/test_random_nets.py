"""Networks drawn by a seed: skips, views, in-place operations, shared layers, branches without a gradient."""

import time
from collections import Counter

import pytest

from tests.adversarial.harness import outcome
from tests.adversarial.random_nets import pasteable, program
from tests.support.tiers import slow

pytestmark = pytest.mark.filterwarnings("ignore")
BOUNDS = [0, 30, *range(50, 2001, 50)]  # 30 seeds by default, and 50 at a time


@pytest.mark.timeout(300)
@pytest.mark.parametrize("first", [0, *map(slow, BOUNDS[1:-1])])
def test_random_networks_are_right_or_refused(first, record_property):
    seeds = range(first, BOUNDS[BOUNDS.index(first) + 1])
    began, letters = time.process_time(), Counter()
    for seed in seeds:
        source, case, how = program(seed)
        found = outcome(case, how["K"], how["granularity"], M=how["M"], method=how["method"])
        letters[found.letter] += 1
        assert found.letter in "=R-", f"seed {seed}, {how}: {found.text}\n\n{pasteable(source, case, how)}"
    seconds = (time.process_time() - began) / len(seeds)
    record_property("measured", f"seeds {seeds}: {dict(letters)}, {seconds:.2f} s each")
    assert letters["="] > len(seeds) / 2, f"most networks must train, not be refused: {letters}"
