"""Objects from the ``_target_`` nodes of a configuration."""

import contextlib
import inspect
import logging
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import PurePath
from typing import Any

import torch
from hydra.utils import get_object
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

from adl_dist.checkpoint.policy import CheckpointPolicy
from adl_dist.checkpoint.storage import place_of
from adl_dist.cli.config.compose import content_of, is_of_script, known_run, parse, run_of_script
from adl_dist.cli.config.schema import RunConfig
from adl_dist.data import Loading
from adl_dist.errors import AdlError, ConfigError, did_you_mean, in_one_line
from adl_dist.optim import build_lr_schedule
from adl_dist.optimizers import prepare, with_rules
from adl_dist.partition import Chain, checked_sizes, even_sizes, flops_sizes
from adl_dist.report.callbacks import Callbacks
from adl_dist.schedule import Method
from adl_dist.stage import GradientPolicy, LossFn, OptimizerFactory, Precision, TrainSpec, in_dtype
from adl_dist.training.input import DeviceLoader
from adl_dist.training.lazy_weights import is_lazy_model, load_initial
from adl_dist.training.options import Monitoring, PartitionSpec, ProcessOptions
from adl_dist.training.partitioned_model import untied
from adl_dist.training.run_outputs import Outputs
from adl_dist.training.trainer import Trainer
from adl_dist.training.trial import samples as samples_of
from adl_dist.training.trial.trial import keeps_ties

# Keys of data.* that are ours; the two that describe the data reach its target only if that takes them.
OF_THE_LOADER = (
    *("shuffle", "num_workers", "persistent_workers", "collate_fn", "val_collate_fn", "sampler", "samples_per_epoch"),
)
OF_THE_MODEL = ("num_classes", "in_channels")

logging.getLogger("hydra").addHandler(logging.NullHandler())  # it logs what it also raises


def trainer(config: RunConfig, *, handle_signals: bool = False) -> Trainer:
    """Build the model and its trainer. Changes no file and starts no process."""
    return Trainer(
        build_model(config, as_built=True, on_meta=config.runtime.meta_init),
        init_from=config.init_from,
        init_skip=config.init_skip,
        method=config.method,
        num_stages=config.partition.num_stages,
        partition=config.build(PartitionSpec),
        lr_schedule=lr_schedule(config),
        processes=config.build(ProcessOptions, handle_signals=handle_signals),
        timeouts=config.timeouts,
        **_settings(config),
    )


def evaluator(config: RunConfig) -> Trainer:
    """Build the model and a trainer of one stage that evaluates like the run."""
    # As many threads as each process of the run had, or sums would be rounded otherwise.
    processes = config.build(ProcessOptions, threads=config.threads, one_per_stage=False)
    how: dict[str, Any] = {"partition": PartitionSpec(tied=config.partition.tied), "processes": processes}
    return Trainer(build_model(config), method=Method(name="bp"), **how, **_settings(config))


def train_spec(config: RunConfig) -> TrainSpec:
    """Return the specification of the training."""
    return TrainSpec(pipeline=config.pipeline, **_settings(config))


def _settings(config: RunConfig) -> dict[str, Any]:
    """Return the arguments that :class:`Trainer` and :class:`TrainSpec` share."""
    return {
        "loss_fn": build_loss(config),
        "loss_reduction": "batch" if config.loss.get("reduction") == "batch" else "mean",
        "optimizer": build_optimizer(config),
        "precision": precision(config),
        "gradients": config.build(GradientPolicy),
        "metrics": [_named("train.metrics", name) if "." in name else name for name in config.train.metrics],
        "ema": config.train.ema,
        "seed": config.seed,
    }


def precision(config: RunConfig) -> Precision:
    """Return the number formats and kernels of the run."""
    autocast = None if config.runtime.autocast is None else torch.bfloat16
    return config.build(Precision, dtype=getattr(torch, config.dtype), autocast=autocast)


