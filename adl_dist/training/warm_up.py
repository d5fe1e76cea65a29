"""A warm-up before training: kernels and compilation by discarded updates.

Over NCCL a receive that was posted ahead is a kernel that waits for its peer. Loading a new kernel may wait for all
work of the GPU, so each process would wait for the other (CUDA's programming guide, "lazy loading", potential hazards).
Also, K stages that compile in their first micro-batch would do so one after the other.
"""

import logging
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from adl_dist import engine
from adl_dist.batch import Tensors, tensors_of
from adl_dist.engine import StageContext
from adl_dist.errors import ConfigError, in_one_line
from adl_dist.schedule import StageWork, evaluation_work, training_work
from adl_dist.schedule.actions import Op, what_of
from adl_dist.schedule.run_plan import Segment
from adl_dist.stage import Stage, TrainSpec
from adl_dist.stage.calls import is_part
from adl_dist.stage.loss import LossTerms
from adl_dist.streams import streams_kept
from adl_dist.training.edges import specs_of_norm, specs_of_tied
from adl_dist.training.trial.samples import Samples
from adl_dist.transport.coding import Coder
from adl_dist.transport.spec import Specs

logger = logging.getLogger("adl_dist")

NUM_UPDATES = 3  # with all versions alive: the first makes the optimizer's state, the third has stale gradients
HOOKS = "_backward_hooks", "_post_accumulate_grad_hooks"  # registries of a parameter
NUM_TARGETS = 8  # that a process has under way at once


def needs_warm_up(spec: TrainSpec, device: torch.device) -> bool:
    """Return whether a first micro-batch would load or compile kernels."""
    return device.type == "cuda" or spec.precision.compile


def check_without_warm_up(backend: str) -> None:
    """Refuse changing lengths over NCCL, for which there is no warm-up.

    Raises:
        ConfigError: If ``backend``, of the edges, is NCCL, and kernels are not loaded at the start.
    """
    if backend == "nccl" and (found := os.environ.get("CUDA_MODULE_LOADING", "unset")) != "EAGER":
        raise ConfigError(
            "lengths change from one micro-batch to another, so kernels would be loaded while messages of NCCL are "
            "awaited, and ranks could wait for each other for ever: set CUDA_MODULE_LOADING=EAGER in the environment "
            f"of all ranks (it is {found}), or pad all samples to one length"
        )


