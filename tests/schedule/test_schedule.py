"""The schedule alone: no tensor, no process."""

import itertools
import random
import statistics
from itertools import accumulate, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adl_dist.errors import ScheduleError
from adl_dist.schedule import METHODS, Op, Pipeline, Segment, describe, interleave, max_pending_of, method
from adl_dist.schedule.actions import BACKWARDS, LINKS, Action, receiver
from adl_dist.schedule.build_actions import (
    evaluation_actions,
    evaluation_turns,
    training_actions,
    training_turns,
)
from adl_dist.schedule.interleaving import in_turns
from adl_dist.schedule.run_plan import Plan
from adl_dist.schedule.send_limits import max_outstanding
from adl_dist.schedule.split import simulated, split_actions
from adl_dist.training.edges import receives_ahead
from tests.schedule.rendezvous import check_rendezvous

MAY_SPLIT = sorted(name for name, spec in METHODS.items() if "split_backward" in spec.options)
ALL = [
    *((name, {}) for name in METHODS),
    ("gpipe", {"recompute": "except_last"}),
    ("adl", {"weights": "recompute"}),
    ("adl", {"order": "backward_first"}),
    ("dsp", {"activation_queue": 3, "gradient_queue": 2}),
    *((name, {"split_backward": True}) for name in MAY_SPLIT),
    ("adl", {"split_backward": True, "delay": "third"}),
    ("dni", {"head_delay": 0}),
    ("dni", {"head_delay": 5, "head_sees_target": True}),
    ("adl", {"split_backward": True, "delay": "minimal", "max_deferred": 1}),
    ("gpipe", {"split_backward": True, "recompute": "except_last", "max_deferred": 5}),
]
every_variant = pytest.mark.parametrize("variant", ALL, ids=lambda v: " ".join([v[0], *map(str, v[1].values())]))


def adl(M=1):
    return method("adl", accumulation_steps=M)


