"""``adl-dist plan --check``: runs what was predicted, and sets what is measured beside it."""

import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from adl_dist.cli.children import ChildFailed, run_together, summary_in, training
from adl_dist.cli.plan_report import method_words
from adl_dist.cli.schema import RunConfig
from adl_dist.errors import ConfigError
from adl_dist.partition import Chain, Machine, even_sizes
from adl_dist.partition.predict import Prediction, predict
from adl_dist.partition.profile import Profile
from adl_dist.schedule import Method

SECONDS = 15.0  # of one run, about
FEWEST = 12  # updates of one run


@dataclass(kw_only=True)
class Case:
    """One way to train, run several times.

    Attributes:
        title: for people.
        words_of: of ``adl-dist train``, for the sizes of a cut.
        predict: what a measurement makes of it.
        predicted: images per second, of each repetition.
        measured: the same, as measured.
    """

    title: str
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
    kept.append(f"runtime.threads={threads}")
    even = even_sizes(chain, K)

    def cut(sizes: Sequence[int]) -> list[str]:
        words = [f"partition.num_stages={K}", f"partition.grain={grain}", f"partition.balance={list(sizes)}"]
        return [*kept, *method_words(method), *words]

    bp = Method(name="bp", accumulation_steps=method.micro_batches_per_update)
    alone = [*kept, *method_words(bp), "partition.num_stages=1"]
    title = f"{method.name}, K = {K}"
    ours = partial(predict, method=method, num_stages=K, machine=machine)
    return [
        Case(title=f"{title}, best cut", words_of=cut, predict=ours),
        Case(title=f"{title}, even cut", words_of=cut, predict=partial(ours, sizes=even)),
        Case(title="bp, one device", words_of=lambda sizes: alone, predict=partial(predict, method=bp, num_stages=1)),
    ]


def checked(cases: Sequence[Case], measure: Callable[[], Profile], *, repetitions: int, batch_size: int) -> str:
    """Measure the model, run each case, and again, so that predictions and runs see the same state of the machine.

    Returns:
        A table for people.
    """
    sizes: dict[str, list[int]] = {}
    for _ in range(repetitions):
        profile = measure()
        for case in cases:
            same = {"sizes": sizes[case.title]} if case.title in sizes else {}  # the same cut in each repetition
            prediction = case.predict(profile, **same)
            sizes[case.title] = prediction.balance.sizes
            case.predicted.append(prediction.images_per_second)
            updates = max(FEWEST, round(SECONDS * prediction.images_per_second / batch_size))
            summary = _train([*case.words_of(prediction.balance.sizes), f"train.max_updates={updates}"])
            case.measured.append(summary["samples_per_second"])
    return table(cases)


def table(cases: Sequence[Case]) -> str:
    """Medians, and the spread of what was measured."""
    lines = ["run                       predicted images/s  measured (least .. most)       measured / predicted"]
    for case in cases:
        spread = f"{statistics.median(case.measured):.0f} ({min(case.measured):.0f} .. {max(case.measured):.0f})"
        lines.append(f"{case.title:<26}{statistics.median(case.predicted):<20.0f}{spread:<31}{case.ratio():.2f}")
    return "\n".join(lines)


def _train(words: Sequence[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        child = training([*words, "train.epochs=100000"], Path(folder))
        try:
            run_together([child])
        except ChildFailed as failed:
            raise ConfigError(f"--check: adl-dist train {' '.join(words)} failed: {failed}") from failed
        return summary_in(Path(folder))
