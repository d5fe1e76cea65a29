"""Predictions from known costs, the advice that follows, and ``adl-dist plan`` as a user calls it."""

import json
import multiprocessing
import os
import sys
import time
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from adl_dist.cli.config.compose import balance_word, compose_run
from adl_dist.cli.plan.command import line_to_paste
from adl_dist.cli.plan.profiler import Profiler, link_figures, measure_link
from adl_dist.codecs import Codecs
from adl_dist.errors import ChannelError, ConfigError
from adl_dist.partition import Machine, UnitCost
from adl_dist.partition.costs import Profile
from adl_dist.partition.predict import Throughput, advise, alternative, best_of, predict
from adl_dist.schedule import Pipeline, method
from tests.support.commands import in_process, shows, words
from tests.support.ranks import run_ranks

FAST = ("train.batch_size=16", "runtime.threads=1", "--links", "8gbit,20us", "--neighbours", "0")
SMALL = ("model=resnet8", "data=synthetic", "data.image_size=8", *FAST)
TINY = ("model._target_=tests.support.user_code.good", "data._target_=tests.support.user_code.images", *FAST)
HOST = {"seconds_per_message": 1e-7, "seconds_per_byte": 1e-13}


@pytest.fixture(autouse=True)
def measured_link(monkeypatch):
    """Give a plan the figures of a link, and measure as few rounds as it can."""
    figures = {"bandwidth": 1e6, "latency": 1e-3, **HOST}
    monkeypatch.setattr("adl_dist.cli.plan.command.link_figures", lambda device: figures)
    monkeypatch.setattr(sys.modules["adl_dist.partition.measure"], "SECONDS", 0.0)


def known(num_units=8, *, forward=1.0, backward=2.0, **of_unit):
    units = [UnitCost(name=f"u{i}", forward=forward, backward=backward, **of_unit) for i in range(num_units)]
    whole = {"forward": forward * num_units, "backward": backward * num_units}
    return Profile(of={"micro_batch_size": 10}, units=units, optimizer_copies=1.0, **whole)


def planned(profile, name="adl", K=2, **of_machine):
    """The prediction for the method ``name`` with M = 4."""
    return predict(profile, Pipeline(method(name, accumulation_steps=4), K), machine=Machine(**of_machine))


