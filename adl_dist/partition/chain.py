"""A model as a chain of units, between which it can be cut."""

import difflib
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

from torch import fx, nn

from adl_dist.errors import PartitionError
from adl_dist.partition.piece import Crossing, StageModule, extract
from adl_dist.partition.trace import Trace, is_light, is_plain_sequential, read


class Chain(Protocol):
    """Units of a model that run one after the other.

    Attributes:
        units: names, in the order they run.
        forbidden: cuts that cannot be made, by the unit before them, each with the reason.
    """

    units: list[str]
    forbidden: dict[int, str]

    def pieces(self, sizes: Sequence[int]) -> list[nn.Module]:
        """Return the stages that hold ``sizes`` units each, and together exactly the model's modules."""
        ...


def linearise(model: nn.Module, *, granularity: str = "block") -> Chain:
    """Read ``model`` as a chain of units.

    Args:
        model: any module that torch.fx can trace, with one tensor as its input.
        granularity: ``layer``: units are single layers and operations, also in residual blocks; ``block``: units are
            what the model's own forward calls, of an ``nn.Sequential`` its children, which need not be traceable.

    Raises:
        PartitionError: it cannot be traced; names the line and the ways out.
    """
    if granularity == "block" and is_plain_sequential(model):
        return SequentialChain(model)
    return TracedChain(model, *read(model, granularity=granularity))


class SequentialChain:
    """The children of an ``nn.Sequential``; one that stands twice is two units."""

    def __init__(self, model: nn.Module) -> None:
        children = [(name, child) for name, child in model._modules.items() if child is not None]
        self.units = [name for name, _ in children]
        self._children = children
        homes = _Homes()
        for unit, (name, child) in enumerate(children):
            homes.add_module(unit, name, child)
        self.forbidden = homes.between()

    def pieces(self, sizes: Sequence[int]) -> list[nn.Module]:
        """See :class:`Chain`."""
        bounds = _bounds(sizes)
        return [nn.Sequential(OrderedDict(self._children[a:b])) for a, b in pairwise(bounds)]


class TracedChain:
    """The steps of a traced forward: each unit is one step that computes, and the light ones that follow it."""

    def __init__(self, model: nn.Module, training: Trace, evaluation: Trace) -> None:
        self._model = model
        unit_of, self.units = _units(training)
        self._modes = [_Mode(training, unit_of, len(self.units))]
        if evaluation is not training:
            self._modes.append(_Mode(evaluation, _aligned(training, unit_of, evaluation), len(self.units)))
        homes = _Homes()
        for mode in self._modes:
            for step, unit in mode.unit_of.items():
                if step.op == "call_module":
                    homes.add_module(unit, str(step.target), model.get_submodule(str(step.target)))
                elif step.op == "get_attr":
                    homes.add(unit, str(step.target), _attribute(model, str(step.target)))
        self.forbidden = homes.between()
        for mode in self._modes:
            for cut in range(len(self.units) - 1):
                across = [crossing.node for crossing in mode.crossing(cut)]
                names = [node.name for node in across if node in mode.trace.independent]
                if names:
                    self.forbidden.setdefault(cut, f"'{names[0]}', which does not depend on the input, would cross it")

    def pieces(self, sizes: Sequence[int]) -> list[nn.Module]:
        """See :class:`Chain`."""
        pieces = []
        for start, stop in pairwise(_bounds(sizes)):
            graphs = [mode.graph(start, stop) for mode in self._modes]
            unlike = self._modes[0].trace.unlike, self._modes[-1].trace.unlike
            pieces.append(StageModule(self._model, (graphs[0], graphs[-1]), self.units[start:stop], unlike))
        self._adopt_the_rest(pieces)
        return list(pieces)

    def _adopt_the_rest(self, pieces: Sequence[StageModule]) -> None:
        """Give what no forward reads, and second names of what one does, to the stage of that tensor, or the last."""
        held = {name for piece in pieces for name in piece.state_dict()}
        home = {id(t): piece for piece in pieces for t in (*piece.parameters(), *piece.buffers())}
        for name, tensor in self._model.state_dict(keep_vars=True).items():
            if name not in held:
                home.get(id(tensor), pieces[-1]).adopt(self._model, name)


