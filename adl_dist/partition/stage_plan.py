"""The plan of all stages: their calls, their tensors, and cut crossings."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import torch
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX

from adl_dist.errors import PartitionError
from adl_dist.partition.absent import RecordedResults
from adl_dist.partition.recording import INPUT, Call, Key, ModeRecord, Recording, state_label
from adl_dist.partition.value import EVERYWHERE, Label

EXTRA_STATE = _EXTRA_STATE_KEY_SUFFIX  # in a state_dict
VIEWS = {
    *("__getitem__", "select", "narrow", "chunk", "split", "unbind", "view", "view_as", "reshape", "flatten"),
    *("unflatten", "expand", "transpose", "permute", "movedim", "squeeze", "unsqueeze", "swapaxes", "T", "mT", "t"),
    "detach",
}  # of torch's functions, those that only look at memory


class CutImpossibleError(PartitionError):
    """A cut that the model does not allow.

    Attributes:
        stage: the cut is after this stage.
        reason: why, without the names of stages.
    """

    def __init__(self, stage: int, reason: str) -> None:
        super().__init__(f"the model cannot be cut after stage {stage}: {reason}; cut elsewhere (partition.balance)")
        self.stage, self.reason = stage, reason


@dataclass(frozen=True)
class Unit:
    """A call with a possible cut before it.

    Attributes:
        name: of the module, or of the module and the function that it calls; unique.
        block: the name of the block that it lies in.
        begins_block: whether it is the first unit of that block.
    """

    call: Call
    name: str
    block: str
    begins_block: bool


def units_of(recording: Recording) -> list[Unit]:
    """Return the units of a recorded model, in the order in which they run."""
    modes = sorted(recording.modes.values(), key=lambda mode: -sum(call.is_unit for call in mode.calls.values()))
    units: list[Unit] = []
    names: Counter[str] = Counter()
    blocks: dict[Key, str] = {}
    with_units = {_block_of(call).key for call in modes[0].calls.values() if call.is_unit}
    for call in modes[0].calls.values():
        # A block that is followed, for its effects, and computes nothing is also a unit: counts are of blocks.
        is_empty = call.is_open and not call.is_block and _block_of(call) is call and call.key not in with_units
        if call.is_unit or (is_empty and call.is_module):
            block = _block_of(call)
            if block.key not in blocks:
                blocks[block.key] = _unique(block, names)
            name = blocks[block.key] if block is call else _unique(call, names)
            last = units[-1] if units else None
            is_new = last is None or last.block != blocks[block.key]
            units.append(Unit(call, name, blocks[block.key], is_new))
    return units


def _block_of(call: Call) -> Call:
    while call.parent is not None and not call.parent.is_block:
        call = call.parent
    return call


def _unique(call: Call, names: Counter[str]) -> str:
    name = call.name if call.is_module else f"{call.caller}.{call.name}".lstrip(".")
    names[name] += 1
    return name if names[name] == 1 else f"{name}_{names[name]}"


class Way(Enum):
    """The way in which stages run a call of a module."""

    THROUGH = auto()  # every stage runs its forward and follows the calls inside
    SPLIT = auto()  # so do the stages from the first to the last that have calls inside; others skip it
    WHOLE = auto()  # one stage runs it, others skip it


@dataclass(eq=False)
class CallPlan:
    """The stages' plan for one recorded call.

    Attributes:
        key, answer, varies, recorded, is_module, is_tainted: as in :class:`~adl_dist.partition.recording.Call`.
        way: how stages run the call; a function runs as a whole.
        first, last: the first and last stage that have calls inside, or the stage that makes the call.
        stages: for each tensor in the result, the first stage that has it.
        draws: whether the call, or one inside, draws random numbers.
        written: positions of the argument tensors that a module writes to.
        follows: whether the stage that has the last of its arguments makes the call.
        is_plain: whether it does nothing but compute its result on one stage.
        repeats: whether later stages make this view again, so that less crosses the cuts.
        frame: the plan of the calls inside, if stages follow them.
        dtypes: the dtypes of the tensors in the result.
    """

    key: Key
    way: Way
    first: int
    last: int
    stages: tuple[int, ...]
    draws: bool
    answer: Any
    varies: bool
    recorded: RecordedResults
    written: tuple[int, ...] = ()
    follows: bool = False
    repeats: bool = False
    is_module: bool = False
    is_plain: bool = False
    is_tainted: bool = True
    frame: "FramePlan | None" = None
    dtypes: tuple[torch.dtype, ...] = ()


@dataclass(eq=False)
class FramePlan:
    """Plans of the calls in one forward, by name and number of calls before."""

    modules: dict[str, list[CallPlan]] = field(default_factory=dict)
    functions: dict[str, dict[Any, CallPlan]] = field(default_factory=dict)

    def callers(self, stages: set[int]) -> Iterator[tuple[str, set[int]]]:
        """Yield (module name, ``stages`` that run its forward) for calls inside."""
        for name, plans in self.modules.items():
            for planned in plans:
                inside = stages
                if planned.way is not Way.THROUGH and planned.first != EVERYWHERE:
                    inside = stages & {*range(planned.first, planned.last + 1)}
                yield name, inside
                if planned.frame is not None:
                    yield from planned.frame.callers(inside)


@dataclass(eq=False)
class ModePlan:
    """The stages' plan for the forward in training, or in evaluation.

    Attributes:
        root: the calls of the model's own forward.
        crossing: by edge, the labels of each value that crosses it: first its own, then those that it has as a result
            of modules around its call.
        sizes: by edge, for each dimension of each input, its size or the (slot, dimension) that has it; None if the
            shapes are sent.
        state: by the name of a tensor that the forward changes with values of the batch, the stage that holds it.
        births: keys of functions that make memory which values of the batch are written to.
        decides: whether micro-batches may take different paths, so that labels are sent.
        draws, draws_own: see :class:`ModeRecord`.
        numbers, labels, aliases: for :attr:`decides`, the number of each label, which its aliases share.
        common: labels of the whole-number inputs, which go to all stages that need them.
        overwritten: labels of values in memory that is written to.
    """

    root: FramePlan
    crossing: list[list[tuple[Label, ...]]]
    sizes: list[list[list[int | tuple[int, int]]] | None]
    state: dict[str, int]
    births: set[Key]
    decides: bool
    draws: set[str]
    draws_own: set[str]
    numbers: dict[Label, int]
    labels: list[Label]
    aliases: dict[Label, list[Label]]
    common: set[Label]
    overwritten: set[Label]
    recorded: ModeRecord


@dataclass(eq=False)
class StagePlan:
    """The plan of a model on K stages.

    Attributes:
        modes: the plans for training (True) and for evaluation (False).
        holders: for each tensor of the model, the stages that compute with it, the first of which saves it; for a
            module's extra state, the stages that run its forward.
        everywhere: names of buffers of which each stage has a copy.
    """

    num_stages: int
    recording: Recording
    modes: dict[bool, ModePlan]
    holders: dict[str, tuple[int, ...]]
    everywhere: set[str]


def plan_stages(recording: Recording, units: Sequence[Unit], sizes: Sequence[int], names: Iterable[str]) -> StagePlan:
    """Plan the stages of ``sizes`` units each.

    ``names`` are those of the entries in the model's ``state_dict``.

    Raises:
        CutImpossibleError: If a value would have to flow to an earlier stage, or two stages would change one tensor.
    """
    main = next(mode for mode in recording.modes.values() if mode.calls.get(units[0].call.key) is units[0].call)
    stage_of = _stages_of_units(main, units, sizes)
    order = sorted(recording.modes, key=lambda training: recording.modes[training] is not main)
    state: dict[str, int] = {}  # tensors that a forward writes to are where the writing is, also when they are read
    while True:
        homes: dict[str, int] = {}
        planned, before = {}, dict(state)
        for training in order:
            planned[training] = assigned = _Assignment(
                recording.modes[training], stage_of, homes, len(sizes), recording, state
            )
            for name, stages in assigned.users().items():
                homes.setdefault(name, min(stages))
        if state == before:
            break
    used = _users(planned.values(), state)
    modes = {training: assigned.plan() for training, assigned in planned.items()}
    holders = used | _holders_of_others(recording, modes.values(), used, {*range(len(sizes))}, names)
    return StagePlan(
        len(sizes),
        recording,
        modes,
        {name: tuple(sorted(stages)) for name, stages in holders.items()},
        {name for name in recording.glue if name not in recording.state},
    )


def _stages_of_units(main: ModeRecord, units: Sequence[Unit], sizes: Sequence[int]) -> dict[Key, int]:
    """Return the stage of each unit, and of calls before a block's first unit."""
    stages = (stage for stage, size in enumerate(sizes) for _ in range(size))
    stage_of = {unit.call.key: stage for unit, stage in zip(units, stages, strict=True)}
    first = {_block_of(unit.call).key: stage_of[unit.call.key] for unit in reversed(units)}
    for call in main.calls.values():
        block = _block_of(call).key
        if call.key in stage_of:
            first.pop(block, None)
        elif not call.is_open and block in first:
            stage_of[call.key] = first[block]
    return stage_of


