"""K processes against one process, bit for bit, for every odd model that trains."""

import pytest
import torch

from adl_dist import AdlError
from tests.adversarial import table
from tests.adversarial.cases import STAGES
from tests.adversarial.harness import train
from tests.adversarial.outcomes import OPEN, letters
from tests.support.ranks import run_ranks
from tests.support.tiers import slow

pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore")]

AT_A_TIME = 24


def that_are(letter, K, granularity):
    """Names of the models that are trained with K stages, or those that are refused at the start."""
    names = (name for name in table.MODELS if letters(name, granularity)[K] == letter)
    return [name for name in names if (name, granularity) not in OPEN]


def train_all(K, names, granularity):
    """What each leaves, or the kind of its refusal; in this process, or as one rank of K."""
    torch.set_num_threads(1)
    return [trained(table.MODELS[name], K, granularity) for name in names]


def trained(case, K, granularity):
    try:
        it = train(case, K, STAGES[K], granularity)
    except AdlError as error:
        return type(error).__name__
    return it.state, it.validation


DEFAULT = {
    2: ["padding_mask", "memory_bank", "hands_on_with_booleans", "dropout_path", "argmax_in_the_middle", "lora"],
    3: ["detached_branch", "head_for_training", "rope_attention", "teacher", "flow"],
}
RUNS = [pytest.param(K, names, "block", id=f"{K}") for K, names in DEFAULT.items()]
for K in (2, 3):
    for granularity in ("block", "layer"):
        names = that_are("=", K, granularity)
        some = [names[i : i + AT_A_TIME] for i in range(0, len(names), AT_A_TIME)]
        RUNS += [slow(K, part, granularity, id=f"{K} {granularity} {part[0]}") for part in some]


# An error ends the processes, so each of them gets its own.
REFUSED = [slow(name, granularity) for granularity in ("block", "layer") for name in that_are("R", 2, granularity)]


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("K", "names", "granularity"), RUNS)
def test_k_processes_train_odd_models_as_one_does(K, names, granularity):
    by_rank = run_ranks(K, train_all, K, names, granularity, timeout_seconds=220)
    for name, right, *of_ranks in zip(names, train_all(K, names, granularity), *by_rank, strict=True):
        assert not isinstance(right, str), f"{name}: {right}"
        expected, of_one = right
        for found in of_ranks:
            assert not isinstance(found, str), f"{name}: {found}"
            state, validation = found
            assert state.keys() == expected.keys(), name
            assert [n for n, t in expected.items() if not torch.equal(state[n].to_dense(), t.to_dense())] == [], name
            assert validation == of_one, name


@pytest.mark.parametrize(("name", "granularity"), [("one_storage", "block"), *REFUSED])
def test_each_of_k_processes_refuses_what_one_refuses(name, granularity):
    (in_one,) = train_all(2, [name], granularity)
    assert isinstance(in_one, str)
    by_rank = [found for (found,) in run_ranks(2, train_all, 2, [name], granularity, timeout_seconds=100)]
    assert in_one in by_rank
    assert {*by_rank} <= {in_one, "StageFailed"}  # what one rank tells another
