"""``adl-dist plan --check``: which runs, which of their updates count, and what is told of one that fails."""

from dataclasses import replace

import pytest

from adl_dist.cli.config import instantiate
from adl_dist.cli.config.compose import compose_run
from adl_dist.cli.plan import check
from adl_dist.cli.plan.check import check_cases, checked
from adl_dist.cli.subprocesses import ChildFailed
from adl_dist.errors import ConfigError
from adl_dist.partition import Machine, UnitCost, linearise
from adl_dist.partition.profile import Profile

EQUAL = Profile(
    of={"micro_batch_size": 10},
    units=[UnitCost(name=f"u{i}", forward=1.0, backward=2.0, update=0.0) for i in range(30)],
    forward=30.0,
    backward=60.0,
    optimizer_copies=1.0,
)
SAMPLES = 40


def cases_of(*words):
    overrides = ["model=resnet8", "data=synthetic", *words]
    config, _ = compose_run(overrides)
    chain = linearise(instantiate.build_model(config), granularity="layer")
    return check_cases(config, overrides, "layer", chain, Machine(), samples=SAMPLES, threads=1)


def steady_after(warmup, seconds):
    """What a run whose first updates take longer tells of its updates."""
    return [100.0 * (i + 1) for i in range(warmup)] + [100.0 * warmup + seconds * i for i in range(1, 7)]


def test_a_run_is_measured_in_its_steady_state_and_is_one_epoch(monkeypatch):
    ran = []

    def train(words):
        ran.append(words)
        return steady_after(3, seconds=2.0)

    monkeypatch.setattr(check, "_train", train)
    cases = cases_of("partition.num_stages=2")
    checked(cases, lambda: EQUAL, repetitions=2, samples=SAMPLES)
    assert [case.measured for case in cases] == [[SAMPLES / 2.0] * 2] * 3
    updates = 3 + check.FEWEST
    for words in ran:
        assert {f"data.bench_samples={updates * SAMPLES}", "train.epochs=1", f"train.max_updates={updates}"} <= set(
            words
        )


def test_each_measurement_makes_its_own_best_cut(monkeypatch):
    ran = []

    def train(words):
        ran.append(next((word for word in words if word.startswith("partition.balance")), None))
        return steady_after(3, seconds=2.0)

    monkeypatch.setattr(check, "_train", train)
    heavy = [replace(EQUAL.units[0], forward=13.0), *EQUAL.units[1:]]
    profiles = iter([EQUAL, replace(EQUAL, units=heavy, forward=42.0)])
    cases = cases_of("partition.num_stages=2")
    checked(cases, lambda: next(profiles), repetitions=2, samples=SAMPLES)
    even = "partition.balance=[15,15]"
    assert ran == [even, even, None, "partition.balance=[13,17]", even, None]
    best, even_cut, bp = cases
    assert best.predicted == pytest.approx([10 / 45, 10 / 51])
    assert even_cut.predicted == pytest.approx([10 / 45, 10 / 57])
    assert bp.predicted == pytest.approx([10 / 90, 10 / 102])


def test_no_update_counts_before_the_pipeline_is_full():
    words = ("partition.num_stages=4", "method=fdg", "method.accumulation_steps=1")
    assert [case.warmup for case in cases_of(*words)] == [7, 7, 3]


def test_what_would_start_the_clock_again_does_not_reach_the_run():
    theirs = ["runtime.checkpoint_every_updates=2", "resume=false", "runtime.trace=true", "train.max_updates=3"]
    kept = ["optimizer.lr=0.5", "train.batch_size=64"]
    words = list(cases_of(*theirs, *kept)[0].words_of([10, 20], 9))
    assert not set(theirs) & set(words)
    assert set(kept) <= set(words)
    assert "hydra.mode=RUN" in words


@pytest.mark.parametrize("ends", [[1.0, 2.0, 3.0], ChildFailed("exit code 3, without a word")])
def test_a_run_that_tells_nothing_is_one_line_with_its_command(monkeypatch, ends):
    def train(words):
        if isinstance(ends, ChildFailed):
            raise ends
        return ends

    monkeypatch.setattr(check, "_train", train)
    with pytest.raises(ConfigError, match=r"--check: adl-dist train model=resnet8 .* failed: (3 updates|exit code 3)"):
        checked(cases_of("partition.num_stages=2"), lambda: EQUAL, repetitions=1, samples=SAMPLES)
