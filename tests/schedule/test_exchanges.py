"""Tied weights, and clipping by the norm of the whole model: when sums and norms travel, by the actions alone."""

import itertools
import random
from dataclasses import replace

import pytest

from adl_dist.schedule import METHODS, Costs, Op, Pipeline, interleave, max_pending_of, method
from adl_dist.schedule.actions import RECEIVES, what_of
from adl_dist.schedule.build_actions import training_actions, training_turns
from adl_dist.schedule.timing import time_per_update
from adl_dist.training.edges import tied_edges
from tests.schedule.rendezvous import check_rendezvous

SHARING = [name for name, spec in METHODS.items() if not spec.has_heads]
VARIANTS = [
    *((name, {}) for name in SHARING),
    *((name, {"split_backward": True}) for name in SHARING if "split_backward" in METHODS[name].options),
    ("adl", {"split_backward": True, "delay": "third"}),
    ("adl", {"order": "backward_first"}),
    ("adl", {"delay": [5, 5, 2, 0]}),
    ("dsp", {"activation_queue": 2, "gradient_queue": 3}),
    ("fr", {"flush_epochs": 1}),
    ("gpipe", {"recompute": "except_last"}),
]
every_variant = pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: " ".join([v[0], *map(str, v[1].values())]))
TIES = [((0, 3),), ((0, 3), (1, 2)), ((0, 2, 3), (0, 1))]
K, GROUPS = 4, [4] * 6 + [3]


def made(variant, tied, M=4, groups=None):
    name, options = variant
    pipeline = Pipeline(method(name, accumulation_steps=M, **options), K, tied=tied)
    groups = groups or [M] * 6 + [1]
    return pipeline, [list(training_actions(pipeline, k, group_sizes=groups)) for k in range(K)], groups


def turns_of(pipeline, groups):
    if pipeline.stages_per_process == 1:
        return None
    return [list(training_turns(pipeline, p, group_sizes=groups)) for p in range(pipeline.num_processes)]


@every_variant
@pytest.mark.parametrize("tied", TIES, ids=str)
def test_every_group_is_added_up_and_applied_once_by_all(variant, tied):
    for M, groups in ((4, GROUPS), (3, [3] * 5 + [2])):
        pipeline, lists, _ = made(variant, tied, M, groups)
        ends = list(itertools.accumulate(groups))
        for tie, op, message in tied_edges(pipeline):
            sent = [a.number for a in lists[message.sender] if a.op is op and what_of(a) == message.what]
            got = [a.number for a in lists[message.receiver] if a.op in RECEIVES and what_of(a) == message.what]
            assert sent == got == [end - 1 for end in ends]
            for k in tie.stages:
                updates = [a.number for a in lists[k] if a.op is Op.UPDATE_TIED and a.tie == tie]
                assert updates == list(range(len(groups)))


@every_variant
@pytest.mark.parametrize("tied", TIES, ids=str)
def test_no_order_and_no_edge_deadlocks(variant, tied):
    pipeline, lists, groups = made(variant, tied)
    turns = turns_of(pipeline, groups)
    for seed in range(3):
        assert len(list(interleave(lists, pick_next=random.Random(seed).choice, turns=turns))) == sum(map(len, lists))
    check_rendezvous(lists, max_pending=max_pending_of(pipeline), turns=turns)


@every_variant
def test_a_tie_makes_no_stage_wait_that_would_not_wait_anyway(variant):
    """With a balanced pipeline, and with one whose last stage is slow or whose links are."""
    uneven = Costs(forward=[1, 1, 1, 2], backward=[2, 2, 2, 4], link=[0.3] * 3)
    name, options = variant
    if name in ("interleaved", "zbh1", "zbh2") or (METHODS[name].flush and options):
        pytest.skip("a method that flushes waits for the sum before its next group")
    for costs, M in ((Costs.balanced(K), 1), (uneven, 3)):
        chosen = method(name, accumulation_steps=M if name != "2bw" else 4, **options)
        alone = time_per_update(Pipeline(chosen, K), costs)
        shared = time_per_update(Pipeline(chosen, K, tied=((0, 3),)), costs)
        assert shared <= alone * 1.02, (M, shared, alone)


