"""``adl-dist plan --check``: runs what was predicted, and sets what is measured beside it."""

import shlex
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from adl_dist.cli.bench.measured import seconds_per_update, training, update_ends, words_to_measure
from adl_dist.cli.config.schema import RunConfig
from adl_dist.cli.subprocesses import ChildFailed, run_together
from adl_dist.errors import ConfigError
from adl_dist.partition import Chain, Machine, even_sizes
from adl_dist.partition.predict import Prediction, predict
from adl_dist.partition.profile import Profile
from adl_dist.schedule import Method, Pipeline

SECONDS = 15.0  # of one run, about
FEWEST = 6  # updates of one run
WARMUP = 3  # updates before these, at least: a prediction is of the steady state


@dataclass(kw_only=True)
class Case:
    """One way to train, run several times.

    Attributes:
        title: for people.
        warmup: updates that do not count.
        words_of: of ``adl-dist train``, for the sizes of a cut and a number of updates.
        predict: what a measurement makes of it.
        predicted: images per second, of each repetition.
        measured: the same, as measured.
    """

    title: str
    warmup: int
    words_of: Callable[[Sequence[int], int], Sequence[str]]
    predict: Callable[..., Prediction]
    predicted: list[float] = field(default_factory=list)
    measured: list[float] = field(default_factory=list)

    def ratio(self) -> float:
        """Measured over predicted images per second, medians."""
        return statistics.median(self.measured) / statistics.median(self.predicted)


def check_cases(
    config: RunConfig,
    overrides: Sequence[str],
    granularity: str,
    chain: Chain,
    machine: Machine,
    *,
    samples: int,
    threads: int,
) -> list[Case]:
    """The configured method with the best cut and with an even one, and backpropagation on one device."""
    configured, K = config.method.chosen(), config.partition.num_stages
    bp = Method(name="bp", accumulation_steps=configured.micro_batches_per_update)

    def case(title: str, method: Method, num_stages: int, fixed: Sequence[int] | None = None) -> Case:
        pipeline = Pipeline(method, num_stages)

        def words_of(sizes: Sequence[int], num_updates: int) -> Sequence[str]:
            return words_to_measure(
                config,
                overrides,
                method=method,
                num_stages=num_stages,
                cut=(granularity, sizes) if num_stages > 1 else None,
                num_updates=num_updates,
                samples=samples,
                threads=threads,
                bind_cores=config.runtime.bind_cores,
            )

        return Case(
            title=f"{method.name}, {title}",
            warmup=max(WARMUP, pipeline.updates_to_fill),
            words_of=words_of,
            predict=partial(predict, pipeline=pipeline, machine=machine, sizes=fixed),
        )

    return [
        case(f"K = {K}, best cut", configured, K),
        case(f"K = {K}, even cut", configured, K, even_sizes(chain, K)),
        case("one device", bp, 1),
    ]


def checked(cases: Sequence[Case], measure: Callable[[], Profile], *, repetitions: int, samples: int) -> str:
    """Measure the model, cut it, run each case, and again: prediction and run see the same state of the machine.

    Args:
        cases: to be run.
        measure: the model.
        repetitions: how often.
        samples: of an update.

    Returns:
        A table for people.

    Raises:
        ConfigError: a run failed.
    """
    for _ in range(repetitions):
        profile = measure()
        for case in cases:
            prediction = case.predict(profile)
            case.predicted.append(prediction.images_per_second)
            updates = case.warmup + max(FEWEST, round(SECONDS * prediction.images_per_second / samples))
            words = case.words_of(prediction.balance.sizes, updates)
            try:
                seconds = seconds_per_update(_train(words), warmup=case.warmup)
            except ChildFailed as failed:
                raise ConfigError(f"--check: adl-dist train {shlex.join(words)} failed: {failed}") from failed
            case.measured.append(samples / seconds)
    return table(cases)


def table(cases: Sequence[Case]) -> str:
    """Medians, and the spread of what was measured."""
    lines = ["run                       predicted images/s  measured (least .. most)       measured / predicted"]
    for case in cases:
        spread = f"{statistics.median(case.measured):.0f} ({min(case.measured):.0f} .. {max(case.measured):.0f})"
        lines.append(f"{case.title:<26}{statistics.median(case.predicted):<20.0f}{spread:<31}{case.ratio():.2f}")
    return "\n".join(lines)


def _train(words: Sequence[str]) -> list[float]:
    """When each update ended."""
    with tempfile.TemporaryDirectory() as folder:
        run_together([training(words, Path(folder))])
        return update_ends(Path(folder))
