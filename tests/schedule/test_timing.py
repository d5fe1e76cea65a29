"""What schedules take and hold: against formulas, the published tables, and examples small enough for a pencil."""

import itertools
import random
from dataclasses import replace
from pathlib import Path

import pytest

from adl_dist.errors import ConfigError
from adl_dist.schedule import METHODS, Costs, Pipeline, actions_of_all, figures, method, simulate, speed
from adl_dist.schedule.actions import RECEIVES, Op, message_of
from adl_dist.schedule.least_delays import with_least_delays
from adl_dist.schedule.timing import makespan
from benchmarks.capped import simulate_dataflow
from benchmarks.paper_tables import paper_tables


def worked(spans, stage):
    own = [s for s in spans if s.stage == stage and s.action.op in (Op.FORWARD, Op.BACKWARD, Op.UPDATE)]
    return [(str(s.action), round(s.start, 9), round(s.end, 9)) for s in own]


# --- With a pencil -----------------------------------------------------------------------------------------

TINY = Costs(forward=[1, 2], backward=[2, 3], update=[0.5, 0.5], link=[0.25])
TINY_STAGES = [
    [("F0", 0, 1), ("F1", 1, 2), ("B0", 6.5, 8.5), ("U0", 8.5, 9), ("B1", 12, 14), ("U1", 14, 14.5)],
    [("F0", 1.25, 3.25), ("B0", 3.25, 6.25), ("U0", 6.25, 6.75)],
]
TINY_STAGES[1] += [("F1", 6.75, 8.75), ("B1", 8.75, 11.75), ("U1", 11.75, 12.25)]


def test_two_stages_take_what_a_pencil_says_listed_or_capped():
    listed = simulate(actions_of_all(Pipeline(method("pipedream"), 2), num_micro_batches=2), TINY)
    for spans in (listed, simulate_dataflow(TINY, [2, 1], num_micro_batches=2)):
        assert [worked(spans, k) for k in range(2)] == TINY_STAGES
        assert makespan(spans) == 14.5


# --- The model columns of the paper's Table 3 --------------------------------------------------------------


@pytest.mark.parametrize("K", [2, 3, 4])
@pytest.mark.parametrize(
    ("name", "options", "formula"),
    [
        ("bp", {}, lambda K: 1),
        ("ddg", {}, lambda K: 3 * K / (K + 2)),
        ("fr", {}, lambda K: 3 * K / (K + 3)),
        ("gpipe", {}, lambda K: K * 4 / (4 + K - 1)),
        ("gpipe", {"recompute": "except_last"}, lambda K: 3 * K * 4 / (3 * (4 + K - 1) + 3)),
        ("gpipe", {"recompute": "always"}, lambda K: 3 * K * 4 / (3 * (4 + K - 1) + 4)),
        ("gpipe", {"accumulation_steps": 9}, lambda K: K * 9 / (9 + K - 1)),
        ("1f1b", {}, lambda K: K * 4 / (4 + K - 1)),
        ("1f1b", {"accumulation_steps": 2}, lambda K: K * 2 / (2 + K - 1)),
        ("dsp", {}, lambda K: 3 * K / 4),
        *((name, {}, lambda K: K) for name in ("adl", "fdg", "pipedream", "paci", "dgl", "dni")),
        ("dni", {"head_delay": 1}, lambda K: K),
    ],
)
def test_balanced_stages_speed_up_as_the_formula_says(name, options, formula, K):
    told = speed(method(name, **options), Costs.balanced(K))
    assert told.speed_up == pytest.approx(formula(K), abs=1e-9)
    if name in ("gpipe", "1f1b") and "recompute" not in options:  # (K - 1) / (M + K - 1)
        assert told.bubble == pytest.approx(1 - formula(K) / K)


