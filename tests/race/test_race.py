"""``python -m benchmarks.race``: who shares runs with whom, devices, what is kept, and the table."""

import json
import math
import os

import pytest

from adl_dist.cli.bench.runner import Measured
from adl_dist.cli.config.compose import compose_run
from adl_dist.distributed.parent_process import RENDEZVOUS_FOLDER
from benchmarks.race import replicas
from benchmarks.race.contenders import NAMES, REPLICATED, contenders
from benchmarks.race.devices import devices
from benchmarks.race.link import read_link
from benchmarks.race.report import rows
from benchmarks.race.seconds import Timings, key_of
from benchmarks.race.updates import RaceConfig, Target, UpdatesToTarget, find_updates, read_target
from tests.support.commands import in_process, words
from tests.support.ranks import run_ranks

ACCURACY = Target(metric="accuracy", value=0.9)
USERS = ["model._target_=tests.support.user_code.good", "data._target_=tests.support.user_code.images"]


def named(*names, words=(), num_stages=2, M=4):
    able, left_out = contenders(names, words, num_stages=num_stages, M=M, large_M=8)
    return {contender.name: contender for contender in able}, left_out


def test_all_that_flush_share_the_runs_of_one_device():
    """With the same M: BatchNorm sees micro-batches. What is stale, and replicas, have runs of their own."""
    found, left_out = named(*NAMES)
    assert left_out == {}
    shared = {}
    for name, contender in found.items():
        shared.setdefault(contender.values.name, set()).add(name)
    assert shared.pop("bp-M1") == {"one-device"}
    assert shared.pop("bp-M4") == {"bp", "1f1b", "zbh1"}
    assert shared.pop("bp-M8") == {"torch-1f1b", "torch-zb"}
    assert sorted(map(sorted, shared.values())) == sorted(
        [name] for name in (*REPLICATED, "zbh1-int8", "2bw", "paci", "adl", "adl-int8", "adl-full", "adl-full-int8")
    )


@pytest.mark.parametrize(
    ("num", "cores", "expected"),
    [
        (2, [0, 1], [([0], 1), ([1], 1)]),
        (4, [0, 1], [([0], 0.5), ([0], 0.5), ([1], 0.5), ([1], 0.5)]),
        (3, [0, 1], [([0], 0.5), ([0], 0.5), ([1], 0.5)]),
        (2, [3, 5, 7, 8, 9], [([3, 5], 1), ([7, 8], 1)]),
    ],
)
def test_devices_are_equal_shares_of_the_cores(num, cores, expected):
    assert [(list(device.cores), device.share) for device in devices(num, cores)] == expected


def test_a_target_is_met_by_what_is_as_good_or_better():
    assert read_target("accuracy=0.9") == ACCURACY
    assert [ACCURACY.is_met(value) for value in (0.89, 0.9, 0.95)] == [False, True, True]
    loss = read_target("loss=1.5")
    assert [loss.is_met(value) for value in (1.6, 1.5, 1.0)] == [False, True, True]


def race_in(folder, *, rates, seeds, target=ACCURACY):
    return RaceConfig(
        words=["train.epochs=3"], only_values=(), folder=folder, rates=rates, seeds=seeds, target=target,
        side_by_side=1, command="",
    )  # fmt: skip


def ran(folder, accuracies, *, epochs=3):
    """What a run leaves: a validation after each epoch of ten updates."""
    folder.mkdir(parents=True)
    lines = [
        json.dumps({"name": "validation/accuracy", "value": value, "update": 10 * epoch + 9, "epoch": epoch})
        for epoch, value in enumerate(accuracies)
    ]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "summary.json").write_text(json.dumps({"epochs": epochs, "updates": 30}))


def test_the_rate_that_gets_there_first_is_taken(tmp_path):
    values = named("adl")[0]["adl"].values
    for name, accuracies in {
        "lr0.1-seed0": [0.5, 0.8, 0.91],
        "lr0.2-seed0": [0.6, 0.9, 0.7],  # there first, though it ends worse
        "lr0.4-seed0": [0.1, 0.1, 0.1],
        "lr0.2-seed1": [0.95, 0.95, 0.95],
        "lr0.1-seed1": [0.99, 0.99, 0.99],  # of a rate that was not taken
    }.items():
        ran(tmp_path / values.name / name, accuracies)
    found = find_updates([values], race_in(tmp_path, rates=[0.1, 0.2, 0.4], seeds=[0, 1]), start=False)[values.name]
    assert (found.rate, found.updates, found.at_edge) == (0.2, [20, 10], False)
    assert found.trials == {"0.1": 30, "0.2": 20, "0.4": None}
    assert (found.best, found.median) == ([0.9, 0.95], 15)