@dataclass
class _Mode:
    """A trace, each step in its unit."""

    trace: Trace
    unit_of: dict[fx.Node, int]
    num_units: int
    _last_value_use: dict[fx.Node, int] = field(default_factory=dict)
    _last_shape_use: dict[fx.Node, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        def note(node: fx.Node, unit: int, last: dict[fx.Node, int]) -> None:
            if node not in self.trace.shapes:
                last[node] = max(unit, last.get(node, 0))
            else:  # computed where it is needed, from the shapes of tensors
                for source in node.all_input_nodes:
                    note(source, unit, self._last_shape_use)

        for step, unit in self.unit_of.items():
            for source in step.all_input_nodes:
                note(source, unit, self._last_value_use)
        fx.node.map_arg(self.trace.result, lambda node: note(node, self.num_units - 1, self._last_value_use))

    def crossing(self, cut: int) -> list[Crossing]:
        """Return the values that cross the cut after unit ``cut``, in the order they were computed."""
        before = [self.trace.input, *(step for step in self.trace.steps if self.unit_of[step] <= cut)]
        values = {node for node in before if self._last_value_use.get(node, -1) > cut}
        outlines = {node for node in before if self._last_shape_use.get(node, -1) > cut} - values
        return [Crossing(node, node in outlines) for node in before if node in values or node in outlines]

    def graph(self, start: int, stop: int) -> fx.Graph:
        """Return the graph of the stage that holds units ``start`` to ``stop`` - 1."""
        steps = [step for step in self.trace.steps if start <= self.unit_of[step] < stop]
        arriving = self.crossing(start - 1) if start > 0 else [Crossing(self.trace.input, shape_token=False)]
        return extract(self.trace, steps, arriving, self.crossing(stop - 1) if stop < self.num_units else None)


class _Homes:
    """Which units use which tensors; those of one tensor must stay on one stage."""

    def __init__(self) -> None:
        self._used: dict[int, list[tuple[int, str]]] = {}

    def add_module(self, unit: int, name: str, module: nn.Module) -> None:
        for kind in (module.named_parameters, module.named_buffers):
            for inner, tensor in kind(prefix=name, remove_duplicate=False):
                self.add(unit, inner, tensor)

    def add(self, unit: int, name: str, tensor: object) -> None:
        self._used.setdefault(id(tensor), []).append((unit, name))

    def between(self) -> dict[int, str]:
        """Return the cuts that would split one tensor, with the reason."""
        torn: dict[int, str] = {}
        for uses in self._used.values():
            (first, name), (last, other) = min(uses), max(uses)
            shared = f"'{name}' is used on both sides of it"
            for cut in range(first, last):
                torn.setdefault(cut, shared if name == other else f"'{name}' and '{other}' are one and the same tensor")
        return torn


def user_frame(name: str, units: Sequence[str]) -> int:
    """Return the unit called ``name``, or the first one of the block of that name.

    Raises:
        PartitionError: there is none.
    """
    for unit, known in enumerate(units):
        if known == name or known.startswith(f"{name}."):
            return unit
    blocks = [known.rsplit(".", 1)[0] for known in units]
    close = difflib.get_close_matches(name, [*units, *blocks], n=3) or units[:3]
    raise PartitionError(
        f"partition.balance: there is no unit or block '{name}'; near it are {', '.join(dict.fromkeys(close))}; "
        "adl-dist plan lists them all"
    )


def _units(trace: Trace) -> tuple[dict[fx.Node, int], list[str]]:
    unit_of: dict[fx.Node, int] = {}
    names: list[str] = []
    seen: Counter[str] = Counter()
    waiting: list[fx.Node] = []  # constants, and light steps before the first that computes
    for step in trace.steps:
        if step in trace.constants:
            waiting.append(step)
        elif is_light(step) and not waiting and names:
            unit_of[step] = len(names) - 1
        elif is_light(step):
            waiting.append(step)
        else:
            unit_of |= dict.fromkeys([*waiting, step], len(names))
            waiting.clear()
            name = _name(step)
            seen[name] += 1
            names.append(name if seen[name] == 1 else f"{name}_{seen[name]}")
    if not names:
        raise PartitionError("the model computes nothing that could be cut; use partition.num_stages=1")
    unit_of |= dict.fromkeys(waiting, len(names) - 1)
    return unit_of, names


def _name(step: fx.Node) -> str:
    if step.op == "call_module":
        return str(step.target)
    function = step.target if isinstance(step.target, str) else getattr(step.target, "__name__", step.name)
    within = next(reversed(step.meta.get("nn_module_stack") or {"": None}), "")
    return f"{within}.{function}".lstrip(".")


def _aligned(training: Trace, unit_of: Mapping[fx.Node, int], evaluation: Trace) -> dict[fx.Node, int]:
    """Return the unit of each step of ``evaluation``: that of its counterpart in training, or of the step before it.

    A constant without a counterpart goes with the step that follows, which is the first that uses it.
    """
    in_training, in_evaluation = ([(s.op, str(s.target)) for s in trace.steps] for trace in (training, evaluation))
    aligned: dict[fx.Node, int] = {}
    units: dict[int, int] = {}
    for block in difflib.SequenceMatcher(None, in_training, in_evaluation, autojunk=False).get_matching_blocks():
        for offset in range(block.size):
            units[block.b + offset] = unit_of[training.steps[block.a + offset]]
    unit = 0
    for place, step in enumerate(evaluation.steps):
        if place in units or step not in evaluation.constants:
            unit = aligned[step] = units.get(place, unit)
    for step in reversed(evaluation.steps):
        unit = aligned.setdefault(step, unit)
    return aligned


def _attribute(model: nn.Module, path: str) -> object:
    value: object = model
    for part in path.split("."):
        value = getattr(value, part)
    return value


def _bounds(sizes: Sequence[int]) -> list[int]:
    bounds = [0]
    for size in sizes:
        bounds.append(bounds[-1] + size)
    return bounds
