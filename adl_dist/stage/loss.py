"""The loss: terms, micro-batch weights, calls on a stage, start checks.

The gradient of a group is that of all its samples at once if each micro-batch has the weight n_b / n_group, where n is
the number of terms that the loss averages over. Usually these are samples, weighted by schedule/run_plan.py. If the
terms are others, such as targets that are not ignored, stage 0 counts them in the whole group before the first
micro-batch of the group.
"""

import functools
import math
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import islice, repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map, tree_unflatten

from adl_dist.batch import (
    Batch,
    Structure,
    as_classes,
    concatenate,
    copy_batch,
    device_of,
    is_class_target,
    map_batch,
    map_tensors,
    num_samples,
    tensors_of,
    version_of,
)
from adl_dist.errors import ConfigError, in_one_line
from adl_dist.losses import ModelLoss, TokenCrossEntropy
from adl_dist.schedule.run_plan import weights_in_group
from adl_dist.stage.calls import flatten_output
from adl_dist.stage.spec import LossFn, TrainSpec
from adl_dist.streams import streams_kept

IGNORED = -100  # what torch's losses ignore unless told otherwise
KEYWORDS = {"weight", "ignore_index", "reduction", "label_smoothing"}  # of F.cross_entropy and F.nll_loss
RELATIVE = 1e-6  # by which two counts that are equal may differ: they may have weights


@dataclass(frozen=True)
class ClassLoss:
    """The settings of a cross-entropy or negative log-likelihood of classes.

    The loss divides by the summed weights of its targets.

    Attributes:
        ignore_index: the target that the loss ignores.
        weight: of each class, float64[C] on the CPU; if None, each weighs 1.
        is_torchs_own: whether torch's forward computes the loss; False for a derived class with its own.
        dim: the outputs' dimension of classes.
    """

    ignore_index: int
    weight: Tensor | None
    is_torchs_own: bool = True
    dim: int = 1

    def num_terms(self, target: Tensor) -> float:
        """Return the summed weights of the counted classes in ``target``."""
        target = as_classes(target)
        counts = target != self.ignore_index
        if self.weight is None:
            return float(counts.sum())
        counts &= (target >= 0) & (target < len(self.weight))  # the loss itself refuses those that are no class
        return float(self.weight[target[counts]].sum())


def class_loss(loss_fn: Any) -> ClassLoss | None:
    """Return the settings of a loss of classes of torch, or None for others.

    Losses of classes are nn.CrossEntropyLoss and nn.NLLLoss, classes derived from them, their functions, also with
    keywords by functools.partial, and TokenCrossEntropy.
    """
    settings, own, dim = dict[str, Any](), True, 1
    if isinstance(loss_fn, nn.CrossEntropyLoss | nn.NLLLoss):
        settings = {"ignore_index": loss_fn.ignore_index, "weight": loss_fn.weight}
        forward = getattr(loss_fn.forward, "__func__", None)
        own = forward in (nn.CrossEntropyLoss.forward, nn.NLLLoss.forward, TokenCrossEntropy.forward)
        dim = -1 if forward is TokenCrossEntropy.forward else 1
    else:
        if isinstance(loss_fn, functools.partial) and not loss_fn.args:
            loss_fn, settings = loss_fn.func, loss_fn.keywords
        if not (loss_fn is F.cross_entropy or loss_fn is F.nll_loss) or not settings.keys() <= KEYWORDS:
            return None
    if (weight := settings.get("weight")) is not None:
        weight = weight.detach().double().cpu()
    return ClassLoss(settings.get("ignore_index", IGNORED), weight, own, dim)


def is_of_classes(loss_fn: Any) -> bool:
    """Return whether ``loss_fn`` surely takes whole-number targets as classes.

    Other losses may not use such targets.
    """
    return class_loss(loss_fn) is not None or isinstance(loss_fn, ModelLoss)


