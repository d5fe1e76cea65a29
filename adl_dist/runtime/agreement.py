"""Start-up agreement: what travels on each edge is settled, through the store, before the first tensor is sent.

Stage 0 publishes the spec of its input. Each stage takes what is published for it, runs its part of the model
once on zeros, and publishes what comes out for the next. A stage whose part refuses its input publishes the
reason instead, so the error is readable on both sides; in gloo a mismatch would abort the process.
"""

import json
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from adl_dist.errors import AdlError, ChannelError, ConfigError
from adl_dist.runtime.control import StageFailed
from adl_dist.stage import may_start_in_place, packed, unpacked
from adl_dist.transport import TensorSpec

NUM_TRIAL_SAMPLES = 2

Specs = list[TensorSpec]


def agree(
    store: dist.Store,
    modules: Mapping[int, nn.Module],
    *,
    num_stages: int,
    loss_fn: Callable[[Tensor, Tensor], Tensor],
    sample: tuple[Tensor, Tensor] | None,
    device: torch.device,
    check: Callable[[int, Specs], None] | None = None,
) -> tuple[dict[int, Specs], Specs]:
    """Settle what arrives at each stage of this process.

    Args:
        store: shared with the other stages; a fresh prefix for each agreement.
        modules: the stages of this process.
        num_stages: K.
        loss_fn: of the last stage.
        sample: input [1, ...] and target [1, ...] as the first stage will get them; on stage 0's process only.
        device: where the modules are.
        check: refuses what a stage sends on, by raising.

    Returns:
        The acts that arrive at each stage k of this process and at k + 1, by stage (K: the model's output);
        and the target's spec.

    Raises:
        ConfigError: a part of the model does not take what it gets, or returns no batch of tensors.
        StageFailed: another stage found so.
        ChannelError: no answer from another stage in time.
    """
    if sample is not None:
        _publish(store, 0, {"act": [TensorSpec.of(sample[0])], "target": [TensorSpec.of(sample[1])]})
    acts: dict[int, Specs] = {}
    for stage in sorted(modules):
        told = _await(store, stage, by=max(stage - 1, 0))
        acts[stage], target = told["act"], told["target"]
        try:
            is_last = stage == num_stages - 1
            outs = _try_out(modules[stage], stage, acts[stage], target if is_last else None, loss_fn, device)
            if check is not None and not is_last:
                check(stage, outs)
        except AdlError as error:
            refuse(store, error, stages=range(stage + 1, num_stages + 1))
            raise
        acts[stage + 1] = outs
        _publish(store, stage + 1, {"act": outs, "target": target})
    # Nobody starts before the last stage has agreed: a refusal downstream is told upstream, too.
    _await(store, num_stages, by=num_stages - 1)
    return acts, target


def check_same(store: dist.Store, rank: int, size: int, fingerprint: Mapping[str, Any]) -> None:
    """Refuse to start if the processes were not given the same job.

    Raises:
        ConfigError: names the two ranks and the first entry that differs.
    """
    store.set(f"fingerprint/{rank}", json.dumps(fingerprint))
    for other in range(1, size) if rank == 0 else [0]:
        theirs = _read(store, f"fingerprint/{other}", other)
        mine = json.loads(json.dumps(fingerprint))
        if theirs != mine:
            name = next(n for n in {**mine, **theirs} if mine.get(n) != theirs.get(n))
            raise ConfigError(
                f"rank {rank} and rank {other} were not given the same job: {name} is "
                f"{_short(mine.get(name))} here and {_short(theirs.get(name))} there; start all ranks with one command"
            )