@pytest.mark.parametrize(("backward", "longest"), [([2, 3, 4, 1.5], 2), ([4, 3, 2, 1], 4), ([1, 1, 9, 1], 9 - 3)])
def test_a_forward_lock_takes_all_forwards_and_what_none_hides(backward, longest):
    """Stage k may go on until the next forward reaches it: sum f + max over k of b_k minus the forwards before k."""
    costs = Costs(forward=[1, 2, 1.5, 0.5], backward=backward)
    assert speed(method("ddg"), costs).time_per_update == pytest.approx(5 + longest)


@pytest.mark.parametrize("name", METHODS)
def test_busy_shares_are_work_over_time(name):
    costs = Costs(forward=[1, 2, 1], backward=[2, 2, 3], update=[0.5, 0.5, 0.5], link=[0.2, 0.1])
    chosen = method(name, accumulation_steps=4)
    told = speed(chosen, costs)
    replayed = {"dsp": [1, 2, 0], "fr": [1, 2, 0]}.get(name, [0, 0, 0])  # the last stage has its graph at once
    for k in range(3):
        work = 4 * (costs.forward[k] + costs.backward[k] + replayed[k]) + 0.5
        assert told.busy[k] == pytest.approx(work / told.time_per_update)
    assert told.bubble == pytest.approx(1 - sum(told.busy) / Pipeline(chosen, 3).num_processes)


# --- Links and stragglers ----------------------------------------------------------------------------------


def test_the_tables_of_the_paper_are_those_of_the_docs():
    page = (Path(__file__).parents[2] / "docs" / "dev" / "results" / "timing.md").read_text()
    assert paper_tables() == page.split("```text\n")[1].split("```")[0].rstrip("\n")


# --- Staleness and memory ----------------------------------------------------------------------------------


