"""A model as a chain of units, between which it can be cut."""

import difflib
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate, pairwise
from operator import attrgetter
from typing import Any

import torch
from torch import fx, nn

from adl_dist.batch import call, tensors_of
from adl_dist.errors import PartitionError
from adl_dist.partition.layered import look
from adl_dist.partition.module_state import modes_kept
from adl_dist.partition.nodes import is_light
from adl_dist.partition.piece import Crossing, TracedStage, adopt, extract
from adl_dist.partition.ran import Ran, Samples, run
from adl_dist.partition.ties import KEPT, Ties, Use, never_moved
from adl_dist.partition.trace import Trace, read, unsendable
from adl_dist.partition.tracer import UntraceableError, check_signature, has_hooks
from adl_dist.partition.trimmed import LayeredStage, travelling


def linearise(
    model: nn.Module,
    *,
    granularity: str = "block",
    samples: Samples | None = None,
    varies: bool = False,
    keeps_ties: str | None = KEPT,
) -> "Chain":
    """Read ``model``, any module that torch.fx can trace, as a chain of units.

    One with an attribute ``layer_list``, the name of an ``nn.ModuleList`` in it, is not traced: its units are those of
    :class:`LayeredChain`, whatever the granularity.

    At granularity ``layer`` units are single layers and operations, also in residual blocks; at ``block`` they are what
    the model's own forward calls, of an ``nn.Sequential`` its children, which need not be traceable. ``samples``: real
    inputs of two different batch sizes, on the model's device, say of 2 and 4 samples. The parts of the model run once
    on both, so that its forward may branch on what is the same for every batch; None: its input is one tensor, and it
    branches on nothing but parameters. ``varies``: inputs of other lengths will come; a forward that would decide
    something otherwise for one of them ends with an error. ``keeps_ties``: why a parameter that units have under names
    of their own must be on one stage, in words; None: it need not, and stages are made that share it.

    Raises:
        PartitionError: it cannot be traced; names the line and the ways out.
    """
    if has_layer_list(model):
        return LayeredChain(model, str(model.layer_list), samples, keeps_ties)
    if granularity == "block" and has_plain_units(model):
        return SequentialChain(model, samples, keeps_ties)
    try:
        traces = read(model, granularity=granularity, samples=samples, varies=varies)
        return TracedChain(model, *traces, keeps_ties)
    except UntraceableError as error:
        raise PartitionError(f"{error}; {_ways_out(model, error.where, granularity, samples)}") from error


def has_layer_list(model: nn.Module) -> bool:
    """Return whether ``model`` says by an attribute ``layer_list`` which list of layers it is cut at."""
    return getattr(model, "layer_list", None) is not None


def has_plain_units(model: nn.Module) -> bool:
    """Return whether ``model`` is an ``nn.Sequential`` that does nothing else than calling its children in order."""
    if isinstance(model, torch.jit.ScriptModule):  # whose class has no such methods
        return False
    is_plain = all(getattr(type(model), name) is getattr(nn.Sequential, name) for name in ("forward", "train"))
    return is_plain and not has_hooks(model)


def check_same_chain(chain: "Chain", model: nn.Module, samples: Samples, *, granularity: str) -> None:
    """Refuse a ``model`` that does something else for ``samples`` of another length than those ``chain`` was read with.

    Raises:
        PartitionError: its forward branches on a length, or repeats something as often.
    """
    if not isinstance(chain, TracedChain):
        return
    other = TracedChain(model, *read(model, granularity=granularity, samples=samples, varies=True))
    if other.keys != chain.keys:
        shapes = [list(tensor.shape) for tensor in tensors_of(samples[0])]
        raise PartitionError(
            f"{type(model).__name__}: its forward is another one for an input of {shapes}, because it branches on a "
            "length or repeats something as often, and would be read once and for all: hide the function that does by "
            "torch.fx.wrap, use partition.granularity=block if it lies in a block, or pad to one length"
        )


