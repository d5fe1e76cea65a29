"""A segment that is ended while it runs: the actions alone, no tensor, no process."""

import itertools
import random

import pytest

from adl_dist.schedule import (
    METHODS,
    Op,
    Pipeline,
    Segment,
    interleave,
    method,
    shorten,
    training_work,
    updates_that_load,
)
from adl_dist.schedule.actions import RECEIVES, Action, is_of_groups, what_of
from adl_dist.schedule.build_actions import training_actions
from adl_dist.schedule.interleaving import downstream_first
from adl_dist.training.edges import posted_ahead, tied_edges

MAY_SPLIT = [name for name, spec in METHODS.items() if "split_backward" in spec.options]
CHOSEN = {
    **{name: {} for name in METHODS},
    "dsp": {"activation_queue": 2, "gradient_queue": 3},
    "adl": {"order": "backward_first"},
    "gpipe": {"recompute": "except_last"},
    **{name: {"flush_epochs": 1} for name in ("pipedream", "fr")},
}
CHOSEN |= {f"{name} split": CHOSEN[name] | {"split_backward": True} for name in MAY_SPLIT}
CHOSEN["dni late"] = {"head_delay": 7, "head_sees_target": True}
CHOSEN["adl third"] = {"split_backward": True, "delay": "third"}
CHOSEN["adl far"] = {"delay": [5, 5, 2, 0]}
SIZES = [(1, 2), (2, 9), (4, 2)]  # K, M
every_method = pytest.mark.parametrize("name", [name for name in CHOSEN if name != "adl far"])
every_size = pytest.mark.parametrize(("K", "M"), SIZES)
NUM_MICRO_BATCHES = 21
TIES = [((0, 3), (1, 2)), ((0, 2, 3), (0, 1))]
# What stages exchange around the updates: nothing, gradients of tied weights, or norms.
AROUND = [
    *((name, K, M, {}) for name in CHOSEN if name != "adl far" for K, M in SIZES),
    *(
        (name, 4, M, {"tied": tied})
        for name in CHOSEN
        if not METHODS[name.split()[0]].has_heads
        for M, tied in zip((1, 4), TIES, strict=True)
    ),
    *(
        (name, 4, 2, {"shares_norms": True})
        for name in CHOSEN
        if METHODS[name.split()[0]].flush and not METHODS[name.split()[0]].early
    ),
]


def chosen(name, K, M, **around):
    M = max(M, K - 1) if name.startswith("2bw") else M
    pipeline = Pipeline(method(name.split()[0], accumulation_steps=M, **CHOSEN[name]), K, **around).in_epoch(0)
    return pipeline, [M] * (NUM_MICRO_BATCHES // M) + [1]


def actions_of(pipeline, k, groups):
    return list(training_actions(pipeline, k, group_sizes=groups))


@every_method
@every_size
def test_until_a_later_micro_batch_a_stage_does_the_same(name, K, M):
    pipeline, groups = chosen(name, K, M)
    whole = [actions_of(pipeline, k, groups) for k in range(K)]
    for k, num_updates in itertools.product(range(K), range(1, len(groups))):
        actions, end = [*whole[k]], sum(groups[:num_updates])
        begins = [i for i, a in enumerate(actions) if a.op in (Op.LOAD, Op.RECV_ACT) and a.number >= end]
        known = begins[0] - (actions[begins[0] - 1].op is Op.WEIGHTS)
        before = actions[:known]
        shorten(actions, pipeline, k, group_sizes=groups[:num_updates])
        assert actions[:known] == before
        assert actions == actions_of(pipeline, k, groups[:num_updates])


@pytest.mark.parametrize(("name", "K", "M", "around"), AROUND)
def test_ended_at_any_load_all_stages_end_after_the_same_update(name, K, M, around):
    """And no receive is posted for what is not sent, with as many posted ahead as over gloo."""
    pipeline, groups = chosen(name, K, M, **around)
    beyond = {edge.what: posted_ahead(pipeline, tie, op, edge.receiver) for tie, op, edge in tied_edges(pipeline)}
    whole, arriving = [actions_of(pipeline, k, groups) for k in range(K)], {}
    for k, action in ((k, action) for k, actions in enumerate(whole) for action in actions):
        if action.op in RECEIVES:
            arriving.setdefault((k, what_of(action)), []).append(action.number)
    for ahead, stop_at in zip(itertools.cycle((0, 2)), range(0, NUM_MICRO_BATCHES, 5), strict=False):
        lists = [[*actions] for actions in whole]
        done, got, num_updates = [[] for _ in range(K)], dict.fromkeys(arriving, 0), len(groups)
        for k, action in interleave(lists, pick_next=random.Random(stop_at).choice if stop_at else downstream_first):
            if action == Action(Op.LOAD, stop_at):
                num_updates = updates_that_load(groups, stop_at + 1 + max(ahead, *beyond.values(), 0))
                end = sum(groups[:num_updates])
                for (j, what), order in arriving.items():
                    # The next one is awaited, and so many are posted beyond it; of groups none is awaited yet.
                    begun = got[j, what]
                    posted = begun + (beyond.get(what, 1) if is_of_groups(what) else 1 + ahead)
                    if (begun or what == "act") and num_updates < len(groups):
                        assert all(b < end for b in order[begun:posted]), what
                for j, actions in enumerate(lists):
                    shorten(actions, pipeline, j, group_sizes=groups[:num_updates])
            done[k].append(action)
            if action.op in RECEIVES:
                got[k, what_of(action)] += 1
        assert done == [actions_of(pipeline, k, groups[:num_updates]) for k in range(K)]


def test_the_fewest_updates_that_load_so_many_micro_batches():
    assert [updates_that_load([4, 4, 2], n) for n in (1, 4, 5, 8, 9, 10, 11)] == [1, 1, 2, 2, 3, 3, 3]


def test_emptying_leaves_no_trace_just_where_nothing_is_stale():
    for K, untraced in (
        (3, {"bp", "gpipe", "1f1b", "zbh1", "zbh2", "interleaved", "dgl"}),
        (1, METHODS.keys() - {"2bw"}),
    ):
        assert {name for name in METHODS if Pipeline(method(name), K).drain_is_exact} == untraced


def test_what_one_epoch_shortens_is_whole_in_the_next():
    pipeline = Pipeline(method("adl", accumulation_steps=2), 2)
    segment = Segment(epoch=0, first_update=0, num_samples=12, micro_batch_size=1, accumulation_steps=2)

    def work():
        return training_work(pipeline, segment, stages=[1])[1].actions

    whole = list(work())
    shorten(work(), pipeline, 1, group_sizes=[2])
    assert work() == whole == actions_of(pipeline, 1, [2] * 6)
