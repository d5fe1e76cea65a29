"""What is settled before a race and then kept: the cut, and the delays that a link asks for."""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from adl_dist.cli.bench.command import apart
from adl_dist.cli.bench.entries import ModelSurvey, survey
from adl_dist.cli.config.compose import compose_run
from adl_dist.cli.config.schema import RunConfig
from adl_dist.cli.plan.link import coding_seconds
from adl_dist.cli.plan.profiler import Profiler
from adl_dist.cli.race.contenders import Racer
from adl_dist.cli.race.devices import Device
from adl_dist.cli.race.link import Link
from adl_dist.codecs import Codecs
from adl_dist.partition import Machine
from adl_dist.partition.predict import with_delays
from adl_dist.report.files import write_atomically
from adl_dist.report.runs import read_json
from adl_dist.schedule import Method, Pipeline

SETTLED = "settled.json"


def settled_cut(folder: Path, words: Sequence[str], able: Sequence[Racer]) -> tuple[list[str], ModelSurvey]:
    """Return the settings of the cut that this race began with, and a survey of the model with that cut."""
    known = read_json(folder / SETTLED)
    cut: list[str] = known.get("cut", [])
    config, _ = compose_run([*words, *cut])
    found: ModelSurvey = apart(partial(survey, predicts=False), config, [contender.entry for contender in able])
    if not cut:
        K = config.partition.num_stages
        sizes = ",".join(map(str, found.cuts[K].sizes))
        cut = [f"partition.granularity={found.granularity}", f"partition.balance=[{sizes}]"]
        _keep(folder, {**known, "cut": cut})
    return cut, found


def settled_delays(
    folder: Path, config: RunConfig, racing: Sequence[Racer], links: Sequence[Link], on: Device
) -> dict[str, list[Racer]]:
    """Return who races over each link, by its name, with the delays that it asks for; measured once."""
    known = read_json(folder / SETTLED)
    delays: dict[str, Any] = known.get("delays", {})
    asked = {
        _key(racer): racer
        for racer in racing
        if racer.awaits_delays and any(_key(racer) not in delays.get(link.name, {}) for link in links)
    }
    if asked:
        found = apart(_delays, config, list(asked.values()), list(links), on)
        for name, lists in found.items():
            delays[name] = {**delays.get(name, {}), **dict(zip(asked, lists, strict=True))}
        _keep(folder, {**known, "delays": delays})
    return {link.name: [_with(contender, delays.get(link.name, {})) for contender in racing] for link in links}


def _with(contender: Racer, delays: Mapping[str, Sequence[int]]) -> Racer:
    if not contender.awaits_delays:
        return contender
    method = contender.entry.method
    found = {"delay": tuple(delays[_key(contender)])}
    return contender.with_method(Method(**{**method.settings, **found}))


def _delays(config: RunConfig, racing: Sequence[Racer], links: Sequence[Link], on: Device) -> dict[str, list[Any]]:
    """Measure the model on this machine; return for each link the delays of each of those who ask for them."""
    K, batch = config.partition.num_stages, config.train.batch_size
    profiler = Profiler(config, granularity=config.partition.chosen().units, threads=on.threads)
    found: dict[str, list[Any]] = {link.name: [] for link in links}
    coding = coding_seconds(torch.device("cpu"))
    for racer in racing:
        method, codecs = racer.entry.method, Codecs(racer.codec, racer.codec)
        profile = profiler.profile(batch // method.micro_batches_per_update)
        for link in links:
            rate, one_way = link.bits_per_second / 8, link.round_trip_seconds / 2
            machine = Machine(
                speeds=[on.share] * K, bandwidth=rate, latency=one_way, codecs=codecs, coding_seconds=coding
            )
            pipeline = with_delays(profile, Pipeline(method, K), machine=machine, sizes=config.partition.balance)
            found[link.name].append(list(pipeline.delays))
    return found


def _key(racer: Racer) -> str:
    """Return what its delays depend on."""
    return json.dumps({**racer.entry.method.settings, "codec": racer.codec}, sort_keys=True, default=list)


def _keep(folder: Path, facts: Mapping[str, Any]) -> None:
    with write_atomically(folder / SETTLED) as unfinished:
        unfinished.write_text(json.dumps(facts, indent=1) + "\n")