def _try_out(
    module: nn.Module,
    stage: int,
    arriving: Specs,
    target: Specs | None,
    loss_fn: Callable[[Any, Tensor], Tensor],
    device: torch.device,
) -> Specs:
    told = f"stage {stage} ({_units(module)}) gets {', '.join(map(str, arriving))}"
    acts = [spec.empty(NUM_TRIAL_SAMPLES, device).zero_() for spec in arriving]
    if stage > 0:
        acts = [a.requires_grad_(a.is_floating_point()) for a in acts]
    was_training = module.training
    module.eval()  # running statistics must not move
    try:
        # A graph is built, because an in-place operation on the stage's input fails only then.
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            copies = stage > 0 and may_start_in_place(module)
            out = module(packed(tuple(act.clone() if copies else act for act in acts)))
    except Exception as error:  # the user's own forward can raise anything
        raise ConfigError(f"{told} and fails on it: {type(error).__name__}: {error}") from error
    finally:
        module.train(was_training)
    outs = unpacked(out)
    if not isinstance(out, Tensor) and len(outs) == 1:
        raise ConfigError(f"{told} and returns a {type(out).__name__} of one tensor; return the tensor itself")
    for tensor in outs:
        if not isinstance(tensor, Tensor) or tensor.shape[:1] != (NUM_TRIAL_SAMPLES,):
            found = list(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ConfigError(
                f"{told} and returns {found} for {NUM_TRIAL_SAMPLES} samples; expected tensors whose first "
                "dimension is the batch"
            )
    specs = [TensorSpec.of(tensor) for tensor in outs]
    if target is not None:
        _try_loss(stage, specs, out, target[0], loss_fn)
    return specs


def _try_loss(stage: int, specs: Specs, out: Any, target: TensorSpec, loss_fn: Callable[[Any, Tensor], Tensor]) -> None:
    got = f"{', '.join(map(str, specs))} and {target}"
    if getattr(loss_fn, "reduction", "mean") == "sum":
        raise ConfigError(f"stage {stage}: the loss is a sum; expected the mean over the samples: reduction='mean'")
    try:
        with warnings.catch_warnings(action="ignore"):  # it may warn of what it then raises
            loss = loss_fn(out, target.empty(NUM_TRIAL_SAMPLES, unpacked(out)[0].device).zero_())
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise ConfigError(
            f"stage {stage}: the loss gets {got} and fails on it: {type(error).__name__}: {error}; choose another "
            "loss._target_ (loss_fn), or mend the model's output or the targets"
        ) from error
    if loss.ndim > 0:
        raise ConfigError(
            f"stage {stage}: the loss has shape {list(loss.shape)} for {got}; expected one number, the mean over "
            "the samples"
        )


def _publish(store: dist.Store, stage: int, told: Mapping[str, Specs]) -> None:
    store.set(f"arrives/{stage}", json.dumps({k: [spec.to_json() for spec in v] for k, v in told.items()}))


def refuse(store: dist.Store, error: Exception, *, stages: Iterable[int], rank: int | None = None) -> None:
    """Tell those that wait for an agreement that there will be none.

    Args:
        store: of the agreement.
        error: why.
        stages: which may wait for their specs.
        rank: of this process, if others may still wait for its fingerprint.
    """
    told = json.dumps({"failed": str(error), "exit_code": getattr(error, "exit_code", 1)})
    for key in [f"arrives/{stage}" for stage in stages] + [f"fingerprint/{rank}"] * (rank is not None):
        store.set(key, told)


def _await(store: dist.Store, stage: int, *, by: int) -> dict[str, Specs]:
    told = _read(store, f"arrives/{stage}", by)
    return {what: [TensorSpec.from_json(spec) for spec in specs] for what, specs in told.items()}


def _read(store: dist.Store, key: str, rank: int) -> dict[str, Any]:
    try:
        told = dict(json.loads(store.get(key)))
    except RuntimeError as error:
        text = f"no word from rank {rank} at start-up; its own log, logs/rank{rank}.log, says why"
        raise ChannelError(text) from error
    if "failed" in told:
        raise StageFailed(told["failed"], exit_code=told["exit_code"])
    return told


def _units(module: nn.Module) -> str:
    names = [name for name, _ in module.named_children()] or [type(module).__name__]
    return names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}"


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def num_outputs(store: dist.Store, num_stages: int) -> int | None:
    """Classes that the agreed model tells apart; None if its output is not [B, classes]."""
    out = _await(store, num_stages, by=num_stages - 1)["act"][0]
    return out.shape[0] if len(out.shape) == 1 else None
