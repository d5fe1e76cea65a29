"""Runs a model unit by unit, where it will be trained, and times it."""

import copy
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map, tree_structure, tree_unflatten

from adl_dist.batch import Batch, call
from adl_dist.codecs import CODECS, coded_bytes
from adl_dist.partition.chain import Chain
from adl_dist.partition.costs import Profile, UnitCost
from adl_dist.partition.module_state import modes_kept
from adl_dist.partition.piece import as_argument
from adl_dist.streams import streams_kept

WARMUP = 2  # rounds; the second is the first to add to gradients that are there
FEWEST, MOST = 3, 30  # rounds after these
GPU_WARMUP_SECONDS = 1.0  # and as many more rounds as fit: a GPU that rested runs at a fraction of its clock
SECONDS = 6.0  # beyond the fewest no round is started after so long

Figures = TypeVar("Figures")
LossFn = Callable[[Any, Any], Tensor]
Within = Callable[[], AbstractContextManager[Any]]  # what forward and loss are called in: autocast, or nothing


def measure(  # 9: the model and its units, a sample, how it is trained, and the name of the measurement
    model: nn.Module,
    chain: Chain,
    *,
    input_: Batch,
    target: Batch,
    loss_fn: LossFn,
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer],
    of: dict[str, Any],
    within: Within = nullcontext,
) -> Profile:
    """Run ``model`` unit by unit, and as a whole, and time it. Its state is as before.

    The mean loss ``loss_fn`` (output, ``target`` [B, ...]) is counted to the last unit. ``of``: the identity of the
    measurement.
    """
    pieces = chain.pieces([1] * len(chain.units))
    # Before anything else: more tensors in memory would make its allocations cheaper than in training.
    forward, backward = pace(model, input_, target, loss_fn, within)
    with restored(model, input_), torch.enable_grad():
        for module in (model, *pieces):
            module.train()
        bench = _Bench(pieces, input_, target, loss_fn, within)
        units = bench.look(model, chain)
        rounds = _repeated(bench.run, input_.device)
        updates, copies = _updates(model, pieces, optimizer, input_.device)
    # The least: a unit is short, so what is slower was interrupted. Of the whole the mean: training is interrupted.
    forwards, backwards = (map(min, zip(*times, strict=True)) for times in zip(*rounds, strict=True))
    units = [
        replace(unit, forward=f, backward=b, **vars(update))
        for unit, f, b, update in zip(units, forwards, backwards, updates, strict=True)
    ]
    return Profile(of=of, units=units, forward=forward, backward=backward, optimizer_copies=copies)


def pace(
    model: nn.Module, input_: Batch, target: Batch, loss_fn: LossFn, within: Within = nullcontext
) -> tuple[float, float]:
    """Return the mean seconds of forward and backward of the whole model. Its state is as before."""

    def once() -> tuple[float, float]:
        given, wanted = input_.clone(), target.clone()  # model and loss may write to them
        start = now(input_.device)
        with within():
            loss = loss_fn(call(model, given), wanted)
        middle = now(input_.device)
        loss.backward()
        return middle - start, now(input_.device) - middle

    with restored(model, input_), torch.enable_grad():
        model.train()
        forwards, backwards = zip(*_repeated(once, input_.device), strict=True)
    return statistics.fmean(forwards), statistics.fmean(backwards)


@contextmanager
def restored(model: nn.Module, input_: Batch) -> Iterator[None]:
    """Leave the model, and the random streams of its device, as they were found."""
    state = copy.deepcopy(model.state_dict())
    # Some buffers are no part of the state, and a forward may put others in their places.
    owned = [(owner, *named) for owner in model.modules() for named in owner.named_buffers(recurse=False)]
    buffers = [(*place, place[-1].clone()) for place in owned]
    try:
        with modes_kept(model), streams_kept(input_.device):
            yield
    finally:
        for owner, name, buffer, values in buffers:
            setattr(owner, name, buffer.copy_(values))
        model.load_state_dict(state)
        model.zero_grad()


