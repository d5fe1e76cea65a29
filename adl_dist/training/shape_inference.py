"""Start-up agreement: what travels on each edge is settled, through the store, before the first tensor is sent.

Stage 0 publishes the spec of its input. Each stage takes what is published for it, runs its part of the model
once on zeros, and publishes what comes out for the next. A stage whose part refuses its input publishes the
reason instead, so the error is readable on both sides; in gloo a mismatch would abort the process.
"""

import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from adl_dist.distributed.world import disconnect
from adl_dist.errors import AdlError, ChannelError, ConfigError, StageFailed
from adl_dist.stage import packed, takes_gradient, unpacked
from adl_dist.transport import Specs, TensorSpec

SIZES = "sizes"
NUM_SAMPLES = 2  # of the dry run

InBothModes = tuple[list[bool], list[bool]]  # in training, in evaluation


class Agreed(NamedTuple):
    """The result of the agreement for one process.

    Attributes:
        acts: what arrives at each stage k of this process and at k + 1 (K: the model's output).
        target: what the loss takes besides the output.
        overwrites: for each act of each stage of this process whether the stage's module writes to it, in both modes.
    """

    acts: dict[int, Specs]
    target: TensorSpec
    overwrites: dict[int, InBothModes]


def infer_shapes(
    store: dist.Store,
    modules: Mapping[int, nn.Module],
    *,
    num_stages: int,
    loss_fn: Callable[[Tensor, Tensor], Tensor],
    sample: tuple[Tensor, Tensor] | None,
    device: torch.device,
    within: Callable[[], AbstractContextManager[Any]] = nullcontext,
    check: Callable[[int, Sequence[TensorSpec]], None] | None = None,
) -> Agreed:
    """Settle what arrives at each stage of this process.

    Args:
        store: shared with the other stages; a fresh prefix for each agreement.
        modules: the stages of this process.
        num_stages: K.
        loss_fn: the loss of the last stage.
        sample: input [1, ...] and target [1, ...] as the first stage will get them; on stage 0's process only.
        device: where the modules are.
        within: what modules and loss will be called in; it decides what dtypes come out.
        check: refuses what a stage sends on, by raising.

    Raises:
        ConfigError: a part of the model does not take what it gets, or returns no batch of tensors.
        StageFailed: another stage found so.
        ChannelError: no answer from another stage in time.
    """
    if sample is not None:
        _publish(store, 0, Specs.always([TensorSpec.of(sample[0])]), TensorSpec.of(sample[1]), ([False], [False]))
    acts: dict[int, Specs] = {}
    overwrites: dict[int, InBothModes] = {}
    for stage in sorted(modules):
        acts[stage], target, shared = _await(store, stage, by=max(stage - 1, 0))
        try:
            is_last = stage == num_stages - 1
            loss_target = target if is_last else None
            found = dry_run(modules[stage], stage, acts[stage], loss_target, loss_fn, device, shared, within=within)
            if check is not None and not is_last:
                check(stage, found.outs.training)
        except AdlError as error:
            publish_error(store, error, stages=range(stage + 1, num_stages + 1))
            raise
        acts[stage + 1], overwrites[stage] = found.outs, found.overwrites
        _publish(store, stage + 1, found.outs, target, found.shared)
    # No stage starts before the last one has agreed: a refusal downstream is reported upstream, too.
    _await(store, num_stages, by=num_stages - 1)
    return Agreed(acts, target, overwrites)


def check_consistent(store: dist.Store, rank: int, size: int, fingerprint: Mapping[str, Any]) -> None:
    """Refuse to start if the processes were not given the same job.

    Raises:
        ConfigError: names the two ranks and the first entry that differs.
    """
    with _reaching(0):
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


def _publish(store: dist.Store, stage: int, acts: Specs, target: TensorSpec, shared: InBothModes) -> None:
    specs_of = {mode: [spec.to_json() for spec in specs] for mode, specs in acts._asdict().items()}
    with _reaching(0):
        store.set(f"arrives/{stage}", json.dumps({**specs_of, "target": target.to_json(), "shared": shared}))


def publish_error(store: dist.Store, error: Exception, *, stages: Iterable[int], rank: int | None = None) -> None:
    """Tell those that wait for an agreement that there will be none.

    Args:
        store: the one of the agreement.
        error: why.
        stages: which may wait for their specs.
        rank: this process's rank, if others may still wait for its fingerprint.
    """
    message = json.dumps({"failed": str(error), "exit_code": getattr(error, "exit_code", 1)})
    keys = [f"arrives/{stage}" for stage in stages] + [f"fingerprint/{rank}"] * (rank is not None)
    with suppress(RuntimeError):  # rank 0, whose store it may be, is gone
        for key in keys + [SIZES] * (rank == 0):
            store.set(key, message)