def groups(N, M):
    return [M] * (N // M) + [N % M] * (N % M > 0)


def actions_of(K, group_sizes, chosen=None, *, epoch=9):
    pipeline = Pipeline(chosen or adl(max(group_sizes)), K).in_epoch(epoch)
    return [list(training_actions(pipeline, k, group_sizes=group_sizes)) for k in range(K)]


def versions(K, group_sizes, seed):
    """Weight version at every forward and at every backward, and the most micro-batches in flight per stage."""
    version, in_flight, most = [0] * K, [0] * K, [0] * K
    at_forward, at_backward = {}, {}
    for k, (op, b, *_) in interleave(actions_of(K, group_sizes), pick_next=random.Random(seed).choice):
        if op is Op.FORWARD:
            at_forward[k, b] = version[k]
            in_flight[k] += 1
            most[k] = max(most[k], in_flight[k])
        elif op is Op.BACKWARD:
            at_backward[k, b] = version[k]
            in_flight[k] -= 1
        elif op is Op.UPDATE:
            version[k] += 1
    assert in_flight == [0] * K
    return at_forward, at_backward, most


def counted(K, M, k, seed=0):
    """Staleness of each place in a group of stage k, counted by interleaving, once the pipeline is full."""
    full = 2 * (K - 1) // M + 1
    at_forward, at_backward, _ = versions(K, [M] * (full + 1), seed)
    return [at_backward[k, b] - at_forward[k, b] for b in range(M * full, M * (full + 1))]


# --- The paper ---------------------------------------------------------------------------------------------


def test_figure_1_staleness_of_three_modules():
    """K = 3: the labels of Fig. 1(a) and Fig. 1(b), counted by interleaving and given by the formula."""
    for M, expected in ((2, [[2, 2], [1, 1], [0, 0]]), (4, [[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]])):
        assert [Pipeline(adl(M), 3).steady_staleness(k) for k in range(3)] == expected
        assert [counted(3, M, k) for k in range(3)] == expected


# Module 1 and module 6 of K = 8 for M = 1..12: averaged staleness (Fig. 2; numbers of Eq. 17).
FIGURE_2 = {
    1: (14, 4), 2: (7, 2), 3: (4.667, 1.333), 4: (3.5, 1), 5: (2.8, 0.8), 6: (2.333, 0.667),
    7: (2, 0.571), 8: (1.75, 0.5), 9: (1.556, 0.444), 10: (1.4, 0.4), 11: (1.273, 0.364), 12: (1.167, 0.333),
}  # fmt: skip


@pytest.mark.parametrize("M", FIGURE_2)
def test_figure_2_averaged_staleness_of_modules_1_and_6(M):
    for module, expected in zip((1, 6), FIGURE_2[M], strict=True):
        told = counted(8, M, module - 1, seed=M)
        assert statistics.mean(told) == pytest.approx(expected, abs=6e-4)
        assert told == Pipeline(adl(M), 8).steady_staleness(module - 1) == sorted(told, reverse=True)
        assert max(told) - min(told) <= 1, "so the mean says what each place has"


# --- Any order ---------------------------------------------------------------------------------------------


@settings(max_examples=100)
@given(st.integers(1, 8), st.lists(st.integers(1, 5), min_size=1, max_size=6), st.integers(0, 2**32))
def test_any_groups_in_any_order_give_the_same_versions(K, sizes, seed):
    """A forward sees the groups that end d micro-batches before; at most d + 1 are in flight, and at last as many."""
    at_forward, at_backward, most = versions(K, sizes, seed)
    ends = list(accumulate(sizes))
    for k, d in enumerate(Pipeline(adl(), K).delays):
        assert [at_forward[k, b] for b in range(ends[-1])] == [sum(e <= b - d for e in ends) for b in range(ends[-1])]
        assert [at_backward[k, b] for b in range(ends[-1])] == [sum(e <= b for e in ends) for b in range(ends[-1])]
        assert most[k] == min(d + 1, ends[-1])


@every_variant
@pytest.mark.parametrize(("K", "M"), [(4, 8), (2, 3), (8, 7)])
def test_every_version_and_staleness_is_that_of_the_formula(variant, K, M):
    """Counted by interleaving: which weights each forward of each method sees, and which update it enters."""
    name, options = variant
    chosen = method(name, accumulation_steps=M if name != "2bw" else max(M, K - 1), **options)
    pipeline = Pipeline(chosen, K)
    for N, seed in ((5, 1), (16, 2), (30, 3)):
        sizes = groups(N, pipeline.micro_batches_per_update)
        version, forced = [0] * K, [None] * K
        for k, (op, b, *_) in interleave(actions_of(K, sizes, chosen), pick_next=random.Random(seed).choice):
            if op in (Op.FORWARD, Op.FORWARD_ONLY):
                used = version[k] if forced[k] is None else forced[k]
                assert used == pipeline.forward_version(k, b)
            elif op in BACKWARDS:
                assert version[k] - pipeline.forward_version(k, b) == pipeline.staleness(k, b)
            elif op is Op.WEIGHTS:
                assert version[k] - 1 <= b <= version[k], "two versions are enough"
                forced[k] = b
            elif op is Op.UPDATE:
                version[k] += 1
        assert version == [len(sizes)] * K


@pytest.mark.parametrize("M", [1, 3])
@pytest.mark.parametrize("K", [2, 4])
def test_backward_first_is_the_order_of_the_authors_mode_b(K, M):
    """Written out slot by slot: backward, step, forward; the last module forward, backward, step."""
    N = 12 * M
    made = actions_of(K, [M] * 12, method("adl", accumulation_steps=M, order="backward_first"))
    for k in range(K):
        delay, expected = 2 * (K - 1 - k), []
        for slot in range(N + delay):
            forward = [f"F{slot}"] if slot < N else []
            b = slot - delay
            backward = [f"B{b}"] + ([f"U{b // M}"] if (b + 1) % M == 0 else []) if b >= 0 else []
            expected += forward + backward if k == K - 1 else backward + forward
        assert [str(a) for a in made[k] if a.op in (Op.FORWARD, Op.BACKWARD, Op.UPDATE)] == expected


# --- A backward in two parts -------------------------------------------------------------------------------


@settings(max_examples=100)
@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 3), st.sampled_from(MAY_SPLIT))
def test_gradients_of_weights_come_after_what_is_sent(K, M, most, name):
    """And before the group's update, in the order of the first parts, never of more than so many micro-batches."""
    chosen = method(name, accumulation_steps=max(M, K), split_backward=True, max_deferred=most)
    for k, actions in enumerate(actions_of(K, groups(4 * M + 3, chosen.micro_batches_per_update), chosen)):
        outstanding, done = [], 0
        if not Pipeline(chosen, K).splits_backward(k):
            assert [number for op, number, *_ in actions if op is Op.BACKWARD] == [*range(4 * M + 3)]
            assert not any(op in (Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT, Op.SEND_GRAD) for op, *_ in actions)
            continue
        for before, (op, number, *_) in pairwise(actions):
            if op is Op.BACKWARD_INPUT:
                outstanding.append(number)
                assert len(outstanding) <= most
            elif op is Op.SEND_GRAD:
                assert before == Action(Op.BACKWARD_INPUT, number), "at once"
            elif op is Op.BACKWARD_WEIGHT:
                assert outstanding.pop(0) == number
                done += 1
            elif op is Op.UPDATE:
                assert not outstanding
        assert done == 4 * M + 3, f"stage {k}"
        assert not any(a.op is Op.BACKWARD for a in actions)