def build_model(config: RunConfig, *, as_built: bool = False, on_meta: bool = False) -> nn.Module:
    """Build the uncut model, the same on every rank and for every K.

    With ``as_built`` or ``on_meta`` neither untie weights nor read ``init_from``, because the trainer does.
    """
    torch.manual_seed(config.seed)
    with torch.device("meta") if on_meta else contextlib.nullcontext():
        model: nn.Module = _call("model", config.model, nn.Module, "a torch.nn.Module")
    if on_meta:
        if not is_lazy_model(model):
            raise ConfigError(
                f"runtime.meta_init=true builds the model on torch.device('meta'), but {config.model['_target_']} has "
                "no tensors, or some that are not on meta; use runtime.meta_init=false"
            )
        return model
    if not as_built:
        if config.partition.tied == "untie":
            untied(model)
        if config.init_from is not None:
            load_initial(model, place_of(config.init_from), config.init_skip)
    prepare(model, build_optimizer(config))  # freeze parameters by the rules, also where no Trainer is made
    return model


def described_model(config: RunConfig) -> nn.Module:
    """Return the model of a run for its names and shapes, on meta if possible."""
    try:
        return build_model(config, on_meta=True)
    except ConfigError:  # its own code makes values
        return build_model(config)


def run_with(run_dir: PurePath, words: Sequence[str]) -> RunConfig:
    """Return a run's configuration, changed by words like data.root=images.

    For the run of a script, ``words`` must describe its model, data and loss.

    Raises:
        ConfigError: If words are unknown, or the model of a script's run is not described.
    """
    plain = content_of(run_dir)
    if is_of_script(plain) and any(word.startswith("model") for word in words):
        return run_of_script(plain, words)
    config = known_run(run_dir)
    if others := [word for word in words if not word.startswith("data.")]:
        raise ConfigError(f"{others[0]}: {run_dir} has a model, data and a loss of its own; give data.KEY=VALUE only")
    taken = _parameters(_locate("data", config.data)) if words else None
    for key, value in ((each.key_or_group.removeprefix("data."), each.value()) for each in map(parse, words)):
        if key not in config.data and (taken is None or key not in taken):
            takes = ", ".join(sorted(taken or config.data.keys()))
            raise ConfigError(f"there is no key 'data.{key}' in the data of this run, which takes {takes}")
        config.data[key] = value
    return config


def build_data(node: Mapping[str, Any]) -> tuple[Dataset[Any], Dataset[Any]]:
    """Build the training and validation datasets that a data node describes."""
    pair = _call("data", data_arguments(node), tuple, expected := "a pair (training dataset, validation dataset)")
    if len(pair) != 2:
        raise ConfigError(f"data._target_={node['_target_']} returned a tuple of {len(pair)}; expected {expected}")
    return pair  # type: ignore[no-any-return]


def data_arguments(node: Mapping[str, Any]) -> dict[str, Any]:
    """Return a data node's arguments for its target, without our own keys."""
    taken = _parameters(_locate("data", node))
    dropped = OF_THE_LOADER if taken is None else {*OF_THE_LOADER, *(set(OF_THE_MODEL) - taken)}
    return {key: value for key, value in node.items() if key not in dropped}


def loading(config: RunConfig, dataset: Dataset[Any] | None) -> Loading:
    """Return the loader settings, with a sampler if ``dataset`` is given."""
    node, names = config.data, ("collate_fn", "val_collate_fn", "sampler")
    made: dict[str, Any] = {name: _named(f"data.{name}", node[name]) for name in names if node.get(name) is not None}
    if (make := made.pop("sampler", None)) is not None and dataset is not None:
        made["sampler"] = _made("data.sampler", node["sampler"], partial(make, dataset))
    kept = node.get("persistent_workers", False)
    return Loading(**made, samples_per_epoch=node.get("samples_per_epoch"), persistent_workers=kept)


