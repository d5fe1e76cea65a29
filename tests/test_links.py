"""Links as they are described, and what a cut, delays and a codec make of them."""

import math
from dataclasses import replace

import pytest

from adl_dist.cli.plan.output import codec_lines
from adl_dist.codecs import Codecs, CodingCost, PerMessage
from adl_dist.errors import ConfigError
from adl_dist.links import LINKS, parse_links
from adl_dist.partition import Machine
from adl_dist.partition.balance import best_balance
from adl_dist.partition.costs import Profile, StageFootprint, UnitCost
from adl_dist.partition.predict import predict, with_delays
from adl_dist.schedule import Pipeline, method
from tests.support.commands import shows


@pytest.mark.parametrize(
    ("text", "bandwidth", "latency"),
    [
        ("100mbit", (12.5e6,), (0.0,)),
        ("100mbit,50ms", (12.5e6,), (0.025,)),
        ("1.5gbit,0us", (187.5e6,), (0.0,)),
        ("10MB/s,1ms", (1e7,), (5e-4,)),
        ("100mbit,50ms/800kbit,1s/2GB/s,0.1ms", (12.5e6, 1e5, 2e9), (0.025, 0.5, 5e-5)),
    ],
)
def test_links_are_read_in_the_units_of_tc_or_in_bytes(text, bandwidth, latency):
    """And a round trip is twice the way of a message."""
    links = parse_links(text, LINKS)
    assert links.bandwidth == pytest.approx(bandwidth)
    assert links.latency == pytest.approx(latency)


@pytest.mark.parametrize("text", ["0mbit", "100mbit,1e400s", "fast"])
def test_what_is_no_link_is_refused(text):
    with pytest.raises(ConfigError, match=f"'{text}' is not a link; expected a rate above 0 and a round trip"):
        parse_links(text, LINKS)


def test_a_list_of_links_has_one_for_each_cut():
    two = parse_links("1gbit,1ms/1gbit,1ms", LINKS)
    assert two.for_stages(3, LINKS) is two
    with pytest.raises(ConfigError, match="describes 2 links, but 4 stages have 3; give one, that of each"):
        two.for_stages(4, LINKS)