def _users(planned: Iterable["_Assignment"], state: Mapping[str, int]) -> dict[str, set[int]]:
    """Return the stages that use each tensor, or write to it (``state``).

    Raise CutImpossibleError if a buffer that the forward changes has several.
    """
    users: dict[str, set[int]] = {}
    for assigned in planned:
        for name, stages in assigned.users().items():
            users.setdefault(name, set()).update(stages)
    users |= {name: {stage} for name, stage in state.items()}
    for name in (name for assigned in planned for call in assigned.mode.calls.values() for name in call.moves):
        if len(users.get(name, ())) > 1:
            raise CutImpossibleError(min(users[name]), f"'{name}' is changed by the forward and used on both sides")
    return users


def _holders_of_others(
    recording: Recording,
    modes: Iterable[ModePlan],
    used: Mapping[str, set[int]],
    everywhere: set[int],
    names: Iterable[str],
) -> dict[str, set[int]]:
    """Return the stages that hold counters, extra state and unused tensors."""
    callers = {"": everywhere}  # of each module, the stages that run its forward
    for mode in modes:
        for name, stages in mode.root.callers(everywhere):
            callers[name] = callers.get(name, set()) | stages
    holders: dict[str, set[int]] = {}
    for name in recording.moved.keys() - recording.state:
        holders[name] = used.get(name, set()).union(*(callers[forward] for forward in recording.moved[name]))
    for name in names:
        if name not in used and name not in holders:
            path, _, key = name.rpartition(".")
            while path not in callers:
                path = path.rpartition(".")[0]
            holders[name] = callers[path] if key == EXTRA_STATE else {max(callers[path])}
    return holders


