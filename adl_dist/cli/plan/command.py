"""``adl-dist plan``: measure, cut, predict all methods, recommend one."""

import contextlib
import itertools
import json
import sys
from collections.abc import Mapping
from dataclasses import replace

from adl_dist.cli.plan.arguments import Question, asked, machine_of
from adl_dist.cli.plan.profiler import Profiler
from adl_dist.cli.plan.report import Plan, facts_of, line_to_paste, lines_of
from adl_dist.codecs import CODECS, Codecs
from adl_dist.distributed.affinity import num_cores
from adl_dist.errors import ConfigError, DataError, PartitionError
from adl_dist.partition import Machine, checked_sizes
from adl_dist.partition.chain import Chain
from adl_dist.partition.costs import Profile
from adl_dist.partition.cut import begins_of, check_places
from adl_dist.partition.predict import Prediction, advise, alternative, predict
from adl_dist.schedule import Pipeline


def plan(words: list[str]) -> None:
    """Run the command with these command-line words."""
    question = asked(words)
    found = _measured(question)
    flags = question.flags
    text = json.dumps(facts_of(found)) if flags.json else "\n".join(lines_of(found, with_units=flags.units))
    sys.stdout.write(f"{text}\n")


Cuts = Mapping[int, tuple[Machine, list[int] | None]]  # by K: the devices, and the units of each stage if given


def _measured(question: Question) -> Plan:
    """Measure the model, and predict each method by the profile."""
    flags, config, sizes, machine = question.flags, question.config, question.sizes, machine_of(question)
    try:
        profiler = Profiler(config, threads=question.threads, shape=flags.input, kept_in=flags.profile)
    except DataError as error:
        raise DataError(f"{error}; or describe a sample: --input 3,224,224") from error
    cuts, refused = _cuts(question, machine, profiler.chain)
    num_others = flags.neighbours
    if num_others is None:
        num_others = profiler.num_others(max(cuts)) if question.num_devices <= num_cores() else 0
    M, batch = config.method.micro_batches_per_update, config.train.batch_size
    with profiler.with_load(num_others, sizes[M]):
        profiles = {M: profiler.profile(size) for M, size in sizes.items()}
        whole = profiler.pace(batch)
        with profiler.under_load():
            share = profiler.pace(max(1, batch // question.num_devices))
    other = alternative(profiles[M], machine, num_devices=question.num_devices, whole=whole, share=share)
    predictions, unfit = _predict_all(question, cuts, profiles)
    refused += unfit
    choice, reason = advise(predictions, other, unit=profiles[M].of["unit"])
    begins = [] if choice is None else begins_of(profiler.chain, choice.balance.sizes)
    return Plan(
        machine=machine,
        profile=profiles[M],
        other=other,
        predictions=predictions,
        chain=profiler.chain,
        coded=[] if question.links is None else _coded(question, cuts, profiles[M]),
        refused=refused,
        line=None if choice is None else line_to_paste(choice, begins, flags.overrides),
        reason=reason,
    )


def _cuts(question: Question, machine: Machine, chain: Chain) -> tuple[Cuts, list[str]]:
    """Return the devices and the given cut for each possible K, and reasons against other K.

    Raises:
        PartitionError: If the model can be cut into none of them.
    """
    config = question.config.partition
    cuts, refused, speeds = dict[int, tuple[Machine, list[int] | None]](), dict[int, str](), config.device_speeds
    for K in question.stages:
        is_given = isinstance(config.balance, list) and config.num_stages == K  # else the question is which is best
        try:
            if speeds is not None and len(speeds) != K:
                raise ConfigError(f"partition.device_speeds={speeds} has {len(speeds)} numbers for {K} stages")
            check_places(chain, K)
            sizes = checked_sizes(chain, K, config.balance) if is_given else None
            cuts[K] = replace(machine, speeds=speeds), sizes
        except (PartitionError, ConfigError) as error:
            refused[K] = str(error).replace("partition.num_stages=", "--stages ")
    if not cuts:
        raise PartitionError(next(iter(refused.values())))
    return cuts, [f"K = {K}: {error}" for K, error in refused.items()]


def _coded(question: Question, cuts: Cuts, profile: Profile) -> list[Prediction]:
    """Return predictions of the configured method for each K and codec."""
    found = []
    for (K, (machine, sizes)), codec in itertools.product(cuts.items(), CODECS):
        pipeline, coding = Pipeline(question.config.method, K), replace(machine, codecs=Codecs(codec, codec))
        if pipeline.num_processes <= question.num_devices:
            with contextlib.suppress(PartitionError, ConfigError):  # reported below the table of all methods
                found.append(predict(profile, pipeline, machine=coding, sizes=sizes))
    return found


def _predict_all(question: Question, cuts: Cuts, profiles: Mapping[int, Profile]) -> tuple[list[Prediction], list[str]]:
    """Return all possible predictions, and the reasons against the others."""
    predictions, refused, n = [], [], question.num_devices
    for (K, (machine, sizes)), method in itertools.product(cuts.items(), question.methods):
        try:
            pipeline = Pipeline(method, K)
            if pipeline.num_processes > n:
                needs = f"it needs {pipeline.num_processes} devices, and there are {n}"
                refused.append(f"K = {K}: {needs}; --devices {pipeline.num_processes} predicts it")
                continue
            profile = profiles[method.micro_batches_per_update]
            predictions.append(predict(profile, pipeline, machine=machine, sizes=sizes))
        except (PartitionError, ConfigError) as error:
            refused.append(f"{method.name}, K = {K}: {error}")
    return predictions, [*dict.fromkeys(refused)]
