"""``python -m benchmarks.race``: who shares runs with whom, devices, what is kept, the table, and what is refused."""

import contextlib
import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from adl_dist.baselines.loop import broadcast_number
from adl_dist.cli.bench.entries import Cut, ModelSurvey
from adl_dist.cli.bench.runner import Measured
from adl_dist.cli.config.compose import compose_run
from adl_dist.distributed.parent_process import RENDEZVOUS_FOLDER
from adl_dist.errors import ConfigError
from adl_dist.partition.costs import Profile, UnitCost
from adl_dist.schedule import Method
from adl_dist.training.options import PartitionSpec
from adl_dist.transport.spec import TensorSpec
from benchmarks.race import replicas
from benchmarks.race.__main__ import race
from benchmarks.race.contenders import NAMES, REPLICATED, contenders
from benchmarks.race.cut_and_delays import settled_cut, settled_delays
from benchmarks.race.devices import devices, quotas
from benchmarks.race.link import read_link
from benchmarks.race.report import draw, report, rows
from benchmarks.race.seconds import Timings, key_of
from benchmarks.race.updates import RaceConfig, Target, UpdatesToTarget, find_updates, read_target
from tests.race.test_links import needs_namespaces
from tests.support.commands import in_process, shows, words
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


def test_a_contender_that_cannot_run_is_left_out_with_the_reason():
    found, left_out = named("ddp", "adl", "torch-1f1b", words=["train.batch_size=66"], num_stages=4, M=2)
    assert list(found) == ["adl", "torch-1f1b"]
    shows(left_out["ddp"], ["cannot be shared evenly by 4 replicas"])
    with pytest.raises(ConfigError, match="there is no 'nope'"):
        named("nope")


def test_a_race_cuts_for_its_slowest_link_and_its_devices(monkeypatch, tmp_path):
    """The cut is made once. A later call with other links keeps it, because the results so far belong to it."""
    cut_for = []

    def apart(_, config, able):
        config.build(PartitionSpec)  # refuses what does not fit together
        cut_for.append((config.partition.links, config.partition.device_speeds, config.partition.balance))
        found = Cut(sizes=[1, 2], begins=["second"], act_bytes=[8], grad_bytes=[8])
        facts = {"target": TensorSpec((), "int64"), "exchanged_bytes": {}, "predicted": {}}
        return ModelSurvey(cuts={2: found}, granularity="block", channels_last=False, **facts)

    monkeypatch.setattr("benchmarks.race.cut_and_delays.apart", apart)
    links, on = [read_link(text) for text in ("100mbit", "50mbit", "50mbit,20ms", "1gbit,80ms")], devices(4, [0, 1])[0]
    for own, given in (
        ([], links),
        ([], links[:1]),
        (["partition.links=1gbit", "partition.device_speeds=[1,2]"], links),
    ):
        folder = tmp_path / str(len(own))
        folder.mkdir(exist_ok=True)
        cut, _ = settled_cut(folder, ["partition.balance=auto", *own], [], given, on)
        settled = compose_run(["partition.balance=auto", *own, *cut])[0].build(PartitionSpec)
        assert (settled.balance, settled.links, settled.speeds) == (["second"], None, None)
    assert cut_for == [
        ("50mbit,20ms", [0.5, 0.5], "auto"),
        (None, None, ["second"]),
        ("1gbit", [1.0, 2.0], "auto"),
    ]


def race_of_three(tmp_path, on, rate="10gbit", name="adl"):
    """What is predicted of ADL, or of another one, over a link, in seconds per update."""
    words = ["model=resnet8", "data=digits", "train.batch_size=128"]
    config, _ = compose_run([*words, "partition.num_stages=3", "partition.balance=[2,2,1]"])
    config.runtime.threads = 1
    racing, link = list(named(name, num_stages=3)[0].values()), read_link(rate)
    tmp_path.mkdir()
    _, predicted = settled_delays(tmp_path, config, racing, [link], on)
    return predicted[link.name][name]


def test_a_race_predicts_with_the_share_and_link_of_devices(tmp_path, monkeypatch):
    """Units of 1 and 2 s, each message of 8 bytes; the middle of three stages has one link for two of them."""
    units = [UnitCost(name=f"u{n}", forward=1.0, backward=2.0, act_bytes=8, grad_bytes=8) for n in range(5)]
    known = Profile(of={"micro_batch_size": 32}, units=units, forward=5.0, backward=10.0, optimizer_copies=1.0)
    profiler = SimpleNamespace(
        chain=None,
        num_others=lambda K: 1,
        with_load=lambda num, samples: contextlib.nullcontext(),
        profile=lambda size: known,
    )
    monkeypatch.setattr("benchmarks.race.cut_and_delays.chosen_sizes", lambda chain, num_stages, balance: balance)
    monkeypatch.setattr("benchmarks.race.cut_and_delays.Profiler", lambda config, **how: profiler)
    host = {"seconds_per_message": 0.0, "seconds_per_byte": 0.0}
    monkeypatch.setattr("benchmarks.race.cut_and_delays.link_figures", lambda device: host)
    monkeypatch.setattr("benchmarks.race.cut_and_delays.coding_costs", lambda device, threads: {})
    monkeypatch.setattr("benchmarks.race.cut_and_delays.apart", lambda function, *given: function(*given))
    whole, half = devices(3, [0, 1, 2])[0], devices(3, [0, 1])[0]
    for name, on, seconds in (("adl", whole, 6), ("adl", half, 12), ("bp", half, 30)):
        assert race_of_three(tmp_path / f"{name}-{on.share}", on, name=name) == pytest.approx(4 * seconds)
    slow = race_of_three(tmp_path / "slow", whole, "0.008kbit")
    assert slow == pytest.approx(4 * 2 * 8), "two messages of 8 s"


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


