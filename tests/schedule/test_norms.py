"""Clipping by the norm of the whole model: when the norms travel, by the actions alone."""

from dataclasses import replace

import pytest

from adl_dist.schedule import METHODS, Costs, Op, Pipeline, max_pending_of, method, replay
from adl_dist.schedule.build_actions import training_actions, training_turns
from adl_dist.schedule.replay import at_random
from adl_dist.schedule.timing import time_per_update
from tests.schedule.rendezvous import check_rendezvous

ABLE = [name for name, spec in METHODS.items() if spec.flush and not spec.early]
VARIANTS = [(name, {}) for name in ABLE] + [(name, {"split_backward": True}) for name in ("bp", "gpipe", "1f1b")]
every_variant = pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: " ".join([v[0], *v[1]]))


def pipeline_of(variant, K, M, tied=()):
    name, options = variant
    return Pipeline(method(name, accumulation_steps=M, **options), K, tied=tied, shares_norms=True)


def lists_of(pipeline, groups):
    return [list(training_actions(pipeline, k, group_sizes=groups)) for k in range(pipeline.num_stages)]


def turns_of(pipeline, groups):
    if pipeline.stages_per_process == 1:
        return None
    return [list(training_turns(pipeline, p, group_sizes=groups)) for p in range(pipeline.num_processes)]


def test_these_methods_can():
    assert ABLE == ["bp", "gpipe", "1f1b", "zbh1", "interleaved"]


@every_variant
@pytest.mark.parametrize(("K", "M", "tied"), [(2, 1, ()), (3, 4, ((0, 2),)), (4, 4, ((1, 3), (0, 1, 2))), (5, 3, ())])
def test_no_stage_updates_before_all_gradients_are_there(variant, K, M, tied):
    """And no order of events, and no process of several stages, stands still for the norms."""
    pipeline, groups = pipeline_of(variant, K, M, tied), [M] * 4 + [1]
    lists, turns = lists_of(pipeline, groups), turns_of(pipeline, groups)
    for seed in range(3):
        done = [0] * K
        for k, action in replay(lists, pick_next=at_random(seed), turns=turns):
            done[k] += action.op is Op.BACKWARD_WEIGHT or action.op is Op.BACKWARD
            if action.op is Op.UPDATE:
                assert done == [sum(groups[: action.number + 1])] * K, (k, action)
        assert done == [sum(groups)] * K
    check_rendezvous(lists, turns=turns, max_pending=max_pending_of(pipeline))


@every_variant
@pytest.mark.parametrize("K", [2, 4])
def test_the_norms_cost_no_time(variant, K):
    """Where links do, zbh1 waits for the norms of the last WG, and a process for its later stages' totals."""
    pipeline = pipeline_of(variant, K, 4)
    for link in (0.0, 0.3) if variant[0] not in ("zbh1", "interleaved") else (0.0,):
        costs = replace(Costs.balanced(K, link=link), update=[0.5] * K)
        without = time_per_update(replace(pipeline, shares_norms=False), costs)
        assert time_per_update(pipeline, costs) == pytest.approx(without)
