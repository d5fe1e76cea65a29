"""Time the calls of a model's forward, one by one, where it will be trained."""

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from adl_dist.batch import Batch, call, tensors_of
from adl_dist.codecs import CODECS, coded_bytes
from adl_dist.partition.chain import Chain, copied_model
from adl_dist.partition.containers import map_tensors, tensors_in
from adl_dist.partition.costs import Profile, UnitCost
from adl_dist.partition.cut import attempt
from adl_dist.partition.forward_record import INPUT, Call, Recorder
from adl_dist.partition.value import Label
from adl_dist.streams import streams_kept

WARMUP = 2  # rounds; the second is the first to add to gradients that are there
FEWEST, MOST = 3, 30  # rounds after these
GPU_WARMUP_SECONDS = 1.0  # and as many more rounds as fit: a GPU that rested runs at a fraction of its clock
SECONDS = 6.0  # beyond the fewest no round is started after so long

Figures = TypeVar("Figures")
LossFn = Callable[[Any, Any], Tensor]
Within = Callable[[], AbstractContextManager[Any]]  # the context of forward and loss: autocast, or nothing


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
    """Time the calls of ``model`` alone, and the whole model; both as copies.

    Args:
        model: the uncut model, on its device.
        chain: its units. Cuts that turn out to be impossible are added to ``chain.forbidden``.
        input_: a micro-batch.
        target: its targets, [B, ...].
        loss_fn: the mean loss of an output and ``target``, counted to the last unit.
        optimizer: makes the optimizer of some parameters.
        of: the identity of the measurement.
        within: makes the context of forward and loss.
    """
    # Before anything else: more tensors in memory would make its allocations cheaper than in training.
    forward, backward = pace(model, input_, target, loss_fn, within)
    twin = copied_model(model).train()
    with streams_kept(input_.device), torch.enable_grad():
        capture = _Capture(twin, chain, within)
        capture.run(input_, lambda output: loss_fn(output, target.clone()))
        units = _unit_costs(twin, chain, capture, input_)
        rounds = _repeated(partial(_times, capture.calls, len(units), within, input_.device), input_.device)
        updates, copies = _updates([*twin.parameters()], [*_owned(twin, chain).values()], optimizer, input_.device)
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
    """Return the mean seconds of forward and backward of a copy of the whole model."""
    twin = copied_model(model).train()

    def once() -> tuple[float, float]:
        given, wanted = input_.clone(), target.clone()  # model and loss may write to them
        start = now(input_.device)
        with within():
            loss = loss_fn(call(twin, given), wanted)
        middle = now(input_.device)
        loss.backward()
        return middle - start, now(input_.device) - middle

    with streams_kept(input_.device), torch.enable_grad():
        forwards, backwards = zip(*_repeated(once, input_.device), strict=True)
    return statistics.fmean(forwards), statistics.fmean(backwards)


def now(device: torch.device) -> float:
    """Return the time at which the work launched on ``device`` is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def first_units(chain: Chain) -> dict[str, int]:
    """Return the first unit that computes with each parameter or buffer, by its name."""
    found: dict[str, int] = {}
    for unit, names in enumerate(_uses(chain)):
        for name in names:
            found.setdefault(name, unit)
    return found


def _uses(chain: Chain) -> list[set[str]]:
    """Return the names of the parameters and buffers that each unit computes with."""
    uses: list[set[str]] = [set() for _ in chain.units]
    for one in chain.recording.modes[True].calls.values():
        if not one.is_open:
            uses[chain.places[one.key]] |= one.uses
    return uses


def _owned(model: nn.Module, chain: Chain) -> dict[int, list[nn.Parameter]]:
    """Return the trained parameters of each unit that no earlier unit computes with."""
    owned: dict[int, list[nn.Parameter]] = {unit: [] for unit in range(len(chain.units))}
    firsts = first_units(chain)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            owned[firsts.get(name, len(chain.units) - 1)].append(parameter)
    return owned


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


@dataclass(kw_only=True)
class _Captured:
    """One call of the forward, which can be repeated alone.

    Attributes:
        parameters: the trained ones that it computes with.
        needs_grad: ids of the tensors among its arguments that are part of a graph.
        writes: ids of those that it writes to.
        replays: whether torch.utils.checkpoint runs it once more in the backward.
    """

    unit: int
    function: Callable[..., Any]
    args: Any
    kwargs: Any
    parameters: list[nn.Parameter]
    needs_grad: set[int]
    has_graph: bool = True
    writes: set[int] = field(default_factory=set)
    replays: bool = False

    def prepare(self) -> tuple[list[Tensor], list[Tensor], Any]:
        """Return new leaves, copies of those that the call writes to, and its arguments."""
        leaves: dict[int, Tensor] = {}
        given: dict[int, Tensor] = {}

        def leaf(tensor: Tensor) -> Tensor:
            if isinstance(tensor, nn.Parameter):
                return tensor
            if (key := id(tensor)) not in given:
                leaves[key] = given[key] = tensor.detach().requires_grad_(key in self.needs_grad)
                if key in self.writes:
                    given[key] = leaves[key].clone()
            return given[key]

        arguments = map_tensors(leaf, (self.args, self.kwargs))
        return [*leaves.values()], [given[key] for key in self.writes if key in given], arguments


def _times(
    calls: Sequence[_Captured], num_units: int, within: Within, device: torch.device
) -> tuple[list[float], list[float]]:
    """Return the seconds of each unit's forward and backward."""
    forwards, backwards, graphs = [0.0] * num_units, [0.0] * num_units, []
    for one in calls:
        leaves, written, (args, kwargs) = one.prepare()
        start = now(device)
        with within(), torch.set_grad_enabled(one.has_graph):
            out = one.function(*args, **kwargs)
        seconds = now(device) - start
        forwards[one.unit] += seconds
        backwards[one.unit] += seconds * one.replays
        unique = {id(t): t for t in (*tensors_in(out), *written) if t.grad_fn is not None}
        graphs.append(([leaf for leaf in leaves if leaf.requires_grad], [*unique.values()]))
    for one in reversed(calls):
        leaves, ends = graphs.pop()
        grads = [torch.ones_like(end) for end in ends]
        start = now(device)
        _backward(leaves, one.parameters, ends, grads)
        backwards[one.unit] += now(device) - start
    return forwards, backwards


