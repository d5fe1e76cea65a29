"""K processes against one process, bit for bit, for every odd model that trains."""

import pytest
import torch

from adl_dist import AdlError
from tests.adversarial import table
from tests.adversarial.cases import STAGES
from tests.adversarial.harness import train
from tests.adversarial.verdicts import expected
from tests.support.ranks import run_ranks
from tests.support.tiers import slow

pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore")]

AT_A_TIME = 24
VERDICTS = expected()
EQUAL = [name for name, case in table.MODELS.items() if not {(name, 2), (name, 3)} & {*VERDICTS}]
REFUSED = [name for name in table.MODELS if VERDICTS.get((name, 2), ("",))[0] == "refused"]


def train_all(K, names):
    """What each leaves, or the kind of its refusal; in this process, or as one rank of K."""
    torch.set_num_threads(1)
    return [trained(table.MODELS[name], K) for name in names]


def trained(case, K):
    try:
        it = train(case, K, STAGES[K], "layer")
    except AdlError as error:
        return type(error).__name__
    return it.state, it.validation


DEFAULT = {
    2: ["padding_mask", "memory_bank", "hands_on_with_booleans", "dropout_path", "argmax_in_the_middle", "lora"],
    3: ["detached_branch", "head_for_training", "rope_attention", "flow"],
}
RUNS = [pytest.param(K, names, id=f"{K}") for K, names in DEFAULT.items()]
for K in DEFAULT:
    parts = [EQUAL[i : i + AT_A_TIME] for i in range(0, len(EQUAL), AT_A_TIME)]
    RUNS += [slow(K, part, id=f"{K} {part[0]}") for part in parts]


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("K", "names"), RUNS)
def test_k_processes_train_odd_models_as_one_does(K, names):
    by_rank = run_ranks(K, train_all, K, names, timeout_seconds=220)
    for name, right, *of_ranks in zip(names, train_all(K, names), *by_rank, strict=True):
        assert not isinstance(right, str), f"{name}: {right}"
        expected_state, of_one = right
        for found in of_ranks:
            assert not isinstance(found, str), f"{name}: {found}"
            state, validation = found
            assert state.keys() == expected_state.keys(), name
            differing = [n for n, t in expected_state.items() if not torch.equal(state[n].to_dense(), t.to_dense())]
            assert differing == [], name
            assert validation == of_one, name


@pytest.mark.parametrize("name", [REFUSED[0], *map(slow, REFUSED[1:])])  # an error ends the processes
def test_each_of_k_processes_refuses_what_one_refuses(name):
    (in_one,) = train_all(2, [name])
    assert isinstance(in_one, str)
    by_rank = [found for (found,) in run_ranks(2, train_all, 2, [name], timeout_seconds=100)]
    assert in_one in by_rank
    assert {*by_rank} <= {in_one, "StageFailed"}  # what one rank tells another