class SequentialChain:
    """The children of an ``nn.Sequential``; one that stands twice is two units."""

    def __init__(self, model: nn.Module, samples: Samples | None = None, keeps_ties: str | None = KEPT) -> None:
        self._children = [(name, child) for name, child in model._modules.items() if child is not None]
        self.units = [name for name, _ in self._children]
        self.forbidden: dict[int, str] = {}
        ran = (
            [] if samples is None else _run_one_after_the_other(model, [child for _, child in self._children], samples)
        )
        moved = {buffer for of_unit in ran for one in of_unit for buffer in one.moved}
        ties = Ties(model, never_moved(model, moved) if ran else ())
        uses: list[Use] = []
        for unit, (name, child) in enumerate(self._children):
            uses += ties.uses(unit, name, child, [t for one in ran[unit] for t in one.uses] if ran else None)
        for unit, one in [(unit, one) for unit, of_unit in enumerate(ran[:-1]) for one in of_unit]:
            assert samples is not None
            if (why := unsendable(one.values, (len(samples[0]), len(samples[1])))) is not None:
                self.forbidden.setdefault(unit, why)
        # Behind them: what hides its tensors hides their history, too, so that more seems to be used on both sides.
        self.forbidden = ties.torn(uses, keeps_ties) | self.forbidden
        self.shared = ties.shared

    def pieces(self, sizes: Sequence[int]) -> list[nn.Module]:
        """Return a Sequential of ``sizes`` units for each stage."""
        bounds = pairwise(accumulate(sizes, initial=0))
        return [nn.Sequential(OrderedDict(self._children[start:stop])) for start, stop in bounds]


class TracedChain:
    """The steps of a traced forward: each unit is one step that computes, and the light ones that follow it."""

    def __init__(self, model: nn.Module, training: Trace, evaluation: Trace, keeps_ties: str | None = KEPT) -> None:
        self._model = model
        self.keys = training.key, evaluation.key  # of the forwards that were read
        unit_of, self.units = _units(training)
        self._modes = [_Mode(training, unit_of, len(self.units))]
        if evaluation is not training:
            self._modes.append(_Mode(evaluation, _aligned(training, unit_of, evaluation), len(self.units)))
        ties, uses = Ties(model, training.read_only), list[Use]()
        for mode in self._modes:
            for step, unit in mode.unit_of.items():
                if step.op in ("call_module", "get_attr") and step not in mode.trace.repeated:
                    used = attrgetter(str(step.target))(model)
                    uses += ties.uses(unit, str(step.target), used, mode.trace.uses.get(step))
        self.forbidden, self.shared = ties.torn(uses, keeps_ties), ties.shared
        for cut in range(len(self.units) - 1):
            if (why := next(filter(None, (mode.obstacle(cut) for mode in self._modes)), None)) is not None:
                self.forbidden.setdefault(cut, why)

    def pieces(self, sizes: Sequence[int]) -> list[nn.Module]:
        """Return a module for each stage, with the graphs of its ``sizes`` units for training and evaluation."""
        training, evaluation = self._modes[0], self._modes[-1]
        unlike = training.trace.unlike, evaluation.trace.unlike
        pieces: list[nn.Module] = []
        held: set[str] = set()
        for start, stop in pairwise(accumulate(sizes, initial=0)):
            graphs = training.graph(start, stop), evaluation.graph(start, stop)
            pieces.append(TracedStage(self._model, graphs, self.units[start:stop], unlike, held=held))
            held |= pieces[-1].state_dict().keys()
        # What no forward reads, and second names of what one does, go to the stage of that tensor, or the last.
        home = {id(t): piece for piece in reversed(pieces) for t in (*piece.parameters(), *piece.buffers())}
        for name, tensor in self._model.state_dict(keep_vars=True).items():
            if name not in held:
                adopt(home.get(id(tensor), pieces[-1]), self._model, name)
        return pieces


class LayeredChain:
    """What a model calls before its layers, each layer, and what it calls behind them; nothing of it is read."""

    def __init__(self, model: nn.Module, layers: str, samples: Samples | None, keeps_ties: str | None = KEPT) -> None:
        if samples is None:
            raise PartitionError(f"{type(model).__name__} is cut by watching it run, which takes samples of the data")
        check_signature(model, samples)
        self._model, self._anatomy = model, (anatomy := look(model, layers, samples))
        inside = {0: anatomy.before, anatomy.count + 1: anatomy.after}
        inside |= {place + 1: (f"{layers}.{place}",) for place in range(anatomy.count)}
        ties, uses = Ties(model, never_moved(model, anatomy.moved)), list[Use]()
        for unit, names in inside.items():
            for name in names:
                uses += ties.uses(unit, name, model.get_submodule(name), ())
        with_state = {unit: [n for n in names if model.get_submodule(n).state_dict()] for unit, names in inside.items()}
        first, last = (with_state[0] or ["input"])[0], (with_state[anatomy.count + 1] or ["output"])[-1]
        self.units = [first, *(inside[place + 1][0] for place in range(anatomy.count)), last]
        self.forbidden, self.shared = ties.torn(uses, keeps_ties), ties.shared
        for unit, pair in enumerate(anatomy.pairs):
            if (why := unsendable(pair, (len(samples[0]), len(samples[1])))) is not None:
                self.forbidden.setdefault(unit, why)
        self._travels = travelling(model, anatomy, self.units, samples[0])

    def pieces(self, sizes: Sequence[int]) -> list[nn.Module]:
        """Return the model without what other stages hold, for each stage of ``sizes`` units."""
        bounds = pairwise(accumulate(sizes, initial=0))
        return [
            LayeredStage(self._model, self._anatomy, self.units, start, stop, self._travels) for start, stop in bounds
        ]