def _backward(
    leaves: Sequence[Tensor], parameters: Sequence[nn.Parameter], ends: Sequence[Tensor], grads: Sequence[Tensor]
) -> None:
    """Compute the gradients of the leaves, and add those of parameters to their present ones, as in a group.

    Not by ``backward()``, which would copy a gradient that two leaves share, like the summands of a residual.
    """
    if not ends or not (leaves or parameters):
        return
    computed = torch.autograd.grad(ends, [*leaves, *parameters], grads, allow_unused=True)
    for parameter, grad in zip(parameters, computed[len(leaves) :], strict=True):
        if grad is not None:
            parameter.grad = grad if parameter.grad is None else parameter.grad.add_(grad)


class _Capture(Recorder):
    """Keeps the calls of one forward, what flows between them, and the bytes that autograd saves.

    Attributes:
        calls: those that are no containers, and the loss.
        values: the tensor of each label.
        loss: the loss.
        savers: by storage, the unit that saves it first.
        saved: the bytes that each unit saves first.
    """

    def __init__(self, model: nn.Module, chain: Chain, within: Within) -> None:
        super().__init__(model, chain.recording, training=True)
        self.calls: list[_Captured] = []
        self.values: dict[Label, Tensor] = {}
        self.savers: dict[int, int] = {}
        self.saved = [0] * len(chain.units)
        self._chain, self._within, self._unit = chain, within, 0
        self._known = {_storage(t) for t in (*model.parameters(), *model.buffers())}

    def run(self, batch: Batch, loss_fn: Callable[[Any], Tensor]) -> None:
        """Run the model and the loss on one micro-batch."""
        outputs: list[Any] = []
        handle = self.model.register_forward_hook(lambda _model, _args, output: outputs.append(output))
        with self._within(), torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor):
            self.observe(batch)
            handle.remove()
            self._unit = len(self._chain.units) - 1
            self.loss = self._keep(loss_fn, (outputs[-1],), {}, [])
        for number, tensor in enumerate(tensors_of(batch)):
            self.values.setdefault(("", INPUT, number, 0), tensor)

    def _run(self, call: Call, function: Callable[..., Any], args: Any, kwargs: Any, module: Any) -> Any:
        """Keep a call before it runs."""
        self._unit = self._chain.places.get(call.key, self._unit)
        state = [*module.parameters()] if module is not None else tensors_in((args, kwargs))
        trained = [t for t in state if isinstance(t, nn.Parameter) and t.requires_grad]
        return self._keep(function, args, kwargs, trained, replays=bool(call.checkpoint))

    def _keep(
        self, function: Any, args: Any, kwargs: Any, parameters: list[nn.Parameter], *, replays: bool = False
    ) -> Any:
        tensors = tensors_in((args, kwargs))
        versions = [0 if t.is_inference() else t._version for t in tensors]
        one = _Captured(
            unit=self._unit,
            function=function,
            args=args,
            kwargs=kwargs,
            parameters=parameters,
            needs_grad={id(t) for t in tensors if t.requires_grad},
            has_graph=torch.is_grad_enabled(),
            replays=replays,
        )
        self.calls.append(one)
        out = function(*args, **kwargs)
        one.writes = {id(t) for t, v in zip(tensors, versions, strict=True) if not t.is_inference() and t._version != v}
        return out

    def _value(self, tensor: Tensor, label: Label, call: Call | None = None) -> None:
        super()._value(tensor, label, call)
        self.values[label] = tensor

    def _note_predictable(self, *_: Any) -> None:
        """Look for no shapes: they are recorded already."""

    def _pack(self, tensor: Tensor) -> Tensor:
        key = _storage(tensor)
        if key not in self._known and key not in self.savers:
            self.savers[key] = self._unit
            self.saved[self._unit] += tensor.untyped_storage().nbytes()
        return tensor


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _crossing(chain: Chain, values: dict[Label, Tensor]) -> list[tuple[list[Tensor], int]]:
    """Return the tensors that would cross a cut after each unit but the last, and the number of messages beside them.

    Nothing crosses where no cut is possible.
    """
    count = len(chain.units)

    def everywhere() -> list[int]:
        stops = [unit + 1 for unit in range(count - 1) if unit not in chain.forbidden]
        return [stop - start for start, stop in pairwise([0, *stops, count])]

    sizes, plan = attempt(chain, everywhere, lambda sizes: (sizes, chain.plan(sizes)), fixed=False)
    mode = plan.modes[True]
    found: list[tuple[list[Tensor], int]] = [([], 0) for _ in chain.units[:-1]]
    for edge, stop in enumerate(accumulate(sizes[:-1])):
        tensors = [values[labels[0]] for labels in mode.crossing[edge] if labels[0] in values]
        found[stop - 1] = tensors, (mode.sizes[edge] is None) + mode.decides
    return found


