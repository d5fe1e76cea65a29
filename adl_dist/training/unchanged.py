"""What the user's code must leave as it is once the model is cut: not all stages would see a change, or none."""

import dis
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any
from weakref import ref

from torch import Tensor, nn

from adl_dist.errors import ConfigError
from adl_dist.partition.state_walk import PLAIN, is_of_a_library, names_used_by
from adl_dist.stage import LossFn

DEPTH = 3  # of containers and objects in each other
MOST_ELEMENTS = 1000  # in all containers that one attribute holds; of the rest it counts only which they are
# By the name of a module, and that of what it holds, as the user knows it: what is equal while it is as it was.
Seen = dict[str, dict[str, Any]]
LOSS = "the loss"
_HELD = {"_parameters", "_buffers", "_modules"}
_HOOKS = {"_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"}


class Unchanged:
    """The modules of a model that is in several stages, and its loss, as the user's script refers to them.

    A forward that was traced does not read again what its modules hold besides tensors, and a stage holds the modules
    that it was given. And a callback runs on rank 0 alone, where a change reaches the stages of that process only.

    What is new counts for nothing, nor what begins with an underscore: a cache is made by who reads.
    """

    def __init__(self, model: nn.Module, stages: Sequence[nn.Module], loss_fn: LossFn, *, in_processes: bool) -> None:
        """Look at ``model``, which is now in ``stages`` of this or of several processes; no reference to it is kept."""
        self._in_processes = in_processes
        self._modules = [(name, ref(module)) for name, module in model.named_modules()]
        self._loss_fn = loss_fn
        called = {module for stage in stages for module in stage.modules()}
        self._traced = {name: names_used_by(type(m)) for name, m in model.named_modules() if m not in called}
        self._parts, self._values = self._structure(), self._read_once()

    def check(self) -> None:
        """Raise ConfigError if a module, a tie or a value of a forward that was traced is another than at the start."""
        unlike = _first_unlike(self._parts, self._structure()) or _first_unlike(self._values, self._read_once())
        if unlike is not None:
            raise ConfigError(
                f"{unlike}, or what it is tied to, was changed since the model was cut, which its stages do not see; "
                "make a new Trainer, of a model with the weights of full_state_dict()"
            )

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Raise ConfigError at the end if a change inside would not reach all stages; put the modes of modules back.

        In several processes that is any change of model or loss.
        """
        before, modes = self._everything(), [(name, module, module.training) for name, module in self._alive()]
        yield
        self.check()
        unlike = self._first_in_its_own_mode(modes) or _first_unlike(before, self._everything())
        if unlike is not None:
            raise ConfigError(
                f"it has changed {unlike}, which not all stages would see, as callbacks run on rank 0 alone; change it "
                "between two calls of fit, or within the forward (a buffer), the loss or the lr_schedule"
            )

    def _alive(self) -> Iterator[tuple[str, nn.Module]]:
        return ((name, module) for name, to in self._modules if (module := to()) is not None)

    def _first_in_its_own_mode(self, modes: Sequence[tuple[str, nn.Module, bool]]) -> str | None:
        """Put ``modes`` back; return which module was in another one that neither train() nor eval() has made."""
        now = [module.training for _, module, _ in modes]
        unlike = [name for (name, _, mode), at in zip(modes, now, strict=True) if at != mode]
        possible = []
        for training in (True, False) if unlike else ():
            modes[0][1].train(training)  # the whole model: a part may have a train() of its own
            possible.append([module.training for _, module, _ in modes])
        for _, module, mode in modes:
            module.training = mode
        return f"the mode of '{unlike[0]}' of the model" if unlike and now not in possible else None

    def _structure(self) -> Seen:
        """Return which modules are where, and which parameters have several names."""
        seen: Seen = {}
        names: dict[int, str] = {}
        for name, module in self._alive():
            seen[name] = {key: id(child) for key, child in module._modules.items()}
            for key, p in module._parameters.items():
                if p is not None:
                    seen[name][key] = names.setdefault(id(p), _dotted(name, key))
        return seen

    def _read_once(self) -> Seen:
        """Return the plain values that modules whose forward was traced hold, as far as their code names them."""
        seen: Seen = {}
        for name, module in self._alive():
            if (used := self._traced.get(name)) is None:
                continue
            held = {**_read_by(type(module)), **vars(module), **module._buffers}
            seen[name] = {key: _look_once(held[key], used) for key in used & held.keys() if not key.startswith("_")}
            own = vars(module).get("forward")
            seen[name]["forward"] = id(getattr(own, "__func__", own)) if own is not None else None
        return seen

    def _everything(self) -> Seen:
        """Return all that is seen of the modules and of the loss, as far as other processes would not see it change."""
        if not self._in_processes:
            return {}
        seen = {name: {key: _look(value) for key, value in _held_by(module)} for name, module in self._alive()}
        seen[LOSS] = {key: _look(value) for key, value in reached(self._loss_fn)}
        return seen


def _read_by(kind: type) -> dict[str, Any]:
    """Return the global variables and class attributes that the methods of a user's own class could read as values."""
    held: dict[str, Any] = {}
    for owner in reversed([owner for owner in kind.__mro__ if not is_of_a_library(owner)]):
        for function in [value for value in vars(owner).values() if isinstance(value, FunctionType)]:
            known = function.__globals__
            held |= {key: known[key] for key in _globals_in(function.__code__) if key in known}
        held |= {key: value for key, value in vars(owner).items() if not hasattr(value, "__get__")}
    return {key: value for key, value in held.items() if not callable(value) and not isinstance(value, ModuleType)}