def test_quotas_are_set_as_cgroups_of_version_2_take_them(tmp_path, monkeypatch):
    (tmp_path / "cgroup.controllers").write_text("cpu")
    monkeypatch.setattr("benchmarks.race.devices._remove", lambda group: None)  # files of a kernel need no deleting
    with quotas(devices(4, [0, 1]), tmp_path) as groups:
        assert [(group.parent / "cpu.max").read_text() for group in groups] == ["5000 10000"] * 4
    with quotas(devices(2, [0, 1]), tmp_path) as groups:
        assert groups == [None, None]


@pytest.mark.slow
@needs_namespaces
def test_half_a_core_is_half_of_its_time():
    burn = "import time\nend = time.monotonic() + 2\nwhile time.monotonic() < end: pass\nprint(time.process_time())"
    with quotas(devices(2, [0])) as groups:
        command = ["sh", "-c", f'echo $$ > {groups[0]}; exec "$@"', "sh", sys.executable, "-c", burn]
        told = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    assert 0 < float(told) < 1.2
    assert not groups[0].parent.exists()


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


def test_no_rate_is_chosen_before_all_trials_are_at_their_end(tmp_path):
    values = named("adl")[0]["adl"].values
    ran(tmp_path / values.name / "lr0.1-seed0", [0.5, 0.95], epochs=2)
    ran(tmp_path / values.name / "lr0.2-seed0", [0.5, 0.95, 0.95])
    found = find_updates([values], race_in(tmp_path, rates=[0.1, 0.2], seeds=[0]), start=False)[values.name]
    assert (found.rate, found.updates) == (None, [])


def test_one_rate_alone_is_at_no_edge(tmp_path):
    values = named("adl")[0]["adl"].values
    ran(tmp_path / values.name / "lr0.1-seed0", [0.5, 0.95, 0.95])
    found = find_updates([values], race_in(tmp_path, rates=[0.1], seeds=[0]), start=False)[values.name]
    assert (found.rate, found.at_edge) == (0.1, False)


LINKS = [read_link("100mbit"), read_link("1gbit,20ms")]


def measured(contender, seconds=math.nan, **more):
    return Measured(contender=contender.name, repetition=0, num_updates=5, seconds_per_update=seconds, **more)


def test_timings_are_kept_and_a_success_replaces_failures(tmp_path):
    (adl, ddp), _ = named("adl", "ddp")[0].values(), None
    timings, key = Timings(tmp_path / "s.json"), key_of(adl, LINKS[0])
    timings.add(key, measured(adl, error="no"))
    assert timings.failures([key, key_of(ddp, LINKS[0])]) == {key: "no"}
    for seconds in (2.0, 1.0, 4.0):
        timings.add(key, measured(adl, seconds))
    again = Timings(tmp_path / "s.json")
    assert (again.seconds(key), again.median(key), again.failures([key])) == ([2.0, 1.0, 4.0], 2.0, {})
    assert again.median(key_of(adl, LINKS[1])) is None


def test_other_delays_and_settings_are_measured_by_themselves():
    adl = named("adl")[0]["adl"]
    longer = adl.with_method(Method(name="adl", delay=(3, 0)))
    coded = replace(adl, entry=replace(adl.entry, settings=("runtime.codec=int8",)))
    assert len({key_of(each, LINKS[0]) for each in (adl, longer, coded)}) == 3
    alone = named("one-device")[0]["one-device"]
    assert key_of(alone, LINKS[0]) == key_of(alone, LINKS[1])  # it sends nothing


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


def test_the_report_names_the_best_and_what_did_not_get_there(tmp_path):
    text = report(the_table(tmp_path), LINKS, str(ACCURACY), 3)
    line = {text.split("|")[1].strip(): text for text in text.splitlines()[:8] if "|" in text}
    shows(line["adl"], ["**120 s (100 s to 120 s), 1 not**", "| 60 s (50 s to 60 s), 1 not"])
    shows(line["ddp"], ["| 20 min (10 min to 30 min)", "**50 s (25 s to 75 s)**"])
    shows(line["2bw"], ["not reached (1 of 3 seeds)"])
    shows(
        text,
        ["100mbit,0ms: adl takes 120 s", "ddp 10.00 (best of DDP)", "torch-1f1b 3.33 (best of synchronous pipelines)"],
    )
    shows(text, ["1gbit,20ms: adl takes 60 s", "ddp 0.83 (best of DDP)", "| 0.2!", "| 1.000 (1.040)"])
    bp = {**the_table(tmp_path)[3], "contender": "bp"}
    bp["links"] = {name: {**cell, "seconds_to_target": 1.0} for name, cell in bp["links"].items()}
    text = report([*the_table(tmp_path), bp], LINKS, str(ACCURACY), 3)
    shows(text, ["100mbit,0ms: adl takes 120 s"])  # BP is on one device, and no pipeline of ours