def _repeated(measured: Callable[[], Figures], device: torch.device) -> list[Figures]:
    """Return each measurement, as often as there is time, without the first rounds."""
    warm = time.perf_counter() + (GPU_WARMUP_SECONDS if device.type == "cuda" else 0.0)
    for _ in range(WARMUP):
        measured()
    while time.perf_counter() < warm:
        measured()
    figures: list[Figures] = []
    start = time.perf_counter()
    while len(figures) < FEWEST or (len(figures) < MOST and time.perf_counter() - start < SECONDS):
        figures.append(measured())
    return figures


@dataclass
class _Bench:
    """The units of a model side by side, each with leaves of its own between it and its neighbours."""

    pieces: Sequence[nn.Module]
    input_: Batch
    target: Batch
    loss_fn: LossFn
    within: Within
    written: list[list[bool]] = field(default_factory=list)  # by unit and tensor: whether it writes to its argument

    def look(self, model: nn.Module, chain: Chain) -> list[UnitCost]:
        """Everything but times: what each unit keeps and sends, and which of its inputs it overwrites."""
        known = {_storage(t) for t in (*model.parameters(), *model.buffers())}
        saver: dict[int, int] = {}  # storage -> the unit that first saves it
        saved_bytes = [0] * len(self.pieces)
        alive = []  # leaves and outputs of each unit, or a storage would be used again
        arriving: Any = as_argument(self.pieces[0], self.input_)
        for unit, piece in enumerate(self.pieces):

            def pack(tensor: Tensor, unit: int = unit) -> Tensor:
                if _storage(tensor) not in known and _storage(tensor) not in saver:
                    saver[_storage(tensor)] = unit
                    saved_bytes[unit] += tensor.untyped_storage().nbytes()
                return tensor

            leaves = _leaves(arriving, with_gradient=unit > 0)
            with self.within():
                self.written.append(_written(piece, leaves))
            # Called with the leaves themselves, so that what two units save is one storage.
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                arriving = self._call(unit, self._inputs(unit, leaves))
            alive.append((leaves, arriving))
        first_unit: dict[nn.Parameter, int] = {}
        costs = []
        for unit, (name, piece, (leaves, out)) in enumerate(zip(chain.units, self.pieces, alive, strict=True)):
            tied: dict[int, int] = {}
            for p in piece.parameters():
                if (first := first_unit.setdefault(p, unit)) != unit and p.requires_grad:
                    tied[first] = tied.get(first, 0) + p.nbytes
            parameter_bytes = sum(p.nbytes for p in piece.parameters() if first_unit[p] == unit)
            came_in = sum(t.nbytes for t in tree_leaves(leaves) if isinstance(t, Tensor))
            crossing = tree_leaves(out)
            tensors = [t for t in crossing if isinstance(t, Tensor)]
            firsts = [saver.get(_storage(t)) for t in tensors]
            whole = len(tensors) == len(crossing) and all(t.shape[:1] == (len(self.input_),) for t in tensors)
            last = unit == len(self.pieces) - 1
            sent = [] if last else tensors
            unsaved = [t.nbytes for t, f in zip(sent, firsts, strict=not last) if f is None or f > unit]
            costs.append(
                UnitCost(
                    name=name,
                    forward=0.0,
                    backward=0.0,
                    parameter_bytes=parameter_bytes,
                    tied=[[first, nbytes] for first, nbytes in tied.items()],
                    activation_bytes=saved_bytes[unit],
                    act_bytes=sum(t.nbytes for t in sent),
                    grad_bytes=sum(t.nbytes for t in sent if t.is_floating_point() or t.is_complex()),
                    spared={codec: sum(_bytes_spared(codec, t) for t in sent) for codec in CODECS},
                    num_tensors=1 if last else sum(1 for t in tensors if t.numel()),
                    work_bytes=2 * (parameter_bytes + sum(tied.values())) + came_in + sum(t.nbytes for t in tensors),
                    held_before=sum(unsaved),
                    held_behind=sum(t.nbytes for t, f in zip(tensors, firsts, strict=True) if f is None or f <= unit),
                    may_cut=whole and unit not in chain.forbidden,
                    reason=chain.forbidden.get(unit, "" if whole else "what would cross has no batch"),
                )
            )
        return costs

    def run(self) -> tuple[list[float], list[float]]:
        """Return the seconds of each unit's forward and backward."""
        forwards, backwards, kept = [], [], []
        arriving: Any = as_argument(self.pieces[0], self.input_)
        for unit in range(len(self.pieces)):
            leaves = _leaves(arriving, with_gradient=unit > 0)
            inputs = self._inputs(unit, leaves)
            start = now(self.input_.device)
            arriving = self._call(unit, inputs)
            forwards.append(now(self.input_.device) - start)
            kept.append((leaves, arriving))
        grads: list[Tensor | None] = [torch.ones_like(arriving)]
        for piece, (leaves, out) in zip(reversed(self.pieces), reversed(kept), strict=True):
            start = now(self.input_.device)
            grads = _backward(piece, tree_leaves(leaves), tree_leaves(out), grads)
            backwards.append(now(self.input_.device) - start)
        return forwards, backwards[::-1]

    def _call(self, unit: int, inputs: Any) -> Any:
        with self.within():
            out = call(self.pieces[unit], inputs)
            return self.loss_fn(out, self.target) if unit == len(self.pieces) - 1 else out

    def _inputs(self, unit: int, leaves: Any) -> Any:
        """Return the unit's arguments: copies of those it overwrites."""
        written = iter(self.written[unit])
        return tree_map(lambda t: t.clone() if next(written) else t, leaves)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def now(device: torch.device) -> float:
    """Return the time at which the work launched on ``device`` is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _backward(
    piece: nn.Module, leaves: Sequence[Any], outs: Sequence[Any], grads: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Return gradients of the leaves; those of parameters are added to their present ones, as in a group.

    Not ``backward()``: it would copy a gradient that two leaves share, as the two summands of a residual do, which
    within one graph are not leaves.
    """
    leaf_ids = {id(leaf) for leaf in leaves}
    arrived = [(out, grad) for out, grad in zip(outs, grads, strict=True) if grad is not None]
    passed = {id(out): grad for out, grad in arrived if id(out) in leaf_ids}
    roots = [(out, grad) for out, grad in arrived if out.requires_grad and id(out) not in passed]
    wanted = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
    parameters = [p for p in piece.parameters() if p.requires_grad]
    computed: Sequence[Tensor | None] = [None] * (len(wanted) + len(parameters))
    if roots and computed:
        computed = torch.autograd.grad(
            [o for o, _ in roots], [*wanted, *parameters], [g for _, g in roots], allow_unused=True
        )
    for parameter, grad in zip(parameters, computed[len(wanted) :], strict=True):
        if grad is not None:
            parameter.grad = grad if parameter.grad is None else parameter.grad.add_(grad)
    of_leaf = {id(leaf): grad for leaf, grad in zip(wanted, computed, strict=False)}
    both = [(of_leaf.get(id(leaf)), passed.get(id(leaf))) for leaf in leaves]
    return [a if b is None else b if a is None else a + b for a, b in both]


