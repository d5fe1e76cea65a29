"""``adl-dist bench``: who takes part, in which order, what the table says, and what is refused."""

import _thread
import argparse
import json
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from adl_dist.cli.bench import command
from adl_dist.cli.bench.baseline_rank import rank_batches
from adl_dist.cli.bench.command import baseline, report, rows
from adl_dist.cli.bench.entries import DEFAULT, Cut, ModelSurvey, entries, survey
from adl_dist.cli.bench.runner import (
    BenchConfig,
    Measured,
    seconds_of,
    train_argv,
)
from adl_dist.cli.config.compose import balance_word, compose_run
from adl_dist.cli.subprocesses import Child, ChildFailed, run_together
from adl_dist.schedule import Pipeline
from adl_dist.transport.spec import TensorSpec
from tests.support import commands
from tests.support.commands import as_command, in_process, left_behind, shows

CUTS = {
    K: Cut(sizes=[1] * K, begins=[f"u{k}" for k in range(1, K)], act_bytes=[b] * (K - 1), grad_bytes=[b] * (K - 1))
    for K, b in ((2, 300), (3, 150), (6, 10))
}
SURVEY = ModelSurvey(
    channels_last=True, cuts=CUTS, granularity="block", target=TensorSpec((), "int64"), predicted={"adl": 125.0},
    exchanged_bytes=12_000,
)  # fmt: skip
CONV_NET = ["model=resnet8", "data=synthetic", "data.image_size=8"]


def fit(names, *words):
    return entries(names.split(","), compose_run(words)[0], warmup=3)


def bench_config(words, found):
    where = {"log_folder": Path(), "timeout_seconds": 1.0}
    return BenchConfig(config=compose_run(words)[0], overrides=words, survey=found, **where)


def ran(name, *speeds, **more):
    return [
        Measured(contender=name, repetition=i, num_updates=8, images_per_second=s, **more) for i, s in enumerate(speeds)
    ]


def test_by_default_all_take_part_on_a_cpu():
    """Those whose papers do not accumulate run with one micro-batch per update, of all samples."""
    able, left_out = fit(",".join(DEFAULT), "train.batch_size=66", "partition.num_stages=2")
    assert ([entry.name for entry in able], left_out) == ([*DEFAULT], {})
    steps = {entry.name: (entry.method.micro_batches_per_update, entry.samples) for entry in able}
    assert steps["torch-bp"] == steps["adl"] == steps["gpipe"] == (4, 64)
    assert (steps["torch-bp-whole"], steps["fdg"], steps["ddg"]) == ((1, 64), (1, 66), (1, 66))
    delays = {entry.name: Pipeline(entry.method, 3).delays for entry in able}
    assert (delays["adl-minimal"], delays["adl"]) == ((2, 1, 0), (4, 2, 0))
    (adl, fdg), _ = fit("adl,fdg", "partition.num_stages=4")
    assert (adl.warmup, fdg.warmup) == (3, 7), "6 micro-batches are 2 updates, or 6, and one more: a full pipeline"
    assert seconds_of(replace(adl, warmup=2), [0.0, 10.0, 11.0, 12.0]) == 1.0
    diloco = replace(adl, inner_updates=50, warmup=5)  # four updates of a second, and an exchange of 100
    assert seconds_of(diloco, [*range(5), *range(5, 9), 109]) == pytest.approx(1 + 100 / 50)
    with pytest.raises(ChildFailed, match="2 updates, of which 2 do not count, are too few"):
        seconds_of(replace(adl, warmup=2), [0.0, 10.0])


def test_bytes_are_counted_as_each_way_to_train_sends_them():
    names = "torch-bp,torch-ddp,torch-diloco-50,torch-1f1b,torch-zb,adl,ddg,dgl,dni,zbh1,interleaved"
    able, _ = fit(names, "partition.num_stages=3", "train.batch_size=60")
    told = {contender.name: SURVEY.bytes_per_image(contender) for contender in able}
    assert told == {
        "torch-bp": 0,
        "torch-ddp": 3 * (2 * 2 / 3 * 12_000) / 60,  # a ring: 2 (K-1)/K of the bytes, from each of K
        "torch-diloco-50": pytest.approx(3 * (2 * 2 / 3 * 12_000) / 60 / 50),
        "torch-1f1b": 608,
        "torch-zb": 608,
        "adl": 608,
        "ddg": 608 + 2,  # the word that a micro-batch has passed, over two hops
        "dgl": 300 + 2 * 8,  # no gradients; labels over two hops
        "dni": 608,
        "zbh1": 608,
        "interleaved": 2 * 5 * 10 + 8,  # two stages in each process
    }