def test_the_figure_shows_those_that_got_there(tmp_path):
    table = the_table(tmp_path)
    assert draw(tmp_path / "race.svg", table, LINKS, title="a race")
    assert (tmp_path / "race.svg").stat().st_size > 1000
    assert not draw(tmp_path / "none.svg", [row for row in table if row["contender"] == "2bw"], LINKS, title="")


def refused(*arguments, parts):
    with pytest.raises(ConfigError) as refusal:
        race(arguments)
    shows(str(refusal.value), parts)


@pytest.mark.parametrize(
    ("extra", "parts"),
    [
        (("--contenders", "adl,nope"), ["there is no 'nope'", "diloco-500"]),
        (("--target", "accuracy"), ["--target accuracy is no target", "accuracy=0.9 or loss=1.5"]),
        (("--link", "fast"), ["'fast' is not a link"]),
        (("--seeds", "0"), ["--seeds 0 must be above 0"]),
        (("--rates", "a,b"), ["--rates a,b: write numbers"]),
        (("method=adl",), ["method=adl: each contender has a method of its own"]),
        (("method.delay=auto",), ["method.delay=auto: each contender has a method of its own"]),
        (("runtime.autocast=bfloat16",), ["runtime.autocast would apply to our methods alone"]),
        (("train.clip_norm=1", "callbacks=[adl_dist.EarlyStopping]"), ["train.clip_norm and callbacks would apply"]),
        (("train.max_updates=9",), ["train.max_updates=9: replicas train whole epochs", "train.max_updates=null"]),
        (("--rates", "0.1,-0.2"), ["--rates 0.1,-0.2: each must be above 0"]),
        (("--target", "validation_accuracy=0.9"), ["every contender measures accuracy and loss of the validation"]),
        (("seed=3",), ["seed=3: a race sets it itself"]),
        (("train.batch_size=12",), ["train.batch_size=12 is no multiple of --torch-micro-batches=8"]),
        (("train.batch_size=14", "--contenders", "adl"), ["train.batch_size=14 is no multiple of method.accumulation"]),
        (("partition.num_stages=1",), ["a race needs at least 2 processes"]),
        (("train.batchsize=3",), ["there is no key 'train.batchsize'"]),
    ],
)
def test_a_mistake_is_one_line_and_writes_nothing(extra, parts, tmp_path):
    out = tmp_path / "out"
    refused("data=synthetic", "--target", "accuracy=0.9", "--out", str(out), *extra, parts=parts)
    assert not (out / "settings.json").exists() or extra[0] == "--contenders"


def test_a_folder_of_another_race_is_refused(tmp_path):
    words = "data=synthetic", "--target", "accuracy=0.9", "--out", str(tmp_path), "--contenders", "adl,nope"
    for _ in range(2):  # the same command continues, as far as that
        refused(*words, parts=["there is no 'nope'"])
    for other, parts in (
        (("train.epochs=7",), ["other settings", "train.epochs=7"]),
        (("--torch-micro-batches", "4"), ["other large_M: 8, now 4"]),
        (("--values", "dtype=float64"), ["other values: [], now ['dtype=float64']"]),
    ):
        refused(*words, *other, parts=[f"--out {tmp_path} holds a race with", *parts])


def test_the_old_command_names_the_new_one():
    shows(in_process("race", "data=digits").refusal(), ["python -m benchmarks.race, in a checkout"])


def test_each_replica_has_a_gpu_of_its_own_if_there_are_enough(tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(replicas, "run_together", started.extend)
    replicas.start("ddp", None, words(tmp_path, "partition.num_stages=2")[1:])
    told = [[child.environment[name] for name in ("RANK", "LOCAL_RANK")] for child in started]
    assert told == [["0", "0"], ["1", "1"]]


@pytest.mark.parametrize(("backend", "place"), [("nccl", "meta"), ("gloo", "cpu")])
def test_what_replicas_tell_each_other_is_where_nccl_can_send_it(backend, place, monkeypatch):
    seen = []
    monkeypatch.setattr(dist, "get_backend", lambda: backend)
    monkeypatch.setattr(dist, "broadcast", lambda tensor, src: seen.append(tensor.device.type))
    with contextlib.suppress(RuntimeError):  # the other device that a CPU has cannot tell numbers
        broadcast_number(0.5, torch.device("meta"))
    assert seen == [place]


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