def is_known_mean(loss_fn: Any) -> bool:
    """Return whether ``loss_fn`` is a loss of torch or adl_dist.

    A loss with its own ``num_terms`` is not, nor is the model's own loss.
    """
    made_of = loss_fn.func if isinstance(loss_fn, functools.partial) else loss_fn
    known = "torch.nn.modules.loss", "torch.nn.functional", "adl_dist.losses"
    is_open = own_num_terms(loss_fn) is not None or isinstance(loss_fn, ModelLoss)
    return not is_open and getattr(made_of, "__module__", "") in known


def is_sum(loss_fn: Any) -> bool:
    """Return whether ``loss_fn`` is a loss of torch with reduction='sum'."""
    settings = loss_fn.keywords if isinstance(loss_fn, functools.partial) else getattr(loss_fn, "__dict__", {})
    return bool(settings.get("reduction") == "sum")


def own_num_terms(loss_fn: Any) -> Callable[[Any], Any] | None:
    """Return the ``num_terms`` of a loss, or None if it does not define one."""
    while isinstance(loss_fn, functools.partial) and not hasattr(loss_fn, "num_terms"):
        loss_fn = loss_fn.func
    return getattr(loss_fn, "num_terms", None)


@dataclass(frozen=True)
class LossTerms:
    """A counter of the terms of a loss in a micro-batch's targets."""

    num_terms: Callable[[Any], Any]

    def count(self, target: Batch) -> float:
        """Return the number of terms in ``target`` [B, ...], on the CPU.

        Raises:
            ConfigError: If the user's ``num_terms`` fails, or does not return a finite number of at least 0.
        """
        try:
            number = float(self.num_terms(target))
            fault = None if 0 <= number < math.inf else f"returned {number}"
        except Exception as error:  # the user's own function can raise anything
            fault = f"fails: {in_one_line(error)}"
        if fault is not None:
            given = ", ".join(f"{str(t.dtype).removeprefix('torch.')}{[*t.shape]}" for t in tensors_of(target))
            raise ConfigError(
                f"the loss's num_terms {fault}; it is given the targets of a micro-batch on the CPU, here {given}, and "
                "returns the number of terms that the loss averages over, 0 or more"
            )
        return number


def loss_terms(loss_fn: LossFn, target: Batch, reduction: str = "mean") -> LossTerms | None:
    """Return a counter of the terms of ``loss_fn``, or None to count samples.

    A loss counts its terms if it has ``num_terms``, or if it is torch's loss of classes with weights, with an
    ``ignore_index`` other than torch's default, or with several targets in a sample, as ``target`` [B, ...] shows. With
    one target in each sample nothing is counted, so no target may be one that the loss ignores. With ``reduction``
    "batch" the samples count.
    """
    if reduction == "batch":
        return None
    if (own := own_num_terms(loss_fn)) is not None:
        return LossTerms(own)
    found = class_loss(loss_fn)
    if found is None or not found.is_torchs_own or not is_class_target(target):
        return None  # class probabilities are averaged over samples
    is_plain = tensors_of(target)[0].ndim == 1 and found.weight is None and found.ignore_index == IGNORED
    return None if is_plain else LossTerms(found.num_terms)


def counted(
    batches: Generator[tuple[Batch, Batch], None, None],
    terms: LossTerms,
    group_sizes: Sequence[int] | None,
    *,
    reduction: str = "mean",
) -> Generator[tuple[Any, ...], None, None]:
    """Yield (input, target, counts) of each micro-batch.

    Args:
        batches: yields (input [B, ...], target [B, ...]) of each micro-batch; closed in the end.
        terms: counts the terms in the targets.
        group_sizes: micro-batches of each group; None in evaluation, which has no groups.
        reduction: how the gradients of a group are combined, ``mean`` or ``sum``.

    Yields:
        ``counts`` float64[B, 2] on the CPU has the weight of the micro-batch's loss in its group, and the number of its
        terms, in every row. A group without any term is weighted by its samples, so that the loss function decides on
        its value; torch's is NaN there.
    """
    sizes: Iterable[int] = group_sizes if group_sizes is not None else repeat(1)
    with closing(batches):
        for size in sizes:
            group = deque(islice(batches, size))
            if not group:
                return
            numbers = [terms.count(target) for _, target in group]
            if not any(numbers) and group_sizes is not None:
                numbers = [float(num_samples(target)) for _, target in group]
            weights = weights_in_group(reduction, numbers)
            for of_loss in zip(weights, numbers, strict=True):
                input_, target = group.popleft()
                yield input_, target, torch.tensor(of_loss, dtype=torch.float64).repeat(num_samples(target), 1)


