"""``adl-dist plan --check``: runs what was predicted, and sets what is measured beside it."""

import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from adl_dist.cli.bench_contenders import updates_to_fill
from adl_dist.cli.bench_data import stretching
from adl_dist.cli.children import ChildFailed, ends_in, pace, run_together, training
from adl_dist.cli.plan_report import method_words
from adl_dist.cli.schema import RunConfig
from adl_dist.errors import ConfigError
from adl_dist.partition import Chain, Machine, even_sizes
from adl_dist.partition.predict import Prediction, predict
from adl_dist.partition.profile import Profile
from adl_dist.schedule import Method

SECONDS = 15.0  # of one run, about
FEWEST = 6  # updates of one run
WARMUP = 3  # updates before these, at least: a prediction is of the steady state


@dataclass(kw_only=True)
class Case:
    """One way to train, run several times.

    Attributes:
        title: for people.
        warmup: updates that do not count.
        words_of: of ``adl-dist train``, for the sizes of a cut.
        predict: what a measurement makes of it.
        predicted: images per second, of each repetition.
        measured: the same, as measured.
    """

    title: str
    warmup: int
    words_of: Callable[[Sequence[int]], Sequence[str]]
    predict: Callable[..., Prediction]
    predicted: list[float] = field(default_factory=list)
    measured: list[float] = field(default_factory=list)

    def ratio(self) -> float:
        """Measured over predicted images per second, medians."""
        return statistics.median(self.measured) / statistics.median(self.predicted)


def check_cases(
    config: RunConfig, overrides: Sequence[str], grain: str, chain: Chain, machine: Machine, *, threads: int
) -> list[Case]:
    """The configured method with the best cut and with an even one, and backpropagation on one device."""
    method, K = config.method.chosen(), config.partition.num_stages
    kept = [w for w in overrides if not w.lstrip("+~").startswith(("method", "partition", "runtime.threads="))]
    kept += [f"runtime.threads={threads}", "runtime.trace=false", "runtime.memory=false"]
    even = even_sizes(chain, K)

    def cut(sizes: Sequence[int]) -> list[str]:
        words = [f"partition.num_stages={K}", f"partition.grain={grain}", f"partition.balance={list(sizes)}"]
        return [*kept, *method_words(method), *words]

    bp = Method(name="bp", accumulation_steps=method.micro_batches_per_update)
    alone = [*kept, *method_words(bp), "partition.num_stages=1"]
    title = f"{method.name}, K = {K}"
    ours = partial(predict, method=method, num_stages=K, machine=machine)
    fill = max(WARMUP, updates_to_fill(method, K))
    of_bp = partial(predict, method=bp, num_stages=1)
    return [
        Case(title=f"{title}, best cut", warmup=fill, words_of=cut, predict=ours),
        Case(title=f"{title}, even cut", warmup=fill, words_of=cut, predict=partial(ours, sizes=even)),
        Case(title="bp, one device", warmup=WARMUP, words_of=lambda sizes: alone, predict=of_bp),
    ]


def checked(cases: Sequence[Case], measure: Callable[[], Profile], *, repetitions: int, samples: int, data: str) -> str:
    """Measure the model, cut it, run each case, and again: prediction and run see the same state of the machine.

    Args:
        cases: to be run.
        measure: the model.
        repetitions: how often.
        samples: of an update.
        data: the user's ``data._target_``.

    Returns:
        A table for people.
    """
    for _ in range(repetitions):
        profile = measure()
        for case in cases:
            prediction = case.predict(profile)
            case.predicted.append(prediction.images_per_second)
            updates = max(FEWEST, round(SECONDS * prediction.images_per_second / samples)) + case.warmup
            words = [*case.words_of(prediction.balance.sizes), *stretching(data, updates * samples)]
            ends = _train([*words, "train.epochs=1", f"train.max_updates={updates}"])
            case.measured.append(samples / pace(ends, warmup=case.warmup))
    return table(cases)


def table(cases: Sequence[Case]) -> str:
    """Medians, and the spread of what was measured."""
    lines = ["run                       predicted images/s  measured (least .. most)       measured / predicted"]
    for case in cases:
        spread = f"{statistics.median(case.measured):.0f} ({min(case.measured):.0f} .. {max(case.measured):.0f})"
        lines.append(f"{case.title:<26}{statistics.median(case.predicted):<20.0f}{spread:<31}{case.ratio():.2f}")
    return "\n".join(lines)


def _train(words: Sequence[str]) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        child = training(words, Path(folder))
        try:
            run_together([child])
        except ChildFailed as failed:
            raise ConfigError(f"--check: adl-dist train {' '.join(words)} failed: {failed}") from failed
        return ends_in(Path(folder))