def reached(loss_fn: Any, depth: int = DEPTH) -> Iterator[tuple[str, Any]]:
    """Yield what a loss, or another function, reaches, each with a name: of an object's method, what that names."""
    held: dict[str, Any] = {}
    if isinstance(loss_fn, nn.Module):
        for name, module in loss_fn.named_modules():
            held |= {_dotted(name, key): value for key, value in _held_by(module)}
    elif isinstance(loss_fn, partial):
        held = {_name_of(loss_fn.func): loss_fn.func, **loss_fn.keywords}
        held |= {f"argument {place}": value for place, value in enumerate(loss_fn.args)}
    elif isinstance(loss_fn, MethodType):
        used = names_used_by(type(loss_fn.__self__), [loss_fn.__name__])
        held = {key: value for key, value in vars(loss_fn.__self__).items() if key in used}
    elif isinstance(loss_fn, FunctionType):
        known = loss_fn.__globals__
        held = {key: known[key] for key in loss_fn.__code__.co_names if key in known}
        for key, cell in zip(loss_fn.__code__.co_freevars, loss_fn.__closure__ or (), strict=True):
            with suppress(ValueError):  # it holds nothing yet
                held[key] = cell.cell_contents
    else:
        held = getattr(loss_fn, "__dict__", {})
    for key, value in held.items():
        yield key, value
        if depth and callable(value) and not isinstance(value, type) and not is_of_a_library(value):
            yield from ((_dotted(key, inner), each) for inner, each in reached(value, depth - 1))


def _held_by(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield what ``module`` holds, each with its name; no plain tensors: a forward puts new ones in their places."""
    for key, value in vars(module).items():
        if key in _HELD:
            yield from value.items()
        elif key in _HOOKS:
            yield key, str([*map(id, value.values())]) if value else ""
        elif not key.startswith("_") and key != "training" and not isinstance(value, Tensor):
            yield key, value


def _look(value: Any) -> Any:
    """Return what is equal for the same value: of a tensor which it is, and how often it was written to."""
    left = MOST_ELEMENTS

    def look(value: Any, depth: int) -> Any:
        nonlocal left
        if isinstance(value, PLAIN):
            return value if value == value else "nan"
        if isinstance(value, Tensor):
            return id(value), 0 if value.is_inference() else value._version, value.requires_grad
        if depth == 0 or isinstance(value, nn.Module):
            return id(value)
        if isinstance(value, dict):
            return many(value, value.items(), depth)
        if isinstance(value, list | tuple):
            return many(value, enumerate(value), depth)
        of_user = isinstance(value, Namespace | SimpleNamespace) or not is_of_a_library(type(value))
        if hasattr(value, "__dict__") and not isinstance(value, type) and of_user:
            return id(value), many(vars(value), vars(value).items(), depth)
        return id(value)

    def many(held: Any, pairs: Any, depth: int) -> Any:
        nonlocal left
        left -= len(held)
        return {key: look(each, depth - 1) for key, each in pairs} if left >= 0 else id(held)

    return look(value, DEPTH)


def _globals_in(code: CodeType) -> Iterator[str]:
    """Yield the names of the global variables that ``code`` reads, not those of attributes and methods."""
    yield from (step.argval for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL")
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _globals_in(inner)


def _look_once(value: Any, used: Set[str]) -> Any:
    """Return what is equal for the same value, as far as code that names ``used`` can see it.

    Of a tensor which it is: a forward that is read writes in place. A script's arguments hold much besides.
    """
    if isinstance(value, Tensor):
        return id(value)
    if isinstance(value, Namespace | SimpleNamespace):
        return id(value), {key: _look(one) for key, one in vars(value).items() if key in used}
    return _look(value)


def _first_unlike(before: Seen, now: Seen) -> str | None:
    """Return what is first another than before, of modules that are still there."""
    for name in (name for name in before if name in now):
        for key, then in before[name].items():
            if key not in now[name] or _differs(then, now[name][key]):
                return f"'{key}' of the loss" if name == LOSS else f"'{_dotted(name, key)}' of the model"
    return None


def _differs(then: Any, now: Any) -> bool:
    """Return whether a value is another; entries that are new do not count, nor those that begin with an underscore."""
    if isinstance(then, dict) and isinstance(now, dict):
        counted = (key for key in then if not (isinstance(key, str) and key.startswith("_")))
        return any(key not in now or _differs(then[key], now[key]) for key in counted)
    if isinstance(then, tuple) and isinstance(now, tuple) and len(then) == len(now) == 2:
        return then[0] != now[0] or _differs(then[1], now[1])
    return bool(then != now)


def _name_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _dotted(name: str, key: str) -> str:
    return f"{name}.{key}".lstrip(".")
