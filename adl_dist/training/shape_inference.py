"""Start-up agreement: what travels on each edge is settled, through the store, before the first tensor is sent.

Stage 0 publishes the spec of its input. Each stage takes what is published for it, runs its part of the model
once on zeros, and publishes what comes out for the next. A stage whose part refuses its input publishes the
reason instead, so the error is readable on both sides; in gloo a mismatch would abort the process.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from adl_dist.distributed.world import disconnect
from adl_dist.errors import AdlError, ChannelError, ConfigError, StageFailed
from adl_dist.training.dry_run import InBothModes, dry_run
from adl_dist.transport import Specs, TensorSpec

SIZES = "sizes"


class Agreed(NamedTuple):
    """What a process knows after the agreement.

    Attributes:
        acts: what arrives at each stage k of this process and at k + 1 (K: the model's output).
        target: what the loss takes beside the output.
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
        loss_fn: of the last stage.
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
    # Nobody starts before the last stage has agreed: a refusal downstream is told upstream, too.
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
    told = {mode: [spec.to_json() for spec in specs] for mode, specs in acts._asdict().items()}
    with _reaching(0):
        store.set(f"arrives/{stage}", json.dumps({**told, "target": target.to_json(), "shared": shared}))


def publish_error(store: dist.Store, error: Exception, *, stages: Iterable[int], rank: int | None = None) -> None:
    """Tell those that wait for an agreement that there will be none.

    Args:
        store: of the agreement.
        error: why.
        stages: which may wait for their specs.
        rank: of this process, if others may still wait for its fingerprint.
    """
    told = json.dumps({"failed": str(error), "exit_code": getattr(error, "exit_code", 1)})
    keys = [f"arrives/{stage}" for stage in stages] + [f"fingerprint/{rank}"] * (rank is not None)
    with suppress(RuntimeError):  # rank 0, whose store it may be, is gone
        for key in keys + [SIZES] * (rank == 0):
            store.set(key, told)


@contextmanager
def propagate_errors(store: dist.Store, *, stages: Iterable[int], rank: int) -> Iterator[None]:
    """What stops this rank inside, before the agreement, must not leave the others waiting for it."""
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
    told = _read(store, f"arrives/{stage}", by)
    acts = Specs(*(tuple(map(TensorSpec.from_json, told[mode])) for mode in Specs._fields))
    return acts, TensorSpec.from_json(told["target"]), (told["shared"][0], told["shared"][1])


def _read(store: dist.Store, key: str, rank: int) -> dict[str, Any]:
    with _reaching(rank):
        told = dict(json.loads(store.get(key)))
    if "failed" in told:
        raise StageFailed(told["failed"], exit_code=told["exit_code"])
    return told


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
