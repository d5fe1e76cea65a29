"""A model as a chain of units, between which it can be cut."""

import difflib
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise, product
from operator import attrgetter

from torch import Tensor, fx, nn

from adl_dist.errors import PartitionError
from adl_dist.partition.piece import Crossing, StageModule, extract
from adl_dist.partition.trace import Trace, is_light, read
from adl_dist.partition.tracer import has_hooks


def linearise(model: nn.Module, *, granularity: str = "block", samples: tuple[Tensor, Tensor] | None = None) -> "Chain":
    """Read ``model``, any module that torch.fx can trace, with one tensor as its input, as a chain of units.

    At granularity ``layer`` units are single layers and operations, also in residual blocks; at ``block`` they are what
    the model's own forward calls, of an ``nn.Sequential`` its children, which need not be traceable.

    Raises:
        PartitionError: it cannot be traced; names the line and the ways out.
    """
    is_plain = all(getattr(type(model), name) is getattr(nn.Sequential, name) for name in ("forward", "train"))
    if granularity == "block" and is_plain and not has_hooks(model):
        return SequentialChain(model)
    return TracedChain(model, *read(model, granularity=granularity))


class SequentialChain:
    """The children of an ``nn.Sequential``; one that stands twice is two units."""

    def __init__(self, model: nn.Module) -> None:
        self._children = [(name, child) for name, child in model._modules.items() if child is not None]
        self.units = [name for name, _ in self._children]
        uses = (use for unit, (name, child) in enumerate(self._children) for use in _uses_of(unit, name, child))
        self.forbidden = _torn(uses)

    def pieces(self, sizes: Sequence[int]) -> list[nn.Module]:
        """Return a Sequential of ``sizes`` units for each stage."""
        bounds = pairwise(accumulate(sizes, initial=0))
        return [nn.Sequential(OrderedDict(self._children[start:stop])) for start, stop in bounds]


class TracedChain:
    """The steps of a traced forward: each unit is one step that computes, and the light ones that follow it."""

    def __init__(self, model: nn.Module, training: Trace, evaluation: Trace) -> None:
        self._model = model
        unit_of, self.units = _units(training)
        self._modes = [_Mode(training, unit_of, len(self.units))]
        if evaluation is not training:
            self._modes.append(_Mode(evaluation, _aligned(training, unit_of, evaluation), len(self.units)))
        uses: list[Use] = []
        for step, unit in [item for mode in self._modes for item in mode.unit_of.items()]:
            if step.op in ("call_module", "get_attr"):
                uses += _uses_of(unit, str(step.target), attrgetter(str(step.target))(model))
        self.forbidden = _torn(uses)
        for mode, cut in product(self._modes, range(len(self.units) - 1)):
            for node, _ in mode.crossing(cut):
                if node in mode.trace.independent:
                    self.forbidden.setdefault(cut, f"'{node.name}', which does not depend on the input, would cross it")

    def pieces(self, sizes: Sequence[int]) -> list[nn.Module]:
        """Return a module for each stage, with the graphs of its ``sizes`` units for training and evaluation."""
        training, evaluation = self._modes[0], self._modes[-1]
        unlike = training.trace.unlike, evaluation.trace.unlike
        pieces = []
        for start, stop in pairwise(accumulate(sizes, initial=0)):
            graphs = training.graph(start, stop), evaluation.graph(start, stop)
            pieces.append(StageModule(self._model, graphs, self.units[start:stop], unlike))
        # What no forward reads, and second names of what one does, go to the stage of that tensor, or the last.
        held = {name for piece in pieces for name in piece.state_dict()}
        home = {id(t): piece for piece in pieces for t in (*piece.parameters(), *piece.buffers())}
        for name, tensor in self._model.state_dict(keep_vars=True).items():
            if name not in held:
                home.get(id(tensor), pieces[-1]).adopt(self._model, name)
        return list(pieces)


# ``units``: their names, in the order they run; ``forbidden``: cuts that cannot be made, by the unit before them, each
# with the reason; ``pieces(sizes)``: stages that together hold exactly the model's modules.
Chain = SequentialChain | TracedChain


class _Mode:
    """A trace, each step in its unit."""

    def __init__(self, trace: Trace, unit_of: dict[fx.Node, int], num_units: int) -> None:
        self.trace, self.unit_of, self._num_units = trace, unit_of, num_units
        self._last_value_use: dict[fx.Node, int] = {}
        self._last_shape_use: dict[fx.Node, int] = {}
        for step, unit in unit_of.items():
            for source in step.all_input_nodes:
                self._note_use(source, unit, self._last_value_use)
        fx.node.map_arg(trace.result, lambda node: self._note_use(node, num_units - 1, self._last_value_use))

    def _note_use(self, node: fx.Node, unit: int, last: dict[fx.Node, int]) -> None:
        if node not in self.trace.shapes:
            last[node] = max(unit, last.get(node, 0))
        else:  # computed where it is needed, from the shapes of tensors
            for source in node.all_input_nodes:
                self._note_use(source, unit, self._last_shape_use)

    def crossing(self, cut: int) -> list[Crossing]:
        """Return what crosses the cut after unit ``cut``, in the order it was computed."""
        crossing = []
        for node in (self.trace.input, *(step for step in self.trace.steps if self.unit_of[step] <= cut)):
            is_value = self._last_value_use.get(node, -1) > cut
            if is_value or self._last_shape_use.get(node, -1) > cut:
                crossing.append(Crossing(node, is_shape=not is_value))
        return crossing

    def graph(self, start: int, stop: int) -> fx.Graph:
        """Return the graph of the stage that holds units ``start`` to ``stop`` - 1."""
        steps = [step for step in self.trace.steps if start <= self.unit_of[step] < stop]
        arriving = self.crossing(start - 1) if start > 0 else [Crossing(self.trace.input, is_shape=False)]
        return extract(self.trace, steps, arriving, self.crossing(stop - 1) if stop < self._num_units else None)


Use = tuple[int, str, object]  # a unit, and a tensor that it uses by that name


def _uses_of(unit: int, name: str, used: object) -> Iterator[Use]:
    """Yield the tensors of a module, also those that it holds twice; or the one tensor that ``used`` is."""
    if not isinstance(used, nn.Module):
        yield unit, name, used
        return
    for kind in (used.named_parameters, used.named_buffers):
        yield from ((unit, inner, tensor) for inner, tensor in kind(prefix=name, remove_duplicate=False))


def _torn(uses: Iterable[Use]) -> dict[int, str]:
    """Return the cuts that would split one tensor, all uses of which must be on one stage, with the reason."""
    units_of: dict[int, list[tuple[int, str]]] = {}
    for unit, name, tensor in uses:
        units_of.setdefault(id(tensor), []).append((unit, name))
    torn: dict[int, str] = {}
    for found in units_of.values():
        (first, name), (last, other) = min(found), max(found)
        shared = f"'{name}' is used on both sides of it"
        for cut in range(first, last):
            torn.setdefault(cut, shared if name == other else f"'{name}' and '{other}' are one and the same tensor")
    return torn


def _units(trace: Trace) -> tuple[dict[fx.Node, int], list[str]]:
    unit_of: dict[fx.Node, int] = {}
    names: list[str] = []
    seen: Counter[str] = Counter()
    waiting: list[fx.Node] = []  # constants, and light steps before the first that computes
    for step in trace.steps:
        if step in trace.constants or (is_light(step) and (waiting or not names)):
            waiting.append(step)
        elif is_light(step):
            unit_of[step] = len(names) - 1
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
