"""A user's loss as stages call it: what it takes and returns may be more than one tensor."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from adl_dist.batch import Batch, Several, as_classes
from adl_dist.errors import ConfigError
from adl_dist.stage.loss_terms import IGNORED, own_num_terms


class OnSeveral(nn.Module):
    """A loss whose target is a tuple or a dictionary of tensors, as it is called by stages, which have these apart."""

    def __init__(self, loss_fn: Callable[..., Any]) -> None:
        super().__init__()
        self.loss_fn = loss_fn
        if (own := own_num_terms(loss_fn)) is not None:
            self.num_terms = lambda target: own(_value(target))

    def forward(self, out: Any, target: Any) -> Any:
        """Return the loss of ``out``."""
        return self.loss_fn(out, _value(target))


def _value(target: Any) -> Any:
    return target.value if isinstance(target, Several) else target


def _not_ignored(target: Batch) -> Tensor | None:
    if not isinstance(target, Tensor) or target.is_floating_point():
        return None
    return (as_classes(target) != IGNORED).sum()


RELATIVE = 1e-6  # by which two counts that are equal may differ: they may have weights
# What a loss may count, as far as that can be seen in its targets alone.
COUNTS: dict[str, Callable[[Any], Any]] = {
    "targets that are not -100": _not_ignored,
    "elements of the targets": lambda target: target.numel() if isinstance(target, Tensor) else None,
    "samples": len,
}


class MeanOf(nn.Module):
    """A loss that returns (sum, count), as the mean that stages train with.

    The gradient of a group is weighted by its count, which has to be known before its first backward, where no output
    is. So ``num_terms`` counts in the targets alone, and what the loss says is compared with it each time.
    """

    def __init__(self, loss_fn: Callable[..., Any], target: Batch, count: float) -> None:
        """Take ``loss_fn``, which has said that ``target`` [B, ...] has ``count`` terms.

        Raises:
            ConfigError: it counts nothing that can be seen in targets alone, and has no ``num_terms``.
        """
        super().__init__()
        self.loss_fn = loss_fn
        own = own_num_terms(loss_fn)
        self._is_own = own is not None
        self.is_guessed = own is None  # what it counts is concluded from one number, not said by the user
        candidates: dict[str, Callable[[Any], Any]] = {"its num_terms": own} if own is not None else COUNTS
        for counts in candidates.values():
            found = counts(target)
            if found is not None and math.isclose(float(found), count, rel_tol=RELATIVE):
                self.num_terms = counts
                return
        raise ConfigError(
            f"the loss returns (sum, count) with count {count:g}, but the targets have as "
            f"{self._named(candidates, target)}: give the loss a num_terms(target), the same count from the targets of "
            "a micro-batch, by which micro-batches are weighted before there is an output (docs/own.md)"
        )

    def forward(self, out: Any, target: Any, told: float | None = None) -> Tensor:
        """Return the mean; ``told``: what ``num_terms`` has counted in the target, where that was on the CPU.

        On a GPU, where to ask would wait for the device, a mean over another number of terms is NaN. A ``num_terms`` of
        the user's own counts on the CPU, so there its number must be told; without it nothing is compared.

        Raises:
            ConfigError: the mean is not over what the targets have.
        """
        total, count = self.loss_fn(out, target)
        if target.is_cuda:
            if told is None and self._is_own:
                return total / count  # type: ignore[no-any-return]
            expected = self.num_terms(target) if told is None else told
            gap = abs(torch.as_tensor(count, dtype=torch.float64) - expected)
            return torch.where(torch.as_tensor(gap <= RELATIVE * abs(expected)), total / count, math.nan)
        expected = float(self.num_terms(target))
        if not math.isclose(float(count), expected, rel_tol=RELATIVE):
            raise ConfigError(
                f"the loss returned (sum, count) with count {float(count):g} for a micro-batch, but its targets have "
                f"{expected:g} terms by what they had at the start: give the loss a num_terms(target) that counts as "
                "it does (docs/own.md)"
            )
        return total / count  # type: ignore[no-any-return]

    @staticmethod
    def _named(candidates: dict[str, Callable[[Any], Any]], target: Batch) -> str:
        found = ((name, counts(target)) for name, counts in candidates.items())
        return ", ".join(f"{name} {float(number):g}" for name, number in found if number is not None)
