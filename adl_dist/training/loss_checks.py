"""What can be wrong with a loss, seen on a few samples before training: no number, broadcasting, a state of its own."""

import warnings
from collections.abc import Sequence
from contextlib import closing
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from adl_dist.errors import ConfigError
from adl_dist.partition.module_state import ModuleState
from adl_dist.schedule import Pipeline
from adl_dist.stage import LossFn, TrainSpec
from adl_dist.stage.loss_check import check_many, num_made_up
from adl_dist.stage.loss_terms import is_known_mean, loss_terms
from adl_dist.stage.traits import LossTraits
from adl_dist.streams import streams_kept
from adl_dist.training.findings import Agreed
from adl_dist.training.input import DeviceLoader

MOST_SAMPLES = 256  # whose targets are looked at


def check_loss(stage: int, loss: Any, got: str) -> None:
    """Raise ConfigError unless ``loss``, returned for what it ``got``, is one number as a tensor."""
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


def called_again(pipeline: Pipeline) -> tuple[str, str] | None:
    """Return why the loss is called more than once for a micro-batch, and what to do about it; None: it is not."""
    method, group = pipeline.method, pipeline.micro_batches_per_update
    if any(method.recomputes(place, group, pipeline.delays[-1]) for place in range(group)):
        return "replays its forward, which calls the loss once more", "choose a method that replays nothing"
    if method.spec.local_losses and pipeline.num_stages > 1:
        return "has a local loss on each stage, and they would share it", "use partition.num_stages=1"
    return None


def check_called_once(pipeline: Pipeline, traits: LossTraits) -> None:
    """Refuse a loss that keeps something of its own where the method calls it more than once for a micro-batch.

    Raises:
        ConfigError: the forward is replayed, or each stage has a local loss.
    """
    if not traits.moves or (again := called_again(pipeline)) is None:
        return
    why, way_out = again
    shown, method = ", ".join(traits.moves[:3]), pipeline.method.name
    raise ConfigError(
        f"the loss keeps something of its own, which changes with each call ({shown}), but method={method} {why}; "
        f"let the loss depend on nothing but output and target, or {way_out}"
    )


def check_first_targets(spec: TrainSpec, feed: DeviceLoader, sizes: Sequence[int], agreed: Agreed) -> None:
    """Check a loss of the user's own on the first targets of the training data, where M > 1.

    ``sizes`` are those of the micro-batches of the first epoch, from which ``feed`` loads as many as are needed.

    Raises:
        ConfigError: it is no mean over samples, or over what it counts.
        DataError: a sample that cannot be loaded.
    """
    if agreed.output is None or is_known_mean(spec.loss_fn) or agreed.traits[0].loss.moves:
        return
    most = min(MOST_SAMPLES, num_made_up(agreed.output))
    starts = accumulate(sizes, initial=0)
    some = [min(size, most - start) for start, size in zip(starts, sizes, strict=False) if start < most]
    with closing(feed.batches(0, some)) as batches:
        target = torch.cat([target for _, target in batches])
    state = ModuleState.of(functions={"loss_fn": spec.loss_fn})
    try:
        target = target.to(next(leaf.device for leaf in tree_leaves(agreed.output) if isinstance(leaf, Tensor)))
        check_many(spec.loss_fn, agreed.output, target, loss_terms(spec.loss_fn, target))
    finally:
        state.restore()


def _numbers_like(tensor: Tensor) -> Tensor:
    """Return different numbers between 0 and 1 in the shape of ``tensor``."""
    numbers = torch.linspace(0.1, 0.7, tensor.numel(), dtype=torch.float64) ** 2
    return numbers.view(tensor.shape).to(tensor.device, tensor.dtype)