# What a loss of (sum, count) may count, as far as targets alone show it.
COUNTS: dict[str, Callable[[Any], Any]] = {
    "targets that are not -100": lambda target: sum((tensor != IGNORED).sum() for tensor in tensors_of(target)),
    "elements of the targets": lambda target: sum(tensor.numel() for tensor in tensors_of(target)),
    "samples": num_samples,
}


class SumCountLoss(nn.Module):
    """A loss that returns (sum, count), as the mean that stages train with.

    The count must be known before the first backward of the group, when there is no output yet. So ``num_terms`` counts
    in the targets only, and each micro-batch compares it with the count that the loss returns.
    """

    def __init__(self, loss_fn: LossFn, target: Batch, count: float) -> None:
        """Wrap ``loss_fn``, which has returned ``count`` for ``target`` [B, ...].

        Raises:
            ConfigError: If its ``num_terms``, or each counter in COUNTS if it has none, does not give ``count``.
        """
        super().__init__()
        self.loss_fn, own = loss_fn, own_num_terms(loss_fn)
        counters = COUNTS if own is None else {"its num_terms": own}
        found = {name: float(counter(target)) for name, counter in counters.items()}
        fitting = [name for name, number in found.items() if math.isclose(number, count, rel_tol=RELATIVE)]
        if not fitting:
            raise ConfigError(
                f"the loss returns (sum, count) with count {count:g}, but the targets have as "
                f"{', '.join(f'{name} {number:g}' for name, number in found.items())}: give the loss a "
                "num_terms(target), the same count from the targets of a micro-batch (docs/own.md)"
            )
        self.num_terms = counters[fitting[0]]

    def forward(self, out: Any, target: Batch, num_terms: float | None = None) -> Tensor:
        """Return the mean, sum / count.

        On a GPU, where a check would wait, the result is NaN if the count is not ``num_terms``.

        Raises:
            ConfigError: If the count is not ``num_terms``, on a CPU.
        """
        total, count = self.loss_fn(out, target)
        mean: Tensor = total / count
        if num_terms is None:
            return mean
        is_same = abs(torch.as_tensor(count, dtype=torch.float64) - num_terms) <= RELATIVE * num_terms
        if tensors_of(target)[0].is_cuda:
            return torch.where(is_same, mean, math.nan)
        if not is_same:
            raise ConfigError(
                f"the loss returned (sum, count) with count {float(count):g} for a micro-batch, but its targets have "
                f"{num_terms:g} terms by what they had at the start: give the loss a num_terms(target) that counts as "
                "it does (docs/own.md)"
            )
        return mean