@contextmanager
def propagate_errors(store: dist.Store, *, stages: Iterable[int], rank: int) -> Iterator[None]:
    """Report an error inside, before the agreement, to the ranks that would wait for this one."""
    try:
        yield
    except StageFailed:
        raise
    except Exception as error:
        publish_error(store, error, stages=stages, rank=rank)
        disconnect(in_order=False)
        raise


def publish_sizes(store: dist.Store, sizes: Sequence[int]) -> None:
    """Tell the other ranks the cut that rank 0 has measured."""
    store.set(SIZES, json.dumps({"sizes": list(sizes)}))


def await_sizes(store: dist.Store) -> list[int]:
    """Take what rank 0 has published.

    Raises:
        StageFailed: it could not measure, or found no cut.
        ChannelError: no answer in time.
    """
    return [int(size) for size in _read(store, SIZES, 0)["sizes"]]


def _await(store: dist.Store, stage: int, *, by: int) -> tuple[Specs, TensorSpec, InBothModes]:
    message = _read(store, f"arrives/{stage}", by)
    acts = Specs(*(tuple(map(TensorSpec.from_json, message[mode])) for mode in Specs._fields))
    return acts, TensorSpec.from_json(message["target"]), (message["shared"][0], message["shared"][1])


def _read(store: dist.Store, key: str, rank: int) -> dict[str, Any]:
    with _reaching(rank):
        message = dict(json.loads(store.get(key)))
    if "failed" in message:
        raise StageFailed(message["failed"], exit_code=message["exit_code"])
    return message


@contextmanager
def _reaching(rank: int) -> Iterator[None]:
    """The store ends with the process that holds it, rank 0's unless torchrun's: that may have ended with an error."""
    try:
        yield
    except RuntimeError as error:
        text = f"no word from rank {rank} at start-up; its own log, logs/rank{rank}.log, says why"
        raise ChannelError(text) from error


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def num_outputs(store: dist.Store, num_stages: int) -> int | None:
    """Classes that the agreed model tells apart; None if its output is not [B, classes]."""
    out = _await(store, num_stages, by=num_stages - 1)[0].evaluation[0]
    return out.shape[0] if len(out.shape) == 1 else None


class DryRunResult(NamedTuple):
    """The outcome of a dry run.

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
        target: what the loss takes besides its output; None: this is not the last stage.
        loss_fn: the loss of the model.
        device: where.
        shared: for each act, what the dry run of the stage before has found.
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
            gets = f"stage {stage} ({_units(module)}) gets {', '.join(map(str, specs))}"
            acts = _zeros(specs, device, with_gradient=stage > 0)
            with within():
                out, overwrites = _run(module, acts, gets, device)
            outs.append(_specs_of(out, gets))
            written.append(overwrites)
            of_acts = shared[mode] if shared else [False] * len(acts)
            if any(a and b for a, b in zip(overwrites, of_acts, strict=True)):
                raise ConfigError(
                    f"{gets} and writes in place to one that shares its memory with another, which would not see it; "
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


def _run(module: nn.Module, acts: Sequence[Tensor], gets: str, device: torch.device) -> tuple[Any, list[bool]]:
    before = [act._version for act in acts]
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}  # running statistics must not move
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.enable_grad():
            out = torch.func.functional_call(module, buffers, (packed(tuple(acts)),))
    except Exception as error:  # the user's own forward can raise anything
        raise ConfigError(f"{gets} and fails on it: {type(error).__name__}: {error}") from error
    return out, [act._version != version for act, version in zip(acts, before, strict=True)]


def _shared(outs: Sequence[Tensor], acts: Sequence[Tensor], shared: Sequence[bool]) -> list[bool]:
    memory = [out.untyped_storage().data_ptr() for out in outs]
    of_acts = {act.untyped_storage().data_ptr() for act, is_shared in zip(acts, shared, strict=True) if is_shared}
    return [
        bool(out.numel()) and (memory.count(mine) > 1 or mine in of_acts)
        for out, mine in zip(outs, memory, strict=True)
    ]


def _specs_of(out: Any, gets: str) -> tuple[TensorSpec, ...]:
    outs = unpacked(out)
    if isinstance(out, tuple | list) and len(outs) == 1:
        raise ConfigError(f"{gets} and returns a {type(out).__name__} of one tensor; return the tensor itself")
    for tensor in outs:
        if not isinstance(tensor, Tensor) or tensor.shape[:1] != (NUM_SAMPLES,):
            found = list(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ConfigError(
                f"{gets} and returns {found} for {NUM_SAMPLES} samples; expected tensors whose first dimension is the "
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
            "loss._target_ (loss_fn), or correct the model's output or the targets"
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
