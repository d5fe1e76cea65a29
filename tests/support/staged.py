"""Run a model uncut and in stages, side by side, and compare everything that training uses."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from adl_dist.batch import arguments_of, tensors_of
from adl_dist.errors import PartitionError
from adl_dist.partition.chain import Chain
from adl_dist.partition.containers import tensors_in
from adl_dist.partition.cut import attempt, even_sizes
from adl_dist.partition.stage_module import StageModule


@dataclass
class Verdict:
    """How a model in stages compares with the uncut one: ``equal``, ``close``, ``refused``, ``wrong`` or ``crash``."""

    kind: str
    text: str = ""
    worst: float = 0.0
    units: list[str] = field(default_factory=list)


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def loss_of(out: Any) -> Tensor:
    parts = [t.square().mean() for t in tensors_in(out) if t.is_floating_point() and t.numel()]
    return torch.stack([p.double() for p in parts]).sum()


def even(count: int, parts: int) -> list[int]:
    return [count * (k + 1) // parts - count * k // parts for k in range(parts)]


def compare(
    build: Callable[[], nn.Module],
    batches: Sequence[Any],
    cut: int | Sequence[int],
    *,
    loss: Callable[[Any], Tensor] = loss_of,
    learning_rate: float = 1e-3,
    tolerance: float = 1e-12,
    chain: Chain | None = None,
    replays: bool = False,
) -> Verdict:
    """Train uncut and in stages on ``batches``, evaluate, and compare outputs, gradients and buffers.

    Args:
        build: makes the model, the same every time.
        batches: micro-batches of different sizes.
        cut: the number of stages, or the units of each.
        loss: of the model's output.
        learning_rate: of the updates between micro-batches.
        tolerance: how much ``close`` may differ.
        chain: the recorded model, to record once for several cuts.
        replays: whether each stage replays a forward that it did with other weights. Then buffers are not compared, and
            there is no evaluation.
    """
    try:
        seed_all(0)
        stages, names = stages_of(build, recorded_of(batches), cut, chain)
    except PartitionError as error:
        return Verdict("refused", str(error))
    model = build()
    if any(stage.draws[0] for stage in stages):  # as one stage, with the same streams of what is drawn for all
        seed_all(0)
        ((model,), _) = stages_of(build, recorded_of(batches), [len(names)], chain)
    try:
        worst = _compare(model, stages, batches, loss, learning_rate, replays=replays)
    except PartitionError as error:
        return Verdict("refused", str(error), units=names)
    except Difference as error:
        return Verdict("wrong", str(error), units=names)
    except Exception as error:  # of the model's own Python; a run tells it as "fails on it"
        return Verdict("crash", f"{type(error).__name__}: {error}", units=names)
    return Verdict("equal" if worst == 0 else "close" if worst < tolerance else "wrong", f"{worst:.1e}", worst, names)


def recorded_of(batches: Sequence[Any]) -> list[Any]:
    """Return the micro-batches that a run would record: the first two, and one of each other length."""
    lengths = {str([t.shape[1:] for t in tensors_of(batch)]): batch for batch in reversed(batches)}
    return [*batches[:2], *(batch for batch in lengths.values() if not any(batch is one for one in batches[:2]))]


class Difference(Exception):
    """Something is there in one of the models only."""


def stages_of(
    build: Callable[[], nn.Module], batches: Sequence[Any], cut: int | Sequence[int], chain: Chain | None = None
) -> tuple[list[StageModule], list[str]]:
    """Record a model and return its stages, with the names of its units."""
    model = build()
    chain = chain or Chain(build(), batches)

    def choose() -> list[int]:
        return even_sizes(chain, cut) if isinstance(cut, int) else list(cut)

    def make(sizes: list[int]) -> list[StageModule]:
        return chain.stages(model, chain.plan(sizes), sizes, range(len(sizes)))

    return attempt(chain, choose, make, fixed=not isinstance(cut, int)), chain.units


def _compare(
    model: nn.Module, stages: Sequence[StageModule], batches: Sequence[Any], loss: Any, rate: float, *, replays: bool
) -> float:
    worst = 0.0
    model.train()
    for stage in stages:
        stage.train()
    for number, batch in enumerate(batches):
        seed_all(number)
        if isinstance(model, StageModule):
            model.seeds = (dict.fromkeys(("torch", "python", "numpy"), number),) * 2
        expected = _call(model, batch)
        loss(expected).backward()
        seed_all(number)
        out, _ = chain(stages, batch, loss, number, replays=replays)
        worst = max(worst, _unlike(expected, out, f"output of micro-batch {number}"))
        worst = max(worst, _gradients(model, stages, number))
        if replays:
            _copy_buffers(model, stages)
        else:
            worst = max(worst, _buffers(model, stages, number))
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.data.add_(parameter.grad, alpha=-rate)
                parameter.grad = None
        _update(stages, rate)
    if replays:
        return worst
    model.eval()
    for stage in stages:
        stage.eval()
    for number, batch in enumerate(batches[:2]):
        with torch.no_grad():
            seed_all(100 + number)
            expected = _call(model, batch)
            seed_all(100 + number)
            acts = tensors_of(batch)
            for stage in stages:
                acts = stage(*(t.clone() for t in acts))
            worst = max(worst, _unlike(expected, acts, f"evaluation {number}"), _buffers(model, stages, number))
    return worst


def _call(model: nn.Module, batch: Any) -> Any:
    if isinstance(model, StageModule):
        return model(*(t.clone() for t in tensors_of(batch)))
    args, kwargs = arguments_of(batch)
    return model(*(t.clone() for t in args), **{k: t.clone() for k, t in kwargs.items()})


def chain(
    stages: Sequence[StageModule], batch: Any, loss: Any, seed: int, *, replays: bool = False
) -> tuple[Any, list[Any]]:
    """Run forward and backward through all stages as training does, with leaves between them."""
    acts, kept = tuple(t.clone() for t in tensors_of(batch)), []
    own: Any = dict.fromkeys(("torch", "python", "numpy"), seed)
    for stage in stages:
        if kept:
            acts = tuple(t.detach().requires_grad_(t.requires_grad) for t in acts)
        stage.seeds, stage.own_streams = (dict.fromkeys(("torch", "python", "numpy"), seed), own), None
        out = _replayed(stage, acts) if replays else stage(*acts)
        own = own if stage.own_streams is None else stage.own_streams  # as one stream through all stages
        kept.append((acts, out))
        acts = out
    result = loss(acts)
    grads: Any = [torch.ones_like(result)]
    ends: Any = [result]
    for acts, out in reversed(kept):
        if out is not kept[-1][1]:
            ends = out
        pairs = [(end, grad) for end, grad in zip(ends, grads, strict=False) if grad is not None and end.requires_grad]
        if pairs:
            torch.autograd.backward([end for end, _ in pairs], [grad for _, grad in pairs])
        grads = [act.grad for act in acts]
    return kept[-1][1], []


def _replayed(stage: StageModule, acts: Sequence[Tensor]) -> Any:
    """Return what the replay of a forward gives that had other weights."""
    parameters = [p for p in stage.parameters() if p.is_floating_point()]
    weights, buffers = [p.data.clone() for p in parameters], {name: b.clone() for name, b in stage.named_buffers()}
    for parameter in parameters:
        parameter.data.mul_(1.001)
    stage.keep_tape = True
    with torch.no_grad():
        stage(*(act.detach().clone() for act in acts))
    tape, stage.tape, stage.keep_tape = stage.tape, None, False
    for parameter, weight in zip(parameters, weights, strict=True):
        parameter.data.copy_(weight)
    return stage(*acts, replay=tape, buffers=buffers)


def _copy_buffers(model: nn.Module, stages: Sequence[StageModule]) -> None:
    """Give the stages the buffers of ``model``, because theirs have seen other weights."""
    of_model = dict(model.named_buffers())
    for stage in stages:
        for name, buffer in stage.named_buffers():
            if name in of_model and buffer.shape == of_model[name].shape:
                buffer.copy_(of_model[name])


def _holders(stages: Sequence[StageModule]) -> dict[str, list[nn.Parameter]]:
    found: dict[str, list[nn.Parameter]] = {}
    for stage in stages:
        for name, parameter in stage.named_parameters():
            found.setdefault(name, []).append(parameter)
    return found


def _gradients(model: nn.Module, stages: Sequence[StageModule], number: int) -> float:
    worst, holders = 0.0, _holders(stages)
    for name, parameter in model.named_parameters():
        if name not in holders:
            raise Difference(f"no stage holds {name}")
        grads = [p.grad for p in holders[name] if p.grad is not None]
        if (parameter.grad is None) != (not grads):
            raise Difference(f"micro-batch {number}: {name} has a gradient in one model only")
        if grads:
            total = grads[0]
            for other in grads[1:]:
                total = total + other
            worst = max(worst, _distance(parameter.grad, total, f"gradient of {name}"))
            if worst > 1e-9:
                raise Difference(f"micro-batch {number}: gradient of {name} differs by {worst:.1e}")
    return worst


def _buffers(model: nn.Module, stages: Sequence[StageModule], number: int) -> float:
    worst = 0.0
    found = {name: buffer for stage in reversed(stages) for name, buffer in stage.named_buffers()}
    holders = stages[0].plan.holders
    for stage in stages:  # a table that every stage makes is right on the one that saves it
        found |= {n: buffer for n, buffer in stage.named_buffers() if holders.get(n, (None,))[0] == stage.index}
    for name, buffer in model.named_buffers():
        if name in found:
            worst = max(worst, _distance(buffer, found[name], f"micro-batch {number}: buffer {name}"))
            if worst > 1e-9:
                raise Difference(f"micro-batch {number}: buffer {name} differs by {worst:.1e}")
        else:
            raise Difference(f"no stage holds buffer {name}")
    return worst


def _update(stages: Sequence[StageModule], rate: float) -> None:
    for parameters in _holders(stages).values():
        grads = [p.grad for p in parameters if p.grad is not None]
        if grads:
            total = grads[0]
            for other in grads[1:]:
                total = total + other
            for parameter in parameters:
                parameter.data.add_(total, alpha=-rate)
                parameter.grad = None


def _unlike(one: Any, other: Any, where: str) -> float:
    ones, others = tensors_in(one), tensors_in(other)
    if len(ones) != len(others):
        raise Difference(f"{where}: {len(ones)} tensors and {len(others)}")
    return max((_distance(a, b, where) for a, b in zip(ones, others, strict=True)), default=0.0)


def _distance(one: Tensor, other: Tensor, where: str) -> float:
    if one.shape != other.shape or one.dtype != other.dtype:
        raise Difference(f"{where}: {list(one.shape)} {one.dtype} and {list(other.shape)} {other.dtype}")
    one, other = one.detach().to_dense(), other.detach().to_dense()
    if other.is_meta:
        raise Difference(f"{where}: a tensor without elements")
    if torch.equal(one, other) or one.numel() == 0:
        return 0.0
    scale = max(1.0, float(one.abs().max())) if one.is_floating_point() else 1.0
    return float((one.double() - other.double()).abs().max()) / scale
