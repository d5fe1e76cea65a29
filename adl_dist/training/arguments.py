"""Checks of the arguments of the Python API, with one-line errors."""

import functools
import multiprocessing
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from adl_dist.checkpoint.policy import CheckpointPolicy
from adl_dist.data import Loading
from adl_dist.distributed.world import world_of_process
from adl_dist.errors import AdlError, ConfigError, without_own_frames
from adl_dist.losses import ModelLoss
from adl_dist.monitor.timeouts import WatchdogTimeouts
from adl_dist.schedule import Method
from adl_dist.stage import GradientPolicy, LossFn, Precision
from adl_dist.training.options import Monitoring, PartitionSpec, ProcessOptions

F = TypeVar("F", bound=Callable[..., Any])
_FITTING = threading.Lock()  # held by the trainer that trains


def one_at_a_time(method: F) -> F:
    """Refuse a call of ``method`` while a method of its trainer runs.

    ``fit`` is also refused while another trainer of this process trains, because random streams are common to all
    threads.
    """

    @functools.wraps(method)
    @torch.inference_mode(mode=False)  # which would keep the gradients of the user's own weights
    def alone(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        if trainer.running is not None:
            raise ConfigError(
                f"Trainer.{method.__name__} is called while Trainer.{trainer.running} of the same trainer runs, whose "
                "stages are in mid-training; call it afterwards. A callback finds figures in now.metrics, and weights "
                "in the checkpoint in now.checkpoint (on_checkpoint)"
            )
        if method.__name__ == "fit" and not _FITTING.acquire(blocking=False):
            raise ConfigError(
                "Trainer.fit is called while another trainer of this process trains, and both would draw from the same "
                "random streams; train one after the other, or in a process each"
            )
        trainer.running = method.__name__
        try:
            return method(trainer, *args, **kwargs)
        except AdlError as error:
            raise without_own_frames(error) from error.__cause__
        finally:
            trainer.running = None
            if method.__name__ == "fit":
                _FITTING.release()
            if (world := world_of_process()) is not None:
                world.use_group(works=False)

    return alone  # type: ignore[return-value]


def check_trainer(
    model: nn.Module, loss_fn: Any, optimizer: object, lr_schedule: object, *, num_stages: int, **values: object
) -> LossFn:
    """Check the arguments of a Trainer; return the loss.

    Raises:
        ConfigError: If an argument has a wrong type, or ``model`` is compiled and to be cut.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # a process that only loads data
        raise SystemExit("this script trains when it is imported; put that under `if __name__ == '__main__':`")
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model: expected a torch.nn.Module, got {_kind(model)}; of layers make an nn.Sequential")
    if loss_fn != "model" and (isinstance(loss_fn, type) or not callable(loss_fn)):
        raise ConfigError(
            f"loss_fn: expected a callable that takes (output, target), like torch.nn.CrossEntropyLoss(), or 'model', "
            f"got {_kind(loss_fn)}"
        )
    given = (optimizer, "optimizer", "parameters", Optimizer), (lr_schedule, "lr_schedule", "optimizer", LRScheduler)
    for value, name, takes, made in given:
        if isinstance(value, made):
            kind = type(value).__name__
            raise ConfigError(
                f"{name} is a {kind} that has its {takes} already; each stage makes one of its own: give what makes "
                f"it, like {name}=lambda {takes}: {type(value).__module__}.{kind}({takes}, ...)"
            )
        if not callable(value) and not (value is None and name == "lr_schedule"):
            raise ConfigError(f"{name}: expected a callable that takes {takes}, got {_kind(value)}")
    check_values({**values, "num_stages": num_stages})
    if num_stages > 1 and hasattr(model, "_orig_mod"):
        raise ConfigError(
            "model is one function since torch.compile, and cannot be cut; give the model itself, and have its stages "
            "compiled by Precision(compile=True) (runtime.compile=true)"
        )
    return ModelLoss() if loss_fn == "model" else loss_fn


def resolve_method(method: Method | str | None) -> Method:
    """Return ``method`` as a Method, from a name, or by default if None."""
    if isinstance(method, Method | None):
        return method or Method()
    if not isinstance(method, str):
        raise ConfigError(f"method={method!r}: expected adl_dist.method(NAME, ...) or a name, got {_kind(method)}")
    return Method(name=method)


def check_layers(model: nn.Module, *, distributed: bool) -> None:
    """Raise ConfigError if a SyncBatchNorm would average over stages."""
    synced = (name for name, module in model.named_modules() if isinstance(module, nn.SyncBatchNorm))
    if distributed and (name := next(synced, None)) is not None:
        raise ConfigError(
            f"'{name}' of the model is a SyncBatchNorm: it averages over all processes, but these hold other stages, "
            "not other samples; use BatchNorm: a stage's process sees all samples of a micro-batch"
        )


def conversion_notes(model: nn.Module, loss_fn: object, dtype: torch.dtype) -> list[str]:
    """Return notes on lost digits, modes and loss parameters, a line each.

    The modes of ``model`` stay as they are.
    """
    notes, state = [], dict(model.named_parameters()) | dict(model.named_buffers())
    others = {name: tensor.dtype for name, tensor in state.items() if tensor.is_floating_point()}
    wide = [name for name, of in others.items() if of.itemsize > dtype.itemsize]
    computed = str(dtype).removeprefix("torch.")
    if wide:
        notes.append(
            f"{_shown(wide)} of the model become {computed}, in which the run computes, and lose digits; "
            "dtype=float64 (Precision(dtype=torch.float64)) computes in float64"
        )
    if narrow := [name for name, of in others.items() if of.itemsize < torch.float32.itemsize]:
        notes.append(
            f"{_shown(narrow)} of the model become {computed}, in which the run keeps weights, and take more memory"
        )
    if model.training:
        modes = {module: module.training for module in model.modules()}
        model.train()
        woken = [name for name, module in model.named_modules() if module.training and not modes[module]]
        for module, mode in modes.items():
            module.training = mode
        if woken:
            notes.append(
                f"{_shown(woken)} is in eval mode, but training puts all modules in train mode; one that is to stay in "
                "eval mode needs a train() of its own (docs/own.md)"
            )
    of_loss = loss_fn.named_parameters() if isinstance(loss_fn, nn.Module) else ()
    if trained := [name for name, p in of_loss if p.requires_grad]:
        notes.append(
            f"{_shown(trained)} of the loss takes a gradient, but no optimizer trains a loss: what is to be trained "
            "must be part of the model, for example of its last layer; else set requires_grad=False"
        )
    return notes


def _shown(names: Sequence[str]) -> str:
    return f"'{names[0]}'" + f" and {len(names) - 1} more" * (len(names) > 1)


def check_delays(method: Method, balance: object) -> None:
    """Raise ConfigError if delays need ``balance=auto`` and do not have it."""
    if method.awaits_delays and balance != "auto":
        raise ConfigError(
            "method.delay=auto follows from measured stages; use partition.balance=auto, or give the list that "
            "adl-dist plan prints for this cut, like method.delay=[2,1,0]"
        )


# The arguments that are a value of one type.
VALUES: dict[str, type] = {
    **dict.fromkeys(("num_stages", "seed", "epochs", "batch_size", "num_workers"), int),
    **dict.fromkeys(("max_updates", "eval_every_updates"), int),
    **{"partition": PartitionSpec, "precision": Precision, "gradients": GradientPolicy},
    **{"processes": ProcessOptions, "timeouts": WatchdogTimeouts},
    **{"checkpoints": CheckpointPolicy, "monitoring": Monitoring, "loading": Loading},
}
MAY_BE_NONE = {"max_updates", "eval_every_updates"}  # of the numbers


def check_values(values: Mapping[str, object]) -> None:
    """Raise ConfigError for a value that is not of its type in ``VALUES``."""
    for name, value in values.items():
        wanted = VALUES[name]
        # A number that is True or False is a slip, too.
        is_left_out = value is None and (wanted is not int or name in MAY_BE_NONE)
        if not is_left_out and (not isinstance(value, wanted) or (wanted is int and isinstance(value, bool))):
            expected = "a whole number" if wanted is int else f"adl_dist.{wanted.__name__}(...)"
            raise ConfigError(f"{name}={value!r}: expected {expected}, got {_kind(value)}")
        if name in ("seed", "num_workers") and isinstance(value, int) and value < 0:
            raise ConfigError(f"{name} must be at least 0, got {value}")


def _kind(value: object) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"
