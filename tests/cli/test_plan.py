"""Predictions from known costs, the advice that follows, and ``adl-dist plan`` as a user calls it."""

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from adl_dist.cli.plan.profiler import BackgroundLoad
from adl_dist.cli.plan.report import line_to_paste
from adl_dist.errors import ConfigError
from adl_dist.partition import Machine, UnitCost
from adl_dist.partition.costs import Profile
from adl_dist.partition.predict import Throughput, advise, alternative, predict
from adl_dist.schedule import Pipeline, method
from tests.support.commands import in_process, shows, words

SMALL = (
    *("model=resnet8", "data=synthetic", "data.image_size=8", "train.batch_size=16", "runtime.threads=1"),
    *("--bandwidth", "1e9", "--latency", "1e-5"),
    *("--neighbours", "0"),
)


def known(num_units=8, *, forward=1.0, backward=2.0, update=0.0, **of_unit):
    units = [
        UnitCost(name=f"u{i}", forward=forward, backward=backward, update=update, **of_unit) for i in range(num_units)
    ]
    return Profile(
        of={"micro_batch_size": 10},
        units=units,
        forward=forward * num_units,
        backward=backward * num_units,
        optimizer_copies=1.0,
    )


@pytest.mark.parametrize(
    ("name", "K", "speed_up"),
    [
        ("adl", 2, 2.0),
        ("adl", 4, 4.0),
        ("bp", 4, 1.0),
        ("gpipe", 2, 4 / (4 + 1) * 2),  # M / (M + K - 1) of K
        ("1f1b", 4, 4 / (4 + 3) * 4),
    ],
)
def test_of_equal_units_the_speed_up_is_the_textbooks(name, K, speed_up):
    told = predict(known(), Pipeline(method(name, accumulation_steps=4), K))
    assert told.speed_up == pytest.approx(speed_up)
    assert told.images_per_second == pytest.approx(10 / 24 * speed_up)
    assert told.balance.sizes == [8 // K] * K


def test_units_measured_one_by_one_are_scaled_to_the_whole_model():
    told = known(8)
    slow = Profile(of=told.of, units=told.units, forward=4.0, backward=32.0, optimizer_copies=1.0)
    assert [(u.forward, u.backward) for u in slow.costs(1)] == [(0.5, 4.0)] * 8


def test_stages_take_what_was_measured_next_to_others_at_work(tmp_path):
    """Stages take what was measured next to others at work and one device what was measured alone."""
    profile = replace(known(), loaded=known(forward=2.0, backward=4.0))
    adl = method("adl", accumulation_steps=4)
    assert predict(profile, Pipeline(adl, 2)).images_per_second == pytest.approx(10 / 24)
    assert predict(profile, Pipeline(adl, 2)).speed_up == pytest.approx(1.0)
    assert predict(profile, Pipeline(method("bp"), 1)).images_per_second == pytest.approx(10 / 24)
    profile.save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json") == profile


def state_of(pid):
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


def rests(pid):
    """Whether it is stopped, a moment after it was told."""
    deadline = time.monotonic() + 5
    while state_of(pid) != "T" and time.monotonic() < deadline:
        time.sleep(0.01)
    return state_of(pid) == "T"


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks at processes in /proc")
def test_neighbours_rest_until_they_work_and_end_in_time():
    """Neighbours rest until they are to work and do not outlive the measurement."""
    how = {"shape": [3, 8, 8], "granularity": "layer", "threads": 1}
    with BackgroundLoad.started(1, SMALL[:5], how, 4) as others:
        (pid,) = others.pids
        assert rests(pid)
        with others.at_work():
            time.sleep(0.2)
            assert state_of(pid) != "T"
        assert rests(pid)
    assert not Path(f"/proc/{pid}").exists()


def test_the_factor_is_that_of_theorem_1():
    told = predict(known(), Pipeline(method("adl", accumulation_steps=4), 4))
    assert told.staleness_mean == [1.5, 1.0, 0.5, 0.0]  # 2(K-1-k)/M
    assert told.convergence_factor == pytest.approx((1 + (1.5 + 1.0 + 0.5) / 4) / 4)
    assert predict(known(), Pipeline(method("gpipe", accumulation_steps=4), 4)).convergence_factor == 1 / 4


def test_memory_counts_graphs_versions_gradients_and_state():
    told = predict(known(4, activation_bytes=100, parameter_bytes=10), Pipeline(method("adl", accumulation_steps=4), 2))
    # Stage 0: 3 graphs of 2 units; weights, gradients, momentum, and one older version with gradients of its own.
    assert told.balance.stage_bytes == [3 * 200 + 5 * 20, 200 + 3 * 20]


def test_a_slow_link_costs_what_its_messages_take():
    profile = known(4, act_bytes=8, grad_bytes=8)
    adl = method("adl", accumulation_steps=4)
    assert predict(profile, Pipeline(adl, 2), machine=Machine(bandwidth=0.5)).images_per_second == pytest.approx(
        10 / 16
    )
    busy = predict(profile, Pipeline(adl, 2), machine=Machine(seconds_per_byte=0.1))
    assert busy.images_per_second == pytest.approx(10 / (6 + 1.6))


def without(profile, *, devices, machine=None, M=4):
    """The same pace for any number of samples: as long as a micro-batch takes, for each of its 10."""

    def pace(samples):
        return Throughput(
            samples=samples, forward=profile.forward * samples / 10, backward=profile.backward * samples / 10
        )

    machine = machine or Machine()
    return alternative(profile, machine, num_devices=devices, whole=pace(10 * M), share=pace(10 * M // devices))


def advice_for(profile, *, devices, machine=None, names=("adl",), stages=(2,)):
    machine = machine or Machine()
    told = []
    for name in names:
        for num_stages in stages:
            steps = method(name, accumulation_steps=4)
            told.append(predict(profile, Pipeline(steps, num_stages), machine=machine))
    return advise(told, without(profile, devices=devices, machine=machine))


def test_with_one_device_there_is_nothing_to_gain():
    told = advice_for(known(), devices=1)
    assert told.choice is None
    assert "one device, and the model fits" in told.reason


def test_with_fast_links_and_few_parameters_the_answer_is_ddp():
    told = advice_for(known(), devices=2)
    assert told.choice is None
    assert told.reason.startswith("use DDP: 2 replicas make 1 images/s")


def test_with_many_parameters_on_a_slow_link_the_answer_is_adl():
    """8 units x 100 bytes take 2 x (1/2) x 800 / 8 = 100 s of a ring; one device alone is faster."""
    told = advice_for(known(parameter_bytes=100, act_bytes=8, grad_bytes=8), devices=2, machine=Machine(bandwidth=8.0))
    assert told.choice is not None
    assert (told.choice.pipeline.method.name, told.choice.pipeline.num_stages) == ("adl", 2)
    assert told.reason.startswith("2.00 times as fast as one device would be")


def test_a_model_that_fits_on_no_device_is_cut():
    profile = known(4, activation_bytes=100, parameter_bytes=1000, act_bytes=1, grad_bytes=1)
    told = advice_for(profile, devices=2, machine=Machine(memory_bytes=10_500))
    assert told.choice is not None
    assert "does not fit on one device" in told.reason


def test_what_is_too_stale_is_not_recommended_however_fast():
    """At K = 16 the factor is 4 with M = 4 and 9.2 with M = 3, where the paper's run diverged."""
    # DDP would wait for its ring, and one device alone is slow.
    profile, machine = known(16, parameter_bytes=1000), Machine(bandwidth=8.0)
    for M, is_recommended in ((4, True), (3, False)):
        told = predict(profile, Pipeline(method("adl", accumulation_steps=M), 16), machine=machine)
        other = without(profile, devices=16, machine=machine, M=M)
        assert told.images_per_second > 2 * other.best
        assert (advise([told], other).choice is told) == is_recommended


def test_over_links_that_are_too_slow_one_device_is_best():
    profile = known(parameter_bytes=100, act_bytes=8, grad_bytes=8)
    told = advice_for(profile, devices=2, machine=Machine(bandwidth=0.1))
    assert told.choice is None
    assert told.reason.endswith("the links are too slow")


def test_local_losses_are_not_predicted():
    with pytest.raises(ConfigError, match="local losses have heads that are not measured"):
        predict(known(), Pipeline(method("dgl"), 2))


def done(*words):
    outcome = in_process("plan", *words)
    assert outcome.code == 0, outcome.err
    return outcome.out


def test_the_plan_of_a_small_model_gives_a_line_that_trains(tmp_path):
    """The plan of a small model reports all that was asked for and its line trains."""
    told = done(*SMALL, "--stages", "2,3", "--methods", "bp,gpipe,adl,fr", "--devices", "3", "--units")
    shows(told, ["method ", "adl     2  4  ", "adl     3  4  ", "gpipe   3  4  ", "fr      2  1  "])
    shows(told, ["stem.conv", "layer3_0.add", "without a pipeline: one device", "DDP on 3", "recommended"])
    facts = json.loads(done(*SMALL, "--stages", "2", "--methods", "adl", "--json", "--memory", "4MiB"))
    (adl,) = facts["predictions"] or [None]
    assert sum(adl["balance"]["sizes"]) == len(facts["profile"]["units"])
    sizes = ",".join(map(str, adl["balance"]["sizes"]))
    cut = [f"partition.balance=[{sizes}]", "partition.granularity=layer"]
    assert in_process(*words(tmp_path / "run", *cut)).code == 0


def test_a_model_that_fits_on_no_device_gets_a_line_to_paste():
    base = (*SMALL, "--stages", "2", "--methods", "bp", "--devices", "2")  # each stage holds one graph of its part
    facts = json.loads(done(*base, "--json"))
    largest = max(facts["predictions"][0]["balance"]["stage_bytes"])
    assert largest < facts["alternative"]["bytes"]
    between = (largest + facts["alternative"]["bytes"]) // 2
    told = done(*base, "--memory", f"{between / 1e6:.6f}MB")
    shows(told, ["does not fit", "adl-dist train model=resnet8", "method=bp", "partition.num_stages=2"])
    too_small = done(*base, "--memory", "1kB")
    shows(too_small, ["not possible: bp, K = 2", "neither a cut nor the whole model fits"])


def test_a_measurement_is_used_again_for_the_same_thing_only(tmp_path):
    def predicted(*extra):
        words = (*SMALL, "--stages", "2", "--methods", "adl", "--json", "--profile", str(tmp_path / "p.json"), *extra)
        return json.loads(done(*words))["predictions"]

    first = predicted()
    assert [file.name for file in tmp_path.iterdir()] == ["p-4.json"]
    assert predicted() == first
    assert predicted("optimizer=adamw")[0]["balance"]["stage_bytes"] != first[0]["balance"]["stage_bytes"]


def test_the_line_trains_the_very_method_that_was_predicted():
    words = [*SMALL[:5], "method=fdg", "method.weights=latest", "partition.speeds=[1,1]", "data.num_samples=7"]
    told = predict(known(), Pipeline(method("fdg", weights="latest", accumulation_steps=2), 2))
    assert line_to_paste(told, "layer", words) == (
        "adl-dist train model=resnet8 data=synthetic data.image_size=8 train.batch_size=16 runtime.threads=1 "
        "data.num_samples=7 method=fdg method.accumulation_steps=2 'method.weights=\"latest\"' partition.num_stages=2 "
        "partition.granularity=layer 'partition.balance=[4,4]'"
    )


def test_a_samples_shape_stands_in_for_data_that_is_not_there(tmp_path):
    missing = (
        *("model=resnet8", "data=imagefolder", f"data.root={tmp_path}", "--bandwidth", "1e9", "--stages", "2"),
        *("--neighbours", "0"),
    )
    shows(in_process("plan", *missing).refusal(), ["expected a folder train", "--input 3,224,224"])
    assert "input [3, 8, 8]" in done(*missing, "--input", "3,8,8", "--methods", "adl")


def test_the_picture_shows_every_unit(tmp_path):
    done(*SMALL, "--stages", "2", "--methods", "adl", "--out", str(tmp_path / "units.svg"))
    assert (tmp_path / "units.svg").read_text().count("<path") > 2 * 30, "two bars for each of 30 units"


@pytest.mark.parametrize(
    ("extra", "parts"),
    [
        (("--stages", "a"), ["--stages a", "whole numbers"]),
        (("--stages", "0"), ["at least 1"]),
        (("--methods", "adl,nope"), ["no method 'nope'", "gpipe"]),
        (("--memory", "12"), ["--memory 12", "80GiB"]),
        (("--out", "x.txt", "--stages", "2", "--methods", "adl"), ["x.txt", ".svg"]),
        (("--nonsense",), ["adl-dist plan", "--nonsense"]),
        (("--stages", "1"), ["--stages 1", "at least 2"]),
        (("--devices", "0"), ["--devices 0 must be at least 1"]),
        (("--memory", "infGiB"), ["--memory infGiB", "80GiB"]),
        (("--profile", "/nonexistent/p.json"), ["--profile /nonexistent/p.json", "in an existing folder"]),
        (("--profile", "/tmp"), ["--profile /tmp", "the name of a file"]),
        (("--input", "5,8,8"), ["gets float32[B, 5, 8, 8] and fails on it"]),
        (("loss._target_=torch.nn.MSELoss",), ["the loss gets float32[B, 10]"]),
    ],
)
def test_a_mistake_is_one_line(extra, parts):
    shows(in_process("plan", *SMALL, *extra).refusal(), parts)