class _Assignment:
    """The stages of the calls and values of one mode."""

    def __init__(
        self,
        mode: ModeRecord,
        stage_of: dict[Key, int],
        homes: dict[str, int],
        num_stages: int,
        recording: Recording,
        state: dict[str, int],
    ) -> None:
        """Assign the calls of ``mode`` to stages.

        ``state`` has the stage that writes to each tensor of the model; it is updated.
        """
        self.mode, self.num_stages, self.recording = mode, num_stages, recording
        self._assigned, self._homes, self.state = stage_of, homes, state
        self._assign()

    def _assign(self) -> None:
        self.calls: dict[Key, int] = {}
        self.follows: dict[Key, bool] = {}
        self.labels: dict[Label, int] = {}
        for label in self.mode.shapes:
            if label[1] == INPUT:
                self.labels[label] = 0
        for name in self.recording.state:
            self.labels[state_label(name)] = self.state.get(name, EVERYWHERE)
        self.last_use: dict[Label, int] = {}
        self._torn: dict[Label, tuple[int, str]] = {}
        self._written_to: set[Label] = set()  # through a view, of which the tensor itself does not know
        used_by: dict[int, int] = {}  # of each memory, the last stage that has used it
        checkpoints: dict[int, int] = {}
        for call in self.mode.calls.values():
            if call.is_open:
                continue
            stage = self._stage_of(call)
            if call.writes:
                stage = max(stage, *(used_by.get(memory, EVERYWHERE) for memory in call.writes))
            if call.checkpoint and stage != EVERYWHERE and checkpoints.setdefault(call.checkpoint, stage) != stage:
                reason = f"'{call.name}' runs inside torch.utils.checkpoint, which has one stage"
                raise CutImpossibleError(min(stage, checkpoints[call.checkpoint]), reason)
            self.calls[call.key] = stage
            needed = max((self.labels.get(label, EVERYWHERE) for label in call.reads), default=EVERYWHERE)
            is_pinned = bool(call.uses) or call.key in self._assigned or not self._written_to.isdisjoint(call.reads)
            self.follows[call.key] = stage == needed and not is_pinned
            for label in call.reads:
                self._use(label, stage, used_by)
            for label in call.makes:
                self.labels[label] = stage
            for memory in call.writes:
                self._write(call, memory, stage)
        for label in self.mode.outputs:
            self._use(label, self.num_stages - 1, used_by)
        self.repeated = self._repeat_views()
        for name, label in self.mode.state.items():
            if name in self.recording.state:
                self._note_state(name, self.labels.get(label, EVERYWHERE))

    def _stage_of(self, call: Call) -> int:
        needed = max((self.labels.get(label, EVERYWHERE) for label in call.reads), default=EVERYWHERE)
        stage = self._assigned.get(call.key)
        if stage is None and call.uses:
            stage = max((self._homes[name] for name in call.uses if name in self._homes), default=None)
        if stage is None and call.is_module and call.key[2]:  # called more often than in the other mode
            stage = next((s for k, s in reversed(self._assigned.items()) if k[:2] == call.key[:2]), None)
        if stage is None or (stage < needed and not call.uses):
            return needed
        if stage < needed:
            source = next(label for label in call.reads if self.labels.get(label, EVERYWHERE) == needed)
            raise CutImpossibleError(stage, f"'{call.name}' needs a value that '{source[1]}' makes after the cut")
        return stage

    def _use(self, label: Label, stage: int, used_by: dict[int, int]) -> None:
        if label in self._torn:
            raise CutImpossibleError(*self._torn[label])
        self.last_use[label] = max(stage, self.last_use.get(label, EVERYWHERE))
        memory = self.mode.memory.get(label)
        if memory is not None:
            used_by[memory] = max(stage, used_by.get(memory, EVERYWHERE))

    def _write(self, call: Call, memory: int, stage: int) -> None:
        """Note that the values in ``memory`` belong to ``stage`` from now on."""
        for label, of in self.mode.memory.items():
            before = self.labels.get(label)
            if of != memory or before is None or label in call.makes or before == stage:
                continue
            if before == EVERYWHERE:
                self.labels[label] = stage
                self._written_to.add(label)
            elif before < stage:
                reason = f"'{call.name}' writes to memory that it shares with another value of an earlier stage"
                self._torn[label] = stage - 1, reason
        for name in self.recording.state:
            if self.mode.memory.get(state_label(name)) == memory:
                self._note_state(name, stage)

    def _note_state(self, name: str, stage: int) -> None:
        if stage > self.state.get(name, EVERYWHERE):
            self.state[name] = stage

    def _repeat_views(self) -> set[Key]:
        """Return the keys of views that later stages repeat, so that less is sent.

        Views are repeated if their source crosses anyway, or if several of them are together as large as their source.
        """
        repeated: set[Key] = set()
        written = {memory for call in self.mode.calls.values() for memory in call.writes}
        views: dict[Label, list[Call]] = {}
        for call in self.mode.calls.values():
            if not call.is_module and call.name in VIEWS and len(call.reads) == 1 and not (call.uses or call.writes):
                source = next(iter(call.reads))
                if self.mode.memory.get(source) not in written and self.follows.get(call.key):
                    views.setdefault(source, []).append(call)
        for source in reversed([*views]):
            late = [c for c in views[source] if any(self._last(label) > self.calls[c.key] for label in c.makes)]
            crossing = [label for c in late for label in c.makes if self._last(label) > self.calls[c.key]]
            nbytes = sum(self.mode.nbytes[label] for label in crossing)
            saves = len(crossing) > 1 and nbytes >= self.mode.nbytes.get(source, 0)
            saves = saves or (bool(late) and self._last(source) > self.calls[late[0].key])
            if saves and self.calls[late[0].key] != EVERYWHERE and all(map(self._is_followed_later, late)):
                repeated |= {call.key for call in late}
                self.last_use[source] = max(self._last(label) for label in (source, *crossing))
                for label in crossing:
                    self.last_use[label] = self.labels[label]
        return repeated

    def _is_followed_later(self, call: Call) -> bool:
        """Return whether later stages follow the forward that makes ``call``."""
        around = call.parent
        if around is None:
            return True
        inside = (s for key, s in self.calls.items() if key[0] == around.path or key[0].startswith(f"{around.path}/"))
        return around.has_effects or max(inside) > self.calls[call.key]

    def users(self) -> dict[str, set[int]]:
        """Return the stages that compute with each tensor of the model."""
        found: dict[str, set[int]] = {}
        for call in self.mode.calls.values():
            if not call.is_open:
                for name in call.uses:
                    found.setdefault(name, set()).add(max(self.calls[call.key], 0))
        for name in self.mode.uses:
            found.setdefault(name, set()).add(self.num_stages - 1)
        return found

    def plan(self) -> ModePlan:
        """Return the plan of this mode."""
        aliases = self._aliases()
        written = {memory for call in self.mode.calls.values() for memory in call.writes}
        crossing, sizes = [], []
        for edge in range(self.num_stages - 1):
            slots = [(label, *aliases.get(label, ())) for label in self._crossing(edge)]
            self._check_alike(edge, [label for label, *_ in slots])
            crossing.append(slots)
            sizes.append(None if self.mode.decides else self._sizes(slots))
        labels = [*self.mode.shapes]
        numbers = {alias: number for number, label in enumerate(labels) for alias in aliases.get(label, ())}
        return ModePlan(
            root=self._frame(),
            crossing=crossing,
            sizes=sizes,
            state=self.state,
            births=self.recording.births[next(t for t, m in self.recording.modes.items() if m is self.mode)],
            decides=self.mode.decides,
            draws=self.mode.draws,
            draws_own=self.mode.draws_own,
            numbers=numbers | {label: number for number, label in enumerate(labels)},
            labels=labels,
            aliases=aliases,
            common={label for label in self.mode.shapes if label[1] == INPUT and self._is_common(label)},
            overwritten={
                one
                for label, memory in self.mode.memory.items()
                if memory in written
                for one in (label, *aliases.get(label, ()))
            },
            recorded=self.mode,
        )

    def _aliases(self) -> dict[Label, list[Label]]:
        found: dict[Label, list[Label]] = {}
        for call in self.mode.calls.values():
            if call.is_module:
                for place, label in enumerate(call.results):
                    if label != (*call.key, place):
                        found.setdefault(label, []).append((*call.key, place))
        return found

    def _crossing(self, edge: int) -> list[Label]:
        common = self._common()
        return [
            label
            for label in self.mode.shapes
            if (common.get(label[2], EVERYWHERE) if label[1] == INPUT and self._is_common(label) else self._last(label))
            > edge
            >= self.labels.get(label, EVERYWHERE)
            and self.labels.get(label, EVERYWHERE) != EVERYWHERE
        ]

    def _check_alike(self, edge: int, crossing: Sequence[Label]) -> None:
        """Raise CutImpossibleError if dtypes or dimensions vary between runs."""
        kinds = set()
        for readers in self.mode.readers if self.mode.decides else ():
            stages = {label: [self._reads_on(key) for key in readers.get(label, ())] for label in crossing}
            sent = [label for label, found in stages.items() if max(found, default=EVERYWHERE) > edge]
            kinds.add(tuple((*self.mode.tensors[label], len(self.mode.shapes[label][0])) for label in sent))
        if len(kinds) > 1:
            raise CutImpossibleError(edge, "what crosses it depends on the path that a micro-batch takes")

    def _reads_on(self, key: Key | None) -> int:
        return self.num_stages - 1 if key is None else self.calls.get(key, EVERYWHERE)

    def _last(self, label: Label) -> int:
        return self.last_use.get(label, EVERYWHERE)

    def _is_common(self, label: Label) -> bool:
        return label not in self.mode.memory

    def _common(self) -> dict[int, int]:
        """Return the last stage that needs each whole-number input."""
        found = dict.fromkeys((*self.mode.asked, *self.mode.common), self.num_stages - 1)
        for call in self.mode.calls.values():
            for place in call.common:
                found[place] = max(found.get(place, 0), self.calls.get(call.key, 0))
        return found

    def _sizes(self, slots: Sequence[tuple[Label, ...]]) -> list[list[int | tuple[int, int]]] | None:
        runs, sizes = self.mode.inputs, []
        for place in range(len(runs[0])):
            dims: list[int | tuple[int, int]] = []
            for dim in range(len(runs[0][place])):
                seen = [shapes[place][dim] for shapes in runs]
                if len(set(seen)) == 1 and dim > 0:
                    dims.append(seen[0])
                    continue
                sources = [
                    (slot, d)
                    for slot, (label, *_) in enumerate(slots)
                    if len(shapes := self.mode.shapes[label]) == len(runs)
                    for d in range(min(map(len, shapes)))
                    if [shape[d] for shape in shapes] == seen
                ]
                if len({d for _, d in sources}) != 1:  # none, or it could be another one
                    return None
                dims.append(sources[0])
            sizes.append(dims)
        return sizes

    def _frame(self) -> FramePlan:
        root, frames = FramePlan(), dict[Key, FramePlan]()
        inside: dict[Key, list[int]] = {}
        drawing = {call.key for call in self.mode.calls.values() if call.draws}
        for call in self.mode.calls.values():
            around = call.parent
            while around is not None and not call.is_open:
                if self.calls[call.key] != EVERYWHERE:
                    inside.setdefault(around.key, []).append(self.calls[call.key])
                if call.draws:
                    drawing.add(around.key)
                around = around.parent
        for call in self.mode.calls.values():
            frame = root if call.parent is None else frames[call.parent.key]
            planned = self._call(call, inside.get(call.key, []), draws=call.key in drawing)
            if call.is_open:
                planned.frame = frames[call.key] = FramePlan()
            if call.is_module:
                frame.modules.setdefault(call.name, []).append(planned)
            else:
                frame.functions.setdefault(call.name, {})[call.key[2]] = planned
        for known in (root, *frames.values()):
            for plans in known.modules.values():
                plans.sort(key=lambda planned: planned.key[2])
        return root

    def _call(self, call: Call, inside: Sequence[int], *, draws: bool) -> CallPlan:
        stages = tuple(self.labels.get(label, EVERYWHERE) for label in call.results)
        if not call.is_open:
            stage = self.calls[call.key]
            way, first, last, stages = Way.WHOLE, stage, stage, (stage,)
        else:
            first, last = (min(inside), max(inside)) if inside else (0, self.num_stages - 1)
            way = Way.SPLIT if first < last else Way.WHOLE
            if call.has_effects or call.is_hidden or not inside:
                way = Way.THROUGH
        written = tuple(-1 - label[3] for label in call.makes if label[3] < 0) if call.is_module else ()
        follows = not call.is_open and self.follows[call.key]
        return CallPlan(
            key=call.key,
            way=way,
            first=first,
            last=last,
            stages=stages or (last,),
            draws=draws,
            answer=call.answer,
            varies=call.varies,
            recorded=call.recorded,
            dtypes=tuple(self.mode.tensors[label][0] for label in call.results or call.makes),
            written=written,
            follows=follows,
            repeats=call.key in self.repeated,
            is_module=call.is_module,
            is_tainted=call.is_tainted,
            is_plain=way is Way.WHOLE and first >= 0 and not (written or call.recorded.by_rule or follows),
        )