def test_the_table_shows_speeds_memory_busy_share_and_failures():
    """Ratios are to the faster form of plain backpropagation; the prediction stands next to the measurement."""
    able, _ = fit("torch-bp,torch-bp-whole,torch-bp-cores,adl,fdg")
    runs = [
        *ran("torch-bp", 90, 110, 100, peak_memory_bytes=[2**20]),
        *(*ran("torch-bp-whole", 130, 120, 125), *ran("torch-bp-cores", 400)),
        *ran("adl", 260, 240, peak_memory_bytes=[2**20, 5 * 2**20], busy_share=[0.9, 0.8]),
        *ran("adl", 250, peak_memory_bytes=[3 * 2**20, 4 * 2**20], busy_share=[0.8, 0.9]),
        Measured(contender="fdg", repetition=0, num_updates=8, error="the loss is nan"),
    ]
    table = rows(able, runs, SURVEY)
    adl = table[3]
    assert baseline(table)["contender"] == "torch-bp-whole"
    assert [row.get("ratio_to_baseline") for row in table] == [0.8, 1.0, 3.2, 2.0, None]
    assert (adl["median"], adl["least"], adl["most"]) == (250, 240, 260)
    assert (adl["predicted_images_per_second"], adl["measured_to_predicted"]) == (125.0, 2.0)
    told = report(table, {"torch-ddp": "no"})
    lines = told.splitlines()
    shows(lines[0], ["ratio  predicted  measured/predicted"])
    assert lines[1].split().count("-") == 3  # no prediction, no busy share
    shows(lines[4], ["250.0", "240.0 .. 260.0", "2.00  ", "125.0      2.00", "3 5", "90% 80%"])
    shows(lines[5], ["fdg", "failed"])
    shows(told, ["to torch-bp-whole, the faster of torch-bp and torch-bp-whole"])
    shows(told, ["left out: torch-ddp: no", "failed: fdg: the loss is nan"])


def test_contenders_take_turns_and_one_that_failed_takes_no_more(monkeypatch):
    speeds = {"adl": {"seconds_per_update": 0.5}, "bp": {"seconds_per_update": 1.0}, "fdg": {"error": "no"}}

    def measure_once(entry, setting, *, repetition, num_updates):
        measured = num_updates - entry.warmup
        return Measured(contender=entry.name, repetition=repetition, num_updates=measured, **speeds[entry.name])

    monkeypatch.setattr(command, "measure_once", measure_once)
    able, _ = fit("bp,fdg,adl", "train.batch_size=100")
    setting = bench_config(["model=resnet8"], replace(SURVEY, predicted={"bp": 1.0, "adl": 50.0}))
    flags = argparse.Namespace(updates=None, seconds=20.0, repetitions=3)
    runs = command.measure_all(able, setting, flags)
    # 20 seconds, at least 5 updates: by the prediction at first, if there is one, then by the own speed.
    assert [(run.repetition, run.contender, run.num_updates) for run in runs] == [
        (0, "bp", 5), (0, "fdg", 5), (0, "adl", 10),
        (1, "bp", 20), (1, "adl", 40),
        (2, "bp", 20), (2, "adl", 40),
    ]  # fmt: skip
    unpredicted = command.measure_all(able, replace(setting, survey=replace(SURVEY, predicted={})), flags)
    assert next(unpredicted).num_updates == 5


def test_all_pipelines_are_cut_at_the_same_place(monkeypatch):
    monkeypatch.setattr("adl_dist.cli.bench.entries.predict_speeds", lambda _, __, ___, sizes: (sizes, {}))
    words = [*CONV_NET, "partition.balance=[2,3]"]
    able, _ = fit("gpipe,torch-gpipe,adl", *words)
    found = survey(compose_run([*words, "runtime.threads=1"])[0], able)
    one = found.cuts[2]
    assert (one.begins, found.target) == (["layer2_0.conv1"], TensorSpec((), "int64"))
    # 16 channels of 8 x 8, and the shortcut of the next block, in float32
    assert (one.act_bytes, one.grad_bytes) == ([4096 + 2048], [4096 + 2048])
    argv = [train_argv(entry, bench_config(words, found), 9) for entry in able]
    cut = balance_word(one.begins)
    assert [[word for word in words if word.startswith("partition.balance")] for words in argv] == [[cut]] * 3
    assert [compose_run(words)[0].runtime.channels_last for words in argv] == [True] * 3


