"""Whether a loss is a mean at all: that of a micro-batch follows from those of its parts, gradients too.

The gradient of a group of micro-batches is that of all its samples at once if n L(all) is the sum of n_p L(p) over the
parts p of any division, where n counts what the loss averages over. This is tried out before training, on the samples
of the trial and on the targets of many more, and now and then on a micro-batch in training (:class:`MeanGuard`), since
what a loss does with rare targets shows where they are.
"""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from adl_dist.batch import Batch, Several, detached
from adl_dist.batch import put_together as joined
from adl_dist.errors import ConfigError
from adl_dist.stage.loss_terms import LossTerms, is_known_mean, loss_terms, own_num_terms
from adl_dist.stage.own_loss import MeanOf
from adl_dist.stage.spec import LossFn
from adl_dist.streams import streams_kept

LEAST_TOLERANCE = 1e-6  # of a loss in float64, which may compute a part of itself in float32
WAYS_OUT = (
    "so a group of several micro-batches would not give the gradient of its samples: give the loss "
    "num_terms(target), the number of terms that it averages over (docs/own.md), or use method.accumulation_steps=1"
)
MOST_BYTES = 2**26  # of outputs that are made up, or looked at in training
LOOK_EVERY = 64  # micro-batches in training; more often at first


class _Asked(NamedTuple):
    """A loss, the gradients of the outputs that it was given, and how exact both are."""

    loss: float
    grads: list[Tensor | None]
    tolerance: float


def check_is_mean(
    loss_fn: LossFn, outs: tuple[Any, Any], targets: tuple[Batch, Batch], terms: LossTerms | None
) -> None:
    """Check a loss on two real micro-batches together.

    A module is copied, so that it does not move; of another callable the caller keeps what it holds. The global random
    streams stay where they are. A loss that is not finite, or not the same when it is asked twice, cannot be compared,
    and passes; so does one whose own ``num_terms`` says that it is a mean over samples.

    Args:
        loss_fn: (output, target) to a scalar.
        outs: the model's output for each of two micro-batches of different sizes: [B, ...], or containers of such.
        targets: their targets, [B, ...], on the same device.
        terms: what :func:`~adl_dist.stage.loss_terms.loss_terms` returns for these.

    Raises:
        ConfigError: the loss is no such mean, or fails on the samples.
    """
    out, target = put_together(outs), joined(*targets)
    parts = torch.arange(len(target)).split([len(of_one) for of_one in targets])
    # First in float64, where little is rounded; not each loss takes that. And with outputs that differ: those of a
    # model that has not learnt may all be alike, and each mean of them is the same. Not each loss takes these, either.
    failure: Exception | None = None
    for in_double, varied in ((True, True), (False, True), (False, False)):
        given = _varied(out, target) if varied else out
        try:
            fault = _fault_in_copy(loss_fn, given, target, parts, terms, in_double=in_double)
        except Exception as error:  # the user's own loss can raise anything
            failure = error
            continue
        if fault is not None:
            hint = "; of (sum, count) the first must be the sum, not the mean" if isinstance(loss_fn, MeanOf) else ""
            raise ConfigError(f"{fault}{hint}; {WAYS_OUT}")
        return
    raise ConfigError(
        f"the loss fails on {len(targets[0])}, {len(targets[1])} or all of these samples: {type(failure).__name__}: "
        f"{failure}; if it is none of single samples, give it num_terms(target) (docs/own.md; len, if a mean over the "
        "micro-batches is what is wanted), or use method.accumulation_steps=1"
    ) from failure


def check_many(loss_fn: LossFn, out: Any, target: Tensor, terms: LossTerms | None) -> None:
    """Check a loss on real ``target`` [N, ...] and made-up outputs: those in ``out`` [n, ...], repeated and varied.

    As :func:`check_is_mean` does, but in several divisions, even and uneven. A loss that does not take such outputs is
    not judged by them.

    Raises:
        ConfigError: the loss is no mean over samples, or over its terms.
    """
    given = _varied(_rows(out, torch.arange(len(target)) % _length(out)), target)
    for parts in _divisions(len(target)):
        for in_double in (True, False):
            try:
                fault = _fault_in_copy(loss_fn, given, target, parts, terms, in_double=in_double)
            except Exception:  # it does not take such outputs, or so many
                continue
            if fault is not None:
                raise ConfigError(f"{fault}, seen in the targets of the first {len(target)} samples; {WAYS_OUT}")
            break


def num_made_up(out: Any) -> int:
    """Return for how many samples outputs like ``out`` [n, ...] may be made up."""
    num_bytes = sum(leaf.numel() for leaf in _floating(out)) * torch.finfo(torch.float64).bits // 8
    return MOST_BYTES * _length(out) // max(1, num_bytes)


