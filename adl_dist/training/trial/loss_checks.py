"""What can be wrong with a loss, seen on a few samples before training: no number, broadcasting, a state of its own."""

import warnings
from collections.abc import Sequence
from contextlib import closing
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from adl_dist.batch import Batch, Layout
from adl_dist.errors import ConfigError
from adl_dist.schedule import Pipeline
from adl_dist.stage import LossFn, TrainSpec
from adl_dist.stage.loss_check import check_many, num_made_up
from adl_dist.stage.loss_terms import class_loss, is_known_mean, is_sum, loss_terms
from adl_dist.stage.traits import LossTraits
from adl_dist.streams import streams_kept
from adl_dist.training.input import DeviceLoader
from adl_dist.training.trial.findings import Agreed

MOST_SAMPLES = 256  # whose targets are looked at


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, Tensor) and value.ndim == 0)


class ReturnsSumError(ConfigError):
    """The loss returns a sum and the number of its terms.

    Attributes:
        count: that number.
        target: of the samples it was called with, on the CPU.
    """

    def __init__(self, count: float, target: Any = None) -> None:
        super().__init__("the loss returns a pair; expected a tensor of one number, the mean over the samples")
        self.count, self.target = count, target


def check_loss(stage: int, loss: Any, got: str) -> None:
    """Raise ConfigError unless ``loss``, returned for what it ``got``, is one number as a tensor."""
    if isinstance(loss, tuple | list) and len(loss) == 2:
        for name, value in zip(("first", "second"), loss, strict=True):
            if not _is_number(value):
                raise ConfigError(
                    f"stage {stage}: the loss returned a pair for {got} whose {name} value, a {type(value).__name__}, "
                    "is no number; expected (sum, count), or a tensor of one number, the mean over the samples"
                )
        raise ReturnsSumError(float(loss[1]))
    if not isinstance(loss, Tensor):
        found = "None" if loss is None else f"a {type(loss).__name__}"
        raise ConfigError(
            f"stage {stage}: the loss returned {found} for {got}; expected a tensor of one number, the mean over the "
            "samples: let loss_fn return it, not .item() of it, and nothing with it"
        )
    if loss.ndim > 0:
        raise ConfigError(
            f"stage {stage}: the loss has shape {list(loss.shape)} for {got}; expected one number, the mean over "
            "the samples"
        )


def check_broadcast(stage: int, loss_fn: LossFn, out: Any, target: Tensor) -> None:
    """Refuse a loss that pairs every output with every target, as torch does with shapes [B, 1] and [B].

    ``out`` [B, ...] is the model's output, ``target`` [B, ...] targets for it, with B >= 2; only shapes, dtypes and
    devices matter, the check takes numbers of its own.

    Raises:
        ConfigError: the loss is another one if both have the same shape.
    """
    if not isinstance(out, Tensor) or out.shape == target.shape:
        return
    if not (out.is_floating_point() and target.is_floating_point()) or not out.numel():
        return
    outputs, targets = _numbers_like(out), 1 - _numbers_like(target)

    def loss_of(given: Tensor) -> Tensor:
        torch.default_generator.manual_seed(0)  # a loss may draw
        return loss_fn(given.clone(), targets.clone())  # it may write to both

    with torch.no_grad(), streams_kept(), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            loss = loss_of(outputs)
            # A loss that brings both to one shape by itself does not care which it gets.
            is_same = out.numel() != target.numel() or torch.allclose(loss, loss_of(outputs.view_as(targets)))
        except Exception:  # the user's loss may take these shapes only, or other numbers
            is_same = True
    if is_same and not any("Using a target size" in str(each.message) for each in told):
        return
    shapes = [str(["B", *tensor.shape[1:]]).replace("'", "") for tensor in (out, target)]
    raise ConfigError(
        f"stage {stage}: the model returns {shapes[0]}, but the targets are {shapes[1]}, and the loss pairs every "
        "output with every target (broadcasting); give both one shape: let the model return output.squeeze(1), or the "
        "dataset targets of the model's shape"
    )


