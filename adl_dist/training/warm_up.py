"""What a device does for the first time is done before training: kernels are loaded and chosen, stages compiled.

Over NCCL a receive that was posted ahead is a kernel that waits for its peer. To load another kernel for the first
time may wait for all that the GPU does, so each process would wait for the other (CUDA's programming guide, "lazy
loading", potential hazards). And K stages that compile in their first micro-batch would do so one after the other.
"""

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import nn

from adl_dist import engine
from adl_dist.batch import Tensors, tensors_of
from adl_dist.engine import StageContext
from adl_dist.errors import ConfigError, in_one_line
from adl_dist.schedule import Op, Segment, StageWork, evaluation_work, training_work
from adl_dist.schedule.actions import TiedAction
from adl_dist.stage import TrainSpec
from adl_dist.stage.calls import is_part
from adl_dist.stage.loss import LossTerms
from adl_dist.streams import streams_kept
from adl_dist.training.trial.samples import MicroBatch, Samples
from adl_dist.transport.spec import Specs

logger = logging.getLogger("adl_dist")

STEPS = Op.UPDATE, Op.UPDATE_HEAD  # left out: what they change could not be put back; see warm_updates.py


def needs_warm_up(spec: TrainSpec, device: torch.device) -> bool:
    """Whether the first micro-batch would do more than those after it."""
    return device.type == "cuda" or spec.precision.compile


def check_without_warm_up(backend: str) -> None:
    """Refuse lengths that change, for which there is no warm-up, where receives posted ahead wait on the GPU.

    Raises:
        ConfigError: ``backend``, of the edges, is NCCL, and kernels are not loaded at the start.
    """
    if backend == "nccl" and (found := os.environ.get("CUDA_MODULE_LOADING", "unset")) != "EAGER":
        raise ConfigError(
            "lengths change from one micro-batch to another, so kernels would be loaded while messages of NCCL are "
            "awaited, and ranks could wait for each other for ever: set CUDA_MODULE_LOADING=EAGER in the environment "
            f"of all ranks (it is {found}), or pad all samples to one length"
        )


def warm_up(
    contexts: Mapping[int, StageContext],
    spec: TrainSpec,
    device: torch.device,
    acts: Mapping[int, Specs],
    samples: Samples,
    terms: LossTerms | None,
) -> None:
    """Have each stage carry out the actions of one micro-batch of each size, without updates, and forget it.

    Everything that can be seen of a stage, and the random streams, are as before. What comes from other stages are
    zeros, so a stage that fails is left to its first real micro-batch.

    Args:
        contexts: the stages of this process.
        spec: how they are trained.
        device: where they are.
        acts: what arrives at each of them and at the next one.
        samples: what the first stage gets, and the last one's targets.
        terms: what the loss counts, if it does.
    """
    samples = samples.to(device, channels_last=bool(spec.precision.channels_last))
    modes = zip((True, False), samples.sizes, strict=True)
    for training, size in [(training, size) for training, sizes in modes for size in sizes]:
        batch = samples.repeated(size)
        targets = _targets_of(batch, terms, size)
        for k, context in contexts.items():
            try:
                _carry_out(k, context, spec, device, acts, tensors_of(batch.input_), targets, training=training)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # the user's code, on values that are not the user's data
                logger.info("stage %d: no warm-up with %d samples: %s", k, size, in_one_line(error))
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _carry_out(  # 8: a stage, what is known of it, and what it is given
    k: int,
    context: StageContext,
    spec: TrainSpec,
    device: torch.device,
    acts: Mapping[int, Specs],
    inputs: Tensors,
    targets: Tensors,
    *,
    training: bool,
) -> None:
    stage, size = context.stage, len(targets[0])
    segment = Segment.without_groups(size, size)
    if training:
        work = training_work(spec.pipeline, segment, stages=[k])[k]
    else:
        work = evaluation_work(segment, num_stages=spec.pipeline.num_stages, stages=[k])[k]

    arriving: dict[str, Tensors] = {"target": targets, "label": targets, "go": ()}
    if k in acts:
        arriving["act"] = zeros_of(acts[k], size, device, training=training)
    if training and k + 1 in acts:
        arriving["grad"] = zeros_of(acts[k + 1].of_gradients(), size, device, training=training)
    rehearsed = replace(
        context,
        receivers={kind: _Given(tensors) for kind, tensors in arriving.items()},
        senders={kind: _Nowhere() for kind in context.senders},
        batches=iter([(*inputs, *targets)]),
        loss_grads=[torch.ones((), dtype=spec.precision.dtype, device=device)],
    )
    modules = [stage.module] if stage.head is None else [stage.module, stage.head]
    with _restored([*modules, *([spec.loss_fn] if isinstance(spec.loss_fn, nn.Module) else [])], device):
        stage.begin(0, training=training)
        try:
            rehearsed.open(_without_steps(work), training=training)
            engine.run(((k, action) for action in rehearsed.work.actions), {k: rehearsed})
        finally:
            stage.begin(0, training=training)  # forgets it


@contextmanager
def _restored(modules: Sequence[nn.Module], device: torch.device) -> Iterator[None]:
    """Leave buffers, gradients and the random streams as they were found."""
    parts = [*modules, *(vars(module)["model"] for module in modules if is_part(module))]
    owners = [owner for part in parts for owner in part.modules()]
    kept = [(o, key, b, b.clone()) for o in owners for key, b in o._buffers.items() if b is not None and not b.is_meta]
    grads = [(p, p.grad) for module in modules for p in module.parameters()]
    for parameter, _ in grads:
        parameter.grad = None
    try:
        with streams_kept(device):
            yield
    finally:
        for owner, key, buffer, values in kept:
            owner._buffers[key] = buffer
            buffer.data.copy_(values)
        for parameter, grad in grads:
            parameter.grad = grad


def zeros_of(specs: Specs, size: int, device: torch.device, *, training: bool) -> Tensors:
    """Return zeros in the place of what crosses a cut for a micro-batch of ``size`` samples."""
    return tuple(spec.empty(size, device).zero_() for spec in specs.for_segment(training=training))


def _targets_of(batch: MicroBatch, terms: LossTerms | None, size: int) -> Tensors:
    """Return what the last stage gets besides activations: targets, and their counts if the loss counts its terms."""
    targets = tensors_of(batch.target)
    if terms is None:
        return targets
    return (*targets, torch.tensor([1.0, terms.count(batch.target)], dtype=torch.float64).repeat(size, 1))


def _without_steps(work: StageWork) -> StageWork:
    actions = [a for a in work.actions if a.op not in STEPS and not isinstance(a, TiedAction)]
    return replace(work, actions=actions)


class _Given:
    """A receiver that has one message."""

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors

    def open(self, sizes: Sequence[int], order: Sequence[int], *, training: bool) -> None:
        """Nothing is to come."""

    def shorten(self, num_micro_batches: int) -> None:
        """Nothing is to come."""

    def recv(self, micro_batch: int) -> Tensors:
        """Return it."""
        return self._tensors


class _Nowhere:
    """A sender without a peer."""

    def open(self, sizes: Sequence[int], *, training: bool) -> None:
        """Nothing is to leave."""

    def send(self, micro_batch: int, tensors: Tensors) -> None:
        """Drop it."""

    def drain(self) -> None:
        """Nothing is under way."""
