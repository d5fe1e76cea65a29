"""Settle the cut, the delays for each link and the predictions before a race, and keep them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from adl_dist.cli.bench.entries import ModelSurvey, survey
from adl_dist.cli.config import instantiate
from adl_dist.cli.config.compose import balance_word, compose_run
from adl_dist.cli.config.schema import RunConfig
from adl_dist.cli.plan.profiler import Profiler, link_figures
from adl_dist.cli.subprocesses import apart
from adl_dist.codecs import Codecs
from adl_dist.partition import Machine
from adl_dist.partition.predict import predict
from adl_dist.report.files import write_atomically
from adl_dist.report.runs import read_json
from adl_dist.schedule import Pipeline
from adl_dist.schedule.run_plan import micro_batch_size_of
from adl_dist.transport.coding_speed import coding_costs
from benchmarks.race.contenders import Contender
from benchmarks.race.devices import Device
from benchmarks.race.link import Link

SETTLED = "settled.json"


def settled_cut(
    folder: Path, words: Sequence[str], able: Sequence[Contender], links: Sequence[Link], on: Device
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
        partition.links = slowest.name if partition.links in (None, "auto") else partition.links
        partition.device_speeds = partition.device_speeds or [on.share] * partition.num_stages
    entries = [contender.entry for contender in able]
    found: ModelSurvey = apart(partial(survey, predicts=False), [(config, entries)])[0]
    if not cut:
        K = config.partition.num_stages
        cut = [balance_word(found.cuts[K].begins)]
        cut += ["partition.links=null", "partition.device_speeds=null"]  # they weigh a cut that is still to be made
        _keep(folder, {**known, "cut": cut})
    return cut, found


def settled_delays(
    folder: Path, config: RunConfig, racing: Sequence[Contender], links: Sequence[Link], on: Device
) -> tuple[dict[str, list[Contender]], dict[str, dict[str, float]]]:
    """Return the racers over each link with their delays, and the predicted seconds per update.

    Both by the link's name; the seconds are of ours, by the contender's name, as ``adl-dist plan`` predicts them.
    Measured once.
    """
    known = read_json(folder / SETTLED)
    ours: dict[str, dict[str, Any]] = known.get("ours", {})
    asked = {
        _key(contender): contender
        for contender in racing
        if contender.entry.kind == "ours" and any(_key(contender) not in ours.get(link.name, {}) for link in links)
    }
    if asked:
        found = apart(_predicted, [(config, list(asked.values()), list(links), on)])[0]
        for name, told in found.items():
            ours[name] = {**ours.get(name, {}), **dict(zip(asked, told, strict=True))}
        _keep(folder, {**known, "ours": ours})
    over = {link.name: [_with(contender, ours.get(link.name, {})) for contender in racing] for link in links}
    predicted = {
        link.name: {r.name: ours[link.name][_key(r)]["seconds_per_update"] for r in racing if r.entry.kind == "ours"}
        for link in links
    }
    return over, predicted


def _with(contender: Contender, told: Mapping[str, Mapping[str, Any]]) -> Contender:
    if not contender.awaits_delays:
        return contender
    return contender.with_method(contender.entry.method.with_delays(told[_key(contender)]["delays"]))


def _micro_batch(config: RunConfig, contender: Contender) -> int:
    return micro_batch_size_of(config.train.batch_size, contender.entry.method.micro_batches_per_update)


def _predicted(
    config: RunConfig, racing: Sequence[Contender], links: Sequence[Link], on: Device
) -> dict[str, list[dict[str, Any]]]:
    """Measure the model on this machine; return each contender's delays and seconds per update, by the link's name.

    A device that is a part of a core takes longer by its share.
    """
    K = config.partition.num_stages
    profiler = Profiler(config, threads=on.threads)
    sizes = instantiate.chosen_sizes(profiler.chain, K, config.partition.balance)
    found: dict[str, list[dict[str, Any]]] = {link.name: [] for link in links}
    measured, coded = link_figures(config.runtime.device), coding_costs(torch.device("cpu"), threads=on.threads)
    with profiler.profiles(
        [_micro_batch(config, contender) for contender in racing], profiler.num_others(K)
    ) as profiles:
        pass
    for contender in racing:
        num = contender.entry.num_stages
        devices = Machine(
            speeds=[on.share] * num,
            codecs=Codecs(contender.codec, contender.codec),
            coding={codec: cost.slowed(1 / on.share) for codec, cost in coded.items()},
            **{name: measured[name] / on.share for name in ("seconds_per_message", "seconds_per_byte")},
            shares_link=True,
        )
        for link in links:
            machine = replace(devices, bandwidth=link.bits_per_second / 8, latency=link.round_trip_seconds / 2)
            pipeline, profile = Pipeline(contender.entry.method, num), profiles[_micro_batch(config, contender)]
            prediction = predict(profile, pipeline, machine=machine, sizes=sizes if num == K else None)
            delays = list(prediction.pipeline.nominal_delays)
            found[link.name].append({"delays": delays, "seconds_per_update": prediction.seconds_per_update})
    return found


def _key(contender: Contender) -> str:
    """Return the settings that its delays depend on, as a key."""
    return json.dumps({**contender.entry.method.settings, "codec": contender.codec}, sort_keys=True, default=list)


def _keep(folder: Path, facts: Mapping[str, Any]) -> None:
    with write_atomically(folder / SETTLED) as unfinished:
        unfinished.write_text(json.dumps(facts, indent=1) + "\n")