def is_called_again(pipeline: Pipeline) -> bool:
    """Return whether a loss is called more than once for a micro-batch: by a replay, or by local losses."""
    method, group = pipeline.method, pipeline.micro_batches_per_update
    replays = any(method.recomputes(place, group, pipeline.delays[-1]) for place in range(group))
    return replays or (method.spec.local_losses and pipeline.num_stages > 1)


def check_not_shared(pipeline: Pipeline, traits: LossTraits) -> None:
    """Refuse a loss that keeps something of its own where each stage has a local loss.

    Raises:
        ConfigError: K processes would each keep their own.
    """
    if traits.moves and pipeline.method.spec.local_losses and pipeline.num_stages > 1:
        raise ConfigError(
            f"the loss keeps something of its own, which changes with each call ({', '.join(traits.moves[:3])}), but "
            f"method={pipeline.method.name} has a local loss on each stage, and they would share it; let the loss "
            "depend on nothing but output and target, or use partition.num_stages=1"
        )


def check_first_targets(spec: TrainSpec, feed: DeviceLoader, sizes: Sequence[int], agreed: Agreed) -> None:
    """Check a loss of the user's own on the first targets of the training data, where M > 1.

    ``sizes`` are those of the micro-batches of the first epoch, from which ``feed`` loads as many as are needed.

    Raises:
        ConfigError: it is no mean over samples, or over what it counts.
        DataError: a sample that cannot be loaded.
    """
    if feed.varies or isinstance(agreed.traits[0].loss.target, Layout):
        return  # its targets are of several lengths or parts: no outputs can be made up for them
    if agreed.output is None or is_known_mean(spec.loss_fn) or agreed.traits[0].loss.moves:
        return
    most = min(MOST_SAMPLES, num_made_up(agreed.output))
    starts = accumulate(sizes, initial=0)
    some = [min(size, most - start) for start, size in zip(starts, sizes, strict=False) if start < most]
    with closing(feed.batches(0, some)) as batches:
        target = torch.cat([target for _, target in batches if isinstance(target, Tensor)])
    target = target.to(next(leaf.device for leaf in tree_leaves(agreed.output) if isinstance(leaf, Tensor)))
    check_many(spec.loss_fn, agreed.output, target, loss_terms(spec.loss_fn, target))


def _numbers_like(tensor: Tensor) -> Tensor:
    """Return different numbers between 0 and 1 in the shape of ``tensor``."""
    numbers = torch.linspace(0.1, 0.7, tensor.numel(), dtype=torch.float64) ** 2
    return numbers.view(tensor.shape).to(tensor.device, tensor.dtype)


def try_loss(stage: int, got: str, out: Any, target: Batch, loss_fn: LossFn) -> Tensor:
    """Return the loss of a micro-batch; ``got`` says what it is given.

    Raises:
        ConfigError: it fails, or is not one mean.
    """
    if is_sum(loss_fn):
        raise ConfigError(f"stage {stage}: the loss is a sum; expected the mean over the samples: reduction='mean'")
    try:
        with warnings.catch_warnings(action="ignore"):  # it may warn of what it then raises
            loss = loss_fn(out, target)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # the user's own loss can raise anything
        way_out = "choose another loss._target_ (loss_fn), or correct the model's output or the targets"
        shapes = [one.shape for one in (out, target) if isinstance(one, Tensor)]
        if class_loss(loss_fn) is not None and len(shapes) == 2 and len(shapes[1]) > 1 and shapes[0][:-1] == shapes[1]:
            way_out = "for outputs with the classes last, use loss=tokens (adl_dist.losses.TokenCrossEntropy)"
        raise ConfigError(
            f"stage {stage}: the loss gets {got} and fails on it: {type(error).__name__}: {error}; {way_out}"
        ) from error
    try:
        check_loss(stage, loss, got)
    except ReturnsSumError as found:
        raise ReturnsSumError(found.count, target.cpu()) from None
    return loss