@dataclass(frozen=True, kw_only=True)
class _Update:
    """What a unit takes of a group's end, in seconds, as UnitCost has it."""

    update: float = 0.0
    update_fixed: float = 0.0
    copy: float = 0.0


def _updates(
    model: nn.Module,
    pieces: Sequence[nn.Module],
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer],
    device: torch.device,
) -> tuple[list[_Update], float]:
    """Return what each unit takes of a group's end (norm, step, cleared gradients), and optimizer bytes per byte.

    Each is measured, because rules differ: Muon takes long for a matrix, and AdamW a moment for an embedding. Fixed is
    what the smallest parameter takes alone: on a GPU nearly all of it may be the calls, which are as many for a small
    stage as for the whole model.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not (num_bytes := sum(p.nbytes for p in parameters)):
        return [_Update() for _ in pieces], 0.0
    made = optimizer(parameters)
    whole = statistics.median(_seconds_of_update(made, parameters, device))
    state = sum(t.nbytes for kept in made.state.values() for t in kept.values() if isinstance(t, Tensor))
    del made  # what it remembers takes as much memory as the copies below
    copy = _seconds_of_copy(parameters, device) / num_bytes
    smallest = min(parameters, key=lambda parameter: parameter.nbytes)
    fixed = min(whole, *_seconds_of_update(optimizer([smallest]), [smallest], device))
    owned, seen = list[list[nn.Parameter]](), set[nn.Parameter]()
    for piece in pieces:
        owned.append([p for p in piece.parameters() if p.requires_grad and p not in seen])
        seen.update(owned[-1])
    sizes = [sum(p.nbytes for p in of_unit) for of_unit in owned]
    # The least, as of forward and backward. At least a little: of units that are as small, times may not tell.
    alone = [
        min(_seconds_of_update(optimizer(of_unit), of_unit, device)) if size else fixed
        for of_unit, size in zip(owned, sizes, strict=True)
    ]
    little = [(whole - fixed) * size / num_bytes / 10 for size in sizes]
    parts = [max(seconds - fixed, least) for seconds, least in zip(alone, little, strict=True)]
    scale = (whole - fixed) / sum(parts) if whole > fixed else 0.0
    return [
        _Update(update=part * scale, update_fixed=fixed, copy=size * copy) if size else _Update()
        for part, size in zip(parts, sizes, strict=True)
    ], state / num_bytes


def _seconds_of_copy(parameters: Sequence[nn.Parameter], device: torch.device) -> float:
    """Return the seconds to copy them while the copy before is still held."""
    seconds, held = [], list[list[Tensor]]()
    for _ in range(4):
        start = now(device)
        held.append([parameter.detach().clone() for parameter in parameters])
        seconds.append(now(device) - start)
        del held[:-1]
    return statistics.median(seconds[1:])


def _seconds_of_update(made: Optimizer, parameters: Sequence[nn.Parameter], device: torch.device) -> list[float]:
    """Return the seconds of some groups' ends, without the first, which makes the optimizer's state."""
    seconds = []
    for _ in range(5):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)  # not zeros, whose pages need not be there
        start = now(device)
        get_total_norm([p.grad for p in parameters if p.grad is not None])
        made.step()
        made.zero_grad()
        seconds.append(now(device) - start)
    return seconds[1:]


def _leaves(values: Any, *, with_gradient: bool) -> Any:
    def leaf(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.detach().requires_grad_(with_gradient and (value.is_floating_point() or value.is_complex()))

    return tree_map(leaf, values)


def _written(piece: nn.Module, leaves: Any) -> list[bool]:
    """Return, for each argument of a unit, whether the unit writes to it."""
    probe = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in tree_leaves(leaves)]
    before = [t._version if isinstance(t, Tensor) else 0 for t in probe]
    call(piece, tree_unflatten(probe, tree_structure(leaves)))
    return [isinstance(t, Tensor) and t._version != version for t, version in zip(probe, before, strict=True)]


def _bytes_spared(codec: str, tensor: Tensor) -> int:
    """Return by how many bytes a codec makes ``tensor`` [B, ...] smaller."""
    if not tensor.is_floating_point() or not tensor.numel() or not tensor.ndim:  # a number crosses no cut
        return 0
    coded = coded_bytes(codec, tensor.numel() // len(tensor), tensor.element_size())
    return 0 if coded is None else tensor.nbytes - len(tensor) * coded