def device_loader(
    config: RunConfig, device: torch.device, *, shuffle: bool, dataset: Dataset[Any] | None = None
) -> DeviceLoader:
    """Return the loader of the first stage, by default for training data."""
    whole = build_data(config.data)[0] if dataset is None else dataset
    return DeviceLoader(
        whole,
        "training",
        seed=config.seed,
        shuffle=shuffle,
        num_workers=config.data.get("num_workers", 0),
        loading=loading(config, whole if dataset is None else None),
        device=device,
        precision=precision(config),
    )


def read_units(config: RunConfig, model: nn.Module, *, keeps: str | None) -> Chain:
    """Run ``model`` on the first training samples, and return its units.

    The model may be on meta; ``keeps`` is the ``keeps_ties`` of :class:`Chain`. Raise DataError if data is missing.
    """
    loader = device_loader(config, torch.device("cpu"), shuffle=True)
    samples = samples_of.take(loader, None, None)
    assert samples is not None
    batches = [batch for pair in samples.readings for batch in pair]
    model = in_dtype(model, loader.precision.dtype)
    return Chain(model, batches, granularity=config.partition.granularity, keeps_ties=keeps)


def chosen_sizes(chain: Chain, num_stages: int, balance: str | Sequence[int] | Sequence[str]) -> list[int]:
    """Return the units of each stage for a cut that needs no measurement.

    ``balance`` is a ``partition.balance``. Raise PartitionError if the model cannot be cut like that.
    """
    if balance == "even":
        return even_sizes(chain, num_stages)
    return flops_sizes(chain, num_stages) if isinstance(balance, str) else checked_sizes(chain, num_stages, balance)


def check_cut(config: RunConfig, *, has_data: bool = True) -> None:
    """Build the model of a run and, if ``has_data``, check the cut.

    Raises:
        PartitionError, DataError, ConfigError: If the cut is impossible, data is missing, or the model fails.
    """
    num_stages, balance = config.partition.num_stages, config.partition.balance
    model = described_model(config) if config.runtime.meta_init else build_model(config)
    if has_data and (num_stages > 1 or not isinstance(balance, str)):
        chosen_sizes(read_units(config, model, keeps=keeps_ties(config.pipeline.method)), num_stages, balance)


def callbacks(config: RunConfig) -> list[Any]:
    """Instantiate and check the user's callbacks."""
    made = [_listed(f"callbacks[{number}]", node) for number, node in enumerate(config.callbacks)]
    Callbacks(made)
    return made


def monitoring(config: RunConfig) -> Monitoring:
    """Return the monitoring settings, with the user's loggers instantiated."""
    loggers = [
        one if isinstance(one, str) and "." not in one else _listed(f"runtime.loggers[{number}]", one)
        for number, one in enumerate(config.runtime.loggers)
    ]
    return config.build(Monitoring, loggers=loggers)


def check_targets(config: RunConfig) -> None:
    """Check all ``_target_`` nodes by signature, and call some, without data.

    The model is built only if the optimizer has rules for its parameters, or refuses a 1 x 1 parameter.
    """
    for name, node in (("data", data_arguments(config.data)), ("model", config.model)):
        _bind(name, node)
    _bind_loss(config.loss)
    loading(config, None)
    callbacks(config)
    outputs, spec = Outputs(config.build(CheckpointPolicy), monitoring(config)), train_spec(config)
    outputs.check(config.run_dir, config.resume, spec, is_distributed=config.runtime.processes)
    optimizer = None
    if not config.optimizer.get("rules"):  # which are about parameters of the model
        with contextlib.suppress(ConfigError):
            optimizer = spec.optimizer([nn.Parameter(torch.zeros(1, 1))])  # a matrix, which most take
    if optimizer is None:
        optimizer = spec.optimizer([*build_model(config).parameters()])
    epoch = 1000  # any length will do: the data is not there yet
    total = epoch * config.train.epochs
    build_lr_schedule(lr_schedule(config), optimizer, updates_per_epoch=epoch, total_updates=total)