class MeanGuard:
    """Looks now and then, in training, whether the loss of two micro-batches together is the mean of theirs.

    In between it costs a comparison of two numbers. It looks at the 1st, 3rd, 6th, 12th, ... micro-batch and the one
    after it, then at every 64th, each time at the price of the loss of four micro-batches; gradients, which do not
    depend on rare targets alone, are compared at the start. What only rarer targets show, it may never meet; but then
    it has little weight.
    """

    def __init__(self, loss_fn: LossFn, within: Callable[[], AbstractContextManager[Any]], where: str) -> None:
        """Take a loss that keeps nothing; it is called ``within`` a context. ``where`` begins an error."""
        self._loss_fn, self._within, self._where = loss_fn, within, where
        self._count, self._next = 0, 1
        self._first: tuple[Any, Any] | None = None  # a micro-batch that the next one is compared with

    @classmethod
    def of(cls, loss_fn: LossFn, within: Callable[[], AbstractContextManager[Any]], where: str) -> "MeanGuard | None":
        """Return a guard, if what the loss averages over is not known anyway."""
        return None if is_known_mean(loss_fn) else cls(loss_fn, within, where)

    def look(self, out: Any, target: Batch) -> None:
        """Look at a micro-batch, if it is its turn: the model's ``out`` and ``target`` [B, ...], on one device.

        Raises:
            ConfigError: the loss of two micro-batches together is not the mean of theirs.
        """
        self._count += 1
        if self._first is None and self._count < self._next:
            return
        rows = torch.arange(min(len(target), max(2, num_made_up(out))))
        present = _rows(detached(out), rows)
        first, self._first = self._first, (present, _at(target, rows))
        if first is None:  # the next one will be compared with it
            self._next = self._count + min(self._count, LOOK_EVERY)
            return
        self._first = None
        both, targets = put_together((first[0], present)), torch.cat([first[1], _at(target, rows)])
        parts = torch.arange(len(targets)).split([len(first[1]), len(rows)])
        try:
            with torch.enable_grad(), self._within():
                fault = _fault(self._loss_fn, both, targets, parts, loss_terms(self._loss_fn, target), with_grads=False)
        except Exception:  # two micro-batches that the loss does not take, or no memory for them, say nothing about it
            return
        if fault is not None:
            raise ConfigError(f"{self._where}: {fault}, which no sample at the start has shown; {WAYS_OUT}")


def halves(out: Any) -> tuple[Any, Any]:
    """Return the first half of the samples of an output or a target, and the other one."""
    rows = torch.arange(_length(out))
    half = len(rows) // 2
    return _rows(out, rows[:half]), _rows(out, rows[half:])


def put_together(outs: tuple[Any, Any]) -> Any:
    """Return the output of two micro-batches together; of what has no dimension, that of the first."""
    return tree_map(lambda a, b: torch.cat([a, b]) if isinstance(a, Tensor) and a.ndim else a, *outs)


def _fault_in_copy(
    loss_fn: LossFn, out: Any, target: Batch, parts: Sequence[Tensor], terms: LossTerms | None, *, in_double: bool
) -> str | None:
    own = loss_fn
    if isinstance(loss_fn, nn.Module):
        try:
            own = copy.deepcopy(loss_fn).double() if in_double else copy.deepcopy(loss_fn)
        except Exception:  # as of a torch.Generator, or a lock; what the loss holds can raise anything
            own = loss_fn
    if in_double:
        out, target = tree_map(_widened, out), _widened(target)
    with streams_kept(target.device):
        return _fault(own, out, target, parts, terms)


def _fault(
    loss_fn: LossFn,
    out: Any,
    target: Batch,
    parts: Sequence[Tensor],
    terms: LossTerms | None,
    *,
    with_grads: bool = True,
) -> str | None:
    """Return why the loss of a micro-batch does not follow from those of its two ``parts``, rows [n]; None: it does."""
    counts = [float(len(rows)) if terms is None else terms.count(_at(target, rows).cpu()) for rows in parts]
    is_said = own_num_terms(loss_fn) is not None and not getattr(loss_fn, "is_guessed", False)
    if not any(counts) or (is_said and counts == [len(rows) for rows in parts]):
        return None
    asked = [
        _ask(loss_fn, _rows(out, rows), _at(target, rows), with_grads=with_grads) if count else None
        for rows, count in zip(parts, counts, strict=True)
    ]
    whole = _ask(loss_fn, out, target, with_grads=with_grads)
    found = _difference(whole, asked, parts, counts) if math.isfinite(whole.loss) else None
    # One that is random, or counts its calls, cannot be compared.
    if found is None or whole.loss != _ask(loss_fn, out, target, with_grads=False).loss:
        return None
    mean, one = ("the samples", "samples") if terms is None else ("the terms that it counts", "terms")
    losses = [f"{of_part.loss:.6g}" if of_part is not None else "nothing" for of_part in asked]
    return (
        f"the loss is no mean over {mean}: of {counts[0]:g} {one} it is {losses[0]}, of {counts[1]:g} others "
        f"{losses[1]}, and of all of them {found}"
    )


