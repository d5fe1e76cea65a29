"""One forward of one stage, with results of other stages.

Calls of this stage are computed. Other results are received, computed again or absent. An absent value has a shape and
a dtype. A request for its elements is an error with the user's line. Values that this stage needs have been received.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_unflatten

from adl_dist.batch import Tensors, arguments_of
from adl_dist.errors import PartitionError
from adl_dist.memory import memory_of
from adl_dist.partition.absent import Results, call_signature, filled, infer
from adl_dist.partition.containers import map_tensors, other_leaves, tensors_in, unique_tensors
from adl_dist.partition.functions import ASK_DEVICE, LIKE_SECOND, Kind, answer_of_device, kind_of, writes_to
from adl_dist.partition.intercept import users_line, users_line_of
from adl_dist.partition.recording import INPUT, held_tensors, put_tensor, state_label, tensor_named
from adl_dist.partition.stage_plan import CallPlan, FramePlan, ModePlan, Way
from adl_dist.partition.tape import Tape
from adl_dist.partition.value import (
    EVERYWHERE,
    ForeignParameter,
    Label,
    Mark,
    Value,
    Watch,
    as_tensor,
    as_value,
    native,
    turn_into,
)
from adl_dist.streams import Streams, seed_each

UNSEEN = "which no recorded micro-batch did; let the recorded ones, the first two, do so"


class ForwardError(PartitionError):
    """A forward that cannot run on a stage as in the uncut model."""


def call_of(module: nn.Module, name: str, own: Callable[..., Any], stage: Any) -> Callable[..., Any]:
    """Return the replacement for ``own``, the call of ``module``."""
    index = stage.index

    def call(*args: Any, **kwargs: Any) -> Any:
        run = Watch.active
        if run is None:  # in a backward, by torch.utils.checkpoint, which has kept what the forward gave it
            for value in tensors_in((args, kwargs)):
                as_tensor(value)
            return own(*args, **kwargs)
        if (frame := run.frame) is None:
            return own(*args, **kwargs)
        counts = run.counts
        count = counts.get(name, 0)
        counts[name] = count + 1
        try:
            planned = frame.modules[name][count]
        except (KeyError, IndexError):
            planned = run.repeated(name, count)
        run.last = planned
        if len(args) == 1 and not kwargs:  # the two common cases: nothing may show in the time of a skipped call
            arg, results = args[0], run.results.get(planned)
            if results is not None:
                fast = results.fast
                if fast is not None and fast[0] is arg and fast[2] is torch.is_grad_enabled():
                    return fast[1]
            elif planned.is_plain and planned.first == index and run.is_plain and type(arg) is Value:
                mark = arg.mark
                if not mark.absent and mark.data is None:
                    arg.__class__ = Tensor  # type: ignore[assignment]
                    run.frame = None
                    try:
                        out = own(arg)
                    finally:
                        run.frame = frame
                        arg.__class__ = Value
                    if type(out) is Tensor and out is not arg:
                        run.made(out, (run.path, name, count, 0))
                        return out
                    return run.marked(out, (run.path, name, count))
        return run.module(planned, (run.path, name, count), module, own, args, kwargs)

    return call


class ForwardRun:
    """One forward of one stage.

    Attributes:
        stage: the StageModule whose forward it is.
        frame: the plan of the calls in the forward being followed; None inside a call that runs as a whole.
        failure: an error that the forward may have caught.
    """

    def __init__(self, stage: Any, mode: ModePlan) -> None:
        self.stage, self.index, self.mode = stage, stage.index, mode
        self.results = stage.results
        self.frame: FramePlan | None = mode.root
        self.path, self.counts = "", dict[str, int]()
        self.last: CallPlan | None = None  # the last call of a module
        self._counted: CallPlan | None = None
        self._since: dict[str, int] = {}
        self.received: dict[Label, Tensor] = {}
        self.failure: PartitionError | None = None
        self.tape: Tape | None = None
        self.watcher: _Watcher | None = None
        self._stale: dict[int, Tensor] = {}  # memory another stage writes to; kept, so that no other gets its number
        self._state: dict[str, Tensor] = {}
        edge = mode.crossing[self.index] if not stage.is_last else []
        self._leaving: list[Tensor | None] = [None] * len(edge)
        self._wanted = {label: slot for slot, labels in enumerate(edge) for label in labels}
        self._found: dict[Label, Tensor] = {}  # what leaves where paths differ
        self._own_streams: Any = None

    @property
    def follows_functions(self) -> bool:
        """True while the calls of a forward are followed."""
        return self.frame is not None

    # Begin and end

    def begin(self, acts: Tensors) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the model's (args, kwargs) from the incoming activations."""
        stage, mode = self.stage, self.mode
        if stage.keep_tape:
            self.tape = Tape(acts)
            for name in stage.plan.recording.moved.keys() | mode.state.keys():
                if name in stage.held:
                    self.tape.buffer(tensor_named(stage.model, name), name)
                elif name not in mode.state and isinstance(tensor := tensor_named(stage.model, name), Tensor):
                    self.tape.buffer(tensor, tensor.clone())
        self.is_plain = self.tape is None and not mode.draws
        if mode.births or self.tape is not None:
            self.watcher = _Watcher(self)
        shapes = self._input_shapes = self._receive(acts) if self.index else [t.shape for t in acts]
        recorded = mode.recorded.inputs[0]
        if len(recorded) != len(shapes) or [len(a) for a in recorded] != [len(b) for b in shapes]:
            self.fail(f"the model gets inputs of shapes {[list(s) for s in shapes]}, unlike when it was recorded")
        inputs = [self._input(place, shape, acts) for place, shape in enumerate(shapes)]
        self._begin_state()
        self._seed()
        return arguments_of(tuple(inputs) if stage.layout is None else tree_unflatten(inputs, stage.layout))

    def _receive(self, acts: Tensors) -> list[Any]:
        """Label the received tensors and return the shapes of the inputs."""
        mode, edge, sizes = self.mode, self.mode.crossing[self.index - 1], self.mode.sizes[self.index - 1]
        tensors = [*acts]
        shapes: list[Any] = []
        if sizes is None:
            flat, ndims = tensors.pop().tolist(), [len(shape) for shape in mode.recorded.inputs[0]]
            for ndim in ndims:
                shapes.append(torch.Size(flat[:ndim]))
                del flat[:ndim]
        if mode.decides:
            for number, tensor in zip(tensors.pop().tolist(), tensors, strict=True):
                label = mode.labels[number]
                self._bind((label, *mode.aliases.get(label, ())), tensor)
        else:
            for labels, tensor in zip(edge, tensors, strict=True):
                self._bind(labels, tensor)
        if sizes is not None:
            shapes = [
                torch.Size([d if isinstance(d, int) else tensors[d[0]].shape[d[1]] for d in dims]) for dims in sizes
            ]
        return shapes

    def _bind(self, labels: Sequence[Label], tensor: Tensor) -> None:
        self.received |= dict.fromkeys(labels, tensor)
        for label in labels:
            if (slot := self._wanted.get(label)) is not None:
                self._leaving[slot] = tensor
        if self.mode.decides and labels[0] in self.mode.common:
            self._found[labels[0]] = tensor

    def _input(self, place: int, shape: Any, acts: Tensors) -> Tensor:
        label = ("", INPUT, place, 0)
        tensor = acts[place] if self.index == 0 else self.received.get(label)
        is_common_input = label not in self.mode.recorded.memory
        if tensor is not None and is_common_input:
            if self.index == 0:
                self._produced(label, tensor)
                if self.mode.decides and label in self.mode.common:
                    self._found[label] = tensor
            return tensor.detach()
        if tensor is not None and self.index:
            return self._value_of(tensor, Mark(label, 0, absent=False))
        if tensor is None:
            dtype = self.mode.recorded.dtypes[place]
            key = place, shape, torch.is_grad_enabled()
            made: Tensor | None = self.stage.absent_inputs.get(key)
            if made is None:
                made = torch.empty(shape, dtype=dtype, device="meta")
                made = as_value(made, Mark(None if is_common_input else label, 0, absent=True))
                self.stage.absent_inputs[key] = made
            return made
        value = as_value(tensor.detach(), Mark(label, 0, absent=False))
        if self.tape is not None:
            self.tape.same(value, tensor)
        self._produced(label, value)
        return value

    def _state_tensors(self) -> Iterator[tuple[str, int, nn.Module, Tensor]]:
        """Yield (name, stage, module, tensor) of the state changed by forwards."""
        for name, home in self.mode.state.items():
            path, _, key = name.rpartition(".")
            module = self.stage.model.get_submodule(path)
            if isinstance(tensor := getattr(module, key, None), Tensor):
                yield name, home, module, tensor

    def _begin_state(self) -> None:
        """Turn model tensors that forwards compute from the batch into values."""
        for name, home, module, tensor in self._state_tensors():
            label = state_label(name)
            if home == self.index:
                as_value(tensor, Mark(label, home, absent=False))
                self._produced(label, tensor)
            else:
                spec = self._state.setdefault(name, tensor)
                made = torch.empty_like(as_tensor(spec), device="meta")
                made = self._arrived(as_value(made, Mark(label, home, absent=True)))
                put_tensor(module, name, made)

    def restore(self) -> None:
        """Turn the changed state of the model back into plain tensors."""
        for name, home, module, tensor in self._state_tensors():
            if home == self.index:
                as_tensor(tensor)
            elif name in self._state:
                put_tensor(module, name, self._state[name])

    def end(self, out: Any) -> Any:
        """Return the tensors for the next stage, or the model's result."""
        for name, home, _, tensor in self._state_tensors():
            if home == self.index and tensor.is_meta and not self.stage.is_lazy:
                raise ForwardError(
                    f"stage {self.index}: buffer '{name}' was computed by another stage in this micro-batch, unlike in "
                    "the recorded ones"
                )
        if self.stage.is_last:
            return map_tensors(self._resolved_output, out)
        if self.mode.decides:
            for tensor in tensors_in(out):
                self._note(tensor)
            order = sorted(self._found, key=lambda label: self.mode.numbers[label])
            numbers = torch.tensor([self.mode.numbers[label] for label in order], device=self.stage.device)
            leaving = [self._found[label] for label in order]
            tail = [numbers, self._shapes()]
        else:
            leaving = [self._left(slot, kept) for slot, kept in enumerate(self._leaving)]
            tail = [self._shapes()] if self.mode.sizes[self.index] is None else []
        return (*map(as_tensor, leaving), *tail)

    def _left(self, slot: int, kept: Tensor | None) -> Tensor:
        labels = self.mode.crossing[self.index][slot]
        if kept is None:
            raise ForwardError(
                f"stage {self.index}: '{labels[0][1]}' did not run in this micro-batch, but its result crosses to the "
                "next stage in all recorded ones, which were the first"
            )
        return kept

    def _shapes(self) -> Tensor:
        sizes = [size for shape in self._input_shapes for size in shape]
        return torch.tensor(sizes, device=self.stage.device)

    def _resolved_output(self, tensor: Tensor) -> Tensor:
        if type(tensor) is not Value and not isinstance(tensor, ForeignParameter):
            if tensor.is_meta:
                self.fail("the model returns a tensor that an earlier stage has made, but no recorded run did so")
            return tensor
        return as_tensor(self._resolved(tensor, "the model's result"))

    # Calls of modules

    def repeated(self, name: str, count: int) -> CallPlan:
        """Return the plan of a module call beyond the recorded number of calls."""
        assert self.frame is not None
        plans = self.frame.modules.get(name)
        if plans is None:
            self.fail(f"calls '{name}', {UNSEEN}")
        plans.append(replace(plans[-1], key=(*plans[-1].key[:2], count)))
        return plans[-1]

    def module(
        self,
        planned: CallPlan,
        key: tuple[str, str, Any],
        module: nn.Module,
        own: Callable[..., Any],
        args: Any,
        kwargs: Any,
    ) -> Any:
        """Follow or compute a call of a module, or return an absent result."""
        way, index = planned.way, self.index
        if way is Way.THROUGH or (way is Way.SPLIT and planned.first <= index <= planned.last):
            return self._follow(planned, key, own, args, kwargs)
        with native():
            stage = planned.last if index < planned.first else planned.first
            if planned.follows:
                values = [leaf for leaf in tensors_in((args, kwargs)) if type(leaf) is Value]
                stage = max((value.mark.stage for value in values), default=EVERYWHERE)
            if stage in (index, EVERYWHERE):
                leaves = tensors_in((args, kwargs))
                return self._compute(own, key, stage, args, kwargs, leaves, planned=planned)
            return self._skip(planned, key, stage, module, own, args, kwargs)

    def _follow(self, planned: CallPlan, key: tuple[str, str, Any], own: Any, args: Any, kwargs: Any) -> Any:
        before = self.frame, self.path, self.counts, self.last
        self.frame, self.path, self.counts, self.last = planned.frame, f"{key[0]}/{key[1]}#{key[2]}", {}, None
        try:
            return own(*args, **kwargs)
        finally:
            self.frame, self.path, self.counts, self.last = before
            self._counted, self._since = None, {}

    def _skip(
        self,
        planned: CallPlan,
        key: tuple[str, str, Any],
        stage: int,
        module: nn.Module | None,
        function: Callable[..., Any],
        args: Any,
        kwargs: Any,
    ) -> Any:
        """Return the absent result of a call of another stage."""
        is_noted = self.mode.decides and stage > self.index
        if is_noted:
            for leaf in tensors_in((args, kwargs)):
                self._note(leaf)
        results = self.results.get(planned)
        if results is None:
            results = self.results[planned] = Results(
                self.stage.templates,
                planned.recorded,
                dtypes=planned.dtypes,
                varies=planned.varies,
                is_changed=self.stage.is_changed,
            )
        stages = planned.stages if planned.way is Way.SPLIT else (stage,)
        try:
            out = results.get(function, args, kwargs, label=key, stages=stages, module=module)
        except ValueError as error:
            self.fail(
                f"the shape of what '{key[1]}' returns is not known on a stage that does not compute it ({error})"
            )
        if stage < self.index and self.received:
            out = self._arrived(out)
        if planned.written:
            unique = unique_tensors((args, kwargs))
            for place in planned.written:
                self._write_absent(unique[place], (*key, -1 - place), stage)
        elif len(args) == 1 and not kwargs and not is_noted and type(out) is type(args[0]) is Value:
            results.keep_last(args[0], out)
        return out

    def _arrived(self, out: Any) -> Any:
        """Put received tensors into the result of an earlier stage's call."""

        def arrived(tensor: Tensor) -> Tensor:
            if type(tensor) is not Value or not tensor.mark.absent or tensor.mark.label not in self.received:
                return tensor
            return self._value_of(self._resolved(tensor, "the forward"), tensor.mark)

        if type(out) is Value:
            return arrived(out) if out.mark.label in self.received else out
        return map_tensors(arrived, out)

    def _value_of(self, tensor: Tensor, mark: Mark) -> Tensor:
        """Return a received tensor as a value, copied if its memory is written to."""
        if type(tensor) is not Value and mark.label is not None:
            if mark.label in self.mode.overwritten:
                tensor = self._cloned(tensor)
            as_value(tensor, Mark(mark.label, mark.stage, absent=False))
            self.received[mark.label] = tensor
        return tensor

    def _cloned(self, tensor: Tensor) -> Tensor:
        clone = tensor.clone()
        if self.tape is not None:
            self.tape.note(torch.clone, (tensor,), {}, clone)
        return clone

    def play(self, tape: Tape, acts: Tensors) -> Any:
        """Repeat the calls of ``tape`` for ``acts``, and return the result."""
        if self.mode.draws and self.stage.seeds is not None:
            self._own_streams = self.stage.seeds[1]
        return tape.play(acts, self._stream, lambda name: tensor_named(self.stage.model, name))

    def _compute(
        self,
        function: Callable[..., Any],
        key: tuple[str, str, Any],
        stage: int,
        args: Any,
        kwargs: Any,
        leaves: Sequence[Any],
        *,
        planned: CallPlan | None,
        target: Tensor | None = None,
    ) -> Any:
        """Run a call of this stage, with received tensors for absent arguments."""
        written, draws = (planned.written, planned.draws) if planned is not None else ((), True)
        values: list[Any] = [leaf for leaf in leaves if type(leaf) is Value or type(leaf) is ForeignParameter]
        if self.is_plain and not written and target is None and (planned is None or not planned.recorded.by_rule):
            for leaf in values:
                if type(leaf) is not Value or leaf.mark.absent or leaf.mark.data is not None:
                    break
            else:
                out = self._run(function, args, kwargs, values)
                return out if planned is not None and not planned.is_tainted else self.marked(out, key, None, stage)
        replaced: dict[int, Tensor] = {}
        is_module = planned is not None and planned.is_module
        for leaf in values:
            if id(leaf) not in replaced and not (is_module and not self._has(leaf)):  # a use there finds out
                replaced[id(leaf)] = self._resolved(leaf, key[1])
        values = [leaf for leaf in values if id(leaf) in replaced]
        if written or target is not None:
            unique: list[Any] = unique_tensors(leaves)
            for leaf in (*(unique[place] for place in written), *([] if target is None else [target])):
                if id(leaf) in replaced and replaced[id(leaf)] is not leaf and leaf.mark.data is None:
                    replaced[id(leaf)] = self._cloned(replaced[id(leaf)])  # received: not to be written to
        if any(replaced[id(leaf)] is not leaf for leaf in values):
            args, kwargs = map_tensors(lambda t: replaced.get(id(t), t), (args, kwargs))
        begun = None if self.tape is None else self.tape.begin_call(function, args, kwargs)
        out = self._run(function, args, kwargs, [t for t in replaced.values() if type(t) is Value], draws=draws)
        if self.tape is not None:
            self.tape.end_call(function, begun, out, draws=draws)
        originals = {id(new): leaf for leaf in values if (new := replaced[id(leaf)]) is not leaf}
        if planned is not None and planned.recorded.by_rule:
            self._check_rule(planned, key, args, kwargs, out)
        if written or target is not None:
            for leaf in (*(unique[place] for place in written), *([] if target is None else [target])):
                place = -1 if target is not None else self._place(unique, leaf)
                self._written(leaf, replaced.get(id(leaf), leaf), (*key, place), stage)
        if planned is not None and not planned.is_tainted:
            return out
        return self.marked(out, key, originals, stage)

    def _run(
        self, function: Callable[..., Any], args: Any, kwargs: Any, values: Sequence[Tensor], *, draws: bool = False
    ) -> Any:
        """Run a call with its ``values`` as plain tensors.

        None of these may be absent. If the call ``draws``, it uses the stage's own random streams.
        """
        for leaf in values:
            turn_into(leaf, Tensor)
        frame, self.frame = self.frame, None
        try:
            if not (draws and self.mode.draws):
                return function(*args, **kwargs)
            with self._own_stream():
                return function(*args, **kwargs)
        finally:
            self.frame = frame
            for leaf in values:
                turn_into(leaf, Value)

    def marked(self, out: Any, key: tuple[str, str, Any], originals: Any = None, stage: int | None = None) -> Any:
        """Return a result of this stage with its tensors turned into values.

        Received tensors in it are replaced by the forward's own objects (``originals``).
        """
        if key[1] == "contiguous" and (type(out) is Value or originals):
            view = out.view_as(out)
            if self.tape is not None:
                self.tape.note(Tensor.view_as, (out, out), {}, view)
            out, originals = view, None
        if type(out) is Tensor and not originals:
            self.made(out, (*key, 0), stage)
            return out
        for place, tensor in enumerate(tensors_in(out)):
            if type(tensor) is Tensor and not (originals and id(tensor) in originals):
                self.made(tensor, (*key, place), stage)
        return map_tensors(lambda t: originals.get(id(t), t), out) if originals else out

    @staticmethod
    def _place(unique: Sequence[Tensor], leaf: Tensor) -> int:
        return -1 - next(n for n, one in enumerate(unique) if one is leaf)

    def made(self, tensor: Tensor, label: Label, stage: int | None = None) -> None:
        """Label a computed ``tensor``; keep it if it crosses the next cut."""
        if tensor.is_meta and not self.stage.is_lazy:
            self.fail(f"'{label[1]}' is computed with a parameter or buffer that another stage holds")
        as_value(tensor, Mark(label, self.index if stage is None else stage, False))
        if label in self._wanted:
            self._produced(label, tensor)

    def _written(self, leaf: Tensor, tensor: Tensor, label: Label, stage: int) -> None:
        """Note a write of this stage to ``leaf`` or to its received ``tensor``."""
        if type(leaf) is not Value:
            as_value(leaf, Mark(label, stage, absent=False))
        mark = leaf.mark  # type: ignore[attr-defined]
        if tensor is not leaf:
            mark.data = tensor
            if mark.cache is not None:
                mark.cache.forget()
                mark.cache = None
        mark.label, mark.stage = label, stage
        self._produced(label, tensor)

    def _produced(self, label: Label, tensor: Tensor) -> None:
        slot = self._wanted.get(label)
        if slot is not None and label not in self.received:
            self._leaving[slot] = tensor

    def _note(self, tensor: Tensor) -> None:
        """Note the use of ``tensor`` by a later stage, to send it there."""
        if type(tensor) is not Value or (label := tensor.mark.label) is None:
            return
        mark = tensor.mark
        found = mark.data if mark.data is not None else None if mark.absent else tensor
        if found is None:
            found = self.received.get(label)
        if found is not None:
            if label not in self.mode.numbers:
                self.fail(f"hands a result of '{label[1]}' to a later stage, which no recorded micro-batch did")
            self._found[label] = found

    def _check_rule(self, planned: CallPlan, key: Any, args: Any, kwargs: Any, out: Any) -> None:
        try:
            rule = filled(planned.recorded.by_sizes((args, kwargs)), args, kwargs)
        except ValueError:
            return  # no other stage has an answer, either
        expected, found = ([[list(t.shape) for t in tensors_in(one)], [*other_leaves(one)]] for one in (rule, out))
        if found != expected:
            self.fail(f"'{key[1]}' returns {found} where the recorded micro-batches let stages expect {expected}")

    # Calls of functions

    def key(self, name: str) -> tuple[str, str, Any]:
        """Return the key of a function call, counted since the last module call."""
        last = self.last
        if last is not self._counted:
            self._counted, self._since = last, {}
        count = self._since.get(name, 0)
        self._since[name] = count + 1
        return self.path, name, (*last.key[1:], count) if last is not None else ("", 0, count)

    def function(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a function of values of the batch or of foreign parameters."""
        name, kind = kind_of(func)
        with native():
            if kind is Kind.ASK:
                if name in ASK_DEVICE and args and args[0].is_meta:
                    return answer_of_device(name, self.stage.device)
                return func(*args, **kwargs)
            if self.frame is None:
                resolved = map_tensors(lambda t: self._resolved(t, name), (args, kwargs))
                return func(*resolved[0], **resolved[1])
            leaves = tensors_in((args, kwargs))
            if kind is Kind.LIKE:
                args, kwargs = map_tensors(self._stub, (args, kwargs))
                return func(*args, **kwargs)
            if name in LIKE_SECOND and not _is_batch(leaves[0]):
                (args, kwargs), leaves = self.like_first(args, kwargs), leaves[:1]
                if type(leaves[0]) not in (Value, ForeignParameter):
                    return func(*args, **kwargs)
            if any(map(_is_batch, leaves)):
                return self._function(func, name, kind, args, kwargs, leaves)
            if any(type(leaf) in (Value, ForeignParameter) for leaf in leaves):
                return self._foreign(func, name, kind, args, kwargs)
            watcher = self.watcher  # an autograd function of the stage's own tensors
            return func(*args, **kwargs) if watcher is None else watcher.__torch_function__(func, (), args, kwargs)

    def _function(self, func: Any, name: str, kind: Kind, args: Any, kwargs: Any, leaves: Sequence[Tensor]) -> Any:
        assert self.frame is not None
        plans = self.frame.functions.get(name)
        if plans is None:
            self.fail(f"calls '{name}' on values of the batch, {UNSEEN}")
        key = self.key(name)
        planned = plans.get(key[2])
        if kind is Kind.ELEMENTS:
            return self._answer(func, args, kwargs, leaves, planned)
        stage = EVERYWHERE
        for leaf in leaves:
            if type(leaf) is Value and leaf.mark.stage > stage:
                stage = leaf.mark.stage
        if planned is not None:
            if planned.repeats and EVERYWHERE < stage < self.index and all(map(self._has, leaves)):
                return self._compute(func, key, stage, args, kwargs, leaves, planned=planned)
            if not planned.follows and planned.first > stage:
                stage = planned.first
        if kind is Kind.HOOK:
            if stage != self.index or leaves[0].is_meta:
                return _Handle()
            if self.tape is not None:
                self.tape.note(func, args, kwargs, None)
            return func(*args, **kwargs)
        target = writes_to(name, args, kwargs)
        if stage in (self.index, EVERYWHERE):
            return self._compute(func, key, stage, args, kwargs, leaves, planned=planned, target=target)
        if planned is None:
            planned = next(reversed(plans.values()))
        if target is None:
            return self._skip(planned, key, stage, None, func, args, kwargs)
        if self.mode.decides and stage > self.index:
            for leaf in leaves:
                self._note(leaf)
        self._write_absent(target, (*key, -1), stage, func, args, kwargs)
        return None if name == "__setitem__" else target

    def _write_absent(
        self, target: Tensor, label: Label, stage: int, func: Any = None, args: Any = (), kwargs: Any = None
    ) -> None:
        """Note another stage's write to ``target``; fill in received elements."""
        if type(target) is not Value:
            as_value(target, Mark(label, stage, absent=False))
        mark: Mark = vars(target)["mark"]
        if mark.cache is not None:
            mark.cache.forget()
            mark.cache = None
        if func is not None:
            shape, stride, requires_grad = self._written_spec(target, label, func, args, kwargs)
            if target.is_meta and (shape, stride) != (target.shape, target.stride()):
                target.requires_grad_(False).as_strided_(shape, stride)
            if requires_grad != target.requires_grad and (target.is_leaf or target.is_meta):
                target.requires_grad_(requires_grad)
        if not target.is_meta:
            self._stale[memory_of(target)] = target
            self.is_plain = False
            mark.absent = True
        mark.label, mark.stage, mark.data = label, stage, None
        if label in self.received and stage < self.index:
            found = self._cloned(self._resolved(target, "the forward"))
            self.received[label] = target
            if self.tape is not None:
                self.tape.same(target, found)
            try:
                torch.utils.swap_tensors(target, as_value(found, mark))  # all references see it
            except RuntimeError:  # torch holds it, as where a view of it is in a graph
                self.fail("another stage writes to a tensor that this stage has computed with; write to a copy")
            mark.absent = False

    def _written_spec(self, target: Tensor, label: Label, func: Any, args: Any, kwargs: Any) -> Any:
        """Return (shape, stride, requires_grad) of ``target`` after a write."""
        signature = call_signature(args, kwargs)
        if signature is not None and (known := self.stage.written.get((label, signature))) is not None:
            return known
        try:
            _, twins = infer(func, args, kwargs)
        except Exception as error:  # for unusual arguments
            self.fail(f"the shape of a tensor that another stage writes to is not known ({error})")
        twin = twins[next(n for n, one in enumerate(unique_tensors((args, kwargs))) if one is target)]
        found = twin.shape, twin.stride(), twin.requires_grad
        if signature is not None:
            self.stage.written[label, signature] = found
        return found

    def _foreign(self, func: Any, name: str, kind: Kind, args: Any, kwargs: Any) -> Any:
        """Run a function of parameters or inputs that this stage does not hold."""
        if kind is Kind.ELEMENTS:
            self.fail("asks for elements of a parameter or input that this stage does not hold")
        if kind is Kind.HOOK:
            return _Handle()
        target = writes_to(name, args, kwargs)
        if target is not None:
            if not target.is_meta:
                memory = memory_of(target)
                if any(memory_of(tensor) == memory for _, tensor in held_tensors(self.stage.model)):
                    self.fail("writes values of a parameter that another stage holds to a tensor of this one")
                for tensor in (target, target._base):
                    if tensor is not None:  # its elements need what this stage lacks
                        as_value(tensor, Mark(None, EVERYWHERE, absent=True))
            return target
        key = self.key(f"{name}?")
        results = self.stage.foreign.setdefault((self.stage.training, key), Results(self.stage.templates))
        try:
            out = results.get(func, args, kwargs, label=key, stages=(EVERYWHERE,))
        except ValueError as error:
            self.fail(f"the shape of what '{name}' returns for a parameter of another stage is not known ({error})")
        for tensor in tensors_in(out):
            if type(tensor) is Value and tensor.mark.label is not None and tensor.mark.label[:3] == key:
                tensor.mark.label = None
        return out

    def _answer(self, func: Any, args: Any, kwargs: Any, leaves: Sequence[Tensor], planned: CallPlan | None) -> Any:
        """Return the number that the forward asks for, the same on all stages."""
        known = planned.answer if planned is not None else None
        if all(self._has(leaf) for leaf in leaves):
            args, kwargs = map_tensors(lambda t: self._resolved(t, "a question"), (args, kwargs))
            out = func(*args, **kwargs)
            if known is not None and out != known:
                self.fail(
                    f"the answer is {out} here, and was {known} in all recorded micro-batches, as other stages expect"
                )
            if known is None and self.stage.plan.num_stages > 1:
                self.fail("asks for elements that other stages do not have")
            return out
        if known is None:
            self.fail(f"asks for elements of a tensor that stage {self.index} does not have")
        return known

    def _has(self, tensor: Tensor) -> bool:
        if type(tensor) is not Value:
            return not tensor.is_meta
        mark = tensor.mark
        return mark.data is not None or not mark.absent or mark.label in self.received

    def _resolved(self, tensor: Tensor, where: str) -> Tensor:
        """Return ``tensor``, or the received or written tensor in its place."""
        if type(tensor) is not Value:
            if type(tensor) is ForeignParameter:
                self.fail(f"'{where}' is computed with a parameter that another stage holds")
            return tensor
        mark = tensor.mark
        if mark.data is not None:
            return mark.data
        if not mark.absent and not (self._stale and memory_of(tensor) in self._stale and mark.stage != self.index):
            return tensor
        found = self.received.get(mark.label) if mark.label is not None else None
        if found is None or mark.label is None:
            made = "a parameter or an input" if mark.label is None else f"'{mark.label[1]}'"
            self.fail(
                f"stage {self.index} computes '{where}' with a tensor {list(tensor.shape)} of {made}, which it lacks: "
                "no recorded micro-batch used it there, or it was kept from an earlier micro-batch"
            )
        if found.shape != tensor.shape or found.dtype != tensor.dtype:
            self.fail(
                f"{list(found.shape)} {found.dtype} arrived for '{mark.label[1]}', where {list(tensor.shape)} "
                f"{tensor.dtype} is expected"
            )
        return found

    def like_first(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments, with empty tensors for absent ones but the first."""
        rest, others = map_tensors(self._stub, (args[1:], kwargs))
        return (args[0], *rest), others

    def _stub(self, tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self.stage.device)

    # Random streams

    def _seed(self) -> None:
        """Seed the random streams that are common to all stages."""
        if self.stage.seeds is None or not self.mode.draws:
            return
        common, self._own_streams = self.stage.seeds
        seed_each(common, self.stage.device)

    @contextmanager
    def _own_stream(self) -> Iterator[None]:
        """Draw from the stage's own random streams inside the context."""
        common = Streams(self.stage.device)
        if isinstance(self._own_streams, dict):
            seed_each(self._own_streams, self.stage.device)
        elif self._own_streams is not None:
            self._own_streams.restore()
        try:
            yield
        finally:
            self._own_streams = self.stage.own_streams = Streams(self.stage.device)
            common.restore()

    @contextmanager
    def _stream(self, draws: Any) -> Iterator[None]:
        """Draw from the random streams of a taped call inside the context.

        If ``draws`` is True, these are the stage's own; otherwise ``draws`` has the state of the common ones.
        """
        if draws is not True:
            draws.restore()
        with self._own_stream() if draws is True and self.mode.draws else nullcontext():
            yield

    # Errors

    def fail(self, why: str) -> NoReturn:
        """Raise a ForwardError, and keep it in case the forward catches it."""
        error = ForwardError(
            f"{users_line()}: stage {self.index}: {why}" if not why.startswith("stage ") else f"{users_line()}: {why}"
        )
        self.failure = self.failure or error
        raise error

    def explain(self, error: Exception) -> None:
        """Raise a ForwardError if ``error`` comes from a tensor without elements."""
        text = str(error)
        if any(word in text for word in ("meta tensor", "device meta", "on meta", "'Meta' backend")):
            raise ForwardError(
                f"{users_line_of(error)}: stage {self.index} computes with a tensor of another stage that is kept in "
                f"an object or reached past the calls of modules ({type(error).__name__}: {text.splitlines()[0]})"
            ) from error


class _Watcher(TorchFunctionMode):
    """A mode that follows functions which do not depend on the batch.

    Memory that will receive values of the batch becomes a value. A tape notes functions of parameters.
    """

    def __init__(self, run: ForwardRun) -> None:
        super().__init__()
        self._run = run

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, run = kwargs or {}, self._run
        if run.frame is None or Watch.active is not run:
            return func(*args, **kwargs)
        name, kind = kind_of(func)
        if kind is Kind.ASK:
            return func(*args, **kwargs)
        leaves = tensors_in((args, kwargs))
        taken = leaves[:1] if name in LIKE_SECOND and leaves and not _is_batch(leaves[0]) else leaves
        if kind is not Kind.LIKE and any(map(_is_batch, taken)):
            return func(*args, **kwargs)
        key = run.key(f"{name}*")
        draws = Streams(run.stage.device) if run.tape is not None and run.mode.draws else None
        out = func(*args, **kwargs)
        if run.tape is not None and any(type(t) is nn.Parameter or run.tape.knows(t) for t in taken):
            if len(taken) < len(leaves):
                with native():
                    args, kwargs = run.like_first(args, kwargs)
            run.tape.note(func, args, kwargs, out, draws=draws)
        if key in run.mode.births and type(out) is Tensor:
            return as_value(out, Mark((*key, 0), EVERYWHERE, absent=False))
        return out


class _Handle:
    """A handle of a hook that was registered on another stage, not here."""

    def remove(self) -> None:
        """Do nothing."""


def _is_batch(tensor: Tensor) -> bool:
    return type(tensor) is Value and tensor.mark.label is not None
