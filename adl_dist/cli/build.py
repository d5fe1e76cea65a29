"""From the open nodes of a configuration to the objects they name."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from hydra.utils import get_object
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

from adl_dist.cli.schema import RunConfig
from adl_dist.errors import AdlError, CheckpointError, ConfigError
from adl_dist.runtime.trainer import Trainer
from adl_dist.schedule import Method

# Keys of data.* that speak to us; the two that describe the data reach its target only if that takes them.
OF_THE_LOADER = ("shuffle", "num_workers")
OF_THE_MODEL = ("num_classes", "in_channels")


def trainer(config: RunConfig, *, num_stages: int | None = None, processes: bool | None = None) -> Trainer:
    """Build the model and its trainer. Changes no file and starts no process.

    Args:
        config: of the run.
        num_stages: another K than the configured, for evaluating; then the cut is even.
        processes: another way to run than the configured.

    Raises:
        ConfigError, PartitionError, CheckpointError: see the message.
    """
    model = build_model(config)
    balance = config.partition.balance
    return Trainer(
        model,
        loss_fn=_call("loss", config.loss),
        optimizer=_optimizer(config),
        method=Method(
            name=config.method.name,
            accumulation_steps=config.method.accumulation_steps,
            weights=config.method.weights.value,
        ),
        num_stages=config.partition.num_stages if num_stages is None else num_stages,
        balance=None if balance == "even" or num_stages is not None else balance,
        lr_schedule=_lr_schedule(config),
        seed=config.seed,
        device=config.runtime.device.value,
        dtype=getattr(torch, config.dtype.value),
        channels_last=config.runtime.channels_last,
        threads=config.runtime.threads,
        processes=config.runtime.processes if processes is None else processes,
        timeout_seconds=config.runtime.timeout_seconds,
    )


def build_model(config: RunConfig) -> nn.Module:
    """Build the uncut model, the same on every rank and for every K.

    Raises:
        ConfigError: the target cannot be called like that, or returns no module.
        CheckpointError: ``init_from`` does not fit.
    """
    torch.manual_seed(config.seed)
    model = _call("model", config.model)
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model._target_={config.model['_target_']} returned {type(model).__name__}, no nn.Module")
    if config.init_from is not None:
        _load_state(model, Path(config.init_from))
    return model


def build_data(config: RunConfig) -> tuple[Dataset[Any], Dataset[Any]]:
    """Build the training and validation datasets.

    Raises:
        ConfigError: the target cannot be called like that, or returns no pair.
        DataError: what the target has to say.
    """
    pair = _call("data", data_arguments(config))
    if not isinstance(pair, tuple) or len(pair) != 2:
        raise ConfigError(
            f"data._target_={config.data['_target_']} returned {type(pair).__name__}; expected a pair "
            "(training dataset, validation dataset)"
        )
    return pair


def check_targets(config: RunConfig) -> None:
    """Check the arguments of all open nodes without calling anything.

    Raises:
        ConfigError: a target that is not there, or an argument that it does not take.
    """
    for name, node in (("model", config.model), ("data", data_arguments(config)), ("loss", config.loss)):
        _bind(name, node)
    _bind("optimizer", config.optimizer, "params")
    _lr_schedule(config)


def data_arguments(config: RunConfig) -> dict[str, Any]:
    """The data node without what is not meant for its target."""
    node = {k: v for k, v in config.data.items() if k not in OF_THE_LOADER}
    taken = _parameters(_locate("data", node))
    return {k: v for k, v in node.items() if k not in OF_THE_MODEL or taken is None or k in taken}


def _optimizer(config: RunConfig) -> Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]:
    target, arguments = _bind("optimizer", config.optimizer, "params")

    def make(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        try:
            return target(parameters, **arguments)  # type: ignore[no-any-return]
        except (TypeError, ValueError) as error:
            raise ConfigError(f"optimizer: {config.optimizer['_target_']} refuses {arguments}: {error}") from error

    return make


def _lr_schedule(config: RunConfig) -> Callable[..., LRScheduler]:
    given = ("optimizer", "updates_per_epoch", "total_updates")
    taken = _parameters(_locate("lr_schedule", config.lr_schedule)) or ()
    target, arguments = _bind("lr_schedule", config.lr_schedule, *(name for name in given if name in taken))
    return partial(target, **arguments)


def _call(name: str, node: Mapping[str, Any]) -> Any:
    target, arguments = _bind(name, node)
    try:
        return target(**arguments)
    except AdlError:
        raise
    except Exception as error:  # the user's own code: say whose it is and what it said
        raise ConfigError(f"{name}: {node['_target_']} failed: {type(error).__name__}: {error}") from error


def _bind(name: str, node: Mapping[str, Any], *given: str) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The target of ``node`` and its arguments, which together with those ``given`` later suffice."""
    target = _locate(name, node)
    arguments = {k: v for k, v in node.items() if k != "_target_"}
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError):
        return target, arguments  # built-in callables have none to check against
    try:
        signature.bind(**arguments, **dict.fromkeys(given))
    except TypeError as error:
        takes = ", ".join(p for p in signature.parameters if p not in given)
        raise ConfigError(f"{name}: {error}; {node['_target_']} takes {takes}") from None
    return target, arguments


def _locate(name: str, node: Mapping[str, Any]) -> Callable[..., Any]:
    path = node.get("_target_")
    if not path:
        raise ConfigError(f"{name}._target_ must name a callable, for example {name}._target_=my.module.make")
    try:
        target = get_object(path)
    except Exception as error:  # importing runs the user's module, which can fail in any way
        raise ConfigError(f"{name}._target_={path} cannot be imported: {str(error).splitlines()[0]}") from error
    if not callable(target):
        raise ConfigError(f"{name}._target_={path} is a {type(target).__name__}, not something to call")
    return target  # type: ignore[no-any-return]


def _parameters(target: Callable[..., Any]) -> set[str] | None:
    """The names that ``target`` takes; None if it takes any."""
    parameters = inspect.signature(target).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return None
    return set(parameters)


def _load_state(model: nn.Module, path: Path) -> None:
    if not path.is_file():
        raise CheckpointError(f"init_from={path} is not a file; expected a state_dict saved by torch.save")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        model.load_state_dict(state)
    except Exception as error:  # a damaged pickle can raise anything
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(f"init_from={path} does not fit the model: {type(error).__name__}: {reason}") from error
