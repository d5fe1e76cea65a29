"""``adl-dist plan``: measure, cut, predict all methods, recommend one."""

import contextlib
import itertools
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from adl_dist.cli.plan.arguments import Question, asked, machine_of
from adl_dist.cli.plan.profiler import Profiler
from adl_dist.cli.plan.report import codec_lines, facts_of, line_to_paste, report, tied_lines
from adl_dist.codecs import CODECS, Codecs
from adl_dist.distributed.affinity import num_cores
from adl_dist.errors import ConfigError, DataError, PartitionError
from adl_dist.partition import Machine, checked_sizes
from adl_dist.partition.chain import Chain
from adl_dist.partition.costs import Profile
from adl_dist.partition.cut import begins_of, check_places
from adl_dist.partition.predict import Alternative, Prediction, advise, alternative, predict
from adl_dist.schedule import Pipeline


def plan(words: list[str]) -> None:
    """Run the command with these command-line words."""
    question = asked(words)
    found = _measured(question)
    lines = [json.dumps(_facts(found))] if question.flags.json else _lines(found, with_units=question.flags.units)
    sys.stdout.write("\n".join(lines) + "\n")


@dataclass(frozen=True, kw_only=True)
class _Found:
    """The measurements, the predictions, and the advice."""

    machine: Machine
    profile: Profile  # with the configured M
    other: Alternative
    predictions: list[Prediction]  # of each method and K
    chain: Chain
    coded: list[Prediction]  # of the configured method, by K and codec; empty: no links are described
    refused: list[str]
    line: str | None  # the recommended command; None: no pipeline is
    reason: str


def _measured(question: Question) -> _Found:
    """Measure the model, and predict each method by the profile."""
    flags, config, sizes, machine = question.flags, question.config, question.sizes, machine_of(question)
    shown = {"shape": flags.input, "kept_in": flags.profile, "quiet": flags.json}
    try:
        profiler = Profiler(config, threads=question.threads, **shown)
    except DataError as error:
        raise DataError(f"{error}; or describe a sample: --input 3,224,224") from error
    question, refused = _possible(question, machine, profiler.chain)
    num_others = flags.neighbours
    if num_others is None:
        num_others = profiler.num_others(max(question.stages)) if question.num_devices <= num_cores() else 0
    M, batch = config.method.micro_batches_per_update, config.train.batch_size
    with profiler.with_load(num_others, sizes[M]):
        profiles = {M: profiler.profile(size) for M, size in sizes.items()}
        whole = profiler.pace(batch)
        with profiler.under_load():
            share = profiler.pace(max(1, batch // question.num_devices))
    other = alternative(profiles[M], machine, num_devices=question.num_devices, whole=whole, share=share)
    predictions, unfit = _predict_all(question, machine, profiler.chain, profiles)
    refused += unfit
    choice, reason = advise(predictions, other, unit=profiles[M].of["unit"])
    begins = [] if choice is None else begins_of(profiler.chain, choice.balance.sizes)
    return _Found(
        machine=machine,
        profile=profiles[M],
        other=other,
        predictions=predictions,
        chain=profiler.chain,
        coded=[] if question.links is None else _coded(question, machine, profiler.chain, profiles[M]),
        refused=refused,
        line=None if choice is None else line_to_paste(choice, begins, flags.overrides),
        reason=reason,
    )


def _possible(question: Question, machine: Machine, chain: Chain) -> tuple[Question, list[str]]:
    """Return the question for the possible K, and reasons against other K.

    Raises:
        PartitionError: If the model can be cut into none of them.
        ConfigError: If there are not as many speeds as stages.
    """
    refusals = dict[int, PartitionError]()
    for K in question.stages:
        try:
            if _cut(question, machine, chain, K)["sizes"] is None:
                check_places(chain, K)
        except (PartitionError, ConfigError) as error:
            refusals[K] = PartitionError(str(error).replace("partition.num_stages=", "--stages "))
    stages = [K for K in question.stages if K not in refusals]
    if not stages:
        raise next(iter(refusals.values()))
    return replace(question, stages=stages), [f"K = {K}: {error}" for K, error in refusals.items()]


def _coded(question: Question, machine: Machine, chain: Chain, profile: Profile) -> list[Prediction]:
    """Return predictions of the configured method for each K and codec."""
    found, chosen = [], question.config.method
    for K, codec in itertools.product(question.stages, CODECS):
        if Pipeline(chosen, K).num_processes > question.num_devices:
            continue
        with contextlib.suppress(PartitionError, ConfigError):  # reported below the table of all methods
            cut = _cut(question, replace(machine, codecs=Codecs(codec, codec)), chain, K)
            found.append(predict(profile, Pipeline(chosen, K), **cut))
    return found


def _cut(question: Question, machine: Machine, chain: Chain, K: int) -> dict[str, Any]:
    """Return the arguments of a prediction with the cut into K stages."""
    config = question.config.partition
    balance, speeds = config.balance, config.device_speeds
    if speeds is not None and len(speeds) != K:
        raise ConfigError(f"partition.device_speeds={speeds} has {len(speeds)} numbers, but there are {K} stages")
    is_given = isinstance(balance, list) and config.num_stages == K  # else the question is which is best
    sizes = checked_sizes(chain, K, balance) if is_given else None
    return {"machine": replace(machine, speeds=speeds), "sizes": sizes}


def _facts(found: _Found) -> dict[str, Any]:
    """Return the answer as plain values."""
    return {
        "profile": asdict(found.profile),
        "machine": asdict(found.machine),
        "predictions": list(map(facts_of, found.predictions)),
        "refused": found.refused,
        "coded": list(map(facts_of, found.coded)),
        "alternative": asdict(found.other),
        "recommended": found.line,
        "reason": found.reason,
    }


def _lines(found: _Found, *, with_units: bool) -> list[str]:
    """Return the answer as a person reads it."""
    told = found.profile, found.machine, found.predictions, found.refused, found.other
    blocks = [found.chain.block_names[number] for number in found.chain.blocks]  # of each unit
    lines = [*report(*told, with_units=with_units, blocks=blocks)]
    lines += tied_lines(found.chain.shared, found.predictions)
    lines += [*(codec_lines(found.coded, found.profile.of["unit"]) if found.coded else []), ""]
    return [*lines, f"recommended  {found.reason}", *([] if found.line is None else [f"             {found.line}"])]


def _predict_all(
    question: Question, machine: Machine, chain: Chain, profiles: Mapping[int, Profile]
) -> tuple[list[Prediction], list[str]]:
    """Return all possible predictions, and the reasons against the others."""
    predictions, refused, n = [], [], question.num_devices
    for K, method in itertools.product(question.stages, question.methods):
        try:
            pipeline = Pipeline(method, K)
            if pipeline.num_processes > n:
                needs = f"it needs {pipeline.num_processes} devices, and there are {n}"
                refused.append(f"K = {K}: {needs}; --devices {pipeline.num_processes} predicts it")
                continue
            cut = _cut(question, machine, chain, K)
            predictions.append(predict(profiles[method.micro_batches_per_update], pipeline, **cut))
        except (PartitionError, ConfigError) as error:
            refused.append(f"{method.name}, K = {K}: {error}")
    return predictions, [*dict.fromkeys(refused)]
