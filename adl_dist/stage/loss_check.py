"""Whether a loss is a mean at all: that of two micro-batches together follows from those of each."""

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from adl_dist.errors import ConfigError
from adl_dist.stage.loss_terms import LossTerms, own_num_terms
from adl_dist.stage.spec import LossFn
from adl_dist.streams import streams_kept

LEAST_TOLERANCE = 1e-6  # of a loss in float64, which may compute a part of itself in float32


def check_is_mean(
    loss_fn: LossFn, outs: tuple[Any, Any], targets: tuple[Tensor, Tensor], terms: LossTerms | None
) -> None:
    """Check that the gradient of a group of micro-batches is that of all its samples at once.

    It is if n_A L(A) + n_B L(B) = (n_A + n_B) L(A and B), where n counts ``terms``, or the samples. ``loss_fn`` is
    copied, so that nothing that it holds moves, and the global random streams stay where they are. A loss that is not
    finite, not the same when it is asked twice, or that cannot be copied, cannot be compared, and passes; so does one
    whose own ``num_terms`` says that it is a mean over samples.

    Args:
        loss_fn: (output, target) to a scalar.
        outs: the model's output for each of two micro-batches of different sizes: [B, ...], or containers of such.
        targets: their targets, [B, ...], on the same device.
        terms: what :func:`~adl_dist.stage.loss_terms.loss_terms` returns for these.

    Raises:
        ConfigError: the loss is no such mean, or fails on the samples.
    """
    sizes = [len(target) for target in targets]
    counts = [float(len(t)) if terms is None else terms.count(t.cpu()) for t in targets]
    if not any(counts) or (own_num_terms(loss_fn) is not None and counts == sizes):
        return
    try:
        copy.deepcopy(loss_fn)
    except Exception:  # as of a torch.Generator; what the loss holds can raise anything
        return
    with streams_kept(targets[0].device):
        *losses, again, tolerance = _losses(loss_fn, outs, targets)
    parts = [n * loss if n else 0.0 for n, loss in zip(counts, losses[:2], strict=True)]
    found, expected = losses[2], sum(parts) / sum(counts)
    if found != again or not math.isfinite(found) or not math.isfinite(expected):
        return
    if abs(found - expected) <= tolerance * (abs(found) + sum(map(abs, parts)) / sum(counts)):
        return
    mean, one = ("the samples", "samples") if terms is None else ("the terms that it counts", "terms")
    raise ConfigError(
        f"the loss is no mean over {mean}: of {counts[0]:g} {one} it is {losses[0]:.6g}, of {counts[1]:g} others "
        f"{losses[1]:.6g}, and of all of them {found:.6g} instead of {expected:.6g}; so a group of several "
        "micro-batches would not give the gradient of its samples: give the loss num_terms(target), the number of "
        "terms that it averages over (docs/own.md), or use method.accumulation_steps=1"
    )


def _losses(loss_fn: LossFn, outs: tuple[Any, Any], targets: tuple[Tensor, Tensor]) -> tuple[float, ...]:
    """Return the loss of the first, of the second, of both together, of these again, and how far they may differ."""
    # First in float64, where little is rounded; not each loss takes that. And with outputs that differ: those of a
    # model that has not learnt may all be alike, and each mean of them is the same. Not each loss takes these, either.
    failure: Exception | None = None
    for in_double, varied in ((True, True), (False, True), (False, False)):
        try:
            return _tried(loss_fn, outs, targets, in_double=in_double, varied=varied)
        except Exception as error:  # the user's own loss can raise anything
            failure = error
    raise ConfigError(
        f"the loss fails on {len(targets[0])}, {len(targets[1])} or all of these samples: {type(failure).__name__}: "
        f"{failure}; if it is none of single samples, give it num_terms(target) (docs/own.md; len, if a mean over the "
        "micro-batches is what is wanted), or use method.accumulation_steps=1"
    ) from failure


def _tried(
    loss_fn: LossFn, outs: tuple[Any, Any], targets: tuple[Tensor, Tensor], *, in_double: bool, varied: bool
) -> tuple[float, ...]:
    own, generator = copy.deepcopy(loss_fn), torch.Generator(targets[0].device).manual_seed(0)
    if in_double and isinstance(own, nn.Module):
        own.double()

    def prepared(tensor: Any) -> Any:
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            return tensor
        return tensor.detach().double() if in_double else tensor.detach()

    def leaf(out: Any) -> Any:
        out = prepared(out)
        if not isinstance(out, Tensor) or not out.is_floating_point():
            return out
        return (_varied(out, generator) if varied else out.clone()).requires_grad_()

    def both(first: Any, second: Any) -> Any:
        return torch.cat([first, second]) if isinstance(first, Tensor) and first.ndim else first

    a, b = (tree_map(leaf, out) for out in outs)
    t, u = map(prepared, targets)
    together = tree_map(both, a, b), both(t, u)
    losses = [own(*pair) for pair in ((a, t), (b, u), together, together)]
    dtypes = {loss.dtype for loss in losses if isinstance(loss, Tensor) and loss.is_floating_point()}
    tolerance = max([LEAST_TOLERANCE, *(math.sqrt(torch.finfo(dtype).eps) for dtype in dtypes)])
    return (*(float(loss.detach() if isinstance(loss, Tensor) else loss) for loss in losses), tolerance)


def _varied(out: Tensor, generator: torch.Generator) -> Tensor:
    """Return ``out`` [B, ...] with each sample up to a tenth smaller, and zeros up to a tenth above 0.

    Probabilities stay between 0 and 1, their logarithms below 0.
    """
    options: Any = {"generator": generator, "dtype": out.dtype, "device": out.device}
    of_sample = torch.rand((len(out), *[1] * (out.ndim - 1)), **options)
    lifted = torch.where(out == 0, 0.1 * torch.rand(out.shape, **options), out)
    return (1 - 0.1 * of_sample) * lifted
