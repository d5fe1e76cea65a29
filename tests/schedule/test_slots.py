"""Slots and ticks: what graphs compute with stays until it is used; what happens side by side needs nothing of it."""

import pytest

from adl_dist.schedule import Op, Pipeline, method, shorten
from adl_dist.schedule.actions import LINKS, RECEIVES, message_of
from adl_dist.schedule.build_actions import training_actions
from adl_dist.schedule.slots import slots_of
from adl_dist.schedule.ticks import steady_ticks, ticks_of

NAMES = ("adl", "fdg", "ddg", "bp", "gpipe", "1f1b", "pipedream", "2bw", "paci")
SIZES = [(K, M) for K in (1, 2, 3, 4, 7) for M in (1, 2, 3, 4, 6)]


def pipelines(names, sizes=SIZES):
    for name in names:
        for K, M in sizes:
            if name != "2bw" or K - 1 <= M:
                yield Pipeline(method(name, accumulation_steps=M), K)


def lists_of(pipeline, num_groups=30, last=1):
    M = pipeline.micro_batches_per_update
    groups = [M] * num_groups + [min(last, M)]
    return {k: list(training_actions(pipeline, k, group_sizes=groups)) for k in range(pipeline.num_stages)}


def run_in_slots(pipeline, actions, slots):
    """Carry out a stage's actions on numbered memory; assert that nothing is overwritten before its time."""
    V, A = slots.num_versions, slots.num_micro_batches
    weights, acts, seen, newest, chosen = {0: 0}, {}, {}, 0, None
    latest, in_steady_slot = pipeline.method.weights == "latest", []
    for op, number in actions:
        if op is Op.WEIGHTS:
            chosen = number
        elif op is Op.FORWARD:
            version = newest if chosen is None else chosen
            assert weights[version % V] == version or latest, "the weights of a forward are there"
            acts[number % A], seen[number] = number, version
            in_steady_slot.append(version % V == slots.versions[number % A])
        elif op is Op.BACKWARD:
            assert acts[number % A] == number, "what the forward has left is there"
            assert latest or weights[seen[number] % V] == seen[number], "so are its weights"
        elif op is Op.UPDATE:
            newest += 1
            weights[newest % V] = newest
    return in_steady_slot


@pytest.mark.parametrize("name", NAMES)
def test_no_slot_is_written_before_its_last_use(name):
    for pipeline in pipelines([name]):
        for k, actions in lists_of(pipeline).items():
            slots = slots_of(pipeline, k)
            in_steady_slot = run_in_slots(pipeline, actions, slots)
            fill = pipeline.updates_to_fill * pipeline.micro_batches_per_update
            assert all(in_steady_slot[fill:]), "in steady state the slot says which weights"


@pytest.mark.parametrize("name", ["adl", "ddg", "pipedream"])
def test_one_slot_less_would_be_too_few(name):
    for pipeline in pipelines([name]):
        M = pipeline.micro_batches_per_update
        for k, delay in enumerate(pipeline.delays):
            slots = slots_of(pipeline, k)
            assert slots.num_versions == -(-delay // M) + 1
            assert slots.num_micro_batches >= delay + 1


@pytest.mark.parametrize("name", ["adl", "fdg"])
def test_a_tick_needs_only_what_earlier_ticks_sent(name):
    for pipeline in pipelines([name]):
        lists, sent, done, num_full = lists_of(pipeline), set(), {k: [] for k in range(pipeline.num_stages)}, 0
        for tick in ticks_of(lists):
            before = frozenset(sent)
            for k, action in tick.actions:
                message = message_of(action, k, num_stages=pipeline.num_stages)
                assert action.op not in RECEIVES or (message, action.number) in before
                if action.op in LINKS:
                    sent.add((message, action.number))
                done[k].append(action)
            num_full += len(tick.forwards) == len(tick.backwards) == pipeline.num_stages
        assert done == lists, "each stage does its own actions in their order"
        micro_batches = 30 * pipeline.micro_batches_per_update + 1
        assert num_full == micro_batches - pipeline.delays[0]


@pytest.mark.parametrize(("K", "M"), [(2, 1), (4, 3), (7, 4)])
def test_a_period_of_ticks_has_each_slot_of_each_stage_once(K, M):
    pipeline = Pipeline(method("adl", accumulation_steps=M), K)
    num_slots = slots_of(pipeline, 0).num_micro_batches
    for direction in zip(*steady_ticks(pipeline, num_slots), strict=True):
        for of_stage in zip(*direction, strict=True):
            assert sorted(of_stage) == list(range(num_slots))


@pytest.mark.parametrize("name", ["ddg", "bp", "gpipe", "1f1b", "pipedream", "2bw", "paci"])
def test_stages_that_wait_for_each_other_have_no_ticks(name):
    for pipeline in pipelines([name], [(2, 1), (3, 3), (4, 4)]):
        with pytest.raises(ValueError, match=r"tick"):
            steady_ticks(pipeline, max(2, slots_of(pipeline, 0).num_micro_batches))


@pytest.mark.parametrize("flush_epochs", [0, 1])
def test_ticks_of_any_segment_are_of_the_period_or_not_full(flush_epochs):
    """With fewer micro-batches than a delay, a smaller last group, or groups that are flushed."""
    for K, M in [(2, 1), (3, 1), (3, 2), (5, 2), (4, 3)]:
        pipeline = Pipeline(method("adl", accumulation_steps=M, flush_epochs=flush_epochs), K)
        num_slots, every = slots_of(pipeline, 0).num_micro_batches, range(K)
        forwards, backwards = map(set, zip(*steady_ticks(pipeline, num_slots), strict=True))
        for num_groups in range(9):
            lists, done = lists_of(pipeline.in_epoch(0), num_groups), {k: [] for k in every}
            for tick in ticks_of(lists):
                for k, action in tick.actions:
                    done[k].append(action)
                for found, known in ((tick.forwards, forwards), (tick.backwards, backwards)):
                    assert len(found) < K or tuple(found[k] % num_slots for k in every) in known
            assert done == lists


def test_a_segment_that_is_stopped_ends_in_ticks_too():
    pipeline = Pipeline(method("adl", accumulation_steps=3), 4)
    lists, done = lists_of(pipeline), {k: [] for k in range(4)}
    for tick in ticks_of(lists):
        for k, action in tick.actions:
            done[k].append(action)
            if action == (Op.LOAD, 31):
                for stage, actions in lists.items():
                    shorten(actions, pipeline, stage, group_sizes=[3] * 11)
    assert done == {k: list(training_actions(pipeline, k, group_sizes=[3] * 11)) for k in range(4)}


def test_an_epoch_that_flushes_is_done_in_ticks_too():
    pipeline = Pipeline(method("adl", accumulation_steps=3, flush_epochs=1), 4).in_epoch(0)
    lists, done = lists_of(pipeline, num_groups=4), {k: [] for k in range(4)}
    for tick in ticks_of(lists):
        for k, action in tick.actions:
            done[k].append(action)
    assert done == lists
