"""A recorder of an uncut model's forward: calls, data flow and effects.

The model runs for real on a few micro-batches, in training and in evaluation. A *call* is that of a module, or of a
torch function between modules, that computes with values of the batch. Functions that do not depend on values of the
batch (masks of whole-number inputs, positions, tables) are not recorded as calls, because every stage runs them again.
The Python of the forward is not recorded, because stages also run it again.
"""

import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from adl_dist.batch import Batch, arguments_of, is_equal, version_of
from adl_dist.errors import PartitionError
from adl_dist.memory import has_plain_memory, memory_of
from adl_dist.partition.absent import META, call_signature, infer, is_masked, module_signature
from adl_dist.partition.containers import PLAIN, map_leaves, map_tensors, other_leaves, tensors_in, unique_tensors
from adl_dist.partition.functions import ASK_DEVICE, LIKE_SECOND, Kind, answer_of_device, kind_of, writes_to
from adl_dist.partition.intercept import OF_TORCH, is_openable, place_of_call, users_line
from adl_dist.partition.recording import INPUT, Call, Key, ModeRecord, Recording, held_tensors, state_label
from adl_dist.partition.value import Label, Watch
from adl_dist.partition.work import ATTENTION, Work
from adl_dist.streams import Streams

MOST_RUNS = 40  # while a run has something new: layers that are left out at random
# Layers of which the shapes of the arguments give those of the results; not so BatchNorm(momentum=None), which asks for
# the number of its calls.
OF_SHAPES = {
    *(nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d),
    *(nn.LayerNorm, nn.GroupNorm, nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.Hardswish, nn.Sigmoid, nn.Tanh, nn.Dropout),
    *(nn.Flatten, nn.Identity, nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d),
}


def record_forward(model: nn.Module, batches: Sequence[Batch]) -> Recording:
    """Record the forward of ``model`` on micro-batches of different sizes.

    The runs change the model and the random streams. Tensors on meta stay without elements.

    Raises:
        PartitionError: If the model's own forward cannot be followed, or the model has lazy parameters or backward
            hooks.
    """
    if lazy := [name for name, parameter in model.named_parameters() if is_lazy(parameter)]:
        raise PartitionError(
            f"'{lazy[0]}' has no shape yet, as a parameter of a lazy layer; run the model once before it is handed over"
        )
    device = next((t.device for t in (*model.parameters(), *model.buffers()) if not t.is_meta), torch.device("cpu"))
    recording = Recording(device=device)
    if model._backward_hooks or model._backward_pre_hooks:
        raise PartitionError(
            f"{type(model).__name__} has backward hooks, which need both ends of the model on one stage; put them on a "
            "module inside, or use num_stages=1"
        )
    recording.hooked |= _hooked(model)
    _run_once(model, batches[0], device)
    while True:
        known, recording.refused, recording.closed = recording._known(), "", {}
        for training in (True, False):
            model.train(training)
            recorder = Recorder(model, recording, training=training)
            run = unchanged = 0
            for _ in range(MOST_RUNS):
                calls, followed = len(recorder.mode.calls), recorder.follows_python
                with torch.set_grad_enabled(training):
                    recorder.observe(batches[run % len(batches)])
                if followed != recorder.follows_python:
                    continue  # the same batch once more, to see after which calls Python draws
                run, unchanged = run + 1, unchanged + 1 if len(recorder.mode.calls) == calls else 0
                draws = recorder.mode.draws or recorder.follows_python
                if run >= len(batches) and (unchanged >= 4 and not recorder.is_left_out() if draws else unchanged):
                    break
            recorder.finish()
            recording.modes[training] = recorder.mode
        recording.hooked |= _hooked(model)
        if recording._known() != known:
            continue
        if not recording.closed:
            if recording.refused:
                raise PartitionError(f"the model's own forward cannot be run in stages: {recording.refused}")
            return recording
        recording.whole |= recording.closed


def _run_once(model: nn.Module, batch: Batch, device: torch.device) -> None:
    """Run ``model`` in training and evaluation, before anything is recorded.

    Many models set attributes in their first forward, like the problem_type of transformers. They change only once.
    """
    is_lazy = any(p.is_meta for p in model.parameters())
    for training in (True, False):
        model.train(training)
        with torch.set_grad_enabled(training):
            if is_lazy:
                Recorder(model, Recording(device=device), training=training).observe(batch)
            else:
                args, kwargs = arguments_of(map_tensors(lambda tensor: tensor.detach().clone(), batch))
                model(*args, **kwargs)