def test_where_no_rate_gets_there_the_nearest_is_taken(tmp_path):
    values = named("adl")[0]["adl"].values
    ran(tmp_path / values.name / "lr0.1-seed0", [0.5, 0.6, 0.7])
    ran(tmp_path / values.name / "lr0.2-seed0", [0.5, 0.8, 0.2])
    found = find_updates([values], race_in(tmp_path, rates=[0.1, 0.2], seeds=[0]), start=False)[values.name]
    assert (found.rate, found.updates, found.at_edge, found.median) == (0.2, [None], True, math.inf)


LINKS = [read_link("100mbit"), read_link("1gbit,20ms")]


def measured(contender, seconds=math.nan, **more):
    return Measured(contender=contender.name, repetition=0, num_updates=5, seconds_per_update=seconds, **more)


def the_table(tmp_path):
    racing = list(named("one-device", "ddp", "torch-1f1b", "adl", "2bw")[0].values())
    found = {c.values.name: UpdatesToTarget(rate=0.1, updates=[100, 200, 300], best=[1.0], trials={}) for c in racing}
    adl, two = racing[3], racing[4]
    found[adl.values.name] = UpdatesToTarget(rate=0.2, updates=[100, None, 120], best=[1.0], trials={}, at_edge=True)
    found[two.values.name] = UpdatesToTarget(rate=0.2, updates=[None, None, 120], best=[1.0], trials={})
    timings = Timings(tmp_path / "s.json")
    for contender in racing:
        for link, seconds in zip(
            LINKS, {"adl": (1.0, 0.5), "ddp": (6.0, 0.25)}.get(contender.name, (2.0, 2.0)), strict=True
        ):
            if not timings.seconds(key_of(contender, link)):
                timings.add(key_of(contender, link), measured(contender, seconds))
    predicted = {LINKS[0].name: {"adl": 1.04}}
    return rows(LINKS, {link.name: racing for link in LINKS}, found, timings, None, predicted)


def test_the_time_to_the_target_is_updates_times_seconds(tmp_path):
    table = the_table(tmp_path)
    times = {row["contender"]: row["links"]["100mbit,0ms"].get("seconds_to_target") for row in table}
    assert times == {"one-device": 400.0, "ddp": 1200.0, "torch-1f1b": 400.0, "adl": 120.0, "2bw": None}
    assert table[1]["links"]["1gbit,20ms"]["seconds_to_target"] == 50.0
    assert (table[1]["links"]["1gbit,20ms"]["least"], table[1]["links"]["1gbit,20ms"]["most"]) == (25.0, 75.0)


def one_replica(kind, inner_updates, argv):
    config, _ = compose_run(argv)
    replicas.train(int(os.environ["RANK"]), kind, inner_updates, config, os.environ[RENDEZVOUS_FOLDER])


def validations(folder):
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        (r["name"], r["update"], r["epoch"], pytest.approx(r["value"], rel=1e-5))
        for r in records
        if "validation" in r["name"]
    ]


@pytest.mark.ranks
def test_replicas_see_what_one_device_sees(tmp_path):
    """Without BatchNorm DDP computes what one device does: the same validations after the same updates."""
    alone, together = tmp_path / "alone", tmp_path / "together"
    common = words(alone, *USERS, "train.epochs=3", "seed=3")[1:]
    bp = ["method=bp", "method.accumulation_steps=1", "partition.num_stages=1"]
    assert in_process("train", *common, *bp).code == 0
    together.mkdir()
    run_ranks(2, one_replica, "ddp", None, [*(w for w in common if "run_dir" not in w), f"run_dir={together}"])
    assert validations(together) == validations(alone)
    assert json.loads((together / "summary.json").read_text())["updates"] == 6


@pytest.mark.ranks
def test_dilocos_validations_are_those_of_its_common_weights(tmp_path):
    """Exchanges after every third of two updates an epoch: at the end of an epoch some updates are not common yet."""
    argv = words(tmp_path, *USERS, "train.epochs=3")[1:]
    run_ranks(2, one_replica, "diloco", 3, argv)
    seen = [(name, update) for name, update, *_ in validations(tmp_path) if name == "validation/loss"]
    assert [update for _, update in seen] == [-1, 2, 5]