@dataclass
class WarmUp:
    """Discarded updates of one process, on stages made only for the warm-up.

    Attributes:
        spec: the specification of the training.
        device: the device of the stages.
        acts: by stage, the specs of arriving tensors, for the stages here and the next ones.
        samples: the inputs of the first stage and the targets of the last one.
        terms: the counter of the loss's terms, if it counts them.
        num_loaded: inputs that are loaded at the same time; 0 if none are loaded here.
        with_updates: whether to train until all versions of the weights have been used.
    """

    spec: TrainSpec
    device: torch.device
    acts: Mapping[int, Specs]
    samples: Samples
    terms: LossTerms | None
    num_loaded: int
    with_updates: bool

    def run(self, stages: Mapping[int, Stage]) -> None:
        """Train and evaluate ``stages`` on zeros.

        The stages change. A failure is only logged, because the first real micro-batch would show it.
        """
        self.samples = self.samples.to(self.device, channels_last=bool(self.spec.precision.channels_last))
        largest = max(self.samples.sizes[0], default=0)
        for k, stage in stages.items():
            works = [self._training(k, size, full=size == largest) for size in self.samples.sizes[0]]
            for number, work in enumerate([*works, *(self._evaluation(k, size) for size in self.samples.sizes[1])]):
                try:
                    self._carry_out(stage, work, training=number < len(works))
                except torch.OutOfMemoryError:
                    raise
                except Exception as error:  # the user's code, on values that are not the user's data
                    logger.info("stage %d: no warm-up with %d samples: %s", k, work.sizes[0], in_one_line(error))
        if self.device.type == "cuda":
            if largest:
                self._code(largest)
                self._pin(largest)
            torch.cuda.synchronize(self.device)

    def _training(self, k: int, size: int, *, full: bool) -> StageWork:
        """Return work for one micro-batch, or for all weight versions if ``full``."""
        pipeline = self.spec.pipeline
        M = pipeline.micro_batches_per_update
        num_micro_batches = M * (pipeline.updates_to_fill + NUM_UPDATES) if full and self.with_updates else 1
        segment = Segment(
            epoch=pipeline.method.flush_epochs,
            first_update=0,
            num_samples=size * num_micro_batches,
            micro_batch_size=size,
            accumulation_steps=M,
        )
        return training_work(pipeline, segment, stages=[k])[k]

    def _evaluation(self, k: int, size: int) -> StageWork:
        segment = Segment.without_groups(size, size)
        return evaluation_work(segment, num_stages=self.spec.pipeline.num_stages, stages=[k])[k]

    def _carry_out(self, stage: Stage, work: StageWork, *, training: bool) -> None:
        k, size, zeros = stage.index, work.sizes[0], partial(zeros_of, device=self.device, training=training)
        batch = self.samples.repeated(size)
        inputs, targets = tensors_of(batch.input_), tensors_of(batch.target)
        if self.terms is not None:
            counts = torch.tensor([1.0, self.terms.count(batch.target)], dtype=torch.float64)
            targets = (*targets, counts.repeat(size, 1))
        arriving: dict[str, Tensors] = {"target": targets, "label": targets, "go": ()}
        if k in self.acts:
            arriving["act"] = zeros(self.acts[k], size)
        if training and k + 1 in self.acts:
            arriving["grad"] = zeros(self.acts[k + 1].of_gradients(), size)
        for action in work.actions:
            if action.tie is not None:
                arriving[what_of(action)] = zeros(specs_of_tied(stage.ties[action.tie.number]), 1)
            elif action.op in (Op.RECV_NORM, Op.RECV_TOTAL):
                arriving[what_of(action)] = zeros(specs_of_norm(what_of(action), stage), 1)
        nowhere: Any = SimpleNamespace(open=_do_nothing, send=_do_nothing, drain=_do_nothing)
        context = StageContext(
            stage,
            receivers={kind: _giving(tensors) for kind, tensors in arriving.items()},
            senders=defaultdict(lambda: nowhere),
            batches=iter([(*inputs, *targets)] * len(work.sizes)),
            num_inputs=len(inputs),
            loss_grads=[torch.ones((), dtype=self.spec.precision.dtype, device=self.device)] * len(work.sizes),
        )
        stage.begin(self.spec.pipeline.method.flush_epochs, training=training)
        context.open(work, training=training)
        engine.run(((k, action) for action in work.actions), {k: context})

    def _code(self, size: int) -> None:
        """Encode and decode the messages of each cut that are coded."""
        codecs = self.spec.precision.codecs
        for specs in self.acts.values():
            for crossing, codec in ((specs, codecs.activations), (specs.of_gradients(), codecs.gradients)):
                if codec != "none":
                    coder = Coder(codec, lambda micro_batch: 0)
                    tensors = zeros_of(crossing, size, self.device, training=True)
                    coder.decode(crossing.training, size, coder.encode(crossing.training, tensors, 0))

    def _pin(self, size: int) -> None:
        """Allocate and free pinned memory, which torch keeps for the run."""
        batch = self.samples.repeated(size)
        needed = [(tensor, self.num_loaded) for tensor in tensors_of(batch.input_)]
        needed += [(tensor, max(self.num_loaded, NUM_TARGETS)) for tensor in tensors_of(batch.target)]
        held = [
            torch.empty(like.shape, dtype=like.dtype, pin_memory=True) for like, number in needed for _ in range(number)
        ]
        del held  # at the same time


@contextmanager
def unchanged(modules: Sequence[nn.Module], device: torch.device) -> Iterator[None]:
    """Restore tensors, gradients, parameter hooks and random streams on exit."""
    parts = [*modules, *(vars(module)["model"] for module in modules if is_part(module))]
    owners = [owner for part in parts for owner in part.modules()]
    held = [(tensors, dict(tensors)) for owner in owners for tensors in (owner._parameters, owner._buffers)]
    found = (tensor for _, before in held for tensor in before.values() if tensor is not None and not tensor.is_meta)
    unique = {id(tensor): tensor for tensor in found}
    hooks = [(tensor, name, {*(getattr(tensor, name) or ())}) for tensor in unique.values() for name in HOOKS]
    kept = [(tensor, tensor.detach().to("cpu", copy=True), tensor.grad) for tensor in unique.values()]
    for tensor in unique.values():
        tensor.grad = None
    try:
        with streams_kept(device):
            yield
    finally:
        for tensors, before in held:
            tensors.update(before)
        for tensor, values, grad in kept:
            tensor.data.copy_(values)
            tensor.grad = grad
        for tensor, name, known in hooks:
            registered = getattr(tensor, name) or {}
            for key in registered.keys() - known:
                del registered[key]


def zeros_of(specs: Specs, size: int, device: torch.device, *, training: bool) -> Tensors:
    """Return zeros in the place of the tensors that cross a cut."""
    return tuple(spec.empty(size, device).zero_() for spec in specs.for_segment(training=training))


def _do_nothing(*_: object, **__: object) -> None:
    """Do nothing, in place of an operation with a peer."""


def _giving(tensors: Tensors) -> Any:
    """Return a receiver that gives copies of one message, ``tensors``."""
    return SimpleNamespace(open=_do_nothing, shorten=_do_nothing, recv=lambda b: tuple(t.clone() for t in tensors))
