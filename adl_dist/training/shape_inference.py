"""Start-up agreement: what travels on each edge is settled, through the store, before the first tensor is sent.

Stage 0 publishes the spec of its input. Each stage takes what is published for it, runs its part of the model
once on zeros, and publishes what comes out for the next. A stage whose part refuses its input publishes the
reason instead, so the error is readable on both sides; in gloo a mismatch would abort the process.
"""

import json
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from textwrap import shorten
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from adl_dist.distributed.world import disconnect
from adl_dist.errors import AdlError, ChannelError, ConfigError, StageFailed
from adl_dist.stage import LossFn, TrainSpec
from adl_dist.stage.calls import packed, takes_gradient, unpacked
from adl_dist.stage.heads import check_outs
from adl_dist.training.loss_checks import check_broadcast, check_loss
from adl_dist.transport.spec import Specs, TensorSpec

SIZES = "sizes"  # the key of a cut that rank 0 has measured
NUM_SAMPLES = 2  # of the dry run

InBothModes = tuple[list[bool], list[bool]]  # in training, in evaluation


class Agreed(NamedTuple):
    """The result of the agreement for one process."""

    acts: dict[int, Specs]  # what arrives at each stage k of this process and at k + 1 (K: the model's output)
    target: TensorSpec  # what the loss takes besides the output
    overwrites: dict[int, InBothModes]  # for each act of each stage here whether the stage's module writes to it
    num_classes: int | None  # classes that the model tells apart; None if its output is not [B, classes]


def infer_shapes(
    store: dist.Store,
    modules: Mapping[int, nn.Module],
    spec: TrainSpec,
    *,
    sample: tuple[Tensor, Tensor] | None,
    device: torch.device,
) -> Agreed:
    """Settle what arrives at each stage of this process, through a ``store`` that is fresh for this agreement.

    The stages' ``modules`` are on ``device``. Stage 0's process alone has a ``sample``: input [1, ...] and target
    [1, ...] as stage 0 will get them.

    Raises:
        ConfigError: a part of the model does not take what it gets, or returns what cannot be sent on.
        StageFailed: another stage found so.
        ChannelError: no answer from another stage in time.
    """
    K, method = spec.pipeline.num_stages, spec.pipeline.method
    within = spec.precision.autocasting(device)
    if sample is not None:
        _publish(store, 0, Specs.always([TensorSpec.of(sample[0])]), TensorSpec.of(sample[1]), ([False], [False]))
    acts: dict[int, Specs] = {}
    overwrites: dict[int, InBothModes] = {}
    for k in sorted(modules):
        acts[k], target, shared = _await(store, k, by=max(k - 1, 0))
        try:
            loss_target = target if k == K - 1 else None
            found = dry_run(modules[k], k, acts[k], loss_target, spec.loss_fn, device, shared, within=within)
            if method.spec.local_losses and k < K - 1:
                check_outs(method.head, k, [out.shape for out in found.outs.training])
        except AdlError as error:
            publish_error(store, error, stages=range(k + 1, K + 1))
            raise
        acts[k + 1], overwrites[k] = found.outs, found.overwrites
        _publish(store, k + 1, found.outs, target, found.shared)
    # No stage starts before the last one has agreed: a refusal downstream is reported upstream, too.
    shape = _await(store, K, by=K - 1)[0].evaluation[0].shape
    return Agreed(acts, target, overwrites, shape[0] if len(shape) == 1 else None)