def _hooked(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if _is_hooked(module)}


def _is_hooked(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def is_of_torch(module: nn.Module) -> bool:
    """Return whether ``module`` is one of torch's own layers."""
    return type(module).__module__.startswith(("torch.nn.", "torch.ao."))


def has_blocks(module: nn.Module) -> bool:
    """Return whether ``module`` contains a list of blocks of one class."""
    for part in module.modules():
        if isinstance(part, nn.ModuleList | nn.Sequential | nn.ModuleDict) and (part is not module or _is_plain(part)):
            kinds = Counter(type(m) for m in part.children() if next(m.parameters(), None) is not None)
            if any(n > 1 and not kind.__module__.startswith("torch.nn.modules.") for kind, n in kinds.items()):
                return True
            if any(n > 1 and kind.__module__.endswith(".transformer") for kind, n in kinds.items()):
                return True
    return False


def _is_plain(module: nn.Module) -> bool:
    return type(module) is nn.Sequential and not _is_hooked(module)


@dataclass
class _Fact:
    """The known origin of a tensor.

    Attributes:
        label: the label of a value of the batch; None for other tensors.
        uses: names of the parameters and buffers that another tensor was computed from.
        common: places of the whole-number inputs that it was computed from.
        begin: the number of calls that had begun when it was made.
    """

    label: Label | None = None
    uses: frozenset[str] = frozenset()
    common: frozenset[int] = frozenset()
    begin: int = 0


NOTHING = _Fact()


class _Frame:
    """A forward that is being followed, with the counts of its calls."""

    __slots__ = ("begin", "call", "counts", "draws", "given", "path", "segment", "since")

    def __init__(self, call: Call | None, path: str, begin: int, given: Set[Label | None] = frozenset()) -> None:
        self.call, self.path, self.begin, self.given = call, path, begin, given
        self.counts: Counter[str] = Counter()
        self.segment, self.since = ("", 0), Counter[str]()
        self.draws = False  # random numbers that do not depend on the batch

    def key(self, name: str, *, is_module: bool) -> Key:
        """Count a call of ``name`` and return its key.

        Functions are counted since the last call of a module, in case modules are left out.
        """
        if not is_module:
            self.since[name] += 1
            return self.path, name, (*self.segment, self.since[name] - 1)
        self.counts[name] += 1
        self.segment, self.since = (name, self.counts[name] - 1), Counter()
        return self.path, name, self.counts[name] - 1


class Recorder(TorchFunctionMode):
    """A recorder of the runs of one mode, training or evaluation."""

    def __init__(self, model: nn.Module, recording: Recording, *, training: bool) -> None:
        super().__init__()
        self.model, self.recording, self.training = model, recording, training
        self.mode = ModeRecord()
        self.names = {id(module): name for name, module in model.named_modules()}
        self.is_lazy = any(p.is_meta for p in model.parameters())
        self.is_followed = {name: self._is_followed(name, module) for name, module in model.named_modules()}
        self.is_block = self._blocks()
        self._work: Work | None = None
        self._order: list[Key] = []
        self._first: list[Key] | None = None
        self._memories: dict[tuple[int, int], int] = {}
        self.is_paused = False
        self.follows_python = False  # whether Python and numpy draw in a forward; if so, after which calls
        self._num_rules = 0
        self._answers: dict[Key, Any] = {}
        self._sized_by_elements: set[Call] = set()
        self._parts = {name: [*module.modules()] for name, module in model.named_modules()}
        self._states: dict[Key, list[Any]] = {}  # what each call of a module has left in Python

    def _is_followed(self, name: str, module: nn.Module) -> bool:
        if not name:
            return True
        if not is_openable(module) or name in self.recording.whole:
            return False
        if name in self.recording.opened:
            return True
        has_parameters = next(module.parameters(), None) is not None
        if is_of_torch(module):
            torchs = nn.Sequential, nn.ModuleList, nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder
            return isinstance(module, torchs)
        if next(module.children(), None) is not None:
            return True
        # A table of positions, say, is made on each stage; but a child of an nn.Sequential is a block.
        around = self.model.get_submodule(name.rpartition(".")[0])
        return not has_parameters and type(around) is not nn.Sequential

    def _blocks(self) -> dict[str, bool]:
        """Return for each module whether a cut between blocks may lie inside.

        The blocks of an nn.Sequential are its children.
        """
        if _is_plain(self.model):
            return {name: not name for name, _ in self.model.named_modules()}
        found: dict[str, bool] = {}
        for name, module in self.model.named_modules():
            parent = name.rpartition(".")[0]
            inside = not name or (
                found.get(parent, False) and (_is_plain(module) or _is_list(module) or has_blocks(module))
            )
            found[name] = inside and self.is_followed[name] | _is_list(module)
        return found

    # One run

    def observe(self, batch: Batch) -> Any:
        """Record a run of the model on one micro-batch, and return its output."""
        self.facts: dict[int, _Fact] = {}
        self.kept: list[Any] = []
        self.in_memory: dict[int, dict[int, Tensor]] = {}
        self.inside: Call | None = None
        self.position = 0
        self._readers: dict[Label, set[Key | None]] = {}
        self.returned: dict[Label, set[int]] = {}
        self.made_in: dict[Label, tuple[Call, ...]] = {}
        self.frames = [_Frame(None, "", 0)]
        self._at_start = dict(held_tensors(self.model))
        self.state = {id(t): name for name, t in self._at_start.items()}
        self.origins: dict[int, tuple[str, Any]] = {}  # by memory: what it belongs to
        for name, tensor in self._at_start.items():
            self.origins.setdefault(memory_of(tensor), ("state", name))
            if name in self.recording.state:
                self._value(tensor, state_label(name))
        args, kwargs = self._inputs(batch)
        at_start, self._drawn = _streams(), self._streams()
        Watch.active = self
        try:
            with _intercepted(self.model, self.names, self), self:
                out = self.model(*args, **kwargs)
        finally:
            Watch.active = None
        self._note_draws()
        self.follows_python |= bool(_streams().difference(at_start) - {"torch"})
        for leaf in tensors_in(out):
            fact = self._fact(leaf)
            if fact.label is not None:
                self._read(fact.label, None)
                self.mode.outputs[fact.label] = None
                self._readers.setdefault(fact.label, set()).add(None)
            self.mode.uses |= fact.uses
            self.mode.common |= fact.common
        self._note_replaced()
        self._order_runs()
        self.mode.readers.append(self._readers)
        self.facts, self.kept, self.in_memory = {}, [], {}
        return out

    def _inputs(self, batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs = arguments_of(batch)
        place, shapes = iter(range(len(tensors_in((args, kwargs))))), []
        self.mode.dtypes = [tensor.dtype for tensor in tensors_in((args, kwargs))]

        def given(tensor: Tensor) -> Tensor:
            number, tensor = next(place), tensor.detach().clone()
            shapes.append(tensor.shape)
            if is_common(tensor):
                self._set(tensor, _Fact(common=frozenset({number})))
                self.origins[memory_of(tensor)] = ("input", number)
                self.mode.shapes.setdefault(("", INPUT, number, 0), []).append(tensor.shape)
                self.mode.nbytes[("", INPUT, number, 0)] = tensor.nbytes / max(1, len(tensor))
                return tensor
            tensor = _to_meta(tensor) if self.is_lazy else tensor
            self._value(tensor, ("", INPUT, number, 0))
            return tensor

        made = map_tensors(given, (args, kwargs))
        self.mode.inputs.append(shapes)
        return made  # type: ignore[no-any-return]

    def _order_runs(self) -> None:
        """Merge the order of this run's calls into that of all runs.

        A call that this run lacks stays right after the call that it followed before.
        """
        if self._first is not None and self._first != self._order:
            self.mode.decides = True
        self._first = self._first or [*self._order]
        order, seen = [*self.mode.calls], {key: n for n, key in enumerate(self._order)}
        missing = [key for key in order if key not in seen]
        merged = [*self._order]
        for key in missing:
            where = order.index(key)
            before = next((k for k in reversed(order[:where]) if k in merged), None)
            merged.insert(0 if before is None else merged.index(before) + 1, key)
        self.mode.calls = {key: self.mode.calls[key] for key in merged}
        self._order = []

    def _note_replaced(self) -> None:
        """Note the tensors of the model that values of the batch have replaced."""
        for name, tensor in held_tensors(self.model):
            fact = self.facts.get(id(tensor))
            if fact is not None and fact.label is not None:
                self.mode.state[name] = fact.label
                if name in self._at_start and self._at_start[name] is not tensor:
                    self.recording.state.add(name)

    def is_left_out(self) -> bool:
        """Return whether a module that a draw may leave out was not called yet.

        A draw may leave out parts of a list, and of a module whose own forward draws.
        """
        called = {call.name: call.is_open for call in self.mode.calls.values() if call.is_module}
        whole = tuple(f"{name}." for name, is_open in called.items() if not is_open)
        lists = {name for name, module in self.model.named_modules() if _is_list(module) or _is_plain(module)}
        within = tuple(f"{name}." if name else "" for name in lists)
        deciding = {call.name for call in self.mode.calls.values() if call.path in self.mode.deciders}
        deciding |= {""} & self.mode.deciders
        holders = {name for name, module in self.model.named_modules() if [*module.parameters()]} - {"", *lists}
        return any(
            name not in called
            and (name.startswith(within) or name.rpartition(".")[0] in deciding)
            and not name.startswith(whole)
            for name in holders
        )

    def finish(self) -> None:
        """Note the modules to open or to keep whole in the next recording."""
        for call in self.mode.calls.values():
            if (
                call.is_module
                and (call.has_effects or call.is_hidden)
                and not call.is_open
                and self._may_open(call.name)
            ):
                self.recording.opened.add(call.name)
        for call in self._sized_by_elements:
            if call.parent is not None and not call.recorded.follow_arguments():
                self.recording.closed[call.parent.name] = f"elements decide the size of a result ({call.where})"

    def _may_open(self, name: str) -> bool:
        module = self.model.get_submodule(name)
        return bool(name) and is_openable(module) and not is_of_torch(module) and name not in self.recording.whole

    # Calls of modules

    def module(self, module: nn.Module, name: str, native_call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Record a call of a module, and return its result."""
        if self.inside is not None or torch._C._functorch.peek_interpreter_stack() is not None:
            return native_call(*args, **kwargs)
        with torch._C.DisableTorchFunction(), self._paused():  # or each question of a shape would come back to here
            return self._module(module, name, native_call, args, kwargs)

    @contextmanager
    def _paused(self, *, paused: bool = True) -> Iterator[None]:
        """Pause or resume the following of functions inside the context."""
        before, self.is_paused = self.is_paused, paused
        try:
            yield
        finally:
            self.is_paused = before

    def _module(self, module: nn.Module, name: str, native_call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self._note_draws()
        call = self._call(name, is_module=True)
        leaves = tensors_in((args, kwargs))
        parts = self._parts[name]
        key, before, lists = call_signature(args, kwargs), _python_state(parts), _lists_in((args, kwargs))
        lengths = [*map(len, lists)]
        call.varies |= self._states.get(call.key, before) != before
        if self.is_followed[name]:
            num_rules = self._num_rules
            out = self._follow(call, native_call, args, kwargs)
            if self._num_rules > num_rules:  # tensors on meta do not tell the shapes inside
                call.recorded.by_rule = True
        else:
            out = self._whole(call, native_call, args, kwargs, leaves, module)
        after = self._states[call.key] = _python_state(parts)
        has_objects = not all(isinstance(leaf, PLAIN + OBJECTS) for leaf in other_leaves((args, kwargs)))
        if after != before or lengths != [*map(len, lists)] or has_objects:
            call.has_effects = True
        elif call.is_tainted and not call.is_open and (name in self.recording.hooked or not _is_hooked(module)):
            # Not with an open call's effects, or those of hooks that this forward has added.
            self._note_predictable(call, key, native_call, args, kwargs, out, module)
        call.recorded.note(key, (args, kwargs), out)
        numbers = [leaf for leaf in other_leaves(out) if leaf is not None]
        if numbers and call.is_tainted:
            call.has_effects = True
            call.answers.append(numbers)
        labels = [self._fact(leaf).label for leaf in tensors_in(out)]
        if None in labels and call.is_open:  # whatever does not depend on the batch is made on each stage
            call.has_effects = True
        for label in labels:
            if label is not None:
                self.returned.setdefault(label, set()).add(id(call))
        call.results = [label for label in labels if label is not None]
        return out

    def _follow(self, call: Call, native_call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        call.is_open, call.is_block = True, self.is_block[call.name]
        call.is_tainted = True
        given = {self._fact(leaf).label for leaf in tensors_in((args, kwargs))}
        self.frames.append(_Frame(call, call.path, self.position, given))
        try:
            with torch._C._EnableTorchFunction(), self._paused(paused=False):
                out = native_call(*args, **kwargs)
            self._note_draws()
            return out
        finally:
            self.frames.pop()

    def _whole(
        self, call: Call, function: Callable[..., Any], args: Any, kwargs: Any, leaves: list[Tensor], module: Any
    ) -> Any:
        facts = [self._fact(leaf) for leaf in leaves]
        has_parameters = module is not None and next(module.parameters(), None) is not None
        call.is_tainted |= has_parameters or any(fact.label is not None for fact in facts)
        self._note_reads(call, facts)
        if module is not None and has_parameters:
            call.uses |= {self.state[id(t)] for t in (*module.parameters(), *module.buffers()) if id(t) in self.state}
        buffers = [] if module is None else [*module.buffers()]
        versions = [version_of(t) for t in (*leaves, *buffers)]
        key = call_signature(args, kwargs) if module is None else None
        before, self.inside, self.given = self._drawn, call, {fact.label for fact in facts}
        work = self._work = Work() if not call.flops and not call.nbytes else None
        copies = [(b, b.detach().clone()) for b in buffers if work is not None and has_plain_memory(b)]
        run = partial(self._run, call, function, args, kwargs, module)
        try:
            with work or nullcontext(), torch._C._EnableTorchFunction(), self._paused(paused=False):
                out = work.attention(run, args, kwargs) if work and function is ATTENTION else run()
        finally:
            self.inside = None
        if work is not None:
            call.flops, call.nbytes = work.flops, work.nbytes
        after = self._streams()
        if moved := after.difference(before):
            if call.is_tainted:
                call.draws = True
                self.mode.draws_own |= moved
            else:
                self._note_common_draws(moved)
        self._drawn = after
        # Some kernels of torch change a buffer, but not its version.
        call.moves |= {self.state.get(id(b), "") for b, copy in copies if not is_equal(b, copy)}
        for tensor, version in zip((*leaves, *buffers), versions, strict=True):
            if version_of(tensor) != version:
                if any(tensor is b for b in buffers):
                    call.moves.add(self.state.get(id(tensor), ""))
                elif call.is_tainted:
                    self._note_write(call, tensor, place=-1 - _place(leaves, tensor))
        if call.name == "contiguous" and out is leaves[0]:
            out = out.view_as(out)  # whether it is the same object depends on strides, which stages may have others of
        if call.is_tainted:
            if module is None:
                self._note_predictable(call, key, function, args, kwargs, out, None)
                call.recorded.note(key, (args, kwargs), out)
            for place, leaf in enumerate(tensors_in(out)):
                known = self.facts.get(id(leaf))
                if known is None or known.label is None:
                    self._value(leaf, (*call.key, place), call)
        return out

    def _run(self, call: Call, function: Callable[..., Any], args: Any, kwargs: Any, module: Any) -> Any:
        if not (self.is_lazy and call.is_tainted):
            return function(*args, **kwargs)
        args, kwargs = map_leaves(_on_meta, (args, kwargs))
        try:
            return function(*args, **kwargs)
        except Exception:  # it asks for elements, which there are not
            first = next((t for t in tensors_in((args, kwargs)) if t.is_floating_point()), None)
            if module is None or first is None:
                raise
            return torch.empty_like(first, requires_grad=torch.is_grad_enabled())

    def _note_predictable(
        self, call: Call, key: Any, function: Any, args: Any, kwargs: Any, out: Any, module: nn.Module | None
    ) -> None:
        """Note whether meta tensors predict the shapes of a result.

        If not, the sizes of the result must follow from those of the arguments.
        """
        is_known = type(module) in OF_SHAPES and getattr(module, "momentum", 0.0) is not None
        if is_known or (self.is_lazy and module is None):
            return
        if call.recorded.by_rule:
            self._num_rules += 1
            return
        # Equal calls need not be predicted again.
        known = None if key is None else (function if module is None else module_signature(module), key)
        if known in self.recording.predicted:
            return
        self.inside = call
        try:
            found, _ = infer(function, args, kwargs, module)
            is_alike = [t.shape for t in tensors_in(found)] == [t.shape for t in tensors_in(out)]
        except Exception:  # the user's own forward may ask for elements
            is_alike = False
        finally:
            self.inside = None
        if not is_alike:
            call.recorded.by_rule = True
            self._num_rules += 1
            if module is None and not is_masked(args, kwargs, lambda tensor: self._fact(tensor).label is None):
                self._sized_by_elements.add(call)
        elif known is not None:
            self.recording.predicted.add(known)

    # Calls of functions

    @property
    def follows_functions(self) -> bool:
        """True while the calls of a forward are followed."""
        return self.inside is None and not self.is_paused

    def function(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Record the call of an autograd function, which no torch mode sees."""
        with self._paused():
            return self._function(func, args, kwargs)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.is_paused:
            return func(*args, **kwargs)
        if self.inside is not None or torch._C._functorch.peek_interpreter_stack() is not None:
            if self.inside is None:  # inside torch.vmap, whose results no call has made
                return func(*args, **kwargs)
            facts = [self._fact(leaf) for leaf in tensors_in((args, kwargs))]
            self.inside.is_hidden |= any(f.label is not None and f.label not in self.given for f in facts)
            self._note_reads(self.inside, facts)
            if func is ATTENTION and self._work is not None:
                return self._work.attention(partial(func, *args, **kwargs), args, kwargs)
            return func(*args, **kwargs)
        return self._function(func, args, kwargs)

    def _function(self, func: Any, args: Any, kwargs: Any) -> Any:
        name, kind = kind_of(func)
        if kind is Kind.ASK:
            if self.is_lazy and name in ASK_DEVICE and args and isinstance(args[0], Tensor) and args[0].is_meta:
                return answer_of_device(name, self.recording.device)
            return func(*args, **kwargs)
        self._note_draws()
        leaves = tensors_in((args, kwargs))
        facts = [self._fact(leaf) for leaf in leaves]
        taken = facts[:1] if name in LIKE_SECOND and facts and facts[0].label is None else facts
        if kind is Kind.LIKE or not any(fact.label is not None for fact in taken):
            return self._untainted(name, kind, func, args, kwargs, [] if kind is Kind.LIKE else taken)
        call = self._call(name, is_module=False)
        call.is_tainted = True
        for fact in facts:
            call.uses |= fact.uses
        if kind is Kind.ELEMENTS:
            self._note_reads(call, facts)
            out = func(*args, **kwargs)
            call.answers.append(out if isinstance(out, bool | int) else object())
            self._num_rules += 1  # tensors on meta have no elements
            if call.answer is None:
                self._keep_whole(f"{call.where} asks for elements of a value of the batch")
            return out
        if kind is Kind.HOOK:
            self._note_reads(call, facts[:1])
            return func(*args, **kwargs)
        target = writes_to(name, args, kwargs)
        out = self._whole(call, func, args, kwargs, leaves, None)
        if target is not None and self._fact(target).label != (*call.key, -1):
            self._note_write(call, target, place=-1)
        return out

    def _untainted(self, name: str, kind: Kind, func: Any, args: Any, kwargs: Any, facts: list[_Fact]) -> Any:
        """Run a function without values of the batch, as every stage does."""
        uses = frozenset[str]().union(*(fact.uses for fact in facts))
        common = frozenset[int]().union(*(fact.common for fact in facts))
        for tensor in tensors_in((args, kwargs)):
            if (held := self.state.get(id(tensor))) is not None and not isinstance(tensor, nn.Parameter):
                self.recording.glue.add(held)
        frame = self.frames[-1]
        key = frame.key(f"{name}*", is_module=False)
        if self.is_lazy and any(tensor.is_meta for tensor in tensors_in((args, kwargs))):
            args, kwargs = map_leaves(_on_meta, (args, kwargs))
        target = writes_to(name, args, kwargs)
        version = None if target is None else version_of(target)
        out = func(*args, **kwargs)
        self._note_draws()
        if kind is Kind.ELEMENTS:
            self.mode.asked |= common
            if self.frames[-1].draws:
                self.mode.deciders.add(self.frames[-1].path)
            if repr(self._answers.setdefault(key, out)) != repr(out):
                self.mode.decides = True
            self._note_effects(-1)
            return out
        written = list[Tensor]()
        if target is not None:
            memory = memory_of(target)
            written = [target, *self.in_memory.get(memory, {}).values()]
            kind_of_memory, name_of_memory = self.origins.get(memory, ("", None))
            if kind_of_memory == "input" and version_of(target) != version:
                raise PartitionError(f"{users_line()}: the forward writes to input {name_of_memory}; write to a copy")
            if kind_of_memory == "state":
                around = self.frames[-1].call
                self.recording.moved.setdefault(name_of_memory, set()).add("" if around is None else around.name)
            self._note_effects(self.facts.get(id(target), NOTHING).begin)
        for leaf in (*tensors_in(out), *written):
            origin = self.origins.setdefault(memory_of(leaf), ("birth", key))
            if origin == ("birth", key) and key in self.recording.births[self.training]:
                call = self._call(f"{name}*", is_module=False, key=key)
                call.is_tainted = True
                self._value(leaf, (*key, 0), call)
            elif id(leaf) not in self.facts or target is not None:
                known = self.facts.get(id(leaf), NOTHING)
                self._set(leaf, _Fact(known.label, uses | known.uses, common | known.common, self.position))
        return out

    # Notes

    def _call(self, name: str, *, is_module: bool, key: Key | None = None) -> Call:
        frame = self.frames[-1]
        key = key or frame.key(name, is_module=is_module)
        self.position += 1
        self._order.append(key)
        call = self.mode.calls.get(key)
        if call is None:
            call = self.mode.calls[key] = Call(key, name, frame.call, is_module)
            call.where = "" if is_module else users_line()
        call.checkpoint, call.writes = _checkpoint_around(self.kept), set()
        return call

    def _memory(self, tensor: Tensor) -> int:
        """Return a number for the memory of ``tensor``, unique among all runs."""
        return self._memories.setdefault((len(self.mode.inputs), memory_of(tensor)), len(self._memories))

    def _set(self, tensor: Tensor, fact: _Fact) -> None:
        self.in_memory.setdefault(memory_of(tensor), {})[id(tensor)] = tensor
        self.facts[id(tensor)] = fact

    def _value(self, tensor: Tensor, label: Label, call: Call | None = None) -> None:
        self._set(tensor, _Fact(label, begin=self.position))
        self.mode.shapes.setdefault(label, []).append(tensor.shape)
        self.mode.memory[label] = self._memory(tensor)
        self.mode.tensors[label] = tensor.dtype, tensor.requires_grad
        self.mode.nbytes.setdefault(label, tensor.nbytes / max(1, len(tensor) if tensor.ndim else 1))
        self.made_in[label] = tuple(frame.call for frame in self.frames if frame.call is not None)
        if call is not None:
            call.makes[label] = None

    def _fact(self, tensor: Tensor) -> _Fact:
        known = self.facts.get(id(tensor))
        if known is not None:
            return known
        name = self.state.get(id(tensor))
        if name is not None:
            return _Fact(uses=frozenset({name}))
        if tensor.grad_fn is not None and self.inside is None and not isinstance(tensor, nn.Parameter):
            why = (
                f"{users_line()} uses a tensor that is kept from an earlier forward, or was made by a call which "
                "cannot be followed, like a scripted function, torch.vmap, or a C++ extension; make the tensor in each "
                "forward, and that call in a module of its own"
            )
            self._keep_whole(why)
        return NOTHING

    def _note_reads(self, call: Call, facts: Sequence[_Fact]) -> None:
        for fact in facts:
            if fact.label is not None:
                self._read(fact.label, call)
            call.uses |= fact.uses
            call.common |= fact.common

    def _read(self, label: Label, call: Call | None) -> None:
        """Note a use of a value, and whether it bypasses arguments or results."""
        if call is not None:
            call.reads[label] = None
            self._readers.setdefault(label, set()).add(call.key)
        around = {id(frame.call) for frame in self.frames}
        for frame in self.frames[1:]:
            assert frame.call is not None
            if label not in frame.given and frame.call not in self.made_in.get(label, ()):
                frame.call.is_hidden = True
        for maker in self.made_in.get(label, ()):
            if id(maker) not in around and id(maker) not in self.returned.get(label, ()):
                maker.has_effects = True

    def _note_write(self, call: Call, tensor: Tensor, *, place: int) -> None:
        """Note that ``call`` has written values of the batch to ``tensor``."""
        fact, (kind, origin) = self.facts.get(id(tensor), NOTHING), self.origins.get(memory_of(tensor), ("", None))
        if kind == "state" and origin not in self.recording.state:
            if origin in dict(self.model.named_parameters()):
                raise PartitionError(
                    f"{call.where or call.name}: the forward writes values of the batch to parameter '{origin}'; make "
                    "it a buffer, or use num_stages=1"
                )
            self.recording.state.add(origin)
        elif kind == "birth":
            self.recording.births[self.training].add(origin)
        elif kind == "input":
            raise PartitionError(f"{call.where or call.name}: the forward writes to input {origin}; write to a copy")
        call.writes.add(self._memory(tensor))
        if kind != "state":
            self._note_effects(fact.begin)
        self._value(tensor, (*call.key, place), call)

    def _note_effects(self, begin: int) -> None:
        """Mark forwards begun since position ``begin`` as having side effects."""
        for frame in self.frames[1:]:
            if frame.call is not None and begin <= frame.begin:
                frame.call.has_effects = True

    def _note_draws(self) -> None:
        """Note random numbers that were drawn outside calls since the last call."""
        now = self._streams()
        self._note_common_draws(now.difference(self._drawn))
        self._drawn = now

    def _streams(self) -> Streams:
        return _streams(only_torch=not self.follows_python)

    def _note_common_draws(self, names: set[str]) -> None:
        if names:
            self.frames[-1].draws = True
            if names != {"torch"}:
                self.mode.deciders.add(self.frames[-1].path)
            self.mode.draws |= names
            self.mode.decides = True
            self._note_effects(-1)

    def _keep_whole(self, why: str) -> None:
        """Keep the module of the running forward whole from now on."""
        module = self.frames[-1].call
        if module is None:
            self.recording.refused = self.recording.refused or why
        else:
            self.recording.closed[module.name] = why


_PLAIN, _CONTAINERS = {*PLAIN}, {list, dict, set, OrderedDict}  # of most attributes of modules
OBJECTS = (torch.dtype, torch.device, torch.Size, slice, type(Ellipsis), torch.memory_format, torch.layout)


def is_common(tensor: Tensor) -> bool:
    """Return whether an input tensor holds whole numbers or booleans.

    Such an input goes to all stages that use it.
    """
    return not (tensor.is_floating_point() or tensor.is_complex())


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList | nn.ModuleDict)


def _lists_in(value: Any) -> list[Any]:
    """Return the lists and dictionaries in ``value``, which a call may change."""
    found = [value] if isinstance(value, (list, dict)) else []
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [*found, *(one for part in inside for one in _lists_in(part))]


def _python_state(parts: Sequence[nn.Module]) -> list[Any]:
    """Return the Python state of the modules ``parts``, to be compared.

    Numbers and strings, also those in plain objects, stand for themselves. Any other attribute gives its id and length.
    """
    seen: list[Any] = []
    objects: dict[int, Any] = {}
    for part in parts:
        for key, value in vars(part).items():
            kind = type(value)
            if kind in _PLAIN or (kind not in _CONTAINERS and isinstance(value, PLAIN)):
                seen.append(value)
            elif key not in OF_TORCH:
                seen += id(value), len(value) if isinstance(value, (list, dict, set)) else 0
                is_object = kind not in _CONTAINERS and hasattr(value, "__dict__")
                if is_object and not callable(value) and not isinstance(value, Tensor):
                    objects[id(value)] = value
    return [*seen, *(one for value in objects.values() for one in vars(value).values() if isinstance(one, PLAIN))]


def _place(leaves: Sequence[Tensor], tensor: Tensor) -> int:
    return next(n for n, leaf in enumerate(unique_tensors(leaves)) if leaf is tensor)


def _streams(*, only_torch: bool = False) -> Streams:
    return Streams(torch.device("cuda") if torch.cuda.is_initialized() else None, only_torch=only_torch)


def _to_meta(tensor: Tensor) -> Tensor:
    if tensor.is_meta:
        return tensor
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return made.requires_grad_(tensor.requires_grad)


def _on_meta(leaf: Any) -> Any:
    """Replace a tensor by one on meta, and a device by the meta device."""
    if isinstance(leaf, Tensor):
        return _to_meta(leaf)
    return META if isinstance(leaf, torch.device) else leaf


def _checkpoint_around(kept: list[Any]) -> int:
    """Return an id of the outermost running torch.utils.checkpoint, or 0."""
    frame: Any = sys._getframe(2)
    outermost: Any = None
    while frame is not None:
        if frame.f_code.co_name == "checkpoint" and frame.f_code.co_filename.endswith("checkpoint.py"):
            outermost = frame
        frame = frame.f_back
    if outermost is None:
        return 0
    kept.append(outermost)  # or another one could get its number
    return id(outermost)


@contextmanager
def _intercepted(model: nn.Module, names: dict[int, str], watch: Recorder) -> Iterator[None]:
    """Route the calls of all modules in ``model`` through ``watch.module``."""
    changed = []
    for module in model.modules():
        if module is not model:
            place, own = place_of_call(module, names[id(module)] in watch.recording.hooked)
            changed.append((module, place, vars(module).get(place)))
            vars(module)[place] = _interceptor(module, names[id(module)], own, watch)
    try:
        yield
    finally:
        for module, place, before in changed:
            vars(module).pop(place, None)
            if before is not None:
                vars(module)[place] = before


def _interceptor(module: nn.Module, name: str, own: Callable[..., Any], watch: Recorder) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return watch.module(module, name, own, args, kwargs)

    return call
