"""Captured calls of a forward, run again one by one to time each unit."""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from adl_dist.batch import Batch, tensors_of, version_of
from adl_dist.codecs import CODECS, coded_bytes
from adl_dist.partition.chain import Chain
from adl_dist.partition.containers import map_tensors, tensors_in
from adl_dist.partition.costs import UnitCost
from adl_dist.partition.cut import attempt
from adl_dist.partition.recorder import Recorder
from adl_dist.partition.recording import INPUT, Call
from adl_dist.partition.value import Label

Within = Callable[[], AbstractContextManager[Any]]  # the context of forward and loss: autocast, or nothing


def now(device: torch.device) -> float:
    """Wait for the work launched on ``device``; return the time in seconds."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def first_units(model: nn.Module, chain: Chain) -> dict[str, int]:
    """Return the index of the first unit that uses each parameter, by name.

    An unused parameter gets the last unit.
    """
    found = {name: unit for unit, names in reversed([*enumerate(_uses(chain))]) for name in names}
    return {name: found.get(name, len(chain.units) - 1) for name, _ in model.named_parameters()}


def _uses(chain: Chain) -> list[set[str]]:
    """Return the names of the parameters and buffers used by each unit."""
    uses: list[set[str]] = [set() for _ in chain.units]
    for one in chain.recording.modes[True].calls.values():
        if not one.is_open:
            uses[chain.places[one.key]] |= one.uses
    return uses


@dataclass(kw_only=True)
class CapturedCall:
    """One call of the forward, repeatable on its own.

    Attributes:
        parameters: the trained parameters that it computes with.
        needs_grad: ids of the tensors among its arguments that are part of a graph.
        writes: ids of the argument tensors that it writes to.
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
        """Return (new leaves, copies of written leaves, (args, kwargs)) for a run."""
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


def times_of(
    calls: Sequence[CapturedCall], num_units: int, within: Within, device: torch.device
) -> tuple[list[float], list[float]]:
    """Run ``calls``; return (forward, backward) seconds, each by unit."""
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
        wanted = [*leaves, *one.parameters]
        if not ends or not wanted:
            continue
        start = now(device)
        # Not by backward(), which would copy a gradient that two leaves share, like the summands of a residual.
        computed = torch.autograd.grad(ends, wanted, grads, allow_unused=True)
        for parameter, grad in zip(one.parameters, computed[len(leaves) :], strict=True):
            if grad is not None:
                parameter.grad = grad if parameter.grad is None else parameter.grad.add_(grad)
        backwards[one.unit] += now(device) - start
    return forwards, backwards


class Capture(Recorder):
    """A recorder that also keeps calls, values and bytes saved by autograd.

    Attributes:
        calls: all calls that run as a whole, and the loss.
        values: the tensor of each label.
        loss: the loss.
        savers: for each storage that graphs save, by its address, the first unit that saves it.
        saved: for each unit, the bytes of the storages that it is the first to save.
    """

    def __init__(self, model: nn.Module, chain: Chain, within: Within) -> None:
        super().__init__(model, chain.recording, training=True)
        self.calls: list[CapturedCall] = []
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
        """Run a call of the forward, and keep it to be repeated."""
        self._unit = self._chain.places.get(call.key, self._unit)
        state = [*module.parameters()] if module is not None else tensors_in((args, kwargs))
        trained = [t for t in state if isinstance(t, nn.Parameter) and t.requires_grad]
        return self._keep(function, args, kwargs, trained, replays=bool(call.checkpoint))

    def _keep(
        self, function: Any, args: Any, kwargs: Any, parameters: list[nn.Parameter], *, replays: bool = False
    ) -> Any:
        tensors = tensors_in((args, kwargs))
        versions = [version_of(t) for t in tensors]
        one = CapturedCall(
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
        one.writes = {id(t) for t, v in zip(tensors, versions, strict=True) if version_of(t) != v}
        return out

    def _value(self, tensor: Tensor, label: Label, call: Call | None = None) -> None:
        super()._value(tensor, label, call)
        self.values[label] = tensor

    def _note_predictable(self, *_: Any) -> None:
        """Do nothing, because the shapes are recorded already."""

    def _pack(self, tensor: Tensor) -> Tensor:
        key = _storage(tensor)
        if key not in self._known and key not in self.savers:
            self.savers[key] = self._unit
            self.saved[self._unit] += tensor.untyped_storage().nbytes()
        return tensor


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _crossing(chain: Chain, values: dict[Label, Tensor]) -> list[tuple[list[Tensor], int]]:
    """Return (tensors, number of extra messages) for the cut after each unit.

    The last unit has no entry. Nothing crosses where no cut is possible. Extra messages hold labels or input sizes.
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


def unit_costs(model: nn.Module, chain: Chain, capture: Capture, input_: Batch) -> list[UnitCost]:
    """Return the units' costs except times: bytes, messages, possible cuts."""
    crossing = [*_crossing(chain, capture.values), ([capture.loss], 0)]
    arriving, firsts, uses, costs = [*tensors_of(input_)], first_units(model, chain), _uses(chain), []
    for unit, (name, (tensors, extra)) in enumerate(zip(chain.units, crossing, strict=True)):
        parameter_bytes, tied = 0, dict[int, int]()
        for key, parameter in model.named_parameters():
            if firsts[key] == unit:
                parameter_bytes += parameter.nbytes
            elif key in uses[unit] and parameter.requires_grad:
                tied[firsts[key]] = tied.get(firsts[key], 0) + parameter.nbytes
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


def _bytes_spared(codec: str, tensor: Tensor) -> int:
    """Return the number of bytes that a codec saves on ``tensor`` [B, ...]."""
    if not tensor.is_floating_point() or not tensor.numel() or not tensor.ndim:  # a number crosses no cut
        return 0
    coded = coded_bytes(codec, tensor.numel() // len(tensor), tensor.element_size())
    return 0 if coded is None else tensor.nbytes - len(tensor) * coded