class StageLoss:
    """The loss of a stage: that of the model, or a local one.

    Attributes:
        users_loss: the user's own loss.
        classes: the settings of torch's loss of classes, if it is one.
    """

    def __init__(
        self, spec: TrainSpec, structure: Structure | None, head: nn.Module | None, device: torch.device
    ) -> None:
        """Prepare the loss of one stage.

        Args:
            spec: how the model is trained.
            structure: the structure of a target; None for one tensor.
            head: maps (output, target, loss_fn) to a local loss; None if the output is the model's.
            device: where the loss is computed.
        """
        self._loss_fn, self._head, self._structure = spec.loss_fn, head, structure
        self.users_loss = spec.loss_fn.loss_fn if isinstance(spec.loss_fn, SumCountLoss) else spec.loss_fn
        self._within = spec.precision.autocasting(device)
        self._may_write, self.classes = not is_known_mean(spec.loss_fn), class_loss(spec.loss_fn)

    def wanted(self, given: tuple[Tensor | None, ...]) -> tuple[Batch | None, float | None, float | None]:
        """Return (target, weight in the group, number of terms) of a micro-batch.

        ``given`` is ``wanted`` of :meth:`Stage.forward`. Weight and number are None unless the loss counts its terms.
        """
        structure = self._structure
        number = 1 if structure is None else structure.num_leaves
        target = given[0] if structure is None or given[0] is None else tree_unflatten(given[:number], structure)
        counts = given[number] if len(given) > number else None
        return (target, None, None) if counts is None else (target, *counts[0].tolist())

    def __call__(self, out: Any, target: Batch | None, num_terms: float | None = None) -> Tensor:
        """Return the scalar loss of an output."""
        assert target is not None
        if num_terms == 0:
            # The mean over nothing may be NaN, but in that of the group it counts for nothing.
            return torch.zeros((), device=device_of(target))  # Stage.backward sends zeros upstream
        if self._may_write:  # the target is wanted again, by a replay and for hits
            target = copy_batch(target)
        with self._within():
            if self._head is not None:
                return self._head(out, target, self._loss_fn)  # type: ignore[no-any-return]
            if isinstance(self._loss_fn, SumCountLoss):
                return self._loss_fn(out, target, num_terms)  # type: ignore[no-any-return]
            return self._loss_fn(out, target)


class ReturnsSumError(ConfigError):
    """The error of a loss that returns (sum, ``count``), here for ``target``."""

    def __init__(self, count: float, target: Batch) -> None:
        super().__init__("the loss returns a pair; expected a tensor of one number, the mean over the samples")
        self.count, self.target = count, target


def try_loss(stage: int, got: str, out: Any, target: Batch, loss_fn: LossFn) -> Tensor:
    """Return the loss of a micro-batch; ``got`` describes its arguments.

    Raises:
        ConfigError: If the loss fails, is a sum, or returns no number.
        ReturnsSumError: If it returns two numbers.
    """
    if is_sum(loss_fn):
        raise ConfigError(f"stage {stage}: the loss is a sum; expected the mean over the samples: reduction='mean'")
    outs = flatten_output(out)
    versions = [version_of(tensor) for tensor in outs]
    try:
        with warnings.catch_warnings(action="ignore"):  # it may warn of what it then raises
            loss: Any = loss_fn(out, target)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # the user's own loss can raise anything
        way_out = "choose another loss._target_, or correct the model's output or the targets"
        shapes = [one.shape for one in (out, target) if isinstance(one, Tensor)]
        if hasattr(out, "logits"):
            way_out = "let the loss take output.logits"
            if not isinstance(loss_fn, ModelLoss):
                way_out += ", or use the model's own, loss_fn='model' (docs/recipes.md)"
        elif class_loss(loss_fn) and len(shapes) == 2 and len(shapes[1]) > 1 and shapes[0][:-1] == shapes[1]:
            way_out = "for outputs with the classes last, use loss=tokens (adl_dist.losses.TokenCrossEntropy)"
        raise ConfigError(
            f"stage {stage}: the loss gets {got} and fails on it: {in_one_line(error)}; {way_out}"
        ) from error
    if [version_of(tensor) for tensor in outs] != versions:  # then hits would be counted in what it has written
        raise ConfigError(f"stage {stage}: the loss writes to the model's output; let it compute with a copy")
    if isinstance(loss, Tensor) and not loss.ndim:
        if _pairs_all(loss_fn, out, target):
            named = [str(["B", *tensor.shape[1:]]).replace("'", "") for tensor in (out, *tensors_of(target))]
            raise ConfigError(
                f"stage {stage}: the model returns {named[0]}, but the targets are {named[1]}, and the loss pairs "
                "every output with every target (broadcasting); give both one shape: let the model return "
                "output.squeeze(1), or the dataset targets of the model's shape"
            )
        return loss
    parts = loss if isinstance(loss, tuple | list) else ()
    if len(parts) == 2 and all(getattr(part, "ndim", 0) == 0 and hasattr(part, "__float__") for part in parts):
        raise ReturnsSumError(float(parts[1]), map_batch(Tensor.cpu, target))
    found = "None" if loss is None else f"a {type(loss).__name__}{[*getattr(loss, 'shape', ())] or ''}"
    raise ConfigError(
        f"stage {stage}: the loss returned {found} for {got}; expected a tensor of one number, the mean "
        "over the samples, not .item() of it, or (sum, count)"
    )


