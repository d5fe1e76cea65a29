"""What is fastest within a bound on staleness, by given costs: against all there is."""

import itertools
import random
from dataclasses import replace

import pytest

from adl_dist.partition import Machine, UnitCost
from adl_dist.partition.bounded import only_within, steps_to_try, within_bound
from adl_dist.partition.costs import Profile
from adl_dist.partition.predict import AS_GOOD, best_of, predict
from adl_dist.schedule import Pipeline, method
from adl_dist.schedule.least_delays import AS_FAST

BATCH, UNITS = 24, 4


def costs(draw, steps):
    """Profiles by M whose units take longer for small micro-batches than their share, each in its own way."""
    per_image = [(draw.uniform(0.5, 1.5), draw.uniform(1.0, 3.0)) for _ in range(UNITS)]
    calls = [draw.uniform(0, 8) for _ in range(UNITS)]
    slowdown = draw.uniform(1.0, 1.1)

    def profile(M):
        num = BATCH // M
        times = [(num * f + call, num * b + call) for (f, b), call in zip(per_image, calls, strict=True)]
        units = [
            UnitCost(name=f"u{i}", forward=f, backward=b, backward_weight=b / 2, act_bytes=num, grad_bytes=num)
            for i, (f, b) in enumerate(times)
        ]
        whole = {"forward": sum(f for f, _ in times), "backward": sum(b for _, b in times)}
        of = {"micro_batch_size": num}
        return Profile(of=of, units=units, optimizer_copies=1.0, split_slowdown=slowdown, **whole)

    return {M: profile(M) for M in steps}


def everything(profiles, K, bound, machine):
    """Every M, list of delays, form of the backward and cut within the bound."""
    cuts = [c for c in itertools.product(range(1, UNITS), repeat=K) if sum(c) == UNITS]
    for (M, profile), split in itertools.product(profiles.items(), (False, True)):
        for delays in itertools.product(range(int(bound * M) + 1), repeat=K):
            if list(delays) == sorted(delays, reverse=True) and delays[-1] == 0 and delays[0] <= 2 * K:
                chosen = method("adl", accumulation_steps=M, delay=delays, split_backward=split)
                for sizes in cuts:
                    yield predict(profile, Pipeline(chosen, K), machine=machine, sizes=sizes)


@pytest.mark.parametrize("seed", range(4))
def test_the_choice_is_as_fast_as_the_best_of_all(seed):
    draw = random.Random(seed)
    K, bound, steps = [(2, 0.5, (1, 2, 3)), (3, 1.0, (1, 2)), (2, 0.4, (2, 3, 4)), (2, 1.0, (1, 2))][seed]
    profiles, machine = costs(draw, steps), Machine(latency=draw.choice([0.0, 5.0, 20.0]), bandwidth=2.0)
    found, refused = within_bound(method("adl"), K, bound=bound, profiles=profiles, machine=machine)
    assert not refused
    assert len(found) == 2 * len(profiles)
    assert found == only_within(found, bound)
    choice = best_of(found)
    most = max(p.images_per_second for p in everything(profiles, K, bound, machine))
    assert max(p.images_per_second for p in found) >= most / (AS_FAST + 0.005)
    assert choice.images_per_second >= (1 - AS_GOOD) * most / (AS_FAST + 0.005)


def cheap_calls(M):
    """Of equal units, for which only the number of samples counts."""
    num = BATCH // M
    units = [UnitCost(name=f"u{i}", forward=num, backward=2 * num, backward_weight=num) for i in range(4)]
    return Profile(of={"micro_batch_size": num}, units=units, forward=4 * num, backward=8 * num, optimizer_copies=1.0)


def test_a_bound_is_on_the_mean_of_each_stage():
    for bound in (0.25, 0.5, 1.0):
        profiles = {M: cheap_calls(M) for M in (1, 2, 4)}
        found, _ = within_bound(method("adl"), 2, bound=bound, profiles=profiles)
        assert {max(p.staleness_mean) <= bound for p in found} == {True}
        delays = {p.pipeline.micro_batches_per_update: p.pipeline.method.delay for p in found}
        assert delays == {M: (min(int(bound * M), 1), 0) for M in profiles}, "links take no time"


def test_of_slow_calls_the_fewest_steps_that_bear_the_delay_win():
    """A call of a kernel takes as long as 8 samples: micro-batches should be large, but of two there is no pipeline."""
    profiles = {}
    for M in (1, 2, 4):
        told = cheap_calls(M)
        units = [replace(u, forward=u.forward + 8, backward=u.backward + 16) for u in told.units]
        whole = {"forward": told.forward + 32, "backward": told.backward + 64}
        profiles[M] = replace(told, units=units, **whole)
    found, _ = within_bound(method("adl"), 2, bound=0.5, profiles=profiles)
    choice = best_of(found).pipeline.method
    assert (choice.accumulation_steps, choice.delay, choice.split_backward) == (2, (1, 0), False)


def test_a_split_is_chosen_where_it_gains_more_than_it_costs():
    profiles, machine = {4: cheap_calls(4)}, Machine(latency=4.0)  # a ninth of a stage's work
    for slowdown, splits in ((1.0, True), (1.3, False)):
        of_four = {4: replace(profiles[4], split_slowdown=slowdown)}
        found, _ = within_bound(method("adl"), 2, bound=0.25, profiles=of_four, machine=machine)
        assert [p.pipeline.method.delay for p in found] == [(1, 0), (1, 0)]
        assert best_of(found).pipeline.method.split_backward == splits
    whole_only, _ = within_bound(method("adl"), 2, bound=0.25, profiles=profiles, machine=machine, may_split=False)
    assert [p.pipeline.method.split_backward for p in whole_only] == [False]


def test_where_the_backward_comes_first_delays_are_one_longer():
    chosen = method("adl", order="backward_first")
    for p in within_bound(chosen, 2, bound=0.25, profiles={4: cheap_calls(4)}, machine=Machine(latency=30.0))[0]:
        assert p.pipeline.method.delay == (2, 0)
        assert p.staleness_mean == [0.25, 0.0]


def test_what_does_not_fit_is_told_with_its_steps():
    large = {
        M: replace(cheap_calls(M), units=[replace(u, activation_bytes=99) for u in cheap_calls(M).units])
        for M in (1, 2)
    }
    found, refused = within_bound(method("adl"), 2, bound=1, profiles=large, machine=Machine(memory_bytes=250))
    assert len(found) + len(refused) == 4
    assert any(
        "adl, K = 2, M = 2, backward in one part: no cut into 2 stages fits into memory" in why for why in refused
    )


@pytest.mark.parametrize(
    ("batch", "bound", "K", "steps"),
    [(128, 0.5, 2, [1, 2, 4]), (128, 0.5, 4, [1, 2, 4, 8, 16]), (128, 2.0, 2, [1]), (12, 0.5, 3, [1, 2, 3, 4, 6, 12])],
)
def test_steps_divide_the_batch_up_to_those_for_adls_delays(batch, bound, K, steps):
    assert steps_to_try(batch, bound, K) == steps


def test_no_stage_may_be_staler_than_the_bound():
    told = predict(cheap_calls(4), Pipeline(method("adl", accumulation_steps=4), 2))
    of_stages = [replace(told, staleness_mean=stale) for stale in ([0.5, 0.0], [0.0, 0.5], [0.5, 0.6])]
    assert only_within(of_stages, 0.5) == of_stages[:2]
