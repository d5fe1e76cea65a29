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


def that_train(K, granularity):
    """Names of the models that are trained with K stages, or refused at the start."""
    trains = (name for name in table.MODELS if letters(name, granularity)[K] in "=R")
    return [name for name in trains if (name, granularity) not in OPEN]


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
        names = that_train(K, granularity)
        some = [names[i : i + AT_A_TIME] for i in range(0, len(names), AT_A_TIME)]
        RUNS += [slow(K, part, granularity, id=f"{K} {granularity} {part[0]}") for part in some]


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("K", "names", "granularity"), RUNS)
def test_k_processes_train_odd_models_as_one_does(K, names, granularity):
    by_rank = run_ranks(K, train_all, K, names, granularity, timeout_seconds=220)
    in_one = train_all(K, names, granularity)
    num_trained = 0
    for rank in range(K):
        for name, found, right in zip(names, by_rank[rank], in_one, strict=True):
            if isinstance(right, str) or isinstance(found, str):
                assert found == right, name
                continue
            num_trained += 1
            (state, validation), (expected, of_one) = found, right
            assert state.keys() == expected.keys(), name
            assert [n for n, t in expected.items() if not torch.equal(state[n].to_dense(), t.to_dense())] == [], name
            assert validation == of_one, name
    assert num_trained, "all were refused"