def _pairs_all(loss_fn: LossFn, out: Any, target: Any) -> bool:
    """Return whether a loss broadcasts an output [B, 1] and a target [B].

    The value of such a loss depends on the shape that the output is given.
    """
    are_numbers = all(isinstance(one, Tensor) and one.is_floating_point() for one in (out, target))
    if not are_numbers or len(target) < 2 or out.shape == target.shape or out.numel() != target.numel():
        return False
    losses = []
    with torch.no_grad(), streams_kept(), warnings.catch_warnings(action="ignore"), suppress(Exception):
        for shape in (out.shape, target.shape):
            torch.default_generator.manual_seed(0)  # a loss may draw, and write to both
            losses.append(loss_fn(out.clone().view(shape), target.clone()))
    return len(losses) == 2 and not torch.allclose(losses[0], losses[1])  # it may take one shape only


def check_is_mean(
    stage: int,
    loss_fn: LossFn,
    outs: Sequence[Any],
    targets: Sequence[Batch],
    terms: LossTerms | None,
    *,
    give: str = "give the loss num_terms(target)",
    is_rounded: bool = False,
) -> None:
    """Check that the loss of two micro-batches is the mean of their losses.

    ``outs`` are their outputs, [B, ...] or containers of tensors, ``targets`` [B, ...] are on the same device. A loss
    that is random, changes with its calls, or is not finite cannot be compared, and passes. ``give`` is the remedy that
    the error names. With ``is_rounded`` the model computes in less than float32.

    Raises:
        ConfigError: If the loss is no such mean, or fails on both together.
    """

    def loss_of(out: Any, target: Batch) -> Tensor:
        out = map_tensors(Tensor.clone, out)  # it may write to both
        return try_loss(stage, "two micro-batches together", out, copy_batch(target), loss_fn).detach()

    counts = [
        float(num_samples(target)) if terms is None else terms.count(map_batch(Tensor.cpu, target))
        for target in targets
    ]
    if not any(counts):
        return
    parts = [float(loss_of(*pair)) if count else 0.0 for *pair, count in zip(outs, targets, counts, strict=True)]
    both = tree_map(lambda a, b: torch.cat([a, b]) if isinstance(a, Tensor) and a.ndim else a, *outs)
    found, again = (loss_of(both, concatenate(*targets)) for _ in range(2))
    values = [part * count / sum(counts) for part, count in zip(parts, counts, strict=True)]
    eps, scale = torch.finfo(found.dtype).eps, abs(float(found)) + sum(map(abs, values))
    tolerance = max(1e-6, math.sqrt(eps)) * scale  # a loss in float64 may compute a part of itself in float32
    are_classes = not any(tensor.is_floating_point() for target in targets for tensor in tensors_of(target))
    if (terms is not None or are_classes) and not is_rounded:
        # The first losses of a language model are all alike, and wrong terms show in the fifth digit. The floor is for
        # differences of means.
        tolerance = min(tolerance, max(256 * eps * scale, 1e-5))
    if not abs(float(found) - sum(values)) > tolerance or found != again:  # NaN is not greater
        return
    hint = "; of (sum, count) the first must be the sum, not the mean" if isinstance(loss_fn, SumCountLoss) else ""
    raise ConfigError(
        f"the loss is no mean over {'the samples' if terms is None else 'the terms that it counts'}: of {counts[0]:g} "
        f"it is {parts[0]:.6g}, of {counts[1]:g} others {parts[1]:.6g}, and of all of them {float(found):.6g} instead "
        f"of {sum(values):.6g}{hint}; so a group of micro-batches would not get the gradient of its samples: "
        f"{give}, the number of terms that it averages over, or declare loss.reduction=batch, by which a micro-batch "
        "counts by its samples (docs/own.md)"
    )