def test_of_equal_units_the_speed_up_is_the_textbooks():
    flushed = [("gpipe", 2, 4 / (4 + 1) * 2), ("1f1b", 4, 4 / (4 + 3) * 4)]  # M / (M + K - 1) of K
    for name, K, speed_up in [("adl", 2, 2), ("adl", 4, 4), ("bp", 4, 1), *flushed]:
        told = planned(known(), name, K)
        assert told.speed_up == pytest.approx(speed_up)
        assert told.images_per_second == pytest.approx(10 / 24 * speed_up)
        assert told.balance.sizes == [8 // K] * K


def test_a_stage_that_keeps_older_weights_copies_them():
    """Stage 0 of two does with ADL, and the last stage never."""
    copying = known(copy=1.5, parameter_bytes=8)
    half = 4 * 3.0 * 4  # of four micro-batches, seconds
    assert planned(copying).seconds_per_update == pytest.approx(half + 4 * 1.5)
    assert planned(copying, "1f1b") == planned(known(parameter_bytes=8), "1f1b")


def test_stages_take_what_was_measured_next_to_others_at_work(tmp_path):
    profile = replace(known(), loaded=known(forward=2.0, backward=4.0))
    assert planned(profile).images_per_second == pytest.approx(10 / 24)
    assert planned(profile).speed_up == pytest.approx(1.0)
    assert planned(profile, "bp", 1).images_per_second == pytest.approx(10 / 24)
    profile.save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json") == profile


def seconds_of(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().split()[13]) / os.sysconf("SC_CLK_TCK")


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks at processes in /proc")
def test_neighbours_train_during_the_measurement_and_end():
    profiler = Profiler(compose_run(TINY[:4])[0], threads=1)
    with profiler.profiles([4, 4], 1) as found:
        (process,) = multiprocessing.active_children()
        before, deadline = seconds_of(process.pid), time.monotonic() + 20
        while seconds_of(process.pid) <= before:  # the measurement may get the only core
            assert time.monotonic() < deadline
            profiler.pace(64)
    assert not process.is_alive()
    assert (found.keys(), found[4].loaded is not None) == ({4}, True)


def measured(folder):
    return measure_link(folder, int(os.environ["RANK"]))


@pytest.mark.ranks
def test_a_link_has_a_bandwidth_and_a_latency(tmp_path):
    link, _ = run_ranks(2, measured, str(tmp_path))
    assert replace(Machine(), **link).bandwidth > 1e6
    assert 0 < link["latency"] < 1
    assert min(link["seconds_per_byte"], link["seconds_per_message"]) >= 0


def test_staleness_memory_and_links_are_counted_by_hand():
    told = planned(known(), K=4)
    assert told.staleness_mean == [1.5, 1.0, 0.5, 0.0]  # 2(K-1-k)/M
    assert told.convergence_factor == pytest.approx((1 + (1.5 + 1.0 + 0.5) / 4) / 4), "Theorem 1"
    assert planned(known(), "gpipe", 4).convergence_factor == 1 / 4
    told = planned(known(4, activation_bytes=100, parameter_bytes=10))
    # Stage 0: 3 graphs of 2 units; weights, gradients, momentum, and one older version with gradients of its own.
    assert told.balance.stage_bytes == [3 * 200 + 5 * 20, 200 + 3 * 20]
    profile = known(4, act_bytes=8, grad_bytes=8)
    assert planned(profile, bandwidth=0.5).images_per_second == pytest.approx(10 / 16)
    assert planned(profile, seconds_per_byte=0.1).images_per_second == pytest.approx(10 / (6 + 1.6))


def without(profile, *, devices, machine, M=4):
    """The same pace for any number of samples: as long as a micro-batch takes, for each of its 10."""

    def pace(samples):
        times = {"forward": profile.forward * samples / 10, "backward": profile.backward * samples / 10}
        return Throughput(samples=samples, **times)

    return alternative(profile, machine, num_devices=devices, whole=pace(10 * M), share=pace(10 * M // devices))


def test_replicas_wait_for_the_longer_of_backward_and_ring():
    """With 3 replicas a link carries 2 x (2/3) of 800 bytes, in 4 messages; a CPU sends and receives each byte."""
    profile, share = known(parameter_bytes=100), Throughput(samples=4, forward=1.0, backward=2.0)
    for bandwidth, latency, backward in ((1e9, 0.0, 2.0), (100.0, 0.0, 800 / 75), (100.0, 0.5, 800 / 75 + 2.0)):
        machine = Machine(bandwidth=bandwidth, latency=latency, seconds_per_byte=1e-3)
        told = alternative(profile, machine, num_devices=3, whole=share, share=share)
        copying = 2 * (4 / 3 * 800) * 1e-3
        assert told.ddp == pytest.approx(3 * 4 / (1.0 + backward + copying))


@pytest.mark.parametrize(
    ("profile", "devices", "machine", "is_chosen", "reason"),
    [
        pytest.param(known(), 1, Machine(), False, "one device, and the model fits", id="one device"),
        pytest.param(known(), 2, Machine(), False, "use DDP: 2 replicas make 1 samples/s", id="few parameters"),
        # 8 units x 100 bytes take 2 x (1/2) x 800 / 8 = 100 s of a ring; one device alone is faster.
        pytest.param(
            known(parameter_bytes=100, act_bytes=8, grad_bytes=8), 2, Machine(bandwidth=8.0), True,
            "2.00 times as fast as one device would be", id="many parameters on a slow link",
        ),
        pytest.param(
            known(4, activation_bytes=100, parameter_bytes=1000, act_bytes=1, grad_bytes=1), 2,
            Machine(memory_bytes=10_500), True, "does not fit on one device", id="too large for one device",
        ),
        pytest.param(
            known(parameter_bytes=100, act_bytes=8, grad_bytes=8), 2, Machine(bandwidth=0.1), False,
            "the links are too slow for so little work in a micro-batch", id="slower link",
        ),
    ],
)  # fmt: skip
def test_the_advice_is_what_is_fastest_and_fits(profile, devices, machine, is_chosen, reason):
    told = predict(profile, Pipeline(method("adl", accumulation_steps=4), 2), machine=machine)
    choice, why = advise([told], without(profile, devices=devices, machine=machine))
    assert choice is (told if is_chosen else None)
    shows(why, [reason])


def test_what_is_too_stale_is_not_recommended_however_fast():
    """At K = 16 the factor is 4 with M = 4 and 9.2 with M = 3, where the paper's run diverged."""
    # DDP would wait for its ring, and one device alone is slow.
    profile, machine = known(16, parameter_bytes=1000), Machine(bandwidth=8.0)
    for M, is_recommended in ((4, True), (3, False)):
        prediction = predict(profile, Pipeline(method("adl", accumulation_steps=M), 16), machine=machine)
        other = without(profile, devices=16, machine=machine, M=M)
        assert prediction.images_per_second > 2 * other.best
        assert (advise([prediction], other)[0] is prediction) == is_recommended


def test_a_tenth_of_speed_outweighs_ddp_and_staleness():
    told = planned(known())
    for lead, is_chosen in ((1.09, False), (1.11, True)):
        other = without(known(), devices=2, machine=Machine())
        other = replace(other, ddp=told.images_per_second / lead, single=1e-3)
        choice, why = advise([told], other, unit="sequences")
        assert (choice is told) == is_chosen
        assert is_chosen or "sequences/s" in why
    fresh = replace(told, images_per_second=100.0)
    for speed, is_fresh in ((109.0, True), (112.0, False)):
        stale = replace(fresh, staleness_mean=[1.0, 0.0], images_per_second=speed)
        assert (best_of([stale, fresh]) is fresh) == is_fresh


def test_a_codec_that_beats_ddp_is_recommended_and_no_other():
    plain = planned(known(act_bytes=8, grad_bytes=8))
    exact, coded = (replace(plain, codecs=Codecs(name, name), images_per_second=99.0) for name in ("int8", "int4"))
    other = replace(without(known(), devices=2, machine=Machine()), ddp=80.0, single=1.0)
    choice, _ = advise([replace(plain, images_per_second=70.0), coded, exact], other)
    assert choice is exact
    line = line_to_paste(choice, ["u4"], ["model=mine", "runtime.codec=bf16"])
    assert line.startswith("adl-dist train model=mine runtime.codec=int8 method=adl")
    _, why = advise([exact], replace(other, ddp=98.0))
    shows(why, ["use DDP", "adl with K = 2 and runtime.codec=int8 makes 99"])


def done(*words):
    outcome = in_process("plan", *words)
    assert outcome.code == 0, outcome.err
    return outcome.out


def test_the_plan_of_a_small_model_gives_a_line_that_trains(tmp_path):
    told = done(*SMALL, "--stages", "2,3,99", "--methods", "bp,gpipe,adl,fr", "--devices", "3", "--units")
    assert told.count("not possible: K = 99: --stages 99 needs 98 cuts") == 1
    shows(told, ["method ", "adl     2  4  ", "adl     3  4  ", "gpipe   3  4  ", "fr      2  1  "])
    shows(told, ["adl by codec, over these links:", "3  4  int4 ", "K = 3: no codec is needed"])
    shows(told, [" images/s ", "stem.conv", "layer3_0.conv2", "without a pipeline: one", "DDP on 3", "recommended"])
    facts = json.loads(done(*TINY, "--stages", "2", "--methods", "adl", "--json", "--memory", "4MiB"))
    (adl,) = facts["predictions"]
    assert sum(adl["balance"]["sizes"]) == len(facts["profile"]["units"])
    begin = facts["profile"]["units"][adl["balance"]["sizes"][0]]["name"]
    cut = [balance_word([begin])]
    assert facts["recommended"] is None or cut[0] in facts["recommended"]
    assert in_process(*words(tmp_path / "run", *TINY[:2], *cut)).code == 0


def test_a_plan_of_one_method_recommends_no_other(monkeypatch):
    """The table still lists all methods."""
    advice = "adl_dist.cli.plan.command.advise"
    monkeypatch.setattr(advice, lambda found, *_, **__: (None, " ".join(p.pipeline.method.name for p in found)))
    shows(done(*SMALL, "--stages", "2", "method=1f1b"), ["adl     2  4  ", "recommended  1f1b 1f1b 1f1b 1f1b 1f1b\n"])
    shows(done(*SMALL, "--stages", "2", "method=1f1b", "--methods", "adl"), ["recommended  adl\n"])


def test_a_model_that_fits_on_no_device_gets_a_line_to_paste():
    # Each stage holds one graph of its part.
    base = (*SMALL, "--stages", "2", "--methods", "bp", "--devices", "2")
    facts = json.loads(done(*base, "--json"))
    largest = max(facts["predictions"][0]["balance"]["stage_bytes"])
    assert largest < facts["alternative"]["bytes"]
    between = (largest + facts["alternative"]["bytes"]) // 2
    told = done(*base, "--memory", f"{between / 1e6:.6f}MB")
    shows(told, ["does not fit", "adl-dist train model=resnet8", "method=bp", "partition.num_stages=2"])
    shows(done(*base, "--memory", "1kB"), ["not possible: bp, K = 2", "neither a cut nor the whole model fits"])
    on_one = done(*base, "--devices", "1")
    shows(on_one, ["K = 2: it needs 2 devices, and there are 1; --devices 2 predicts it"])
    assert "bp      2" not in on_one


def test_the_line_trains_the_very_method_that_was_predicted():
    words = [*SMALL[:5], "method=fdg", "method.weights=latest", "partition.device_speeds=[1,1]", "data.num_samples=7"]
    words += ["partition.tied=untie"]
    told = predict(known(), Pipeline(method("fdg", weights="latest", accumulation_steps=2), 2))
    assert line_to_paste(told, ["u4"], words) == (
        "adl-dist train model=resnet8 data=synthetic data.image_size=8 train.batch_size=16 runtime.threads=1 "
        "data.num_samples=7 partition.tied=untie method=fdg method.accumulation_steps=2 'method.weights=\"latest\"' "
        "partition.num_stages=2 'partition.balance=[u4]'"
    )


def test_heads_of_a_method_are_not_predicted():
    for name, told in (("dgl", "its local losses have heads that are not"), ("dni", "its heads are not measured")):
        with pytest.raises(ConfigError, match=told):
            predict(known(), Pipeline(method(name), 2))


def test_a_process_that_dies_while_it_measures_is_told(monkeypatch):
    pool, spawn = Mock(), Mock()
    pool.return_value.map.side_effect = BrokenProcessPool
    monkeypatch.setattr("adl_dist.cli.subprocesses.ProcessPoolExecutor", pool)
    with pytest.raises(ChannelError, match=r"two processes could not .*process that measures was killed; is"):
        link_figures("cpu")
    spawn.Pipe.return_value = Mock(recv=Mock(side_effect=[None, EOFError])), Mock()
    spawn.Process.return_value.is_alive.return_value = False
    monkeypatch.setattr(multiprocessing, "get_context", lambda kind: spawn)
    profiler = SimpleNamespace(threads=1, _shape=None, _config=None)
    for told in ("one of 1 processes that trained .* was killed; is there", "next to the measuring one: it was killed"):
        with pytest.raises(ConfigError, match=told), Profiler._others_at_work(profiler, 1, 4):
            pass