@pytest.mark.parametrize(
    ("name", "delay", "splits"),
    [
        *[("adl", [0], False), ("adl", [1, 0], False), ("adl", [2, 0], False), ("adl", [0, 0], True)],
        *[("adl", [2, 1, 0], True), ("adl", [4, 2, 0], True), ("adl", [5, 2, 0], False), ("adl", [4, 1, 0], False)],
        *[("fr", [2, 0], True), ("gpipe", None, True), ("zbh1", None, True)],  # a forward lock, flushes
    ],
)
def test_stage_0_does_both_parts_at_once_where_there_is_room(name, delay, splits):
    K = 2 if delay is None else len(delay)
    options = {} if name == "zbh1" else {"split_backward": True}
    pipeline = Pipeline(method(name, **({} if delay is None else {"delay": delay}), **options), K)
    assert [pipeline.splits_backward(k) for k in range(K)] == [splits, *[True] * (K - 1)]


# --- Several stages in a process ---------------------------------------------------------------------------


def interleaved(P, v, M, group_sizes, *, fewer=0):
    """The pipeline, the actions of its stages, and the turns of its processes."""
    pipeline = Pipeline(method("interleaved", accumulation_steps=M, stages_per_process=v), P * v - fewer)
    assert pipeline.num_processes == P
    turns = [list(training_turns(pipeline, process, group_sizes=group_sizes)) for process in range(P)]
    return pipeline, actions_of(P * v - fewer, group_sizes, pipeline.method), turns


