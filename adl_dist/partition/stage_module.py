"""One stage of a model: its forward with only the calls of this stage.

The stage has a copy of the model's Python objects. In it, parameters and buffers of this stage are the model's own
tensors; parameters of other stages are on meta. Values of other stages are absent: they have a shape and a dtype, and
asking for their elements is an error with the user's line. A value that a call of this stage needs is received.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from adl_dist.batch import Structure
from adl_dist.partition.absent import Results, module_signature
from adl_dist.partition.containers import map_tensors
from adl_dist.partition.forward_run import ForwardError, ForwardRun, call_of
from adl_dist.partition.intercept import place_of_call
from adl_dist.partition.recording import copied, held_tensors, module_named, put_tensor
from adl_dist.partition.stage_plan import EXTRA_STATE, CallPlan, FramePlan, StagePlan, Way
from adl_dist.partition.tape import Tape
from adl_dist.partition.user_changes import UserChanges
from adl_dist.partition.value import Watch, as_tensor, foreign_parameter, native


class _Part(nn.Module):
    """One stage's tensors of a module that lies on several stages.

    Its state dict has the module's extra state if this stage keeps that.
    """

    _keeps_extra_of: nn.Module | None = None

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self._keeps_extra_of is not None:
            destination[prefix + EXTRA_STATE] = self._keeps_extra_of.get_extra_state()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *rest)
        if self._keeps_extra_of is not None and prefix + EXTRA_STATE in state_dict:
            self._keeps_extra_of.set_extra_state(state_dict[prefix + EXTRA_STATE])


class StageModule(_Part):
    """Stage ``index`` of a model, with tensors under their names in the model.

    Attributes:
        plan: the plan of all stages.
        units: names of its units.
        copies: names of the parameters that an earlier stage of this process holds, and that this one has a copy of.
        seeds: (seeds for draws that do not depend on the batch, seeds for draws that do), each by stream: ``torch``,
            ``python``, ``numpy``. The stage that trains this module sets them for each micro-batch if :attr:`draws`
            asks for them.
        keep_tape: whether a forward leaves its calls in ``tape``, for ``forward(*acts, replay=tape)``.
    """

    model: nn.Module
    tape: Tape | None

    def __init__(
        self,
        model: nn.Module,
        plan: StagePlan,
        index: int,
        units: Sequence[str],
        layout: Structure | None = None,
        of_process: Sequence[int] = (),
    ) -> None:
        """Copy ``model`` for this stage.

        ``layout`` is the structure of the model's inputs, or None if all are positional. ``of_process`` are the stages
        in this process; the first of them that needs a tensor takes the model's own, and the others copy it.
        """
        super().__init__()
        self.plan, self.index, self.units, self.layout = plan, index, list(units), layout
        self.is_last = index == plan.num_stages - 1
        self.copies: list[str] = []
        self._of_process = {index, *of_process}
        self.seeds: tuple[dict[str, int], Any] | None = None
        self.own_streams: Any = None
        self.keep_tape, self.tape = False, None
        self._device: torch.device | None = None
        memo: dict[int, Any] = {id(m): m for m in model.modules() if isinstance(m, torch.jit.ScriptModule)}
        held, copies, shared = self._take_tensors(model, memo)
        twin = copied(model, memo)
        self.model = twin
        self._changes = UserChanges(model, twin, copies=copies, shared=shared)
        self._register(twin, held)
        self.is_changed = False  # by the user, since the model was recorded
        self.results: dict[CallPlan, Results] = {}
        self.templates = plan.recording.templates
        self.foreign: dict[Any, Results] = {}
        self.written: dict[Any, Any] = {}
        self.absent_inputs: dict[Any, Tensor] = {}
        self._natives: dict[nn.Module, tuple[str, Callable[..., Any]]] = {}
        self._compile_keys: dict[str, Any] = {}
        followed = {n for mode in plan.modes.values() for n in _visible(mode.root, index)}
        for module in twin.modules():
            name = self._names[id(module)]
            if name in followed:
                place, call = self._natives[module] = place_of_call(module, name in plan.recording.hooked)
                vars(module)[place] = call_of(module, name, call, self)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the stage, even one named like a module."""
        object.__setattr__(self, name, value)

    def _take_tensors(self, model: nn.Module, memo: dict[int, Any]) -> tuple[dict[str, Tensor], list[str], list[str]]:
        """Return (tensors by all their names, names of copies, of shared ones).

        These are tensors of this stage. Parameters are shared without being named. ``memo`` gets what replaces each
        tensor of ``model`` in the copy.
        """
        plan, names = self.plan, dict[int, list[str]]()
        for name, tensor in (
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        ):
            names.setdefault(id(tensor), []).append(name)
        held: dict[str, Tensor] = {}
        copies, shared = list[str](), list[str]()
        calls = [call for mode in plan.recording.modes.values() for call in mode.calls.values()]
        moved = plan.recording.moved.keys() | {name for call in calls for name in call.moves}
        for name, tensor in held_tensors(model):
            stages = plan.holders.get(name, ())
            memo[id(tensor)] = own = self._own_or_other(name, tensor, stages)
            aliases = [name] if isinstance(tensor, nn.Parameter) else names.get(id(tensor), [name])
            if own is not tensor and not own.is_meta:
                copies += aliases
            elif own is tensor and not isinstance(tensor, nn.Parameter):
                shared += aliases
            if self.index in stages or (stages and name in plan.everywhere - moved):  # copies elsewhere stand still
                held |= dict.fromkeys(names.get(id(tensor), ()), own)
        return held, copies, shared

    def _own_or_other(self, name: str, tensor: Tensor, stages: Sequence[int]) -> Tensor:
        """Return a tensor of the model for this stage: itself, a copy or on meta."""
        index = self.index
        users = (*stages, *range(self.plan.num_stages)) if stages and name in self.plan.everywhere else stages
        is_first = index == next((k for k in users if k in self._of_process), None)
        if isinstance(tensor, nn.Parameter):
            if index not in stages:
                return foreign_parameter(tensor)
            if is_first:
                return tensor
            self.copies.append(name)
            return copy.deepcopy(tensor)
        if is_first:
            return tensor
        if name in self.plan.everywhere or index in stages or not stages:
            return tensor.detach().clone() if tensor.is_leaf or stages else tensor
        return torch.empty_like(tensor, device="meta")

    def _register(self, twin: nn.Module, held: Mapping[str, Tensor]) -> None:
        """Register this stage's modules and tensors by their names in the model."""
        own = {id(tensor) for tensor in held.values()}

        kept = {id(module) for name, module in extra_states(twin).items() if self.index in self.plan.holders[name]}
        self._buffers_of_parts: list[tuple[nn.Module, str, nn.Module]] = []

        def place(module: nn.Module, into: nn.Module) -> None:
            if id(module) in kept:
                vars(into)["_keeps_extra_of"] = module
            into._parameters |= {key: t for key, t in module._parameters.items() if id(t) in own}
            buffers = [key for key, tensor in module._buffers.items() if id(tensor) in own]
            self._buffers_of_parts += [(module, key, into) for key in buffers]
            into._non_persistent_buffers_set = {*into._non_persistent_buffers_set, *module._non_persistent_buffers_set}
            for key, child in module._modules.items():
                if child is None:
                    continue
                mine = [id(tensor) in own for tensor in (*child.parameters(), *child.buffers())]
                mine += [id(part) in kept for part in extra_states(child).values()]
                if any(mine) and all(mine):
                    into._modules[key] = child
                elif any(mine):
                    into._modules[key] = _Part()
                    place(child, into._modules[key])  # type: ignore[arg-type]

        place(twin, self)
        self.register_buffers()
        self.held = [*held]
        self._names = {id(module): name for name, module in twin.named_modules()}

    def register_buffers(self) -> None:
        """Register the present buffers, because a forward may assign new ones."""
        for module, key, part in self._buffers_of_parts:
            part._buffers[key] = module._buffers.get(key)

    def compile_units(self, compiler: Callable[[Callable[..., Any], Any], Callable[..., Any]]) -> None:
        """Compile the modules with parameters that run whole on this stage.

        Each call is replaced by ``compiler(call, key)``. Equal layers have equal keys. The Python between calls stays
        as it is.
        """
        own = {n for mode in self.plan.modes.values() for n in _whole(mode.root, self.index)}
        for module, (place, call) in self._natives.items():
            name = self._names[id(module)]
            if name in own and next(module.parameters(), None) is not None:
                # Of the first time: a warm-up's stages may be in another mode, and share the graphs.
                key = self._compile_keys.setdefault(name, module_signature(module))
                vars(module)[place] = call_of(module, name, compiler(call, key), self)

    def train(self, mode: bool = True) -> "StageModule":
        """Set the mode of the copy through the model's own ``train``."""
        self.training = mode
        self.model.train(mode)
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "StageModule":
        """Move or convert the tensors of this stage."""
        for name in self.held:
            path, _, key = name.rpartition(".")
            module = self.model.get_submodule(path)
            tensor = getattr(module, key)
            if isinstance(tensor, nn.Parameter):
                with torch.no_grad():
                    tensor.data = fn(tensor.data)
                    if tensor.grad is not None:
                        tensor.grad.data = fn(tensor.grad.data)
            elif isinstance(tensor, Tensor) and (other := fn(tensor)) is not tensor:
                self.replace(name, tensor, other)
        for name in self.plan.everywhere:
            path, _, key = name.rpartition(".")
            module = self.model.get_submodule(path)
            if name not in self.held and isinstance(tensor := getattr(module, key, None), Tensor):
                put_tensor(module, name, fn(tensor))
        self.register_buffers()
        self._device = None
        return self

    @property
    def is_lazy(self) -> bool:
        """True while the stage's own tensors are on meta."""
        return any(p.is_meta for p in self.parameters())

    def replace(self, name: str, old: Tensor, new: Tensor) -> None:
        """Replace ``old``, a tensor of this stage and the model, by ``new``."""
        path, _, key = name.rpartition(".")
        for module in (self.model.get_submodule(path), *self._registered(path), *self._changes.replaces(name, new)):
            for registry in (module._parameters, module._buffers):
                if registry.get(key) is old:
                    registry[key] = new  # type: ignore[assignment]
        self._device = None

    def _registered(self, path: str) -> list[nn.Module]:
        try:
            return [module_named(self, path)]
        except KeyError:
            return []  # of a module that lies on another stage

    @property
    def device(self) -> torch.device:
        """The device of the stage's tensors."""
        if self._device is None:
            tensors = (*self.parameters(), *self.buffers(), *self.model.buffers())
            self._device = next((t.device for t in tensors if not t.is_meta), torch.device("cpu"))
        return self._device

    @property
    def draws(self) -> tuple[frozenset[str], frozenset[str]]:
        """The random streams that this stage draws from in any mode.

        The first set is for draws that do not depend on the batch, the second for draws that do.
        """
        modes = self.plan.modes.values()
        common, own = (
            frozenset[str]().union(*some) for some in zip(*((m.draws, m.draws_own) for m in modes), strict=True)
        )
        return common, own

    def take_changes(self) -> None:
        """Take over the changes that the user has made to the model.

        Raises:
            PartitionError: If the model has other modules, parameters or shapes than when it was cut.
        """
        if self._changes.take():
            self.is_changed = True  # results of skipped calls may differ from the recorded ones
            self.results.clear()
        self.register_buffers()

    def forward(self, *acts: Tensor, replay: Tape | None = None, buffers: Mapping[str, Tensor] | None = None) -> Any:
        """Return a tuple of tensors for the next stage, or the model's result.

        Args:
            acts: The inputs of the model on stage 0, [B, ...], and the result of the stage before on others.
            replay: The tape of an earlier forward of the same ``acts``; its calls are made again, with the present
                weights, and the model's forward does not run.
            buffers: With ``replay``, the buffers to compute with, by name; the stage's own are left as they are.

        Raises:
            ForwardError: If the forward does something that was not recorded, or needs a tensor that this stage lacks.
        """
        mode = self.plan.modes[self.training]
        run = ForwardRun(self, mode)
        if replay is not None:
            with self._computing_with(buffers or {}):
                return run.play(replay, acts)
        before, Watch.active = Watch.active, run
        try:
            args, kwargs = run.begin(acts)
            # With a graph, which nothing keeps: what the forward does without one is seen for a tape.
            with torch.set_grad_enabled(torch.is_grad_enabled() or self.keep_tape), run.watcher or nullcontext():
                out = self.model(*args, **kwargs)
            if run.failure is not None:
                raise run.failure
            with native():
                out = run.end(out)
            if run.tape is not None:
                run.tape.end(out)
                self.tape = run.tape
                out = map_tensors(Tensor.detach, out)
            return out
        except ForwardError:
            raise
        except Exception as error:
            if run.failure is not None:
                raise run.failure from None
            run.explain(error)
            raise
        finally:
            Watch.active = before
            run.restore()
            self.register_buffers()
            for act in acts:
                as_tensor(act)

    @contextmanager
    def _computing_with(self, buffers: Mapping[str, Tensor]) -> Iterator[None]:
        """Put ``buffers`` in the place of the stage's own."""
        registries = {name: module_named(self.model, name.rpartition(".")[0])._buffers for name in buffers}
        own = {name: registry[name.rpartition(".")[2]] for name, registry in registries.items()}
        try:
            for name, registry in registries.items():
                registry[name.rpartition(".")[2]] = buffers[name]
            yield
        finally:
            for name, registry in registries.items():
                registry[name.rpartition(".")[2]] = own[name]

    def give_state(self) -> None:
        """Put extra state and replaced buffers into the user's model."""
        kept = {id(part._keeps_extra_of) for part in self.modules() if isinstance(part, _Part)}
        kept |= {id(part) for part in self.modules()}
        self._changes.give([module for module in extra_states(self.model).values() if id(module) in kept])


def extra_states(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules with extra state, by their keys in the state dict."""
    return {
        f"{name}.{EXTRA_STATE}".lstrip("."): module
        for name, module in model.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


def _visible(frame: FramePlan, stage: int) -> Iterator[str]:
    """Yield the names of the modules with calls that a stage follows."""
    for name, plans in frame.modules.items():
        yield name
        for planned in plans:
            if planned.frame is not None and (
                planned.way is Way.THROUGH or (planned.way is Way.SPLIT and planned.first <= stage <= planned.last)
            ):
                yield from _visible(planned.frame, stage)


def _whole(frame: FramePlan, stage: int) -> Iterator[str]:
    """Yield the names of the modules that a stage runs as a whole."""
    for name, plans in frame.modules.items():
        for planned in plans:
            if planned.way is Way.WHOLE and planned.first == planned.last == stage:
                yield name
            elif planned.frame is not None:
                yield from _whole(planned.frame, stage)
