"""What updates and messages do for the first time is done before training, on copies that are thrown away.

The actions of :mod:`adl_dist.training.warm_up` leave this out: an update cannot be put back for any optimizer. Over
NCCL it counts, because an update comes when receives are posted and wait on the GPU, as do coded messages and the
first inputs in pinned memory.
"""

import logging
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_

from adl_dist.batch import tensors_of
from adl_dist.engine import StageContext
from adl_dist.errors import in_one_line
from adl_dist.optimizers import take_role
from adl_dist.stage import TrainSpec
from adl_dist.stage.average import WeightAverage
from adl_dist.stage.mitigation import mitigation_of
from adl_dist.stage.optimizer import stage_optimizer
from adl_dist.stage.stage import Learner
from adl_dist.stage.stats import norm_of
from adl_dist.stage.weights import weight_policy
from adl_dist.streams import streams_kept
from adl_dist.training.trial.samples import Samples
from adl_dist.training.warm_up import zeros_of
from adl_dist.transport.coding import Coder
from adl_dist.transport.spec import Specs

logger = logging.getLogger("adl_dist")

NUM_UPDATES = 3  # the first makes what an optimizer remembers, and only the third has all that stale gradients need
NUM_TARGETS = 8  # that a process has under way at once


def warm_up_updates(
    contexts: Mapping[int, StageContext],
    spec: TrainSpec,
    device: torch.device,
    acts: Mapping[int, Specs],
    samples: Samples,
    *,
    num_loaded: int,
) -> None:
    """Have copies of all that is trained updated, code messages of zeros, and allocate pinned memory once.

    Nothing that can be seen of a stage changes, nor do the random streams. ``acts`` are what arrives at each stage and
    at the next one, ``samples`` what the first stage gets and the last one's targets, ``num_loaded`` the inputs that
    are loaded at the same time; 0: none is here.
    """
    size = max(samples.sizes[0], default=0)
    for k, context in contexts.items():
        for learner in (one for one in context.stage.learners if one.optimizer is not None):
            try:
                with streams_kept(device):
                    _update_copies(learner, k, spec)
            except Exception as error:  # the user's code, in one call more than was asked for; or no memory for copies
                logger.info("%s: no warm-up of its updates: %s", learner.where, in_one_line(error))
        if size:
            _code(k, spec, device, acts, size)
    if device.type == "cuda":
        if size:
            _pin(samples, size, num_loaded)
        torch.cuda.synchronize(device)


def _update_copies(learner: Learner, stage: int, spec: TrainSpec) -> None:
    """Update copies of what ``learner`` trains a few times, with gradients of 0, as its stage would."""
    pipeline, method = spec.pipeline, spec.pipeline.method
    assert method.weights is not None
    copies = {name: _copy_of(parameter) for name, parameter in learner.named_parameters()}
    optimizer = stage_optimizer(spec.optimizer, copies, where=learner.where)
    assert optimizer is not None, "the stage has one"
    trained = [copy for copy in copies.values() if copy.requires_grad]
    mitigation = mitigation_of(pipeline, stage, optimizer, pipeline.lr_factor(stage))
    policy = weight_policy(method.weights, nn.ParameterList(trained), optimizer, mitigation)
    average = None if spec.ema is None else WeightAverage(copies.items(), spec.ema)
    is_stale = pipeline.delays[stage] > 0 and not method.spec.flush
    for update in range(NUM_UPDATES):
        for version in range(max(0, update - is_stale), update + 1):
            with policy.weights_of(version) if version < update else policy.forward_weights(version):
                for copy in trained:
                    copy.grad = torch.zeros_like(copy)
        norm = norm_of([copy.grad for copy in policy.gather() if copy.grad is not None])
        if spec.gradients.clip_norm is not None:
            clip_grads_with_norm_(trained, spec.gradients.clip_norm, norm)
        policy.step(update, in_flight=[update] if is_stale else [])
        if average is not None:
            average.update()


def _copy_of(parameter: nn.Parameter) -> nn.Parameter:
    """Return a copy, with the attributes that a user has put on it, and its role."""
    copy = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
    vars(copy).update(vars(parameter))
    take_role(copy, parameter)
    return copy


def _code(stage: int, spec: TrainSpec, device: torch.device, acts: Mapping[int, Specs], size: int) -> None:
    """Code and restore what ``stage`` sends and gets, where that is coded."""
    codecs = spec.precision.codecs
    for specs in (acts[k] for k in (stage, stage + 1) if k in acts):
        for crossing, codec in ((specs, codecs.activations), (specs.of_gradients(), codecs.gradients)):
            if codec == "none":
                continue
            coder, tensors = Coder(codec, lambda micro_batch: 0), zeros_of(crossing, size, device, training=True)
            coder.decode(crossing.training, size, coder.encode(crossing.training, tensors, 0))


def _pin(samples: Samples, size: int, num_loaded: int) -> None:
    """Allocate pinned memory for inputs and targets of ``size`` samples, which torch keeps when they are freed."""
    batch = samples.repeated(size)
    inputs, targets = tensors_of(batch.input_), tensors_of(batch.target)
    needed = [(tensor, num_loaded) for tensor in inputs]
    needed += [(tensor, max(num_loaded, NUM_TARGETS)) for tensor in targets]
    held = [_pinned(tensor) for tensor, number in needed for _ in range(number)]  # at the same time
    del held


def _pinned(like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)