def unit(seconds=3.0, crossing=8, name="u"):
    spared = {"none": 0, "bf16": crossing // 2, "int8": crossing * 3 // 4}
    backward = seconds * 2 / 3
    of_cut = {"act_bytes": crossing, "grad_bytes": crossing, "spared": spared}
    return UnitCost(name=name, forward=seconds / 3, backward=backward, **of_cut)


def profile_of(units):
    sums = {"forward": sum(u.forward for u in units), "backward": sum(u.backward for u in units)}
    return Profile(of={"micro_batch_size": 10}, units=units, optimizer_copies=1.0, **sums)


def test_the_cut_moves_to_where_its_own_link_is_fast_enough():
    """One of two links is slow, so its cut goes where little crosses."""
    units = [unit(crossing=c) for c in (4, 40, 40, 40, 4, 40)]
    held = [StageFootprint(graphs=1)] * 3
    assert best_balance(units, num_stages=3, held=held).sizes == [2, 2, 2]
    slow_last = best_balance(units, num_stages=3, held=held, machine=Machine(bandwidth=(20.0, 1.0)))
    slow_first = best_balance(units, num_stages=3, held=held, machine=Machine(bandwidth=(1.0, 20.0)))
    assert slow_last.sizes == [2, 3, 1]
    assert slow_last.link_seconds == [2.0, 4.0]
    assert slow_first.sizes[0] == 1
    assert slow_first.link_seconds[0] == 4.0


def per_byte(seconds):
    """What coding takes, of activations and gradients alike."""
    return CodingCost(*[PerMessage(0.0, seconds)] * 2)


def adl(K, M=4, **options):
    return Pipeline(method("adl", accumulation_steps=M, **options), K)


def test_a_codec_lifts_a_link_from_setting_the_pace():
    """Stages of 12 s; a cut of 24 bytes at 1 byte/s takes 24 s, in int8 6 s, besides the coding itself."""
    profile, link = profile_of([unit(crossing=24)] * 8), Machine(bandwidth=1.0)
    plain = predict(profile, adl(2), machine=link)
    int8 = replace(link, codecs=Codecs("int8", "int8"), coding={"int8": per_byte(0.125)})
    coded = predict(profile, adl(2), machine=int8)
    assert (plain.is_compute_bound, coded.is_compute_bound) == (False, True)
    assert plain.seconds_per_update == pytest.approx(4 * 24)
    assert coded.seconds_per_update == pytest.approx(4 * (12 + 2 * 24 * 0.125 / 2)), "half of the coding on each side"
    assert (plain.update_bytes, coded.update_bytes) == (4 * 48, 4 * 12)
    half = predict(profile, adl(2), machine=replace(link, codecs=Codecs("int8", "none")))
    assert half.seconds_per_update == pytest.approx(plain.seconds_per_update), "gradients are the busier direction then"


def test_messages_wait_for_those_before_them_on_their_link():
    """GPipe sends M at once: over a slow link they arrive one after another, over a long one all a while later."""
    profile = profile_of([unit(crossing=24)] * 8)
    slow, long = (predict(profile, Pipeline(method("gpipe", accumulation_steps=4), 2), machine=m).seconds_per_update
                  for m in (Machine(bandwidth=1.0), Machine(bandwidth=math.inf, latency=24.0)))  # fmt: skip
    free = predict(profile, Pipeline(method("gpipe", accumulation_steps=4), 2)).seconds_per_update
    assert long == pytest.approx(free + 2 * 24)
    assert slow > long + 2 * 24


@pytest.mark.parametrize(("seconds", "told"), [
    (0.0, "codec=int8 is needed, and enough"),
    (3.0, "K = 2: no codec is best; longer delays"),
])  # fmt: skip
def test_a_codec_that_costs_more_than_it_saves_is_not_needed(seconds, told):
    """A stage works for 12 s, and the link for 24 s, or 6 s in int8, which takes a stage so many seconds a byte."""
    profile, link = profile_of([unit(crossing=24)] * 8), Machine(bandwidth=1.0, coding={"int8": per_byte(seconds)})
    coded = [predict(profile, adl(2), machine=replace(link, codecs=Codecs(name, name))) for name in ("none", "int8")]
    shows(codec_lines(coded, "images")[-1], [told])


def test_delays_grow_with_latency_and_shrink_with_a_codec():
    profile = profile_of([unit(crossing=24)] * 8)
    pipeline = adl(2, delay="auto")
    assert with_delays(profile, pipeline).nominal_delays == (1, 0)
    far = Machine(bandwidth=4.0, latency=20.0)
    plain = with_delays(profile, pipeline, machine=far).nominal_delays[0]
    coded = with_delays(profile, pipeline, machine=replace(far, codecs=Codecs("int8", "int8"))).nominal_delays[0]
    assert plain > coded > 1


@pytest.mark.parametrize(("name", "delay", "sizes"), [
    ("1f1b", None, [5, 3]), ("zbh1", None, [5, 3]),
    ("adl", None, [5, 3]), ("adl", [8, 0], [4, 4]),  # delays of 2 leave no room for a message on its way, those of 8 do
])  # fmt: skip
def test_who_waits_for_messages_is_cut_where_less_is_sent(name, delay, sizes):
    """At the even cut a message takes as long as a stage, 12 s, and behind the next unit no time, for 3 s more."""
    crossing = [24, 24, 24, 12, 0, 0, 0, 0]
    profile = profile_of([unit(crossing=each) for each in crossing])
    options = {} if delay is None else {"delay": delay}
    pipeline, link = Pipeline(method(name, accumulation_steps=4, **options), 2), Machine(bandwidth=1.0)
    told = predict(profile, pipeline, machine=link)
    assert told.balance.sizes == sizes
    seconds = [predict(profile, pipeline, machine=link, sizes=[n, 8 - n]).seconds_per_update for n in range(1, 8)]
    assert told.seconds_per_update == min(seconds)
