"""On GPUs receives posted ahead hold up no send, in the order in which NCCL starts its kernels by our settings."""

import itertools

import pytest

from adl_dist.distributed.device import FOR_NCCL
from adl_dist.schedule import Pipeline, max_pending_of, method
from adl_dist.training.edges import receives_ahead
from adl_dist.transport.process import POSTED_AHEAD
from tests.schedule.launch_order import standing_still
from tests.schedule.test_schedule import actions_of, every_variant

IN_ORDER = FOR_NCCL["NCCL_LAUNCH_ORDER_IMPLICIT"] != "0"
# With kernels that begin in the order of their launches; by their published delays, which tests of messages change.
STUCK_IN_ORDER = ("bp", "1f1b", "ddg", "fr", "pipedream", "2bw", "paci")


def still(chosen, K, sizes, **options):
    options = {"ahead": POSTED_AHEAD, "in_order_of_launches": IN_ORDER, **options}
    return standing_still(actions_of(K, sizes, chosen), max_pending=max_pending_of(Pipeline(chosen, K)), **options)


@every_variant
@pytest.mark.parametrize("K", [2, 3, 5])
def test_no_method_stands_still_with_the_settings_of_training(variant, K):
    name, options = variant
    for M, ahead in itertools.product((1, 4) if name not in ("2bw",) else (4,), (0, POSTED_AHEAD)):
        chosen = method(name, accumulation_steps=M, **options)
        assert still(chosen, K, [M] * (3 + 8 // M), ahead=ahead) == {}


@pytest.mark.parametrize("name", STUCK_IN_ORDER)
@pytest.mark.parametrize("K", [2, 4])
def test_in_the_order_of_launches_early_receives_hold_up_sends(name, K):
    chosen = method(name, accumulation_steps=4)
    assert still(chosen, K, [4] * 5, in_order_of_launches=True) != {}
    assert still(chosen, K, [4] * 5, in_order_of_launches=True, ahead=0) == {}


@pytest.mark.parametrize(
    ("name", "delay", "ahead"),
    [("adl", None, [2, 2, 2]), ("adl", [7, 0], [7]), ("adl", [9, 5, 4, 0], [4, 2, 4]), ("1f1b", None, [2, 2, 2])],
)
def test_as_many_receives_are_posted_as_may_be_on_the_way(name, delay, ahead):
    K = len(ahead) + 1
    pipeline = Pipeline(method(name, **({} if delay is None else {"delay": delay})), K)
    assert [pipeline.received_ahead(k) for k in range(K - 1)] == ahead
    assert pipeline.most_received_ahead == max(ahead)
    assert receives_ahead(pipeline, 0, K - 1) == (max(ahead) if K > 2 else ahead[0]), "the targets' edge"
    assert [receives_ahead(pipeline, *ends) for ends in ((K - 2, K - 1), (K - 1, K - 2))] == [ahead[-1]] * 2