def check_consistent(
    store: dist.Store, rank: int, size: int, fingerprint: Mapping[str, Any], initial: Mapping[str, Sequence[float]]
) -> None:
    """Refuse to start if the processes were not given the same job.

    ``initial`` are a few elements of each initial weight: other processors may round a random number differently in its
    last digits, but another seed gives another number.

    Raises:
        ConfigError: names the two ranks and the first entry that differs.
    """
    with _reaching(0):
        store.set(f"fingerprint/{rank}", json.dumps({"settings": fingerprint, "initial": initial}))
    mine = json.loads(json.dumps(fingerprint))
    for other in range(1, size) if rank == 0 else [0]:
        message = read(store, f"fingerprint/{other}", other)
        if (found := _first_difference(mine, message["settings"])) is not None:
            name, *both = found
            here, there = (shorten(str(value), 60, placeholder="...") for value in both)
            raise ConfigError(
                f"rank {rank} and rank {other} were not given the same job: {name} is {here} here and {there} there; "
                "start all ranks with one command"
            )
        for name, elements in initial.items():
            theirs = message["initial"].get(name, elements)  # without any, its weights come from a checkpoint
            if not all(math.isclose(a, b, rel_tol=1e-3, abs_tol=1e-6) for a, b in zip(elements, theirs, strict=True)):
                raise ConfigError(
                    f"rank {rank} and rank {other} do not begin with the same weights: the initial {name} differs; "
                    "call torch.manual_seed(...) before the model is built, on every rank"
                )