def test_replicas_share_the_samples_of_each_update():
    words = ["data=synthetic", "data.image_size=2", "data.num_samples=16", "train.batch_size=8", "seed=1"]
    config, cpu = compose_run(words)[0], torch.device("cpu")

    def images(*batches):
        return sorted(image.flatten().tolist() for images, _ in batches for image in images)

    replicas = zip(*(rank_batches("ddp", rank, 2, config, cpu) for rank in (0, 1)), strict=True)
    together = [images(*shares) for shares in replicas]
    assert together == [images(batch) for batch in rank_batches("gpipe", 0, 2, config, cpu)]
    assert len(together) == 2


def test_children_are_ended_by_a_failure_a_limit_and_a_ctrl_c(tmp_path):
    def child(name, code):
        return Child(command=[sys.executable, "-c", f"'{tmp_path}'; {code}"], log=tmp_path / f"{name}.log")

    sleeper = child("sleeper", "import time; time.sleep(60)")
    with pytest.raises(ChildFailed, match="/nowhere cannot be started: No such file or directory"):
        run_together([Child(command=["/nowhere"], log=tmp_path / "log")])
    with pytest.raises(ChildFailed, match="still ran after 1 s and was ended"):
        run_together([sleeper], timeout_seconds=1)
    began = time.monotonic()
    with pytest.raises(ChildFailed, match=r"^what was wrong$"):
        run_together([sleeper, child("failing", "raise SystemExit('adl-dist: error: what was wrong')")])
    assert time.monotonic() - began < 20
    with pytest.raises(ChildFailed, match=r"^exit code 3, without an error message$"):  # the error before was another's
        run_together([child("failing", "raise SystemExit(3)")])
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    try:
        threading.Timer(0.3, _thread.interrupt_main).start()
        with pytest.raises(KeyboardInterrupt):
            run_together([sleeper])
    finally:
        signal.signal(signal.SIGINT, before)
    assert left_behind(tmp_path) == []


def test_the_results_of_another_bench_are_not_written_over(tmp_path):
    (tmp_path / "bench.json").write_text("{}")
    for option in (f"--out={tmp_path}", f"run_dir={tmp_path}"):
        shows(in_process("bench", option).refusal(), ["already holds a bench.json", "another folder"])
    assert (tmp_path / "bench.json").read_text() == "{}"


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.timeout(190)
def test_a_bench_has_a_row_per_contender_and_keeps_every_run(tmp_path):
    out, names = tmp_path / "out", ["torch-bp", "torch-1f1b", "bp", "adl"]  # each process takes seconds to start
    words = [f"{key}={value}" for key, value in commands.TINY.items()]
    words += ["partition.balance=auto", "partition.device_speeds=[1,1]"]
    done = as_command(
        *(sys.executable, "-m", "adl_dist", "bench", *words),
        *("--contenders", ",".join([*names, "torch-ddp"]), "train.batch_size=15", "method.accumulation_steps=3"),
        *("--repetitions", "1", "--updates", "2", "--warmup", "1", "--out", str(out)),
        timeout_seconds=180,
    )
    assert done.code == 0, done.err
    facts = json.loads((out / "bench.json").read_text())
    assert [run["contender"] for run in facts["runs"]] == names == facts["order"]
    assert [row["contender"] for row in facts["table"]] == names
    assert all(row["median"] > 0 for row in facts["table"])
    assert [len(run["peak_memory_bytes"]) for run in facts["runs"]] == [1, 2, 1, 2]
    assert [row.get("predicted_images_per_second", 0) > 0 for row in facts["table"]] == [False, True, True, True]
    shows(done.out, [*names, "ratio: of medians, to torch-bp", "units per stage", "left out: torch-ddp: the 15"])
    assert left_behind(tmp_path) == []