def _unit_costs(model: nn.Module, chain: Chain, capture: _Capture, input_: Batch) -> list[UnitCost]:
    """Return everything but times: bytes that each unit keeps and sends, and where the model can be cut."""
    crossing = [*_crossing(chain, capture.values), ([capture.loss], 0)]
    arriving, firsts = [*tensors_of(input_)], first_units(chain)
    parameters, uses = dict(model.named_parameters()), _uses(chain)
    uses[-1] |= parameters.keys() - firsts.keys()
    costs = []
    for unit, (name, (tensors, extra)) in enumerate(zip(chain.units, crossing, strict=True)):
        own = [(firsts.get(n, unit), parameters[n]) for n in sorted(uses[unit] & parameters.keys())]
        tied: dict[int, int] = {}
        for first, parameter in own:
            if first != unit and parameter.requires_grad:
                tied[first] = tied.get(first, 0) + parameter.nbytes
        parameter_bytes = sum(parameter.nbytes for first, parameter in own if first == unit)
        savers = [(t.nbytes, capture.savers.get(_storage(t), len(chain.units))) for t in tensors]
        sent = [] if unit == len(chain.units) - 1 else tensors
        costs.append(
            UnitCost(
                name=name,
                forward=0.0,
                backward=0.0,
                parameter_bytes=parameter_bytes,
                tied=[[first, nbytes] for first, nbytes in tied.items()],
                activation_bytes=capture.saved[unit],
                act_bytes=sum(t.nbytes for t in sent),
                grad_bytes=sum(t.nbytes for t in sent if t.requires_grad),
                spared={codec: sum(_bytes_spared(codec, t) for t in sent) for codec in CODECS},
                num_tensors=extra + sum(1 for t in tensors if t.numel()),
                work_bytes=2 * (parameter_bytes + sum(tied.values())) + sum(t.nbytes for t in (*arriving, *tensors)),
                held_before=sum(nbytes for nbytes, first in savers if first > unit and sent),
                held_behind=sum(nbytes for nbytes, first in savers if first <= unit or first == len(chain.units)),
                may_cut=unit not in chain.forbidden,
                reason=chain.forbidden.get(unit, ""),
            )
        )
        arriving = tensors
    return costs


@dataclass(frozen=True, kw_only=True)
class _Update:
    """The seconds that a unit takes at the end of a group, as in :class:`UnitCost`."""

    update: float = 0.0
    update_fixed: float = 0.0
    copy: float = 0.0


def _updates(
    parameters: Sequence[nn.Parameter],
    owned: Sequence[Sequence[nn.Parameter]],
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer],
    device: torch.device,
) -> tuple[list[_Update], float]:
    """Return the seconds of each unit at the end of a group, and optimizer bytes per byte of parameters.

    That is norm, step and cleared gradients. Each unit is measured, because rules differ: Muon takes long for a matrix,
    and AdamW a moment for an embedding. The time of the smallest parameter is the fixed part: on a GPU nearly all of it
    may be launches, which are as many for a small stage as for the whole model.
    """
    parameters = [p for p in parameters if p.requires_grad]
    if not (num_bytes := sum(p.nbytes for p in parameters)):
        return [_Update() for _ in owned], 0.0
    made = optimizer(parameters)
    whole = statistics.median(_seconds_of_update(made, parameters, device))
    state = sum(t.nbytes for kept in made.state.values() for t in kept.values() if isinstance(t, Tensor))
    del made  # what it remembers takes as much memory as the copies below
    copy = _seconds_of_copy(parameters, device) / num_bytes
    smallest = min(parameters, key=lambda parameter: parameter.nbytes)
    fixed = min(whole, *_seconds_of_update(optimizer([smallest]), [smallest], device))
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


def _bytes_spared(codec: str, tensor: Tensor) -> int:
    """Return by how many bytes a codec makes ``tensor`` [B, ...] smaller."""
    if not tensor.is_floating_point() or not tensor.numel() or not tensor.ndim:  # a number crosses no cut
        return 0
    coded = coded_bytes(codec, tensor.numel() // len(tensor), tensor.element_size())
    return 0 if coded is None else tensor.nbytes - len(tensor) * coded
