"""From the open nodes of a configuration to the objects they name."""

import difflib
import inspect
import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from hydra.utils import get_object
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

from adl_dist.checkpoint.state import read_weights
from adl_dist.checkpoint.storage import SUFFIX
from adl_dist.cli.config.schema import Device, Dtype, NarrowDtype, RunConfig
from adl_dist.distributed.affinity import num_cores
from adl_dist.errors import AdlError, CheckpointError, ConfigError
from adl_dist.optim import build_lr_schedule
from adl_dist.schedule import Method
from adl_dist.training.precision import Precision
from adl_dist.training.trainer import Trainer

# Keys of data.* that speak to us; the two that describe the data reach its target only if that takes them.
OF_THE_LOADER, OF_THE_MODEL = ("shuffle", "num_workers"), ("num_classes", "in_channels")

logging.getLogger("hydra").addHandler(logging.NullHandler())  # it logs what it also raises


def trainer(config: RunConfig, *, num_stages: int | None = None, processes: bool | None = None) -> Trainer:
    """Build the model and its trainer. Changes no file and starts no process.

    Args:
        config: of the run.
        num_stages: another K than the configured, for evaluating: the cut is then even, and the method none.
        processes: another way to run than the configured.

    Raises:
        ConfigError, PartitionError, CheckpointError: see the message.
    """
    method = config.method.chosen()
    if num_stages is not None:
        method = Method(name="bp", accumulation_steps=method.micro_batches_per_update)
    return Trainer(
        build_model(config),
        loss_fn=build_loss(config),
        optimizer=build_optimizer(config),
        method=method,
        num_stages=config.partition.num_stages if num_stages is None else num_stages,
        balance=config.partition.balance if num_stages is None else "even",
        granularity=config.partition.granularity.value if config.partition.granularity and num_stages is None else None,
        speeds=config.partition.speeds if num_stages is None else None,
        lr_schedule=lr_schedule(config),
        **config.train.guard,
        seed=config.seed,
        device=config.runtime.device.value,
        channels_last=config.runtime.channels_last,
        **vars(precision(config)),
        # As many as each process of the run had, or sums would be rounded otherwise.
        threads=config.runtime.threads or max(1, num_cores() // config.partition.num_stages),
        processes=config.runtime.processes if processes is None else processes,
        bind_cores=config.runtime.bind_cores,
        timeout_seconds=config.runtime.timeout_seconds,
        stall_seconds=config.runtime.stall_seconds,
        abort_seconds=config.runtime.abort_seconds,
    )


def precision(config: RunConfig) -> Precision:
    """In which precision and by what means is computed.

    Raises:
        ConfigError: what cannot be.
    """
    chosen = Precision(
        dtype=getattr(torch, config.dtype.value),
        autocast=torch_dtype(config.runtime.autocast),
        wire_dtype=torch_dtype(config.runtime.wire_dtype),
        compile=config.runtime.compile,
        tf32=config.runtime.tf32,
        cudnn_benchmark=config.runtime.cudnn_benchmark,
    )
    chosen.check(config.method.chosen())
    return chosen


def torch_dtype(chosen: Dtype | NarrowDtype | None) -> torch.dtype | None:
    """The dtype of that name."""
    return None if chosen is None else getattr(torch, chosen.value)


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
    return datasets(config.data)


def datasets(node: Mapping[str, Any]) -> tuple[Dataset[Any], Dataset[Any]]:
    """Build the training and validation datasets that a data node describes; see :func:`build_data`."""
    pair = _call("data", data_arguments(node))
    if not isinstance(pair, tuple) or len(pair) != 2:
        raise ConfigError(
            f"data._target_={node['_target_']} returned {type(pair).__name__}; expected a pair "
            "(training dataset, validation dataset)"
        )
    return pair


def check_targets(config: RunConfig) -> None:
    """Check the arguments of all open nodes, and try out optimizer and schedule on a parameter of no run.

    Raises:
        ConfigError: a target that is not there, or an argument that it does not take.
    """
    for name, node in (("data", data_arguments(config.data)), ("model", config.model), ("loss", config.loss)):
        _bind(name, node)
    optimizer = build_optimizer(config)([nn.Parameter(torch.zeros(1))])
    epoch = 1000  # any length will do: the data is not there yet
    total = epoch * config.train.epochs
    build_lr_schedule(lr_schedule(config), optimizer, updates_per_epoch=epoch, total_updates=total)


def check_device(config: RunConfig) -> None:
    """Look for a GPU without touching it, which the parent of the ranks must not.

    Raises:
        ConfigError: CUDA is asked for and there is none.
    """
    if config.runtime.device is Device.cuda and not torch.cuda.is_available():
        raise ConfigError("runtime.device=cuda, but torch finds no CUDA device here; use runtime.device=cpu")


def data_arguments(node: Mapping[str, Any]) -> dict[str, Any]:
    """The data node without what is not meant for its target."""
    node = {k: v for k, v in node.items() if k not in OF_THE_LOADER}
    taken = _parameters(_locate("data", node))
    return {k: v for k, v in node.items() if k not in OF_THE_MODEL or taken is None or k in taken}


def build_loss(config: RunConfig) -> Callable[[Tensor, Tensor], Tensor]:
    """The loss, from (output, target) to its mean over the samples.

    Raises:
        ConfigError: the target cannot be called like that, or returns nothing to call.
    """
    loss_fn = _call("loss", config.loss)
    if not callable(loss_fn):
        raise ConfigError(
            f"loss._target_={config.loss['_target_']} returned {type(loss_fn).__name__}; expected a callable that "
            "takes (output, target), like torch.nn.CrossEntropyLoss"
        )
    return loss_fn  # type: ignore[no-any-return]


def build_optimizer(config: RunConfig) -> Callable[[Iterable[nn.Parameter]], Optimizer]:
    """What makes the optimizer of some parameters.

    Raises:
        ConfigError: the target cannot be called like that; later, that it refuses its arguments.
    """
    target, arguments = _bind("optimizer", config.optimizer, "params")
    name = config.optimizer["_target_"]

    def make(parameters: Iterable[nn.Parameter]) -> Optimizer:
        try:
            optimizer = target(parameters, **arguments)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"optimizer: {name} refuses {arguments}: {error}") from error
        if not isinstance(optimizer, Optimizer):
            raise ConfigError(
                f"optimizer._target_={name} returned {type(optimizer).__name__}; expected a torch.optim.Optimizer"
            )
        return optimizer

    return make


