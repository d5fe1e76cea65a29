"""What a loss averages over: the samples, or terms of its own, such as the targets that it does not ignore.

The gradient of a group of micro-batches is that of all its samples at once only if each micro-batch has the weight
n_b / n_group, n being what the loss divides by. Where that is samples, the schedule knows it. Where it is something
else, stage 0 counts it in the targets of the whole group, before it hands out the first of its micro-batches.
"""

import functools
import math
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice, repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from adl_dist.batch import Batch, Several, as_classes
from adl_dist.errors import ConfigError
from adl_dist.losses import TokenCrossEntropy
from adl_dist.schedule.run_plan import weights_in_group

IGNORED = -100  # what torch's losses ignore unless told otherwise
KEYWORDS = {"weight", "ignore_index", "reduction", "label_smoothing"}  # of these functions, as far as they are known


@dataclass(frozen=True)
class ClassLoss:
    """torch's cross-entropy or negative log-likelihood of classes, which divides by the weights of its targets.

    Attributes:
        ignore_index: the target that it ignores.
        weight: of each class, float64[C] on the CPU; None: 1.
        is_torchs_own: whether it is known to do that; not if a derived class computes something of its own.
        dim: the outputs' dimension of classes.
    """

    ignore_index: int
    weight: Tensor | None
    is_torchs_own: bool = True
    dim: int = 1

    def num_terms(self, target: Tensor) -> float:
        """Return the sum of the weights of those classes in ``target`` [B, ...] that count."""
        target = as_classes(target)
        counts = target != self.ignore_index
        if self.weight is None:
            return float(counts.sum())
        counts &= (target >= 0) & (target < len(self.weight))  # the loss itself refuses those that are no class
        return float(self.weight[target[counts]].sum())


@dataclass(frozen=True)
class LossTerms:
    """Counts the terms that a loss averages over in the targets of a micro-batch."""

    num_terms: Callable[[Any], Any]

    def count(self, target: Batch) -> float:
        """Return how many terms ``target`` [B, ...] has, on the CPU; not a whole number if they have weights.

        Raises:
            ConfigError: a ``num_terms`` of the user's own fails, or returns no such number.
        """
        try:
            number = float(self.num_terms(target))
        except Exception as error:  # the user's own function can raise anything
            raise ConfigError(
                f"the loss's num_terms fails on {_described(target)}: {type(error).__name__}: {error}; it is given the "
                "targets of a micro-batch on the CPU, and returns the number of terms that the loss averages over"
            ) from error
        if not 0 <= number < math.inf:
            raise ConfigError(
                f"the loss's num_terms returned {number} for {_described(target)}; expected the number of terms that "
                "the loss averages over, 0 or more"
            )
        return number


def class_loss(loss_fn: Any) -> ClassLoss | None:
    """Return how torch's loss of classes is set; None: ``loss_fn`` is none.

    These are nn.CrossEntropyLoss and nn.NLLLoss, also classes derived from them, and their functions, also with
    keywords by functools.partial; and TokenCrossEntropy.
    """
    settings: dict[str, Any] = {}
    own, dim = True, 1
    if isinstance(loss_fn, nn.CrossEntropyLoss | nn.NLLLoss):
        settings = {"ignore_index": loss_fn.ignore_index, "weight": loss_fn.weight}
        # Looked up in the object, which may have been given another one.
        forward = getattr(loss_fn.forward, "__func__", None)
        own = forward in (nn.CrossEntropyLoss.forward, nn.NLLLoss.forward, TokenCrossEntropy.forward)
        dim = -1 if forward is TokenCrossEntropy.forward else 1
    else:
        if isinstance(loss_fn, functools.partial) and not loss_fn.args:
            loss_fn, settings = loss_fn.func, loss_fn.keywords
        if not (loss_fn is F.cross_entropy or loss_fn is F.nll_loss) or not settings.keys() <= KEYWORDS:
            return None
    weight = settings.get("weight")
    weight = None if weight is None else weight.detach().double().cpu()
    return ClassLoss(settings.get("ignore_index", IGNORED), weight, own, dim)