def _difference(
    whole: _Asked, asked: Sequence[_Asked | None], parts: Sequence[Tensor], counts: Sequence[float]
) -> str | None:
    """Return what differs between a loss and the mean of those of its parts, or between their gradients."""
    total = sum(counts)
    shares = [count / total for count in counts]
    values = [share * one.loss for share, one in zip(shares, asked, strict=True) if one is not None]
    expected = sum(values)
    if not math.isfinite(expected):
        return None
    if abs(whole.loss - expected) > whole.tolerance * (abs(whole.loss) + sum(map(abs, values))):
        return f"{whole.loss:.6g} instead of {expected:.6g}"
    order = torch.cat([*parts])
    for place, grad in enumerate(whole.grads):
        if grad is None:
            continue
        of_parts = [
            share * of_part if one is not None and (of_part := one.grads[place]) is not None else None
            for share, one in zip(shares, asked, strict=True)
        ]
        if grad.ndim:
            grad = grad[order.to(grad.device)]
            none = (grad.new_zeros((len(rows), *grad.shape[1:])) for rows in parts)
            mean = torch.cat([zeros if part is None else part for part, zeros in zip(of_parts, none, strict=True)])
        else:
            mean = sum((part for part in of_parts if part is not None), start=torch.zeros_like(grad))
        off, scale = (grad - mean).abs(), max(float(grad.abs().max()), float(mean.abs().max())) if grad.numel() else 0.0
        if not math.isfinite(scale):
            return None
        if scale and float(off.max()) > whole.tolerance * scale:
            worst = int(off.argmax())
            pair = [f"{float(x.flatten()[worst]):.6g}" for x in (grad, mean)]
            return f"{whole.loss:.6g}, but an output gets the gradient {pair[0]} instead of {pair[1]}"
    return None


def _ask(loss_fn: LossFn, out: Any, target: Batch, *, with_grads: bool) -> _Asked:
    """Call a loss on copies, to which it may write, and go backward to the outputs if ``with_grads``."""
    leaves, tree = tree_flatten(out)
    own = [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    wanted = [leaf.requires_grad_() for leaf in own if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    loss = loss_fn(
        tree_unflatten([leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in own], tree), target.clone()
    )
    grads: Sequence[Tensor | None] = [None] * len(wanted)
    if with_grads and wanted and isinstance(loss, Tensor) and loss.requires_grad:
        grads = torch.autograd.grad(loss, wanted, allow_unused=True)
    dtypes = {tensor.dtype for tensor in (loss, *wanted) if isinstance(tensor, Tensor) and tensor.is_floating_point()}
    tolerance = max([LEAST_TOLERANCE, *(math.sqrt(torch.finfo(dtype).eps) for dtype in dtypes)])
    return _Asked(float(loss.detach() if isinstance(loss, Tensor) else loss), [*grads], tolerance)


def _divisions(size: int) -> Iterator[tuple[Tensor, ...]]:
    """Yield divisions of so many samples, in random orders: into halves, quarters and the rest, and so on."""
    generator = torch.Generator().manual_seed(0)  # none of the run's streams
    first = size // 2
    while first > 1:  # not every loss takes a single sample, nor has to
        yield torch.randperm(size, generator=generator).split([first, size - first])
        first //= 2


def _varied(out: Any, target: Batch) -> Any:
    """Return outputs with each sample up to a tenth smaller, and zeros up to a tenth above 0.

    Probabilities stay between 0 and 1, their logarithms below 0.
    """
    generator = torch.Generator(target.device).manual_seed(0)

    def varied(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
            return leaf
        options: Any = {"generator": generator, "dtype": leaf.dtype, "device": leaf.device}
        of_sample = torch.rand((*leaf.shape[:1], *[1] * (leaf.ndim - 1)), **options)
        lifted = torch.where(leaf == 0, 0.1 * torch.rand(leaf.shape, **options), leaf)
        return (1 - 0.1 * of_sample) * lifted

    return tree_map(varied, out)


def _widened(leaf: Any) -> Any:
    return leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


def _rows(out: Any, rows: Tensor) -> Any:
    if isinstance(out, Several):
        return out[rows.to(out.device)]
    return tree_map(lambda leaf: _at(leaf, rows) if isinstance(leaf, Tensor) and leaf.ndim else leaf, out)


def _at(tensor: Any, rows: Tensor) -> Any:
    return tensor[rows.to(tensor.device)]


def _floating(out: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _length(out: Any) -> int:
    if isinstance(out, Several):
        return len(out)
    return next((len(leaf) for leaf in tree_leaves(out) if isinstance(leaf, Tensor) and leaf.ndim), 1)
