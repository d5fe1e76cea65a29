"""What is settled before a race and then kept: the cut, the delays that a link asks for, and what plan predicts."""

import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from adl_dist.cli.bench.command import apart
from adl_dist.cli.bench.entries import ModelSurvey, survey
from adl_dist.cli.config.compose import balance_word, compose_run
from adl_dist.cli.config.reading import chosen_sizes
from adl_dist.cli.config.schema import RunConfig
from adl_dist.cli.plan.link import link_figures
from adl_dist.cli.plan.profiler import Profiler
from adl_dist.cli.race.contenders import Racer
from adl_dist.cli.race.devices import Device, place, quotas
from adl_dist.cli.race.link import Link
from adl_dist.codecs import Codecs
from adl_dist.errors import ConfigError
from adl_dist.partition import Machine
from adl_dist.partition.predict import predict
from adl_dist.report import warn
from adl_dist.report.files import write_atomically
from adl_dist.report.runs import read_json
from adl_dist.schedule import Pipeline
from adl_dist.schedule.run_plan import micro_batch_size_of
from adl_dist.transport.coding_speed import coding_costs

SETTLED = "settled.json"
SECONDS = 3.0  # for which a part of a core is measured at least: its quota comes in periods of 10 ms


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
        partition.links = slowest.name if partition.links in (None, "auto") else partition.links
        partition.speeds = partition.speeds or [on.share] * partition.num_stages
    found: ModelSurvey = apart(partial(survey, predicts=False), config, [contender.entry for contender in able])
    if not cut:
        K = config.partition.num_stages
        cut = [balance_word(found.cuts[K].begins)]
        cut += ["partition.links=null", "partition.speeds=null"]  # they weigh a cut that is still to be made
        _keep(folder, {**known, "cut": cut})
    return cut, found


def settled_delays(
    folder: Path, config: RunConfig, racing: Sequence[Racer], links: Sequence[Link], on: Sequence[Device]
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
        asking = list(asked.values())
        found = apart(_predicted, config, asking, list(links), on[0], _paces_of_parts(config, asking, on))
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
    return contender.with_method(contender.entry.method.with_delays(told[_key(contender)]["delays"]))


def _paces_of_parts(config: RunConfig, racing: Sequence[Racer], on: Sequence[Device]) -> dict[int, float]:
    """Return :func:`_paces` if devices are parts of cores, and nothing if they are not, or quotas cannot be set."""
    if on[0].share == 1:
        return {}
    with ExitStack() as stack:
        try:
            groups = stack.enter_context(quotas(on))
        except ConfigError as error:
            warn(f"predictions, and delays that follow from them, take each rank to be as fast as its share: {error}")
            return {}
        return apart(_paces, config, sorted({_micro_batch(config, racer) for racer in racing}), on, groups)


def _micro_batch(config: RunConfig, racer: Racer) -> int:
    return micro_batch_size_of(config.train.batch_size, racer.entry.method.micro_batches_per_update)


def _profiler(config: RunConfig, on: Device, **how: Any) -> Profiler:
    return Profiler(config, granularity=config.partition.chosen().granularity, threads=on.threads, **how)


def _paces(
    config: RunConfig, sizes: Sequence[int], on: Sequence[Device], groups: Sequence[Path | None]
) -> dict[int, float]:
    """Return what the whole model takes on one of these devices while all others work, by the samples at once.

    Of devices that share a core each takes more than its share of the time.
    """
    profiler, paces = _profiler(config, on[0], quiet=True), dict[int, float]()
    with profiler.with_load(len(on) - 1, sizes[0]) as others, profiler.under_load():
        for pid, device, group in zip((os.getpid(), *others), on, groups, strict=True):
            place(pid, device, group)
        for size in sizes:
            seconds, end = list[float](), time.monotonic() + SECONDS
            while not seconds or time.monotonic() < end:
                pace = profiler.pace(size)
                seconds.append(pace.forward + pace.backward)
            paces[size] = fmean(seconds)
    return paces


def _predicted(
    config: RunConfig, racing: Sequence[Racer], links: Sequence[Link], on: Device, paces: Mapping[int, float]
) -> dict[str, list[dict[str, Any]]]:
    """Measure the model on this machine; return for each link the delays of each, and its seconds per update.

    ``paces``: what :func:`_paces` has measured of devices that are parts of cores; empty: as fast as their share says.
    """
    K, profiler = config.partition.num_stages, _profiler(config, on)
    sizes = chosen_sizes(profiler.chain, K, config.partition.balance)
    found: dict[str, list[dict[str, Any]]] = {link.name: [] for link in links}
    measured, coded = link_figures(config.runtime.device), coding_costs(torch.device("cpu"), threads=on.threads)
    with profiler.with_load(profiler.num_others(K), _micro_batch(config, racing[0])):
        profiles = {size: profiler.profile(size) for size in {_micro_batch(config, racer) for racer in racing}}
    for racer in racing:
        size, num = _micro_batch(config, racer), racer.entry.num_stages
        profile, speed = profiles[size], on.share
        if num > 1 and paces:
            loaded = profile.with_stages(K)
            speed = (loaded.loading + loaded.forward + loaded.backward) / paces[size]
        devices = Machine(
            speeds=[speed] * num,
            codecs=Codecs(racer.codec, racer.codec),
            # What the host has to do takes as much longer.
            coding={codec: cost.slowed(1 / speed) for codec, cost in coded.items()},
            **{name: measured[name] / speed for name in ("seconds_per_message", "seconds_per_byte")},
            shares_link=True,
        )
        for link in links:
            machine = replace(devices, bandwidth=link.bits_per_second / 8, latency=link.round_trip_seconds / 2)
            pipeline = Pipeline(racer.entry.method, num)
            told = predict(profile, pipeline, machine=machine, sizes=sizes if num == K else None)
            delays = list(told.pipeline.nominal_delays)
            found[link.name].append({"delays": delays, "seconds_per_update": told.seconds_per_update})
    return found


def _key(racer: Racer) -> str:
    """Return what its delays depend on."""
    return json.dumps({**racer.entry.method.settings, "codec": racer.codec}, sort_keys=True, default=list)


def _keep(folder: Path, facts: Mapping[str, Any]) -> None:
    with write_atomically(folder / SETTLED) as unfinished:
        unfinished.write_text(json.dumps(facts, indent=1) + "\n")