def is_sum(loss_fn: Any) -> bool:
    """Whether ``loss_fn`` is one of torch's losses, or a function of them with keywords, set to add up."""
    if isinstance(loss_fn, functools.partial):
        return bool(loss_fn.keywords.get("reduction") == "sum")
    return bool(getattr(loss_fn, "reduction", "mean") == "sum")


def is_known_mean(loss_fn: Any) -> bool:
    """Whether ``loss_fn`` is one of torch's losses as torch wrote it, or ours: it is known what it averages over."""
    if own_num_terms(loss_fn) is not None:
        return False
    if isinstance(loss_fn, functools.partial):
        loss_fn = loss_fn.func
    return getattr(loss_fn, "__module__", "") in ("torch.nn.modules.loss", "torch.nn.functional", "adl_dist.losses")


def own_num_terms(loss_fn: Callable[..., Any]) -> Callable[[Tensor], Any] | None:
    """Return what a user has said that ``loss_fn`` averages over; None: nothing."""
    said_by: Any = loss_fn
    while isinstance(said_by, functools.partial) and not hasattr(said_by, "num_terms"):
        said_by = said_by.func
    return getattr(said_by, "num_terms", None)


def loss_terms(loss_fn: Callable[..., Any], target: Batch) -> LossTerms | None:
    """Return what counts the terms of ``loss_fn`` in targets like ``target`` [B, ...]; None: each sample is one.

    A loss counts its terms if it says so, by ``num_terms``, or if it is torch's loss of classes with weights, with an
    ``ignore_index`` other than torch's, or with several targets in a sample. With one target in each sample nothing is
    counted, so that no target may be one that the loss ignores.
    """
    if (own := own_num_terms(loss_fn)) is not None:
        return LossTerms(own)
    found = class_loss(loss_fn)
    if (
        found is None or not found.is_torchs_own or not isinstance(target, Tensor) or target.is_floating_point()
    ):  # class probabilities: one per sample
        return None
    is_plain = target.ndim == 1 and found.weight is None and found.ignore_index == IGNORED
    return None if is_plain else LossTerms(found.num_terms)


def counted(
    batches: Generator[tuple[Batch, Batch], None, None],
    terms: LossTerms,
    group_sizes: Sequence[int] | None,
    *,
    reduction: str = "mean",
) -> Generator[tuple[Any, ...], None, None]:
    """Yield (input, target, counts) of each micro-batch; a whole group is loaded before its first one.

    Args:
        batches: (input [B, ...], target [B, ...]) of each micro-batch, closed in the end.
        terms: counts in the targets.
        group_sizes: micro-batches of each group; None: there are no groups, because this is evaluation.
        reduction: how the gradients of a group are combined, ``mean`` or ``sum``.

    Yields:
        ``counts`` float64[B, 2] on the CPU has the weight of the micro-batch's loss in its group, and the number of
        its terms, in every row. A group without any term is weighted by its samples, so that the loss function has
        the word: torch's is NaN there.
    """
    sizes: Iterable[int] = group_sizes if group_sizes is not None else repeat(1)
    with closing(batches):
        for size in sizes:
            group = deque(islice(batches, size))
            if not group:
                return
            numbers = [terms.count(target) for _, target in group]
            if not any(numbers) and group_sizes is not None:
                numbers = [float(len(target)) for _, target in group]
            weights = weights_in_group(reduction, numbers)
            for of_loss in zip(weights, numbers, strict=True):
                input_, target = group.popleft()
                yield input_, target, torch.tensor(of_loss, dtype=torch.float64).repeat(len(target), 1)


def _described(target: Batch) -> str:
    if isinstance(target, Several):
        return f"{target.layout} ({', '.join(map(_described, target.tensors))})"
    return f"{str(target.dtype).removeprefix('torch.')}{list(target.shape)}"