@every_variant
def test_staleness_counted_by_interleaving_is_the_formulas(variant):
    """Staleness: tied updates between a forward and the update with its gradient; 2BW sees one version earlier."""
    for M in (1, 2, 4) if variant[0] != "2bw" else (4,):
        pipeline, lists, _ = made(variant, ((0, 3),), M, [M] * 40)
        updates, done, seen, stale = [0] * K, [0] * K, {}, {0: {}, 3: {}}
        for k, action in interleave(lists):
            if action.op in (Op.FORWARD, Op.FORWARD_ONLY):
                version = pipeline.forward_version(k, action.number)
                assert pipeline.method.weights == "2bw" or version == updates[k]
                seen[k, action.number] = max(0, version - pipeline.tie_delay(pipeline.ties_of(0)[0]))
            elif action.op is Op.UPDATE:
                updates[k] += 1
            elif action.op is Op.UPDATE_TIED:
                group = action.number
                stale[k][group] = [done[k] - seen[k, b] for b in range(M * group, M * group + M)]
                done[k] += 1
        for k in (0, 3):
            assert stale[k][36] == pipeline.tied_staleness(pipeline.ties_of(k)[0], k), (M, k)


def test_the_sum_is_late_by_what_the_delays_differ():
    for M, late in ((1, 6), (2, 3), (4, 2), (6, 1)):
        pipeline = Pipeline(method("adl", accumulation_steps=M), K, tied=((0, 3), (1, 2)))
        assert pipeline.tie_delay(pipeline.ties_of(0)[0]) == late
        assert pipeline.tie_delay(pipeline.ties_of(1)[0]) == -(-2 // M)
    for name in ("bp", "gpipe", "1f1b", "zbh1", "zbh2", "interleaved"):
        pipeline = Pipeline(method(name), K, tied=((0, 3),))
        assert pipeline.tie_delay(pipeline.ties_of(0)[0]) == 0


# --- Clipping by the norm of the whole model -----------------------------------------------------------------

CLIPS = ["bp", "gpipe", "1f1b", "zbh1", "interleaved"]
CLIPPING = [(name, {}) for name in CLIPS] + [(name, {"split_backward": True}) for name in ("bp", "gpipe", "1f1b")]
every_clipping = pytest.mark.parametrize("variant", CLIPPING, ids=lambda v: " ".join([v[0], *v[1]]))


def clipping(variant, K, M, tied=()):
    name, options = variant
    return Pipeline(method(name, accumulation_steps=M, **options), K, tied=tied, shares_norms=True)


@every_clipping
@pytest.mark.parametrize(("K", "M", "tied"), [(2, 1, ()), (3, 4, ((0, 2),)), (4, 4, ((1, 3), (0, 1, 2))), (5, 3, ())])
def test_no_stage_updates_before_all_gradients_are_there(variant, K, M, tied):
    """And no order of events, and no process of several stages, stands still for the norms."""
    pipeline, groups = clipping(variant, K, M, tied), [M] * 4 + [1]
    lists = [list(training_actions(pipeline, k, group_sizes=groups)) for k in range(K)]
    turns = turns_of(pipeline, groups)
    for seed in range(3):
        done = [0] * K
        for k, action in interleave(lists, pick_next=random.Random(seed).choice, turns=turns):
            done[k] += action.op is Op.BACKWARD_WEIGHT or action.op is Op.BACKWARD
            if action.op is Op.UPDATE:
                assert done == [sum(groups[: action.number + 1])] * K, (k, action)
        assert done == [sum(groups)] * K
    check_rendezvous(lists, turns=turns, max_pending=max_pending_of(pipeline))


@every_clipping
@pytest.mark.parametrize("K", [2, 4])
def test_the_norms_cost_no_time(variant, K):
    """Where links do, zbh1 waits for the norms of the last WG, and a process for its later stages' totals."""
    pipeline = clipping(variant, K, 4)
    for link in (0.0, 0.3) if variant[0] not in ("zbh1", "interleaved") else (0.0,):
        costs = replace(Costs.balanced(K, link=link), update=[0.5] * K)
        without = time_per_update(replace(pipeline, shares_norms=False), costs)
        assert time_per_update(pipeline, costs) == pytest.approx(without)
