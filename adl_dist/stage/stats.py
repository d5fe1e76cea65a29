"""The figures of one stage's training: losses, hits, norms, staleness."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from adl_dist.batch import Batch, is_class_target, num_samples
from adl_dist.stage.loss import ClassLoss
from adl_dist.stage.metrics import PERPLEXITY, Metric, hits

MOST_LOSS = 700.0  # of which the exponential is still a number


@dataclass
class StepStats:
    """The figures of one group, or of an evaluation.

    Attributes:
        staleness: updates between forward and update, one entry per backward.
        sizes: samples of each micro-batch that was scored.
        losses: the mean loss of each of these micro-batches; none where there is no loss.
        num_terms: the number of terms that each of these losses averages over; empty if that is its samples.
        hits: (right predictions, targets), int64[2], in each of these; none if the task has no classes.
        measured: for each of these micro-batches, (sum, count), float64[2], of each metric; empty without metrics.
        outputs: (output, target) of each of these, on the CPU, in an evaluation with epoch metrics.
        of_classes: whether the loss is torch's of classes.
        predictions: those of :class:`~adl_dist.stage.heads.GradientHead` since the last update.
        gradient_norm: 2-norm of the stage's gradient of the group, before it is clipped; None without parameters.
        gradient_of: the name of the gradient with this norm, for errors.
        model_norm: 2-norm of the whole model's gradient, if the gradient is clipped by it.
        skipped: the reason if the update is skipped, otherwise None.
        learning_rate: the learning rate of the update; None before the update, and without parameters.
    """

    staleness: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    num_terms: list[float] = field(default_factory=list)
    hits: list[Tensor] = field(default_factory=list)
    measured: list[Sequence[Tensor]] = field(default_factory=list)
    outputs: list[tuple[Any, Batch]] = field(default_factory=list)
    of_classes: bool = False
    predictions: list[Tensor] = field(default_factory=list)
    gradient_norm: Tensor | None = None
    gradient_of: str = "the gradient"
    model_norm: Tensor | None = None
    skipped: str | None = None
    learning_rate: float | None = None
    _fetched: torch.cuda.Event | None = None

    def score(
        self,
        out: Tensor | None,
        target: Batch,
        loss: Tensor,
        num_terms: float | None = None,
        classes: ClassLoss | None = None,
    ) -> None:
        """Add one micro-batch, without a host synchronisation.

        Args:
            out: The model's output; None if hits are not counted.
            target: The targets; whole numbers are taken for classes.
            loss: The mean loss over ``num_terms``.
            num_terms: The number of terms in that mean; if None, it is over the samples.
            classes: The settings of torch's loss of classes. Only with these may a sample have several targets, or
                soft ones.
        """
        self.sizes.append(num_samples(target))
        self.losses.append(loss.detach())
        self.of_classes = classes is not None
        if num_terms is not None:
            self.num_terms.append(num_terms)
        is_torchs = classes is not None and classes.is_torchs_own
        if is_torchs or (is_class_target(target) and isinstance(target, Tensor) and target.ndim == 1):
            found = hits(None if out is None else out.detach(), target, classes)
            self.hits += [] if found is None else [torch.stack(found)]

    def fetch(self, arrived: Sequence[Tensor] = ()) -> bool:
        """Start to copy the figures off a GPU; return False on a CPU.

        A stage without figures knows its device by the tensors that ``arrived`` for it.
        """
        norms = [] if self.gradient_norm is None else [self.gradient_norm]
        if not any(number.is_cuda for number in (*self.losses[:1], *self.predictions[:1], *norms, *arrived[:1])):
            return False
        figures = self.losses, self.hits, self.predictions, norms
        self.losses, self.hits, self.predictions, norms = (_underway(alike) for alike in figures)
        self.measured = [_underway(list(pairs)) for pairs in self.measured]
        self.gradient_norm = norms[0] if norms else None
        self._fetched = torch.cuda.current_stream().record_event(torch.cuda.Event(enable_timing=True))
        return True

    def seconds_since(self, begin: torch.cuda.Event) -> float | None:
        """Return the seconds from ``begin`` to the figures; None on a CPU.

        The GPU's clock is read. The host's clock would show when the work was launched, about an update earlier.
        """
        return None if self._fetched is None else begin.elapsed_time(self._fetched) / 1000

    def numbers(self) -> dict[str, float | int]:
        """Return the available figures as plain numbers, by name.

        ``loss_sum`` is over ``num_terms`` terms, or over ``num_samples`` samples without these. ``num_correct`` targets
        of ``num_classed`` are hits.
        """
        if self._fetched is None:
            self.fetch()
        if self._fetched is not None:
            self._fetched.synchronize()  # with these copies, not with what was launched behind them
        numbers: dict[str, float | int] = {"num_samples": sum(self.sizes)}
        if self.losses:
            loss_sum = 0.0  # not by sum(), which rounds in another way since Python 3.12
            for loss, size in zip(self.losses, self.num_terms or self.sizes, strict=True):
                loss_sum += float(loss) * size
            numbers["loss_sum"] = loss_sum
            bad = [] if math.isfinite(loss_sum) else [n for n, loss in enumerate(self.losses) if not loss.isfinite()]
            if 0 < len(bad) < len(self.losses):
                numbers["first_bad"] = bad[0]
        if self.num_terms:
            numbers["num_terms"] = math.fsum(self.num_terms)
        if self.hits:
            numbers["num_correct"], numbers["num_classed"] = torch.stack(self.hits).sum(dim=0).tolist()
        if self.gradient_norm is not None:
            numbers["gradient_norm"] = float(self.gradient_norm)
        if self.predictions:
            error, square = (math.fsum(sums) for sums in zip(*(p.tolist() for p in self.predictions), strict=True))
            if square > 0:
                numbers["prediction_error"] = error / square
        return numbers

    def sums(self, metrics: Sequence[Metric]) -> dict[str, tuple[float, float]]:
        """Return (sum, count) of each metric with a count above 0, by name."""
        numbers = self.numbers()
        of_loss = float(numbers.get("loss_sum", 0.0)), float(numbers.get("num_terms", numbers["num_samples"]))
        columns = iter([*zip(*self.measured, strict=True)])
        found: dict[str, tuple[float, float]] = {}
        for metric in metrics:
            pairs = [of_loss] if metric.measure is None else [pair.tolist() for pair in next(columns)]
            totals, counts = zip(*pairs, strict=True)
            found[metric.name] = math.fsum(totals), math.fsum(counts)
        return {name: pair for name, pair in found.items() if pair[1]}


def value_of(name: str, pair: tuple[float, float]) -> float:
    """Return a metric from its sum and its count."""
    mean = pair[0] / pair[1]
    return math.exp(min(mean, MOST_LOSS)) if name == PERPLEXITY else mean


def _underway(alike: list[Tensor]) -> list[Tensor]:
    """Return copies in pinned memory, filled when the GPU reaches the copy."""
    return list(torch.stack(alike).to("cpu", non_blocking=True)) if alike else []


def norms_of(gradients: Sequence[Tensor]) -> Tensor:
    """Return the 2-norm of each of ``gradients``, which are on one device."""
    # torch's get_total_norm without the sorting by device and dtype, which is most of its time for a small stage;
    # and torch 2.11 has no norm of an embedding's sparse gradient
    dense = [gradient.coalesce().values() if gradient.is_sparse else gradient for gradient in gradients]
    return torch.stack(torch._foreach_norm(dense))


def norm_of(gradients: Sequence[Tensor]) -> Tensor:
    """Return the 2-norm of all ``gradients`` together."""
    norm: Tensor = torch.linalg.vector_norm(norms_of(gradients))
    return norm
