"""The balancer: against all cuts, written down from the definitions, and against examples small enough for a pencil."""

import itertools
import math
import random
import re
import time
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adl_dist.errors import PartitionError
from adl_dist.models import gpt
from adl_dist.partition import Chain
from adl_dist.partition.balance import best_balance, evaluate_balance
from adl_dist.partition.costs import Machine, StageFootprint, UnitCost
from adl_dist.partition.cut import flops_sizes, loads_of
from tests.support.tiers import slow


def adl(K, M=1, **options):
    """What ADL holds: 2(K-1-k)+1 graphs, and a weight version for every M of them but one."""
    return [StageFootprint(graphs=d + 1, weight_copies=-(-d // M), **options) for d in range(2 * (K - 1), -1, -2)]


def unit(time=3.0, **options):
    return UnitCost(name="unit", forward=time / 3, backward=time * 2 / 3, **options)


@pytest.mark.parametrize("num_stages", [4, 8])
def test_the_default_cut_of_six_layers_leaves_no_stage_idle(num_stages):
    """Of 6 equal layers, 4 stages cannot all have the same number, and 8 stages get less than one each."""
    chain = Chain(gpt(65, 64, layers=6, width=192, heads=6), [torch.zeros(n, 64, dtype=torch.long) for n in (2, 3)])
    shares = loads_of(chain, flops_sizes(chain, num_stages))
    assert min(shares) >= max(shares) / 2, shares


def borders(sizes):
    return list(itertools.pairwise([0, *itertools.accumulate(sizes)]))


def all_sizes(n, K):
    for cuts in itertools.combinations(range(1, n), K - 1):
        yield [stop - start for start, stop in itertools.pairwise([0, *cuts, n])]


def num_sent(units, sizes):
    return sum(units[stop - 1].act_bytes + units[stop - 1].grad_bytes for _, stop in borders(sizes)[:-1])


def seconds_and_bytes(units, sizes, held, machine, optimizer_copies):
    """Seconds of each stage and link, and bytes of each stage, from the definitions; sums in whatever order comes."""
    stages, links, needs = [], [], []
    for k, (start, stop) in enumerate(borders(sizes)):
        upstream, downstream = units[start - 1 : start], units[stop - 1 : stop] * (stop < len(units))
        inside = units[start:stop]
        update = sum(u.update for u in inside) + max(u.update_fixed for u in inside)
        update += held[k].copies_per_update * sum(u.copy for u in inside)
        busy = update + sum(u.backward for u in inside) + sum(u.forward for u in inside) * (1 + held[k].recomputes)
        copies, halves = torn_ties(units, start, stop)
        busy += sum(first.update * nbytes / first.parameter_bytes for first, nbytes in copies)
        busy /= machine.speeds[k]
        for nbytes in halves:  # a part and a sum, once for all micro-batches of an update
            busy += 2 * (nbytes * machine.seconds_per_byte + machine.seconds_per_message) / held[k].micro_batches
        busy += held[k].targets * machine.seconds_per_message
        for end in upstream + downstream:
            busy += (end.act_bytes + end.grad_bytes) * machine.seconds_per_byte
            busy += end.num_tensors * (1 + (end.grad_bytes > 0)) * machine.seconds_per_message
        stages.append(busy)
        need = (2 + optimizer_copies + held[k].weight_copies + held[k].gradient_copies) * sum(
            u.parameter_bytes for u in inside
        )
        need += (2 + optimizer_copies + held[k].weight_copies + held[k].gradient_copies) * sum(n for _, n in copies)
        need += held[k].sums * sum(halves)
        need += held[k].graphs * sum(u.activation_bytes for u in inside)
        need += held[k].graphs * sum(end.held_behind for end in upstream)
        need += sum(held[k].inputs * (end.act_bytes + end.widened_bytes) + 3 * end.act_bytes for end in upstream)
        need += sum(held[k].grads_sent * end.grad_bytes for end in upstream)
        need += sum(3 * end.grad_bytes for end in downstream)
        graphs = 0 if held[k].recomputes else held[k].graphs
        for place in range(max(held[k].acts_sent, graphs + 1)):  # what the last graphs keep, they keep anyway
            if place < graphs:
                need += sum(end.held_before for end in downstream) * (place < held[k].acts_sent)
            else:
                need += sum(end.act_bytes for end in downstream)
        need += max(u.work_bytes for u in inside)
        needs.append(math.ceil(need))
        links += [max(end.act_bytes / machine.bandwidth, end.grad_bytes / machine.bandwidth) for end in downstream]
    return stages, links, needs


def torn_ties(units, start, stop):
    """Return each copy in a stage with one unit of a tie as (first unit, bytes), and the bytes of all such ties."""
    copies, halves = [], []
    for place, one in enumerate(units):
        for first, nbytes in one.tied:
            has_first, has_later = start <= first < stop, start <= place < stop
            halves += [nbytes] * (has_first != has_later)
            copies += [(units[first], nbytes)] * (has_later and not has_first)
    return copies, halves


def brute_force(units, K, held, machine, optimizer_copies):
    """The best of (seconds, those of stages, bytes sent, sizes), or None; the least that any cut exceeds the memory."""
    fitting, excesses = [], []
    for sizes in all_sizes(len(units), K):
        if all(units[stop - 1].may_cut for _, stop in borders(sizes)[:-1]):
            stages, links, needs = seconds_and_bytes(units, sizes, held, machine, optimizer_copies)
            excesses.append(max(needs) - machine.memory_bytes)
            if excesses[-1] <= 0:
                fitting.append((max(stages + links), max(stages), num_sent(units, sizes), sizes))
    return min(fitting, default=None), min(excesses, default=None)


# Whole seconds and bytes, and all that is divided or multiplied by a power of two: floats hold every figure exactly,
# whatever the order of the sums. So brute force and the balancer must agree to the last bit, and ties are real ties.
POWERS = [0.25, 0.5, 1.0, 2.0]
FOOTPRINTS = {"inputs": (0, 3), "weight_copies": (0, 2), "gradient_copies": (0, 1), "recomputes": (0, 1)}
FOOTPRINTS |= {"acts_sent": (1, 4), "grads_sent": (1, 6), "sums": (2, 5), "micro_batches": (1, 4)}
FOOTPRINTS |= {"copies_per_update": (0, 2), "targets": (0, 1)}


def random_instance(draw):
    """Up to 8 units and 4 stages; few different numbers, so that many cuts cost the same."""
    n, most = draw.randint(1, 8), draw.choice([1, 3, 20])
    K = draw.randint(1, min(4, n))
    cuttable = draw.choice([1.0, 0.7])

    def number():
        return draw.randint(0, most)

    of_bytes = ("parameter", "activation", "work", "act", "widened")
    units = [
        UnitCost(
            name=f"u{i}",
            **{seconds: float(number()) for seconds in ("forward", "backward", "update", "update_fixed", "copy")},
            **{f"{kind}_bytes": number() for kind in of_bytes},
            held_before=number(),
            held_behind=number(),
            grad_bytes=draw.choice([0, number()]),
            num_tensors=draw.randint(1, 3),
            may_cut=draw.random() < cuttable or i == n - 1,
        )
        for i in range(n)
    ]
    if n > 1 and draw.random() < 0.5:  # of embedding and head
        first = replace(units[0], parameter_bytes=number() + 1)
        units = [first, *units[1:-1], replace(units[-1], tied=[[0, first.parameter_bytes]])]
    held = [
        StageFootprint(graphs=draw.randint(1, 2 * K), **{name: draw.choice(pair) for name, pair in FOOTPRINTS.items()})
        for _ in range(K)
    ]
    # Around what an even share of everything takes, so that a limit may bind, not bind, or leave no cut at all.
    tight = draw.choice([0.5, 1, 1.5, 2, 100]) * (1 + 8 * most * n / K)
    machine = Machine(
        speeds=[draw.choice(POWERS) for _ in range(K)],
        memory_bytes=int(tight * draw.uniform(0.5, 2)),
        bandwidth=draw.choice([math.inf, *POWERS]),
        latency=1000.0,
        seconds_per_byte=draw.choice([0.0, *POWERS]),
        seconds_per_message=draw.choice([0.0, *POWERS]),
    )
    return units, K, held, machine, draw.choice([0.0, 0.5, 1.0, 2.0])


@pytest.mark.parametrize("num_instances", [200, slow(1000)])
def test_it_finds_what_brute_force_over_all_cuts_finds(num_instances):
    outcomes = dict.fromkeys(("optimum", "memory", "places"), 0)

    def compare(seed):
        units, K, held, machine, copies = random_instance(random.Random(seed))
        best, excess = brute_force(units, K, held, machine, copies)
        arguments = {"held": held, "machine": machine, "optimizer_copies": copies}
        if best is not None:
            found = best_balance(units, num_stages=K, **arguments)
            assert (found.seconds, found.sizes) == (best[0], best[3])
            assert found == evaluate_balance(units, found.sizes, **arguments)
            figures = found.stage_seconds, found.link_seconds, found.stage_bytes
            assert figures == seconds_and_bytes(units, found.sizes, held, machine, copies)
            outcomes["optimum"] += 1
            return
        with pytest.raises(PartitionError) as refused:
            best_balance(units, num_stages=K, **arguments)
        if excess is None:
            assert f"needs {K - 1} cuts" in str(refused.value)
            outcomes["places"] += 1
        else:
            told = re.search(r"needs ([\d,]+) bytes .* device has ([\d,]+);", str(refused.value))
            need, limit = (int(number.replace(",", "")) for number in told.groups())
            assert need - limit == excess
            outcomes["memory"] += 1

    # Not examples of hypothesis: those depend on the modules that tests before this one have imported.
    for seed in range(num_instances):
        compare(seed)
    assert sum(outcomes.values()) == num_instances
    assert min(outcomes.values()) >= num_instances / 50, outcomes


@settings(max_examples=20)
@given(st.integers(0, 2**32))
def test_times_that_no_float_holds_tie_to_the_last_bit(seed):
    """No tolerance: the tables add, divide and compare as the figures of one cut do."""
    draw = random.Random(seed)
    forward, backward = draw.random(), draw.random()
    units = [UnitCost(name="u", forward=forward, backward=backward, act_bytes=draw.randint(0, 9)) for _ in range(8)]
    machine, held = Machine(speeds=[0.7, 0.7, 0.7, 1.1]), adl(4, recomputes=True)
    cuts = [evaluate_balance(units, sizes, held=held, machine=machine) for sizes in all_sizes(8, 4)]
    first = min(cuts, key=lambda c: (c.seconds, max(c.stage_seconds), num_sent(units, c.sizes), c.sizes))
    assert best_balance(units, num_stages=4, held=held, machine=machine) == first


def test_500_units_are_cut_into_16_stages_in_under_2_seconds():
    draw = random.Random(0)
    units = [
        unit(draw.random(), activation_bytes=draw.randint(1, 9), act_bytes=draw.randint(1, 9), may_cut=i % 7 > 0)
        for i in range(500)
    ]
    machine = Machine(speeds=[draw.uniform(0.8, 1.2) for _ in range(16)], memory_bytes=4000, bandwidth=1.0)
    start = time.process_time()
    best = best_balance(units, num_stages=16, held=adl(16, M=4), machine=machine)
    seconds = time.process_time() - start
    assert max(best.stage_bytes) <= 4000
    assert seconds < 2


def sizes(units, K, *, held=None, **machine):
    return best_balance(units, num_stages=K, held=held or adl(K), machine=Machine(**machine)).sizes


def test_a_limit_that_no_cut_fits_is_refused_with_the_way_out():
    units = [unit(activation_bytes=1000)] * 6
    told = (
        r"into 2 stages .*that of \[1, 5\] units.* needs 5,000 bytes on stage 1 \(micro-batches .*: 1, .* has 4,999; "
        r"use more stages .* or smaller micro-batches .* or method\(weights='recompute'\)$"
    )
    with pytest.raises(PartitionError, match=told):
        sizes(units, 2, memory_bytes=4999)
    assert sizes(units, 2, memory_bytes=5000) == [1, 5]
    with pytest.raises(PartitionError, match=r"has 4,999; use more stages [^;]* or smaller micro-batches \S+$"):
        sizes(units, 2, held=adl(2, recomputes=True), memory_bytes=4999)
    units = [UnitCost(name="first", forward=1, backward=1, may_cut=False), unit(), unit()]
    with pytest.raises(PartitionError, match="cannot be cut right after 'first'; move"):
        evaluate_balance(units, [1, 2], held=adl(2))