@pytest.mark.parametrize("M", [1, 3, 4, 9])
@pytest.mark.parametrize("K", [1, 4, 5])
def test_each_stage_holds_what_the_comparison_table_says(K, M):
    """methods.md section 11, and ceil(d / M) weight copies; d is 2(K-k) or K-k with k from 1."""
    two, one = [2 * (K - k) for k in range(1, K + 1)], [K - k for k in range(1, K + 1)]

    def of(name, **options):
        told = figures(Pipeline(method(name, accumulation_steps=M, **options), K))
        return [(f.graphs, f.inputs, f.weight_copies) for f in told]

    assert of("adl") == of("fdg") == [(d + 1, 0, -(-d // M)) for d in two]
    assert of("ddg") == of("pipedream") == [(d + 1, 0, -(-d // M)) for d in one]
    assert of("paci") == [(d + 1, 0, 0) for d in one]
    assert of("dsp") == [(1, d + 1 if d else 0, 0) for d in two]  # without a delay the graph itself is kept
    assert of("fr") == [(1, d + 1 if d else 0, 0) for d in one]
    assert of("bp") == of("dgl") == of("dni") == [(1, 0, 0)] * K
    told = figures(Pipeline(method("dni", accumulation_steps=M, head_delay=3), K))
    assert [f.outputs for f in told] == [*[4] * (K - 1), 0], "and the outputs of which no gradient has come back"
    assert of("gpipe") == [(M, 0, 0)] * K
    assert of("gpipe", recompute="always") == [(1, M, 0)] * K
    assert of("gpipe", recompute="except_last") == [(1, M - 1, 0)] * K
    assert of("1f1b") == [(min(d + 1, M), 0, 0) for d in one]
    if one[0] <= M:
        assert of("2bw") == [(d + 1, 0, 1) for d in one]
        assert [Pipeline(method("2bw", accumulation_steps=M), K).steady_staleness(k) for k in range(K)] == [[1] * M] * K


# --- A backward in two parts -------------------------------------------------------------------------------


def time_per_micro_batch(K, M, costs, **options):
    return speed(method("adl", accumulation_steps=M, **options), costs).time_per_update / M


@pytest.mark.parametrize(("K", "M"), [(2, 1), (2, 4), (3, 1), (3, 2), (3, 4), (4, 2), (4, 4)])
def test_a_third_of_the_delay_keeps_the_speed_of_adl(K, M):
    """Forwards, I and WG take equally long; staleness is at most half."""
    costs = Costs.balanced(K)
    full = time_per_micro_batch(K, M, costs)
    assert full == pytest.approx(3.0)
    assert time_per_micro_batch(K, M, costs, delay="third", split_backward=True) <= 1.03 * full
    assert K < 4 or time_per_micro_batch(K, M, costs, delay="third") > 1.3 * full, "which takes the split"
    usual, third = (Pipeline(method("adl", delay=rule), K).delays for rule in ("decoupled", "third"))
    assert all(2 * d <= of_adl for d, of_adl in zip(third, usual, strict=True))


@pytest.mark.parametrize(("f", "i", "w"), [(1.0, 1.0, 1.0), (1.2, 1.0, 0.8), (1.0, 1.2, 0.8), (1.0, 1.0, 0.5)])
@pytest.mark.parametrize("K", [2, 4])
def test_zero_bubble_methods_wait_as_long_as_published(K, f, i, w):
    """ZB-H1 (K-1)(F+I-W), ZB-H2 (K-1)(F+I-2W), 1F1B (K-1)(F+I+W), for any M of at least 2K-1 (Qi et al., table 1)."""
    costs = Costs(forward=[f] * K, backward=[i + w] * K, backward_weight=[w] * K)
    for name, wait in (("1f1b", f + i + w), ("zbh1", f + i - w), ("zbh2", f + i - 2 * w)):
        for M in (2 * K - 1, 3 * K):
            told = speed(method(name, accumulation_steps=M), costs)
            assert told.time_per_update == pytest.approx(M * (f + i + w) + (K - 1) * wait)
            assert told.bubble == pytest.approx(1 - M * (f + i + w) / told.time_per_update)


@pytest.mark.parametrize("v", [1, 2, 3])
@pytest.mark.parametrize("P", [2, 3])
def test_interleaved_stages_wait_a_vth_of_1f1b(P, v):
    """(P-1)(F+B)/v, of P processes that all do F+B (Narayanan et al., section 2.2); M is a multiple of P."""
    for rounds in (1, 2, 4):
        M, costs = rounds * P, Costs(forward=[1 / v] * P * v, backward=[2 / v] * P * v)
        told = speed(method("interleaved", accumulation_steps=M, stages_per_process=v), costs)
        assert told.time_per_update == pytest.approx(3 * (M + (P - 1) / v))
        assert told.bubble == pytest.approx((P - 1) / v / (M + (P - 1) / v))
        whole = speed(method("1f1b", accumulation_steps=M), Costs.balanced(P))
        assert told.time_per_update - 3 * M == pytest.approx((whole.time_per_update - 3 * M) / v)


def test_the_part_that_is_put_off_has_a_cost_of_its_own():
    costs = Costs(forward=[1, 1], backward=[3, 3], backward_weight=[1, 1])
    assert [costs.of(0, op) for op in (Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)] == [3, 2, 1]
    told = "costs must be lists that fit .* transfer and transfer_back; got .*; correct these, or omit all but forward"
    with pytest.raises(ConfigError, match=told):
        Costs(forward=[1, 1], backward=[3, 3], backward_weight=[4, 1])
    with pytest.raises(ConfigError, match=told):
        Costs(forward=[1, 1], backward=[3, 3], backward_weight=[1])


# --- The least delays ----------------------------------------------------------------------------------------


def with_least(K, costs, M=4, **options):
    return with_least_delays(method("adl", accumulation_steps=M, **options), costs).delay


@pytest.mark.parametrize("seed", [*range(8), 34, 209])  # in the last two a stage gets less than was tried at first
def test_the_least_delays_keep_the_speed_and_no_stage_needs_less(seed):
    draw = random.Random(seed)
    K, M, split = draw.choice([2, 3, 4]), draw.choice([1, 2, 4]), bool(seed % 2)
    times = {name: [draw.uniform(0.6, 1.4) for _ in range(K)] for name in ("forward", "backward_weight")}
    backward = [weight + draw.uniform(0.6, 1.4) for weight in times["backward_weight"]]
    costs = Costs(**times, backward=backward, link=[draw.uniform(0, 0.5) for _ in range(K - 1)], update=[0.1] * K)
    found = with_least(K, costs, M, split_backward=split)

    def time_of(delays):
        return time_per_micro_batch(K, M, costs, delay=delays, split_backward=split)

    slowest = max(f + b + u / M for f, b, u in zip(costs.forward, costs.backward, costs.update, strict=True))
    assert time_of(found) <= 1.02 * max(slowest, time_of([6 * (K - 1 - k) for k in range(K)])) + 1e-9
    for k in range(K - 1):
        if found[k] > found[k + 1]:
            fewer = [*found[:k], found[k] - 1, *found[k + 1 :]]
            back = costs.backward_input if split else costs.backward
            way = sum(costs.forward[k:]) + sum(back[k:]) + 2 * sum(costs.link[k:])
            assert time_of(fewer) > 1.02 * slowest or found[k] * slowest < way, f"stage {k} of {found}"


@pytest.mark.parametrize("seed", [0, 1, 2, 3, 4, 7, 8])
def test_of_delays_up_to_a_most_none_are_faster(seed):
    """By all lists there are, within the share that is called as fast."""
    draw = random.Random(seed)
    K, M, split = draw.choice([2, 3, 4]), draw.choice([1, 2, 4]), bool(seed % 2)
    most = draw.randint(0, K)
    costs = Costs(
        forward=[draw.uniform(0.6, 1.4) for _ in range(K)],
        backward=[draw.uniform(1.2, 2.8) for _ in range(K)],
        link=[draw.uniform(0, 1) for _ in range(K - 1)],
    )
    chosen = method("adl", accumulation_steps=M, split_backward=split)
    bounded = replace(chosen, delay="auto", max_staleness=max(most, 0.01) / M)
    found = with_least_delays(bounded, costs).delay
    lists = [d for d in itertools.product(range(most + 1), repeat=K) if list(d) == sorted(d, reverse=True)]

    def time_of(delays):
        return time_per_micro_batch(K, M, costs, delay=delays, split_backward=split)

    assert found[0] <= most
    slowest = max(map(sum, zip(costs.forward, costs.backward, strict=True)))
    assert time_of(found) <= 1.025 * max(min(map(time_of, lists)), slowest)


# --- One link of each process to all others ------------------------------------------------------------------


def by_events(lists, costs):
    """Return when all is done: of all stages' next actions the earliest is next; a link is a queue out and one in."""
    K = len(lists)
    at, free, sent, taken, mail = [0] * K, [0.0] * K, [0.0] * K, [0.0] * K, {}
    while True:
        events = []
        for k in range(K):
            if at[k] == len(lists[k]):
                continue
            action = lists[k][at[k]]
            message = message_of(action, k, num_stages=K)
            awaited = message is not None and action.op in RECEIVES
            arrived = mail.get((message.what, k, action.number)) if awaited else 0.0
            if arrived is not None:
                events.append((max(free[k], arrived), k, action, message))
        if not events:
            assert [len(actions) for actions in lists] == at
            return max(free)
        start, k, action, message = min(events)
        at[k] += 1
        free[k] = start + costs.of(k, action.op)
        if message is not None and action.op not in RECEIVES:
            to, way = message.receiver, min(k, message.receiver)
            arrives = start
            if message.what in ("act", "grad"):
                transfer = (costs.transfer if message.what == "act" else costs.transfer_back)[way]
                begins = max(start, sent[k])
                sent[k] = begins + transfer
                arrives = taken[to] = max(begins, taken[to]) + transfer
            mail[message.what, to, action.number] = arrives + costs.link[way]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zbh1", "pipedream", "adl", "fr"])
@pytest.mark.parametrize("seed", range(2))
def test_a_link_for_both_neighbours_takes_messages_as_they_come(name, seed):
    draw = random.Random(seed)
    K = draw.choice([2, 3, 4, 5])

    def some(least, most, number=K):
        return [draw.uniform(least, most) for _ in range(number)]

    times = {"forward": some(0.5, 1.5), "backward": some(1, 3), "recompute": some(0.5, 1)}
    links = {"link": some(0, 1, K - 1), "transfer": some(0, 2, K - 1), "transfer_back": some(0, 2, K - 1)}
    costs = Costs(**times, **links, shares_link=True)
    chosen = method(name, **({"accumulation_steps": 3} if name in ("gpipe", "1f1b", "zbh1", "adl") else {}))
    lists = actions_of_all(Pipeline(chosen, K), num_micro_batches=9)
    assert makespan(simulate(lists, costs)) == pytest.approx(by_events(lists, costs))


def test_a_process_in_the_middle_has_one_link_for_both():
    """Links that are the bottleneck: two messages of 8 for each micro-batch from or to the middle; apart, one."""
    times = {"forward": [0.5] * 3, "backward": [1] * 3, "transfer": [8, 8]}
    apart, one = (time_per_micro_batch(3, 4, Costs(**times, shares_link=shared)) for shared in (False, True))
    assert apart == pytest.approx(8)
    assert one == pytest.approx(16)
    assert [Costs(**times, shares_link=shared).busiest_link for shared in (False, True)] == [8, 16]
    coded = Costs(**times, transfer_back=[2, 4], shares_link=True)
    assert coded.busiest_link == 12, "in: an activation and a gradient of 4; out: an activation and one of 2"
    assert time_per_micro_batch(3, 4, coded) == pytest.approx(12)


def test_delays_cover_what_a_shared_link_takes():
    """A full pipeline goes at the pace of the middle's link, 4; so delays are for that pace, and keep it."""
    costs = Costs(forward=[1] * 3, backward=[1] * 3, transfer=[2, 2], shares_link=True)
    found = with_least(3, costs)
    assert time_per_micro_batch(3, 4, costs, delay=found) <= 1.02 * 4
    assert max(found) < max(with_least(3, Costs(forward=[1] * 3, backward=[1] * 3, transfer=[2, 2])))


@pytest.mark.parametrize("order", ["forward_first", "backward_first"])
@pytest.mark.parametrize(("M", "most"), [(4, 1.5), (25, 1.16)])
def test_the_longest_delay_has_the_staleness_that_is_allowed(order, M, most):
    """Also where the product of the two, 1.16 * 25, is rounded to less than 29."""
    chosen = method("adl", accumulation_steps=M, delay="auto", max_staleness=most, order=order)
    pipeline = Pipeline(chosen.with_delays([chosen.longest_delay(2), 0]), 2)
    assert pipeline.mean_staleness(0) == pytest.approx(most)


@pytest.mark.parametrize(
    ("options", "copies", "histories"),
    [
        ({}, [2, 1, 0], [0, 0, 0]),
        ({"mitigation": ["predict"]}, [3, 2, 0], [1, 1, 0]),
        ({"mitigation": ["predict"], "predict_from": "momentum"}, [3, 2, 0], [0, 0, 0]),
        ({"mitigation": ["predict"], "weights": "latest"}, [2, 2, 0], [1, 1, 0]),
        ({"mitigation": ["nesterov"]}, [3, 2, 0], [1, 1, 0]),
        ({"mitigation": ["error_feedback"]}, [2, 1, 0], [2, 1, 0]),
        ({"mitigation": ["predict", "error_feedback"], "error_feedback_lag": 3}, [3, 2, 0], [4, 4, 0]),
    ],
)
def test_what_a_mitigation_holds_is_counted(options, copies, histories):
    """M = 2: the gradients of the first two stages are 2 and 1 updates old."""
    found = figures(Pipeline(method("adl", accumulation_steps=2, **options), 3))
    assert [f.weight_copies for f in found] == copies
    assert [f.history_copies for f in found] == histories
