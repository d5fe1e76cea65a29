"""Metrics of the last stage's outputs, each as a sum and a count."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils._pytree import tree_map

from adl_dist.batch import as_classes, device_of, logits_of, tensors_of, version_of
from adl_dist.errors import ConfigError, in_one_line
from adl_dist.stage.calls import flatten_output
from adl_dist.stage.loss import IGNORED, ClassLoss

TAKEN = {"loss", "learning_rate", "skipped_updates", "samples_per_second", "tokens_per_second"}  # names of figures
PERPLEXITY = "perplexity"
TOP = {"accuracy": 1, "top5": 5}  # by name, the number of largest outputs among which a target is right


@dataclass(frozen=True)
class Metric:
    """A named figure computed from outputs and targets.

    ``measure`` maps (output, target) to (sum, count); the figure is sum / count over all micro-batches. ``measure`` is
    None if the figure follows from the loss, and for an :class:`EpochMetric`, which sets ``compute`` instead.
    """

    name: str
    measure: Callable[[Any, Any], tuple[Any, Any]] | None
    compute: Callable[[Any, Any], Any] | None = None


class EpochMetric:
    """A metric of all outputs of a validation, like a macro F1.

    ``compute`` maps (outputs [N, ...], targets [N, ...]), on the CPU in the order of the dataset, to a number. Where
    lengths differ, outputs are padded with 0, and targets with 0 or, if they are int64 or int32, with -100.
    """

    def __init__(self, compute: Callable[[Any, Any], Any]) -> None:
        self.compute, self.__name__ = compute, getattr(compute, "__name__", type(compute).__name__)

    def __call__(self, outputs: Any, targets: Any) -> Any:
        """Return the figure."""
        return self.compute(outputs, targets)


def metrics_of(wanted: Sequence[str | Callable[[Any, Any], Any]], classes: ClassLoss | None) -> list[Metric]:
    """Return the metrics that a user names, or gives as callables.

    ``classes`` are the settings of torch's loss of classes.

    Raises:
        ConfigError: If there is no such metric, or two have the same name.
    """
    made = [_metric(one, classes) for one in wanted]
    for metric in made:
        if metric.name in TAKEN or [one.name for one in made].count(metric.name) > 1:
            raise ConfigError(f"metrics: the name '{metric.name}' is taken; give the callable another __name__")
    return made


def _metric(wanted: Any, classes: ClassLoss | None) -> Metric:
    if callable(wanted):
        name = getattr(wanted, "__name__", type(wanted).__name__)
        return Metric(name, None, wanted) if isinstance(wanted, EpochMetric) else Metric(name, wanted)
    if wanted == PERPLEXITY:
        return Metric(PERPLEXITY, None)
    if isinstance(wanted, str) and wanted in TOP:
        return Metric(wanted, partial(_rate, classes=classes, top=TOP[wanted]))
    raise ConfigError(
        f"metrics: there is no {wanted!r}; use accuracy, top5, perplexity, or a callable of (output, target), "
        "on the command line by its name: train.metrics=[MODULE.NAME]"
    )


def _rate(out: Any, target: Any, *, classes: ClassLoss | None, top: int) -> tuple[Tensor, Tensor]:
    """Return :func:`hits`, or raise ConfigError if these are not of classes."""
    logits = logits_of(out)
    if (found := hits(logits, target, classes, top=top)) is not None:
        return found
    shapes = [list(one.shape) if isinstance(one, Tensor) else type(one).__name__ for one in (logits, target)]
    raise ConfigError(
        "metrics: accuracy and top5 need outputs [B, classes, ...] or [B, ..., classes] for targets [B, ...] of whole "
        f"numbers, or soft ones of the shape of the outputs, got {shapes[0]} and {shapes[1]}"
    )


def hits(out: Tensor | None, target: Any, classes: ClassLoss | None, *, top: int = 1) -> tuple[Tensor, Tensor] | None:
    """Return (number of targets in the ``top`` outputs, number of targets).

    Return None if outputs and targets are not of classes. Classes are the second dimension of outputs for torch's own
    losses, [B, C, ...]; for another loss they are the last dimension if targets [B, ...] have all others, otherwise the
    second. Of soft targets, which have the shape of the outputs, the likeliest class counts. Targets that the loss
    ignores, or that are no class, are not counted.
    """
    if out is None or not isinstance(target, Tensor):
        return None
    if target.is_floating_point() and target.ndim > 1 and target.shape == out.shape:
        target = target.argmax(dim=1)
    if target.is_floating_point() or out.ndim != target.ndim + 1:
        return None
    is_last = (classes is None or not classes.is_torchs_own or classes.dim == -1) and out.shape[:-1] == target.shape
    if not is_last and out.shape[2:] != target.shape[1:]:
        return None
    dim = -1 if is_last else 1
    target, num_classes = as_classes(target), out.shape[dim]
    if num_classes < 2:
        return None
    counts = (target >= 0) & (target < num_classes)  # what is no class can only be ignored
    if classes is not None:
        counts &= target != classes.ignore_index
    if top == 1:
        right = out.argmax(dim=dim) == target
    else:
        right = (out.topk(min(top, num_classes), dim=dim).indices == target.unsqueeze(dim)).any(dim=dim)
    return (right & counts).sum(), counts.sum()


@torch.no_grad()
def measured(metrics: Sequence[Metric], out: Any, target: Any) -> list[Tensor]:
    """Return (sum, count), float64[2], of each metric with a ``measure``.

    Raises:
        ConfigError: If a metric fails, does not return two numbers, or writes to its arguments.
    """
    found, given = [], [*flatten_output(out), *tensors_of(target)]
    versions = [version_of(tensor) for tensor in given]
    for metric in metrics:
        if metric.measure is None:
            continue
        with _users_own(
            metric,
            "(output, target) of a micro-batch and returns two numbers, (sum, count), or is "
            "an adl_dist.EpochMetric of the whole validation",
        ):
            total, count = (torch.as_tensor(number, dtype=torch.float64) for number in metric.measure(out, target))
            found.append(torch.stack([total.to(device_of(target)), count.to(device_of(target))]))
        if versions != [version_of(tensor) for tensor in given]:
            raise ConfigError(f"metrics: {metric.name} writes to the output or the target; let it compute with a copy")
    return found


def computed(metrics: Sequence[Metric], parts: Sequence[tuple[Any, Any]]) -> dict[str, float]:
    """Return the figures of epoch metrics by name.

    ``parts`` has (output, target) of each micro-batch of a validation, on the CPU.

    Raises:
        ConfigError: If a metric fails, or does not return a number.
    """

    def joined(*leaves: Any, ignored: int = 0) -> Any:
        if not (isinstance(leaves[0], Tensor) and leaves[0].ndim):
            return leaves[0]
        value = ignored if leaves[0].dtype in (torch.int64, torch.int32) else 0
        most = [max(sizes) for sizes in zip(*(leaf.shape[1:] for leaf in leaves), strict=True)]
        return torch.cat([_padded(leaf, most, value) for leaf in leaves])

    found = {}
    for metric in metrics:
        assert metric.compute is not None
        with _users_own(metric, "(outputs, targets) of the whole validation and returns a number"):
            of_outputs, of_targets = zip(*parts, strict=True)
            outputs, targets = tree_map(joined, *of_outputs), tree_map(partial(joined, ignored=IGNORED), *of_targets)
            found[metric.name] = float(metric.compute(outputs, targets))
    return found


def _padded(tensor: Tensor, sizes: Sequence[int], value: int) -> Tensor:
    """Return ``tensor`` [B, ...], padded with ``value`` to [B, *sizes]."""
    missing = [more for size, wanted in zip(tensor.shape[1:], sizes, strict=True) for more in (wanted - size, 0)]
    return pad(tensor, missing[::-1], value=value) if any(missing) else tensor


@contextmanager
def _users_own(metric: Metric, given: str) -> Iterator[None]:
    """Turn any error of a metric in the block into a ConfigError."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"metrics: {metric.name} fails: {in_one_line(error)}; it is given {given}") from error
