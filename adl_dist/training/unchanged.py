"""What the user's code must leave as it is once the model is cut: not all stages would see a change, or none."""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from types import FunctionType, MethodType
from typing import Any
from weakref import ref

from torch import Tensor, nn

from adl_dist.errors import ConfigError
from adl_dist.partition.state_walk import MOST_ELEMENTS, PLAIN, is_of_a_library
from adl_dist.stage import LossFn

DEPTH = 3  # of containers and objects in each other
# By the name of a module, and that of what it holds, as the user knows it: what is equal while it is as it was.
Seen = dict[str, dict[str, Any]]
LOSS = "the loss"


class Unchanged:
    """The modules of a model that is in several stages, and its loss, as the user's script refers to them.

    A forward that was traced does not read again what its modules hold besides tensors, and a stage holds the modules
    that it was given. And a callback runs on rank 0 alone, where a change reaches the stages of that process only.
    """

    def __init__(self, model: nn.Module, stages: Sequence[nn.Module], loss_fn: LossFn, *, in_processes: bool) -> None:
        """Look at ``model``, which is now in ``stages`` of this or of several processes; no reference to it is kept."""
        self._in_processes = in_processes
        self._modules = [(name, ref(module)) for name, module in model.named_modules()]
        self._loss_fn = loss_fn
        called = {module for stage in stages for module in stage.modules()}
        self._traced = {name for name, module in model.named_modules() if module not in called}
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
        """Raise ConfigError at the end if a change inside would not reach all stages; put the whole model's mode back.

        In several processes that is any change of model or loss.
        """
        before, modes = self._everything(), [(name, module, module.training) for name, module in self._alive()]
        yield
        self.check()
        unlike = _first_in_its_own_mode(modes)
        for _, module, mode in modes:
            module.training = mode
        unlike = unlike or _first_unlike(before, self._everything())
        if unlike is not None:
            raise ConfigError(
                f"it has changed {unlike}, which not all stages would see, as callbacks run on rank 0 alone; change it "
                "between two calls of fit, or within the forward (a buffer), the loss or the lr_schedule"
            )

    def _alive(self) -> Iterator[tuple[str, nn.Module]]:
        return ((name, module) for name, to in self._modules if (module := to()) is not None)

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
        """Return the plain values of modules whose forward was traced."""
        return {
            name: {
                key: _look(value, DEPTH) for key, value in _held_by(module) if not isinstance(value, Tensor | nn.Module)
            }
            for name, module in self._alive()
            if name in self._traced
        }

    def _everything(self) -> Seen:
        """Return all that is seen of the modules and of the loss, as far as other processes would not see it change."""
        if not self._in_processes:
            return {}
        seen = {name: {key: _look(value, DEPTH) for key, value in _held_by(module)} for name, module in self._alive()}
        seen[LOSS] = {key: _look(value, DEPTH) for key, value in reached(self._loss_fn)}
        return seen


_HELD = {"_parameters", "_buffers", "_modules"}


def _held_by(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield what ``module`` holds, each with its name: fast, because of a module's dictionaries most are empty."""
    for key, value in vars(module).items():
        if key in _HELD:
            yield from value.items()
        elif key != "training" and (not isinstance(value, dict) or value):
            yield key, value


def reached(loss_fn: Any, depth: int = DEPTH) -> Iterator[tuple[str, Any]]:
    """Yield what a loss reaches, each with a name."""
    held: dict[str, Any] = {}
    if isinstance(loss_fn, nn.Module):
        for name, module in loss_fn.named_modules():
            held |= {_dotted(name, key): value for key, value in _held_by(module)}
    elif isinstance(loss_fn, partial):
        held = {"the function": loss_fn.func, "its arguments": loss_fn.args, **loss_fn.keywords}
    elif isinstance(loss_fn, MethodType):
        held = {"self": loss_fn.__self__}
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
            yield from reached(value, depth - 1)


def _look(value: Any, depth: int) -> Any:
    """Return what is equal for the same value: of a tensor which it is, and how often it was written to."""
    if isinstance(value, PLAIN):
        return value if value == value else "nan"
    if isinstance(value, Tensor):
        return id(value), 0 if value.is_inference() else value._version, value.requires_grad
    if depth == 0 or isinstance(value, nn.Module):
        return id(value)
    if isinstance(value, dict) and len(value) <= MOST_ELEMENTS:
        return [(key, _look(each, depth - 1)) for key, each in value.items()]
    if isinstance(value, list | tuple | deque) and len(value) <= MOST_ELEMENTS:
        return [_look(each, depth - 1) for each in value]
    if hasattr(value, "__dict__") and not isinstance(value, type) and not is_of_a_library(type(value)):
        return id(value), _look(vars(value), depth - 1)
    return id(value)


def _first_in_its_own_mode(modes: Sequence[tuple[str, nn.Module, bool]]) -> str | None:
    """Return which module is in another mode than it was, and than others; stages set the mode of all of theirs."""
    unlike = [name for name, module, mode in modes if module.training != mode]
    is_uniform = len({module.training for _, module, _ in modes}) == 1
    return None if is_uniform or not unlike else f"the mode of '{unlike[0]}' of the model"


def _first_unlike(before: Seen, now: Seen) -> str | None:
    """Return what is first another than before, of modules that are still there."""
    for name in (name for name in before if name in now):
        then, held = before[name], now[name]
        for key in {**then, **held}:
            if then.get(key) != held.get(key):
                return f"'{key}' of the loss" if name == LOSS else f"'{_dotted(name, key)}' of the model"
    return None


def _dotted(name: str, key: str) -> str:
    return f"{name}.{key}".lstrip(".")