# ``units``: their names, in the order they run; ``forbidden``: cuts that cannot be made, by the unit before them, each
# with the reason; ``shared``: see :class:`Ties`;
# ``pieces(sizes)``: stages that together hold exactly the model's modules.
Chain = SequentialChain | TracedChain | LayeredChain


class _Mode:
    """A trace, each step in its unit."""

    def __init__(self, trace: Trace, unit_of: dict[fx.Node, int], num_units: int) -> None:
        self.trace, self.unit_of, self._num_units = trace, unit_of, num_units
        self._last_value_use: dict[fx.Node, int] = {}
        self._last_shape_use: dict[fx.Node, int] = {}
        self._first_step = min((unit for step, unit in unit_of.items() if step not in trace.repeated), default=0)
        for step, unit in unit_of.items():
            if step not in trace.repeated:
                for source in step.all_input_nodes:
                    self._note_use(source, unit)
        fx.node.map_arg(trace.result, lambda node: self._note_use(node, num_units - 1))

    def _note_use(self, node: fx.Node, unit: int) -> None:
        waiting, last, seen = [node], self._last_value_use, set[fx.Node]()
        while waiting:
            node = waiting.pop()
            if node in self.trace.shapes or node in self.trace.repeated:
                # Computed where it is needed; what else it depends on, it asks for its shape alone.
                waiting += [source for source in node.all_input_nodes if source not in seen]
                seen.update(waiting)
                last = self._last_shape_use
            else:
                last[node] = max(unit, last.get(node, 0))

    def obstacle(self, cut: int) -> str | None:
        """Return why the model cannot be cut after unit ``cut``, apart from what two stages would share."""
        if cut < self._first_step:
            return "nothing is computed before it"
        for node, _ in self.crossing(cut):
            if node in self.trace.independent:
                return (
                    f"'{node.name}', which does not depend on the input, would cross it; its uses must be on one stage"
                )
            if node in self.trace.unsendable:
                return f"'{node.name}': {self.trace.unsendable[node]}"
        return None

    def crossing(self, cut: int) -> list[Crossing]:
        """Return what crosses the cut after unit ``cut``, in the order it was computed."""
        crossing = []
        for node in (*self.trace.inputs, *(step for step in self.trace.steps if self.unit_of[step] <= cut)):
            is_value = self._last_value_use.get(node, -1) > cut
            if is_value or self._last_shape_use.get(node, -1) > cut:
                crossing.append(Crossing(node, is_shape=not is_value))
        return crossing

    def graph(self, start: int, stop: int) -> fx.Graph:
        """Return the graph of the stage that holds units ``start`` to ``stop`` - 1."""
        steps = [step for step in self.trace.steps if start <= self.unit_of[step] < stop]
        first = [Crossing(node, is_shape=False) for node in self.trace.inputs]
        arriving = self.crossing(start - 1) if start > 0 else first
        return extract(self.trace, steps, arriving, self.crossing(stop - 1) if stop < self._num_units else None)


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


def _run_one_after_the_other(model: nn.Module, units: Sequence[nn.Module], samples: Samples) -> list[list[Ran]]:
    """Return what each unit does in training and in evaluation; nothing if one fails, which the trial run tells."""
    found: list[list[Ran]] = [[] for _ in units]
    with modes_kept(model), suppress(Exception, SystemExit):
        for mode in (True, False):
            model.train(mode)
            values: Any = (samples[0].clone(), samples[1].clone())
            with torch.set_grad_enabled(mode):
                for unit, of_unit in zip(units, found, strict=True):
                    of_unit.append(run(partial(call, unit), (((values[0],), {}), ((values[1],), {})), modules=[unit]))
                    values = of_unit[-1].values
        return found
    return []


def _ways_out(model: nn.Module, where: str, granularity: str, samples: Samples | None) -> str:
    """Return what helps if a line of the module ``where`` cannot be read; empty: the model's own forward."""
    wrapped = "hide the function that holds this line from tracing by torch.fx.wrap"
    if granularity == "layer" and where:
        try:
            num_units = len(linearise(model, granularity="block", samples=samples).units)
        except PartitionError:
            num_units = 0
        if num_units > 1:
            return f"{wrapped}, or use partition.granularity=block, which keeps such a block whole ({num_units} units)"
    return (
        f"{wrapped}, or write a forward of the model that calls its parts one after the other, so that no line like "
        "this one stands between them; an nn.Sequential of units always works"
    )