def _first_difference(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> tuple[str, Any, Any] | None:
    """Return the dotted name of the first entry that differs, also in mappings inside, with both values."""
    for name in {**mine, **theirs}:
        here, there = mine.get(name, "missing"), theirs.get(name, "missing")
        if here == there:
            continue
        if isinstance(here, dict) and isinstance(there, dict) and (inner := _first_difference(here, there)):
            return f"{name} {inner[0]}" if name == "model" else f"{name}.{inner[0]}", *inner[1:]
        return name, here, there
    return None


def publish_error(store: dist.Store, error: Exception, *, stages: Iterable[int], rank: int | None = None) -> None:
    """Publish why there is no agreement to ``stages``, and to those that wait for the fingerprint of ``rank``."""
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


def read(store: dist.Store, key: str, rank: int) -> dict[str, Any]:
    """Return what ``rank`` has set ``key`` to.

    Raises:
        StageFailed: it has failed instead, and published why.
        ChannelError: no answer in time.
    """
    with _reaching(rank):
        message = dict(json.loads(store.get(key)))
    if "failed" in message:
        raise StageFailed(message["failed"], exit_code=message["exit_code"])
    return message


def _publish(store: dist.Store, stage: int, acts: Specs, target: TensorSpec, shared: InBothModes) -> None:
    specs_of = {mode: [spec.to_json() for spec in specs] for mode, specs in acts._asdict().items()}
    with _reaching(0):
        store.set(f"arrives/{stage}", json.dumps({**specs_of, "target": target.to_json(), "shared": shared}))


def _await(store: dist.Store, stage: int, *, by: int) -> tuple[Specs, TensorSpec, InBothModes]:
    message = read(store, f"arrives/{stage}", by)
    acts = Specs(*(tuple(map(TensorSpec.from_json, message[mode])) for mode in Specs._fields))
    return acts, TensorSpec.from_json(message["target"]), (message["shared"][0], message["shared"][1])


@contextmanager
def _reaching(rank: int) -> Iterator[None]:
    # The store ends with the process that holds it, rank 0's unless torchrun's: that may have ended with an error.
    try:
        yield
    except RuntimeError as error:
        text = f"no word from rank {rank} at start-up; its own log, logs/rank{rank}.log, says why"
        raise ChannelError(text) from error


class DryRunResult(NamedTuple):
    """The outcome of a dry run."""

    outs: Specs  # what the module returns
    overwrites: InBothModes  # for each act whether the module writes to it
    # For each out whether it is a view of the same memory as another tensor that crosses a cut. Behind the cut they are
    # two: a write to one would not be seen in the other.
    shared: InBothModes


def dry_run(
    module: nn.Module,
    stage: int,
    arriving: Specs,
    target: TensorSpec | None,
    loss_fn: LossFn,
    device: torch.device,
    shared: InBothModes | None = None,
    *,
    within: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> DryRunResult:
    """Run ``module``, the part of a stage on ``device``, in both modes on zeros; its buffers stay as they are.

    It gets what is ``arriving``, ``shared`` as the dry run of the stage before has found. ``target`` is what the loss
    takes besides the output; None: this is not the last stage. Both are called in the context that ``within`` makes.

    Raises:
        ConfigError: it does not take what it gets, writes to a shared act, or returns no batch of tensors; or the loss
            fails on it.
    """
    results = []
    was_training = module.training
    try:
        for mode, specs in enumerate(arriving):
            module.train(mode == 0)
            gets = f"stage {stage} ({_units(module)}) gets {', '.join(map(str, specs))}"
            # Clones: autograd would refuse an operation in place on a leaf, and those are to be found.
            leaves = [spec.empty(NUM_SAMPLES, device).zero_() for spec in specs]
            acts = [leaf.requires_grad_(stage > 0 and takes_gradient(leaf)).clone() for leaf in leaves]
            with within():
                out, overwrites = _run(module, acts, gets, device)
            outs = _specs_of(out, gets)
            of_acts = shared[mode] if shared else [False] * len(acts)
            if any(a and b for a, b in zip(overwrites, of_acts, strict=True)):
                raise ConfigError(
                    f"{gets} and writes in place to one that shares its memory with another, which would not see it; "
                    "cut elsewhere, or replace the operation by one that does not work in place"
                )
            results.append((outs, overwrites, _shared(unpacked(out), acts, of_acts)))
            if target is not None:
                with within():
                    _try_loss(stage, outs, out, target, loss_fn)
    finally:
        module.train(was_training)
    training, evaluation = results
    return DryRunResult(Specs(training[0], evaluation[0]), (training[1], evaluation[1]), (training[2], evaluation[2]))


def _run(module: nn.Module, acts: Sequence[Tensor], gets: str, device: torch.device) -> tuple[Any, list[bool]]:
    before = [act._version for act in acts]
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}  # running statistics must not move
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.enable_grad():
            out = torch.func.functional_call(module, buffers, (packed(tuple(acts)),))
    except (Exception, SystemExit) as error:  # the user's own forward can raise anything
        raise ConfigError(f"{gets} and fails on it: {type(error).__name__}: {error}") from error
    return out, [act._version != version for act, version in zip(acts, before, strict=True)]


def _shared(outs: Sequence[Tensor], acts: Sequence[Tensor], shared: Sequence[bool]) -> list[bool]:
    memory = [out.untyped_storage().data_ptr() for out in outs]
    of_acts = {act.untyped_storage().data_ptr() for act, is_shared in zip(acts, shared, strict=True) if is_shared}
    pairs = zip(outs, memory, strict=True)
    return [bool(out.numel()) and (memory.count(mine) > 1 or mine in of_acts) for out, mine in pairs]


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


def _try_loss(stage: int, specs: Sequence[TensorSpec], out: Any, target: TensorSpec, loss_fn: LossFn) -> None:
    got = f"{', '.join(map(str, specs))} and {target}"
    if getattr(loss_fn, "reduction", "mean") == "sum":
        raise ConfigError(f"stage {stage}: the loss is a sum; expected the mean over the samples: reduction='mean'")
    targets = target.empty(NUM_SAMPLES, unpacked(out)[0].device).zero_()
    try:
        with warnings.catch_warnings(action="ignore"):  # it may warn of what it then raises
            loss = loss_fn(out, targets)
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError) as error:
        raise ConfigError(
            f"stage {stage}: the loss gets {got} and fails on it: {type(error).__name__}: {error}; choose another "
            "loss._target_ (loss_fn), or correct the model's output or the targets"
        ) from error
    check_loss(stage, loss, got)
    check_broadcast(stage, loss_fn, out, targets)


def _units(module: nn.Module) -> str:
    names = getattr(module, "unit_names", None) or [name for name, _ in module.named_children()]
    names = names or [type(module).__name__]
    return names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}"
