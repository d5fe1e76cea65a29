"""One stage's part of the model run once on zeros: what it sends on, and whether it can be run at all."""

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from adl_dist.errors import ConfigError
from adl_dist.stage import packed, takes_gradient, unpacked
from adl_dist.transport import Specs, TensorSpec

NUM_SAMPLES = 2

InBothModes = tuple[list[bool], list[bool]]  # in training, in evaluation


class DryRunResult(NamedTuple):
    """What a trial has shown.

    Attributes:
        outs: what the module returns.
        overwrites: in training and in evaluation, for each act whether the module writes to it.
        shared: likewise, for each out whether it is a view of the same memory as another tensor that crosses a cut.
            Behind the cut they are two: a write to one would not be seen in the other.
    """

    outs: Specs
    overwrites: InBothModes
    shared: InBothModes


def dry_run(
    module: nn.Module,
    stage: int,
    arriving: Specs,
    target: TensorSpec | None,
    loss_fn: Callable[[Any, Tensor], Tensor],
    device: torch.device,
    shared: InBothModes | None = None,
    *,
    within: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> DryRunResult:
    """Run ``module`` in training and in evaluation, on zeros; its buffers stay as they are.

    Args:
        module: stage ``stage`` of the model, on ``device``.
        stage: its index.
        arriving: what it gets.
        target: what the loss takes beside its output; None: this is not the last stage.
        loss_fn: of the model.
        device: where.
        shared: for each act, what the trial of the stage before has found.
        within: what module and loss are called in.

    Raises:
        ConfigError: it does not take what it gets, writes to a shared act, or returns no batch of tensors; or the loss
            fails on it.
    """
    outs: list[tuple[TensorSpec, ...]] = []
    written: list[list[bool]] = []
    shared_outs: list[list[bool]] = []
    was_training = module.training
    try:
        for mode, specs in enumerate(arriving):
            module.train(mode == 0)
            told = f"stage {stage} ({_units(module)}) gets {', '.join(map(str, specs))}"
            acts = _zeros(specs, device, with_gradient=stage > 0)
            with within():
                out, overwrites = _run(module, acts, told, device)
            outs.append(_specs_of(out, told))
            written.append(overwrites)
            of_acts = shared[mode] if shared else [False] * len(acts)
            if any(a and b for a, b in zip(overwrites, of_acts, strict=True)):
                raise ConfigError(
                    f"{told} and writes in place to one that shares its memory with another, which would not see it; "
                    "cut elsewhere, or replace the operation by one that does not work in place"
                )
            shared_outs.append(_shared(unpacked(out), acts, of_acts))
            if target is not None:
                with within():
                    _try_loss(stage, outs[-1], out, target, loss_fn)
    finally:
        module.train(was_training)
    return DryRunResult(Specs(*outs), (written[0], written[1]), (shared_outs[0], shared_outs[1]))


def _zeros(specs: Sequence[TensorSpec], device: torch.device, *, with_gradient: bool) -> list[Tensor]:
    # Clones: autograd would refuse an operation in place on a leaf, and those are to be found.
    acts = [spec.empty(NUM_SAMPLES, device).zero_() for spec in specs]
    return [a.requires_grad_(with_gradient and takes_gradient(a)).clone() for a in acts]


def _run(module: nn.Module, acts: Sequence[Tensor], told: str, device: torch.device) -> tuple[Any, list[bool]]:
    before = [act._version for act in acts]
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}  # running statistics must not move
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.enable_grad():
            out = torch.func.functional_call(module, buffers, (packed(tuple(acts)),))
    except Exception as error:  # the user's own forward can raise anything
        raise ConfigError(f"{told} and fails on it: {type(error).__name__}: {error}") from error
    return out, [act._version != version for act, version in zip(acts, before, strict=True)]


def _shared(outs: Sequence[Tensor], acts: Sequence[Tensor], shared: Sequence[bool]) -> list[bool]:
    memory = [out.untyped_storage().data_ptr() for out in outs]
    of_acts = {act.untyped_storage().data_ptr() for act, is_shared in zip(acts, shared, strict=True) if is_shared}
    return [
        bool(out.numel()) and (memory.count(mine) > 1 or mine in of_acts)
        for out, mine in zip(outs, memory, strict=True)
    ]


def _specs_of(out: Any, told: str) -> tuple[TensorSpec, ...]:
    outs = unpacked(out)
    if isinstance(out, tuple | list) and len(outs) == 1:
        raise ConfigError(f"{told} and returns a {type(out).__name__} of one tensor; return the tensor itself")
    for tensor in outs:
        if not isinstance(tensor, Tensor) or tensor.shape[:1] != (NUM_SAMPLES,):
            found = list(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ConfigError(
                f"{told} and returns {found} for {NUM_SAMPLES} samples; expected tensors whose first dimension is the "
                "batch (numbers cannot cross, either); cut elsewhere: partition.balance=auto knows where"
            )
    return tuple(TensorSpec.of(tensor) for tensor in outs)


def _try_loss(
    stage: int,
    specs: Sequence[TensorSpec],
    out: Any,
    target: TensorSpec,
    loss_fn: Callable[[Any, Tensor], Tensor],
) -> None:
    got = f"{', '.join(map(str, specs))} and {target}"
    if getattr(loss_fn, "reduction", "mean") == "sum":
        raise ConfigError(f"stage {stage}: the loss is a sum; expected the mean over the samples: reduction='mean'")
    try:
        with warnings.catch_warnings(action="ignore"):  # it may warn of what it then raises
            loss = loss_fn(out, target.empty(NUM_SAMPLES, unpacked(out)[0].device).zero_())
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError) as error:
        raise ConfigError(
            f"stage {stage}: the loss gets {got} and fails on it: {type(error).__name__}: {error}; choose another "
            "loss._target_ (loss_fn), or mend the model's output or the targets"
        ) from error
    if loss.ndim > 0:
        raise ConfigError(
            f"stage {stage}: the loss has shape {list(loss.shape)} for {got}; expected one number, the mean over "
            "the samples"
        )


def _units(module: nn.Module) -> str:
    names = getattr(module, "unit_names", None) or [name for name, _ in module.named_children()]
    names = names or [type(module).__name__]
    return names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}"
