"""A segment that is ended while it runs: the actions alone, no tensor, no process."""

import itertools

import pytest

from adl_dist.schedule import METHODS, Op, Pipeline, Segment, method, replay, shorten, training_work, updates_that_load
from adl_dist.schedule.actions import RECEIVES
from adl_dist.schedule.build_actions import training_actions
from adl_dist.schedule.replay import at_random, downstream_first

CHOSEN = {
    **{name: {} for name in METHODS},
    "dsp": {"activation_queue": 2, "gradient_queue": 3},
    "adl": {"order": "backward_first"},
    "gpipe": {"recompute": "except_last"},
    **{name: {"flush_epochs": 1} for name in ("pipedream", "fr")},
}
CHOSEN |= {
    f"{name} split": CHOSEN[name] | {"split_backward": True}
    for name, spec in METHODS.items()
    if "split_backward" in spec.options
}
CHOSEN["dni late"] = {"head_delay": 7, "head_sees_target": True}
CHOSEN["adl third"] = {"split_backward": True, "delay": "third"}
SIZES = [(1, 2), (2, 9), (4, 2)]  # K, M
every_method = pytest.mark.parametrize("name", CHOSEN)
every_size = pytest.mark.parametrize(("K", "M"), SIZES)
NUM_MICRO_BATCHES = 21


def chosen(name, K, M):
    M = max(M, K - 1) if name.startswith("2bw") else M
    pipeline = Pipeline(method(name.split()[0], accumulation_steps=M, **CHOSEN[name]), K).in_epoch(0)
    return pipeline, [M] * (NUM_MICRO_BATCHES // M) + [1]


def actions_of(pipeline, k, groups):
    return list(training_actions(pipeline, k, group_sizes=groups))


@every_method
@every_size
def test_until_a_later_micro_batch_a_stage_does_the_same(name, K, M):
    pipeline, groups = chosen(name, K, M)
    for k, num_updates in itertools.product(range(K), range(1, len(groups))):
        actions, end = actions_of(pipeline, k, groups), sum(groups[:num_updates])
        begins = [i for i, a in enumerate(actions) if a.op in (Op.LOAD, Op.RECV_ACT) and a.number >= end]
        known = begins[0] - (actions[begins[0] - 1].op is Op.WEIGHTS)
        before = actions[:known]
        shorten(actions, pipeline, k, group_sizes=groups[:num_updates])
        assert actions[:known] == before
        assert actions == actions_of(pipeline, k, groups[:num_updates])


@every_method
@every_size
def test_ended_at_any_load_all_stages_end_after_the_same_update(name, K, M):
    pipeline, groups = chosen(name, K, M)
    for ahead, stop_at in itertools.product((0, 2), range(0, NUM_MICRO_BATCHES, 5)):
        lists = [actions_of(pipeline, k, groups) for k in range(K)]
        arriving = {
            (k, what): [a.number for a in s if a.op in RECEIVES and RECEIVES[a.op].what == what]
            for k, s in enumerate(lists)
            for what in {link.what for link in RECEIVES.values()}
        }
        done = [[] for _ in range(K)]
        num_updates = len(groups)
        for k, action in replay(lists, pick_next=at_random(stop_at) if stop_at else downstream_first):
            if action == (Op.LOAD, stop_at):
                num_updates = updates_that_load(groups, stop_at + 1 + ahead)
                end = sum(groups[:num_updates])
                for (j, what), order in arriving.items():
                    got = sum(a.op in RECEIVES and RECEIVES[a.op].what == what for a in done[j])
                    if got or what == "act":  # the next one is awaited, and so many are posted beyond it
                        assert all(b < end for b in order[got : got + 1 + ahead] if end < NUM_MICRO_BATCHES)
                for j, actions in enumerate(lists):
                    shorten(actions, pipeline, j, group_sizes=groups[:num_updates])
            done[k].append(action)
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