def lr_schedule(config: RunConfig) -> Callable[..., LRScheduler]:
    """What makes the LR scheduler of an optimizer, from it and from how long the run is."""
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
    signature = _signature(target)
    if signature is None:
        return target, arguments
    takes = [p for p in signature.parameters if p not in given]
    told = f"{node['_target_']} takes {', '.join(takes) or 'none'}"
    try:
        signature.bind(**arguments, **dict.fromkeys(given))
    except TypeError as error:
        unknown = next((key for key in arguments if key not in takes), None)
        if unknown is None:
            raise ConfigError(f"{name}: {error}; {told}") from None
        close = difflib.get_close_matches(unknown, takes, n=1)
        hint = f"; did you mean '{name}.{close[0]}'?" if close else ""
        raise ConfigError(f"there is no key '{name}.{unknown}'{hint}; {told}") from None
    for key, value in arguments.items():
        # Only what a command line gets wrong: a word where a number belongs. The rest is the target's to judge.
        wanted = signature.parameters[key].annotation if key in signature.parameters else None
        if isinstance(value, str) and wanted in (int, float, bool):
            raise ConfigError(f"{name}.{key}={value}: {node['_target_']} expects {wanted.__name__}, got a word")
    return target, arguments


def _locate(name: str, node: Mapping[str, Any]) -> Callable[..., Any]:
    path = node.get("_target_")
    if not path or not isinstance(path, str):
        raise ConfigError(f"{name}._target_ must name a callable, for example {name}._target_=my.module.make")
    try:
        target = get_object(path)
    except Exception as error:  # importing runs the user's module, which can fail in any way
        cause = error.__cause__ or error
        raise ConfigError(
            f"{name}._target_={path} cannot be imported: {type(cause).__name__}: {cause}; expected a dotted name "
            "like my.module.make, of a module in this folder or an installed one"
        ) from error
    if not callable(target):
        raise ConfigError(f"{name}._target_={path} is a {type(target).__name__}, not something to call")
    return target  # type: ignore[no-any-return]


def _parameters(target: Callable[..., Any]) -> set[str] | None:
    """The names that ``target`` takes; None if it takes any, or does not say."""
    signature = _signature(target)
    if signature is None or any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values()):
        return None
    return set(signature.parameters)


def _signature(target: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(target)
    except (TypeError, ValueError):
        return None  # built-in callables have none to check against


def _load_state(model: nn.Module, path: Path) -> None:
    if not path.exists():
        raise CheckpointError(
            f"init_from={path} is not there; expected a state_dict saved by torch.save, a {SUFFIX} file, or the "
            "folder of a checkpoint"
        )
    try:
        if path.is_dir():
            state: Any = read_weights(path)
        elif path.suffix == SUFFIX:
            state = load_file(path, backend="pread")
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
    except CheckpointError as error:
        raise CheckpointError(f"init_from: {error}") from error
    except Exception as error:  # a damaged pickle can raise anything
        reason = (str(error).strip() or "no more is known").splitlines()[0][:100]
        raise CheckpointError(
            f"init_from={path} cannot be read ({type(error).__name__}: {reason}); expected a state_dict saved by "
            f"torch.save, or a {SUFFIX} file, like those of adl-dist export"
        ) from error
    if not isinstance(state, Mapping):
        raise CheckpointError(f"init_from={path} holds a {type(state).__name__}; expected a state_dict")
    here, there = ({n: _shape(v) for n, v in tensors.items()} for tensors in (model.state_dict(), state))
    for name in {**here, **there}:
        if here.get(name) != there.get(name):
            raise CheckpointError(
                f"init_from={path} is of another model: {name} is {here.get(name, 'missing')} in this model and "
                f"{there.get(name, 'missing')} in the file; use the model= and data= that it was made with"
            )
    model.load_state_dict(dict(state))


def _shape(value: object) -> str:
    return str(list(value.shape)) if isinstance(value, Tensor) else type(value).__name__