@pytest.mark.parametrize(("P", "v", "rounds"), [(2, 2, 1), (2, 2, 3), (2, 3, 2), (3, 2, 2), (4, 2, 2), (4, 1, 2)])
def test_a_process_does_its_stages_in_the_published_order(P, v, rounds):
    """2 (P-1-p) + (v-1) P forwards, then a forward and a backward in turn; after P micro-batches the next stage."""
    M = rounds * P
    _, lists, turns = interleaved(P, v, M, [M])
    for p in range(P):
        forwards = [(Op.FORWARD, i // P % v * P + p, i // (P * v) * P + i % P) for i in range(M * v)]
        backwards = [(Op.BACKWARD, (v - 1 - i // P % v) * P + p, i // (P * v) * P + i % P) for i in range(M * v)]
        expected, lead = [], 2 * (P - 1 - p) + (v - 1) * P
        for i in range(M * v + lead):
            expected += forwards[i : i + 1] + (backwards[i - lead : i - lead + 1] if i >= lead else [])
        own = in_turns({k: lists[k] for k in range(p, P * v, P)}, turns[p])
        assert [(a.op, k, a.number) for k, a in own if a.op in (Op.FORWARD, Op.BACKWARD)] == expected


@pytest.mark.parametrize("fewer", [0, 1])
@pytest.mark.parametrize("P", [1, 2, 3])
@pytest.mark.parametrize("v", [2, 3])
def test_stages_that_share_processes_do_not_deadlock(P, v, fewer):
    """Whatever the groups, also where some processes have a stage less; a stop leaves out whole groups at the end."""
    for M, N in itertools.product((1, 3, 4, 8), (8, 27)):
        sizes = groups(N, M)
        pipeline, lists, turns = interleaved(P, v, M, sizes, fewer=fewer)
        check_rendezvous(lists, turns=turns, max_pending=max_pending_of(pipeline))
        assert sum(1 for _ in interleave(lists, turns=turns)) == sum(map(len, lists)) == sum(map(len, turns))
        shorter = actions_of(pipeline.num_stages, sizes[:1], pipeline.method)
        for p in range(P):
            own = {k: shorter[k] for k in pipeline.stages_of(p)}
            assert len(list(in_turns(own, turns[p]))) == sum(map(len, own.values()))


@pytest.mark.parametrize("fewer", [0, 1])
@pytest.mark.parametrize(("P", "v"), [(2, 2), (2, 3), (3, 2), (4, 3)])
def test_they_evaluate_without_a_deadlock(P, v, fewer):
    pipeline, *_ = interleaved(P, v, 4, [4], fewer=fewer)
    K = pipeline.num_stages
    lists = [list(evaluation_actions(k, num_stages=K, num_micro_batches=41)) for k in range(K)]
    turns = [list(evaluation_turns(pipeline, p, num_micro_batches=41)) for p in range(P)]
    check_rendezvous(lists, turns=turns, max_pending=on_every_edge(K, pipeline.max_pending))


def drawn_split(name, seed):
    """A split pipeline of the method, and group sizes of which all are alike but perhaps the last ones."""
    draw = random.Random(f"{name} {seed}")
    K, M, options = draw.randint(1, 5), draw.randint(1, 5), {"max_deferred": draw.randint(1, 4)}
    if "delay" in METHODS[name].options and name not in ("2bw", "dsp"):
        options["delay"] = sorted((draw.randint(0, 9) for _ in range(K)), reverse=True)
    if "recompute" in METHODS[name].options:
        options["recompute"] = draw.choice(["never", "except_last", "always"])
    M = max(M, K - 1) if name == "2bw" else M
    pipeline = Pipeline(method(name, accumulation_steps=M, split_backward=True, **options), K)
    return pipeline, (*[M] * draw.randint(0, 60), *(draw.randint(1, M) for _ in range(draw.randint(0, 2))))


@pytest.mark.parametrize("name", MAY_SPLIT)
def test_what_repeats_is_what_the_whole_simulation_does(name):
    num_repeated = 0
    for seed in range(8):
        pipeline, sizes = drawn_split(name, seed)
        num_repeated += simulated(pipeline, sizes)[0][1] is not None
        whole = [actions for actions, _ in simulated(pipeline, sizes, 0)]
        assert [split_actions(pipeline, k, sizes) for k in range(pipeline.num_stages)] == whole
    assert num_repeated > 2


@pytest.mark.parametrize(("delay", "M"), [("third", 1), ("decoupled", 4)])
def test_a_long_split_segment_is_not_simulated_to_its_end(M, delay):
    """K = 16: each stage simulates as much of 12,000 micro-batches as of 400."""
    pipeline = Pipeline(method("adl", accumulation_steps=M, delay=delay, split_backward=True), 16)
    short, long = ([len(actions) for actions, _ in simulated(pipeline, (M,) * (N // M))] for N in (400, 12_000))
    assert long == short
    assert len(split_actions(pipeline, 0, (M,) * (12_000 // M))) == 12_000 // M + 7 * 12_000


# --- Deadlock ----------------------------------------------------------------------------------------------


@every_variant
@pytest.mark.parametrize("K", [1, 3, 8])
def test_no_method_deadlocks_even_without_buffers(variant, K):
    """Nor in its first epochs, if they flush."""
    name, options = variant
    first = {"flush_epochs": 1} if "flush_epochs" in METHODS[name].options else {}
    chosen = method(name, accumulation_steps=8, **options, **first)
    for epoch, sizes in itertools.product((0, 1) if first else (1,), ([8, 8, 8], [8, 3], [1] * 12)):
        made = actions_of(K, sizes, chosen, epoch=epoch)
        check_rendezvous(made, max_pending=max_pending_of(Pipeline(chosen, K)))
        assert sum(1 for _ in interleave(made)) == sum(map(len, made))


@settings(max_examples=100)
@given(st.integers(2, 6), st.integers(1, 5), st.data())
def test_no_list_of_delays_deadlocks_with_the_fewest_sends(K, M, data):
    delays = sorted(data.draw(st.lists(st.integers(0, 12), min_size=K, max_size=K)), reverse=True)
    weights = data.draw(st.sampled_from(["stash", "recompute"]))
    order = data.draw(st.sampled_from(["forward_first", "backward_first"]))
    split = data.draw(st.sampled_from([{}, *({"split_backward": True, "max_deferred": n} for n in (1, 2, 4))]))
    first = data.draw(st.integers(0, 1))
    options = {"delay": delays, "weights": weights, "order": order, "flush_epochs": first, **split}
    chosen = method("adl", accumulation_steps=M, **options)
    for epoch in range(first + 1):
        made = actions_of(K, groups(25, M), chosen, epoch=epoch)
        check_rendezvous(made, max_pending=max_pending_of(Pipeline(chosen, K)))


def on_every_edge(K, number):
    return {(link.what, k): number for link in LINKS.values() for k in range(K)}


@pytest.mark.parametrize("K", [2, 5])
def test_one_group_per_pair_or_too_few_sends_deadlock(K):
    """Why transport/ builds one process group per directed edge, and why there is no tighter bound on sends."""
    with pytest.raises(ScheduleError, match=r"deadlock: .*stage 0 at RG0 \(RECV_GRAD\)"):
        check_rendezvous(actions_of(K, [2] * 8), one_per_pair=True)
    with pytest.raises(ScheduleError, match="deadlock"):  # stage 0 waits for room, stage 1 for the gradient behind it
        check_rendezvous(actions_of(K, [1] * 20), max_pending=on_every_edge(K, 0))


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


@pytest.mark.parametrize("K", [1, 2, 4, 5])
def test_evaluation_visits_every_micro_batch_and_never_deadlocks(K):
    lists = [list(evaluation_actions(k, num_stages=K, num_micro_batches=40)) for k in range(K)]
    for actions in lists:
        assert [a.number for a in actions if a.op is Op.PREDICT] == list(range(40))
    assert len(list(interleave(lists))) == sum(map(len, lists))
    limit = min(Pipeline(method(name, accumulation_steps=8), K).max_pending for name in METHODS)
    check_rendezvous(lists, max_pending=on_every_edge(K, limit))


@every_variant
@pytest.mark.parametrize("K", [2, 5])
def test_under_way_is_what_the_last_receiver_leaves_lying(variant, K):
    """Counted for each edge by itself, in the interleaving in which its receiver only moves when no other stage can."""
    name, options = variant
    made = actions_of(K, [8] * 5, method(name, accumulation_steps=8, **options))
    most = max_outstanding(made, range(16, 24))
    sends = {(a.op, k) for k, actions in enumerate(made) for a in actions if a.op in LINKS}
    assert most.keys() == {(LINKS[op].what, k) for op, k in sends}
    for op, sender in sends:
        to, under_way, seen = receiver(op, sender, num_stages=K), 0, 0
        for k, action in interleave(made, pick_next=lambda able, to=to: next((k for k in able if k != to), to)):
            under_way += (k == sender and action.op is op) - (k == to and action.op is LINKS[op].recv)
            if k == sender and action.op is op and 16 <= action.number < 24:
                seen = max(seen, under_way)
        assert most[LINKS[op].what, sender] == seen, (op, sender)


# --- Segments, printing, arguments -------------------------------------------------------------------------


@given(st.integers(1, 500), st.integers(1, 40), st.integers(1, 7))
def test_a_segment_holds_every_sample_once_with_weights_of_one(n, size, M):
    segment = Segment(epoch=0, first_update=0, num_samples=n, micro_batch_size=size, accumulation_steps=M)
    assert sum(segment.sizes) == n
    assert sum(segment.group_sizes) == len(segment.sizes)
    assert segment.num_updates == -(-len(segment.sizes) // M)
    assert segment.loss_weights("sum", segment.sizes) == [1] * len(segment.sizes)
    all_weights, start = segment.loss_weights("mean", segment.sizes), 0
    for count in segment.group_sizes:
        weights, sizes = all_weights[start : start + count], segment.sizes[start : start + count]
        assert sum(weights) == pytest.approx(1)
        assert weights == pytest.approx([s / sum(sizes) for s in sizes])
        start += count


@pytest.mark.parametrize("done", range(12))
def test_segments_end_at_planned_checkpoints_wherever_they_begin(done):
    """As after a run of fewer updates, which is made longer."""
    plan = Plan(
        epochs=1, max_updates=None, checkpoint_every_updates=5, num_samples=70, num_validation=0, micro_batch_size=3,
        accumulation_steps=2,
    )  # fmt: skip
    segment = plan.segment(0, done * 6, done)
    end = done + segment.num_updates
    assert end == min(5 * (done // 5 + 1), plan.updates_per_epoch)
    assert plan.ends_at(end * 6) == (end < plan.updates_per_epoch)


def test_the_printed_table_shows_the_actions_of_each_tick():
    lines = describe(Pipeline(adl(2), 3), num_micro_batches=6).splitlines()
    stage_0 = next(line for line in lines if line.startswith("stage 0"))
    assert " ".join(stage_0.split()[2:]) == "F0 F1 F2 F3 F4 B0 F5 B1 U0 B2 B3 U1 B4 B5 U2"
    assert "0      4      5       0       2              2               2    2 2" in lines