def build_loss(config: RunConfig) -> LossFn:
    """Return the loss: a callable that takes (output, target).

    A target that takes (output, target) is the loss itself, with the node's other keys as arguments; so is an existing
    module, or any target with ``_partial_``. Another target is called and returns the loss.
    """
    target, arguments, is_loss = _bind_loss(config.loss)
    make = partial(target, **arguments)
    if is_loss:
        return make if arguments else target
    expected = "a callable that takes (output, target), like torch.nn.CrossEntropyLoss"
    return _made("loss", config.loss["_target_"], make, Callable, expected)  # type: ignore[no-any-return]


def _bind_loss(node: Mapping[str, Any]) -> tuple[Callable[..., Any], dict[str, Any], bool]:
    """Return a node's target, its arguments, and whether it is the loss.

    Otherwise a call of the target with the arguments makes the loss.
    """
    target = _locate("loss", node)
    # Every other reduction is an argument of the loss, as torch's losses have it.
    given = {key: value for key, value in node.items() if key != "_partial_" and (key, value) != ("reduction", "batch")}
    weights = [key for key in ("weight", "pos_weight") if isinstance(given.get(key), list)]
    given |= {key: torch.tensor(given[key], dtype=torch.float32) for key in weights}
    if isinstance(target, nn.Module):
        return target, _bind("loss", given)[1], True
    signature = _signature(target)
    open_ = [p for p in signature.parameters.values() if p.name not in given] if signature is not None else []
    positional = [p for p in open_ if p.kind is p.POSITIONAL_OR_KEYWORD]
    required = [p for p in open_ if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    takes_a_pair = len(required) == 2 and required == positional[:2] and not isinstance(target, type)
    is_loss = takes_a_pair or node.get("_partial_") is True
    target, arguments = _bind("loss", given, num_positional=2 if is_loss else 0)
    return target, arguments, is_loss


def build_optimizer(config: RunConfig) -> OptimizerFactory:
    """Return the optimizer factory, with groups by ``optimizer.rules`` if any."""
    node, path = dict(config.optimizer), config.optimizer.get("_target_")
    rules = node.pop("rules", None)
    target, arguments = _bind("optimizer", node, num_positional=1)
    rate = arguments.get("lr")
    if rate is not None and not (type(rate) in (int, float) and math.isfinite(rate)):
        raise ConfigError(f"optimizer.lr must be a finite number, got {rate!r}")

    def make(parameters: Iterable[nn.Parameter]) -> Optimizer:
        build = partial(target, parameters, **arguments)
        return _made("optimizer", path, build, Optimizer, "a torch.optim.Optimizer")  # type: ignore[no-any-return]

    return with_rules(make, rules) if rules else make


def lr_schedule(config: RunConfig) -> Callable[..., LRScheduler]:
    """Return the factory of the LR scheduler."""
    taken = _parameters(_locate("lr_schedule", config.lr_schedule)) or set()
    supplied = taken & {"updates_per_epoch", "total_updates"}
    if "total_steps" in taken - config.lr_schedule.keys():
        supplied |= {"total_steps"}
    target, arguments = _bind("lr_schedule", config.lr_schedule, *supplied, num_positional=1)
    return partial(target, **arguments)


def _listed(name: str, node: Any) -> Any:
    """Instantiate a list entry from a dotted name or a ``_target_`` node."""
    node = {"_target_": node} if isinstance(node, str) else node
    if not isinstance(node, Mapping):
        raise ConfigError(f"{name}: expected my.module.make, or {{_target_: my.module.make, KEY: VALUE}}, got {node!r}")
    return _call(name, node)


def _named(name: str, path: Any) -> Callable[..., Any]:
    """Return the callable at ``path``, the value of the key ``name``."""
    holder, _, key = name.rpartition(".")
    return _locate(holder, {"_target_": path}, key=key)


def _call(name: str, node: Mapping[str, Any], kind: Any = object, expected: str = "") -> Any:
    """Call the target of a node, which returns a ``kind``."""
    target, arguments = _bind(name, node)
    return _made(name, node["_target_"], partial(target, **arguments), kind, expected)


def _made(name: str, path: Any, make: Callable[[], Any], kind: Any = object, expected: str = "") -> Any:
    """Return the result of ``make``, the target ``path``; check its type.

    ``name`` is the key for errors. Raise ConfigError if the call fails or returns no ``kind``.
    """
    try:
        made = make()
    except AdlError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{name}: {path} failed: {in_one_line(error)}") from error
    if not isinstance(made, kind):
        raise ConfigError(f"{name}._target_={path} returned {type(made).__name__}; expected {expected}")
    return made


def _bind(
    name: str, node: Mapping[str, Any], *supplied: str, num_positional: int = 0
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Return the target and arguments of ``node``, after a check.

    The target must accept them with ``num_positional`` positional arguments and the keywords ``supplied`` later, or a
    ConfigError is raised. ``name`` is the node's key.
    """
    target = _locate(name, node)
    # An optimizer or a schedule is always made later, of what is supplied then: Hydra's _partial_.
    of_hydra = ("_target_", "_partial_") if num_positional else ("_target_",)
    arguments = {k: v for k, v in node.items() if k not in of_hydra}
    if (signature := _signature(target)) is None:
        return target, arguments
    takes = [p for p in [*signature.parameters][num_positional:] if p not in supplied]
    accepted = f"{node['_target_']} takes {', '.join(takes) or 'none'}"
    try:
        signature.bind(*[None] * num_positional, **arguments, **dict.fromkeys(supplied))
    except TypeError as error:
        unknown = next((key for key in arguments if key not in takes), None)
        if unknown is None:
            raise ConfigError(f"{name}: {error}; {accepted}") from None
        hint = did_you_mean(unknown, takes, f"'{name}.{{}}'")
        raise ConfigError(f"there is no key '{name}.{unknown}'{hint}; {accepted}") from None
    for key, value in arguments.items():
        # Only a word in place of a number, as typed on a command line; the target checks the rest.
        wanted = signature.parameters[key].annotation if key in signature.parameters else None
        if isinstance(value, str) and wanted in (int, float, bool):
            raise ConfigError(f"{name}.{key}={value}: {node['_target_']} expects {wanted.__name__}, got a word")
    return target, arguments


def _locate(name: str, node: Mapping[str, Any], *, key: str = "_target_") -> Callable[..., Any]:
    path, name = node.get("_target_"), f"{name}.{key}"
    if not path or not isinstance(path, str):
        raise ConfigError(f"{name} must name a callable, for example {name}=my.module.make")
    try:
        target = get_object(path)
    except Exception as error:  # importing runs the user's module, which can fail in any way
        module, _, last = path.rpartition(".")
        if module in sys.modules and getattr(error.__cause__, "name", None) == path:
            hint = did_you_mean(last, vars(sys.modules[module]))
            raise ConfigError(f"{name}={path}: {module} has no '{last}'{hint}") from error
        raise ConfigError(
            f"{name}={path} cannot be imported: {in_one_line(error.__cause__ or error)}; expected a dotted name like "
            "my.module.make, of a module in this folder or an installed one"
        ) from error
    if not callable(target):
        raise ConfigError(f"{name}={path} is a {type(target).__name__}, not something to call")
    return target  # type: ignore[no-any-return]


def _parameters(target: Callable[..., Any]) -> set[str] | None:
    """Return the parameter names of ``target``, or None if they are unknown."""
    signature = _signature(target)
    if signature is None or any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values()):
        return None
    return set(signature.parameters)


def _signature(target: Callable[..., Any]) -> inspect.Signature | None:
    with contextlib.suppress(TypeError, ValueError):
        return inspect.signature(target)
    return None  # built-in callables have none to check against
