"""What is settled before a race and then kept: the cut, the delays that a link asks for, and what plan predicts."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from adl_dist.cli.bench.command import apart
from adl_dist.cli.bench.entries import ModelSurvey, survey
from adl_dist.cli.config.compose import compose_run
from adl_dist.cli.config.schema import RunConfig
from adl_dist.cli.plan.link import link_figures
from adl_dist.cli.plan.profiler import Profiler
from adl_dist.cli.race.contenders import Racer
from adl_dist.cli.race.devices import Device
from adl_dist.cli.race.link import Link
from adl_dist.codecs import Codecs
from adl_dist.partition import Machine
from adl_dist.partition.predict import predict
from adl_dist.report.files import write_atomically
from adl_dist.report.runs import read_json
from adl_dist.schedule import Method, Pipeline
from adl_dist.transport.coding_speed import coding_costs

SETTLED = "settled.json"


def settled_cut(
    folder: Path, words: Sequence[str], able: Sequence[Racer], links: Sequence[Link], on: Device
) -> tuple[list[str], ModelSurvey]:
    """Return the settings of the cut that this race began with, and a survey of the model with that cut.

    ``partition.balance=auto`` cuts for the slowest of ``links`` and equal devices, unless the user describes others.
    """
    known = read_json(folder / SETTLED)
    cut: list[str] = known.get("cut", [])
    config, _ = compose_run([*words, *cut])
    partition = config.partition
    if partition.balance == "auto":
        slowest = min(links, key=lambda link: (link.bits_per_second, -link.round_trip_seconds))
        between = between_stages(slowest, partition.num_stages).name
        partition.links = between if partition.links in (None, "auto") else partition.links
        partition.speeds = partition.speeds or [on.share] * partition.num_stages
    found: ModelSurvey = apart(partial(survey, predicts=False), config, [contender.entry for contender in able])
    if not cut:
        K = config.partition.num_stages
        sizes = ",".join(map(str, found.cuts[K].sizes))
        cut = [f"partition.granularity={found.granularity}", f"partition.balance=[{sizes}]"]
        cut += ["partition.links=null", "partition.speeds=null"]  # they weigh a cut that is still to be made
        _keep(folder, {**known, "cut": cut})
    return cut, found


def between_stages(link: Link, num_stages: int) -> Link:
    """Return what two neighbours of a pipeline have of the one ``link`` by which each rank is joined to all others.

    A rank in the middle sends activations and gradients, to different ranks, over the same link: half of it for each.
    """
    return link if num_stages <= 2 else replace(link, bits_per_second=link.bits_per_second / 2)


def settled_delays(
    folder: Path, config: RunConfig, racing: Sequence[Racer], links: Sequence[Link], on: Device
) -> tuple[dict[str, list[Racer]], dict[str, dict[str, float]]]:
    """Return who races over each link, with the delays that it asks for, and the seconds per update to be expected.

    Both by the link's name; the seconds are of ours, by the contender's name, as ``adl-dist plan`` predicts them.
    Measured once.
    """
    known = read_json(folder / SETTLED)
    ours: dict[str, dict[str, Any]] = known.get("ours", {})
    asked = {
        _key(racer): racer
        for racer in racing
        if racer.entry.kind == "ours" and any(_key(racer) not in ours.get(link.name, {}) for link in links)
    }
    if asked:
        found = apart(_predicted, config, list(asked.values()), list(links), on)
        for name, told in found.items():
            ours[name] = {**ours.get(name, {}), **dict(zip(asked, told, strict=True))}
        _keep(folder, {**known, "ours": ours})
    over = {link.name: [_with(contender, ours.get(link.name, {})) for contender in racing] for link in links}
    predicted = {
        link.name: {r.name: ours[link.name][_key(r)]["seconds_per_update"] for r in racing if r.entry.kind == "ours"}
        for link in links
    }
    return over, predicted


def _with(contender: Racer, told: Mapping[str, Mapping[str, Any]]) -> Racer:
    if not contender.awaits_delays:
        return contender
    method = contender.entry.method
    found = {"delay": tuple(told[_key(contender)]["delays"])}
    return contender.with_method(Method(**{**method.settings, **found}))


def _predicted(
    config: RunConfig, racing: Sequence[Racer], links: Sequence[Link], on: Device
) -> dict[str, list[dict[str, Any]]]:
    """Measure the model on this machine; return for each link the delays of each, and its seconds per update."""
    K, batch, sizes = config.partition.num_stages, config.train.batch_size, config.partition.balance
    profiler = Profiler(config, granularity=config.partition.chosen().units, threads=on.threads)
    found: dict[str, list[dict[str, Any]]] = {link.name: [] for link in links}
    # What the host has to do takes a share of a core longer, as the stages do by their speeds.
    coding = {
        codec: cost.slowed(1 / on.share)
        for codec, cost in coding_costs(torch.device("cpu"), threads=on.threads).items()
    }
    measured = link_figures(config.runtime.device)
    host = {name: measured[name] / on.share for name in ("seconds_per_message", "seconds_per_byte")}
    with profiler.with_load(profiler.num_others(K), batch // racing[0].entry.method.micro_batches_per_update):
        for racer in racing:
            method, codecs = racer.entry.method, Codecs(racer.codec, racer.codec)
            profile = profiler.profile(batch // method.micro_batches_per_update)
            for link in links:
                num = racer.entry.num_stages
                rate, one_way = between_stages(link, num).bits_per_second / 8, link.round_trip_seconds / 2
                devices = Machine(speeds=[on.share] * num, codecs=codecs, coding=coding, **host)
                machine = replace(devices, bandwidth=rate, latency=one_way)
                told = predict(profile, Pipeline(method, num), machine=machine, sizes=sizes if num == K else None)
                delays = list(told.pipeline.nominal_delays)
                found[link.name].append({"delays": delays, "seconds_per_update": told.seconds_per_update})
    return found


def _key(racer: Racer) -> str:
    """Return what its delays depend on."""
    return json.dumps({**racer.entry.method.settings, "codec": racer.codec}, sort_keys=True, default=list)


def _keep(folder: Path, facts: Mapping[str, Any]) -> None:
    with write_atomically(folder / SETTLED) as unfinished:
        unfinished.write_text(json.dumps(facts, indent=1) + "\n")
