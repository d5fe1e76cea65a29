"""The state of the stages as tensors of a checkpoint, under names that do not depend on the cut, and back.

model-*        parameters and buffers, by the uncut model's names
optimizer-*    `<parameter>.<key>` of the optimizer's state; what is no tensor there is JSON in the file's metadata
heads-*        heads of local losses, by their prefixed names; the metadata says behind which unit each of them stands

Only the names of the files depend on the cut, and the manifest says what it was. Learning rates are not stored: a
schedule is a function of the update index and of the cut in use.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from adl_dist.checkpoint import layout, storage
from adl_dist.checkpoint.storage import HEADS, MODEL, OPTIMIZER, Shard, Stored
from adl_dist.errors import CheckpointError, ConfigError, UnusableError
from adl_dist.partition.piece import traced_units
from adl_dist.stage import Stage

Signature = dict[str, list[int]]


def signature(model: nn.Module) -> Signature:
    """Return names and shapes of the uncut model's tensors; raise ConfigError for what cannot be saved."""
    if lazy := [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if is_lazy(tensor)]:
        raise ConfigError(f"{lazy[0]} of the model has no shape yet; run the model on one batch before handing it over")
    state = model.state_dict()
    for name, value in state.items():
        if reason := storage.why_unstorable(value):
            raise ConfigError(f"{name} of the model cannot be saved: {reason}")
    return {name: list(tensor.shape) for name, tensor in state.items()}


def state_of(stages: Iterable[Stage], num_stages: int) -> dict[str, Shard]:
    """Return the stages' own tensors to be saved, by name of the file; raise ConfigError for what cannot be saved."""
    shards = {}
    for stage in stages:
        parts = {MODEL: Shard(stage.module.state_dict()), OPTIMIZER: _optimizer_state(stage)}
        if stage.head is not None:
            parts[HEADS] = Shard(_head_tensors(stage), {stage.head_prefix: _end_of(stage)})
        for kind, shard in parts.items():
            if shard.tensors or shard.metadata or kind == MODEL:
                shards[storage.file_name(kind, stage.index, num_stages)] = shard
    return shards


def load(path: Path, stages: Sequence[Stage]) -> None:
    """Read the state of this process's stages, whatever cut wrote it; CheckpointError if something does not fit."""
    files = layout.read_manifest(path)["files"]
    model, _ = storage.scan(path, MODEL, files)
    optimizer, values = storage.scan(path, OPTIMIZER, files)
    heads, places = storage.scan(path, HEADS, files)
    _check_heads(path, stages, heads, places)
    with _explained(path):
        for stage in stages:
            _fill(stage.module.state_dict(), model)
            _fill(_head_tensors(stage), heads)
            restore_optimizer(stage, optimizer, values)


def load_weights(path: Path, module: nn.Module) -> None:
    """Read parameters and buffers of a model or a part of it from a checkpoint; CheckpointError if that fails."""
    with _explained(path):
        _fill(module.state_dict(), storage.scan(path, MODEL, layout.read_manifest(path)["files"])[0])


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read parameters and buffers of a checkpoint and compare its checksums; CheckpointError if it is damaged."""
    files = layout.verify(path)["files"]
    with _explained(path):
        return dict(storage.read(storage.scan(path, MODEL, files)[0]))


def verify(path: Path, expected: Signature) -> dict[str, Any]:
    """Compare a checkpoint with its checksums and the model; return its manifest, or raise UnusableError."""
    manifest = layout.verify(path)
    saved = {name: stored.shape for name, stored in storage.scan(path, MODEL, manifest["files"])[0].items()}
    for name in sorted(expected.keys() | saved.keys()):
        if expected.get(name) != saved.get(name):
            raise UnusableError(
                f"{path} is of another model: {name} is {expected.get(name, 'missing')} in this model and "
                f"{saved.get(name, 'missing')} in the checkpoint; use the run's own model= and data=, or another "
                "run_dir"
            )
    return manifest


def restore_optimizer(stage: Stage, tensors: Mapping[str, Stored], values: Mapping[str, str]) -> None:
    """Give the optimizer of ``stage`` what was saved for its parameters, wherever they were then."""
    if stage.optimizer is None:
        return
    numbers = {id(p): n for n, p in enumerate(p for group in stage.optimizer.param_groups for p in group["params"])}
    # By all names of each parameter: the cut decides under which of them its state was saved.
    named = (*stage.named_parameters(), *stage.module.named_parameters(remove_duplicate=False))
    number_of = {name: numbers[id(p)] for name, p in named if id(p) in numbers}
    wanted = {key: stored for key, stored in tensors.items() if key.rpartition(".")[0] in number_of}
    plain = ((key, json.loads(text)) for key, text in values.items() if key.rpartition(".")[0] in number_of)
    restored: dict[int, dict[str, Any]] = {}
    for key, value in (*storage.read(wanted), *plain):
        name, _, state_key = key.rpartition(".")
        restored.setdefault(number_of[name], {})[state_key] = value
    # torch knows which state belongs on which device, and which counters stay on the CPU.
    groups = stage.optimizer.state_dict()["param_groups"]
    stage.optimizer.load_state_dict({"state": restored, "param_groups": groups})


def _fill(tensors: Mapping[str, Tensor], stored: Mapping[str, Stored]) -> None:
    for name, tensor in tensors.items():
        shape = stored[name].shape if name in stored else "missing"
        if shape != list(tensor.shape):
            raise ValueError(f"{name} should have shape {list(tensor.shape)}, found {shape}")
    for name, value in storage.read({name: stored[name] for name in tensors}):
        tensors[name].copy_(value)


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turn whatever goes wrong while tensors are restored into one readable error."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # a file that was changed meanwhile, state that an optimizer refuses
        raise CheckpointError(
            f"{path} cannot be read: {type(error).__name__}: {' '.join(str(error).split())}; an older checkpoint next "
            "to it, if there is one, is untouched"
        ) from error


def _optimizer_state(stage: Stage) -> Shard:
    tensors: dict[str, Tensor] = {}
    values: dict[str, str] = {}
    states = {} if stage.optimizer is None else stage.optimizer.state
    for parameter_name, parameter in stage.named_parameters():
        for key, value in states.get(parameter, {}).items():
            name = f"{parameter_name}.{key}"
            try:
                if isinstance(value, Tensor):
                    tensors[name] = value
                else:
                    values[name] = json.dumps(value)
            except (TypeError, ValueError) as error:
                reason = f"{error}; expected tensors, numbers, and lists of numbers"
                raise ConfigError(f"{name} of the optimizer's state cannot be saved: {reason}") from None
    return Shard(tensors, values)


def _check_heads(path: Path, stages: Sequence[Stage], heads: Mapping[str, Stored], places: Mapping[str, str]) -> None:
    """Refuse heads of another kind, and those that stood elsewhere, which may well have the same shapes."""
    shapes = {name: list(tensor.shape) for stage in stages for name, tensor in _head_tensors(stage).items()}
    misfits = [f"{n} does not fit" for n, shape in shapes.items() if n not in heads or heads[n].shape != shape]
    for stage in (stage for stage in stages if stage.head is not None):
        here = _end_of(stage)
        if (saved := places.get(stage.head_prefix, here)) != here:
            misfits.append(f"{stage.head_prefix} stood after {saved}, and would now stand after {here}")
    if misfits:
        raise CheckpointError(
            f"{path} holds local losses of another cut or head ({misfits[0]}); continue with the partition and "
            "method.head that it was made with, or start a new run with init_from= in another run_dir"
        )


def _head_tensors(stage: Stage) -> dict[str, Tensor]:
    state = stage.head.state_dict() if stage.head is not None else {}
    return {f"{stage.head_prefix}{name}": tensor for name, tensor in state.items()}


def _end_of(stage: Stage) -> str:
    """Return the unit of the uncut model behind which the head of ``stage`` stands."""
    modules = [name for name, _ in stage.module.named_modules(remove_duplicate=False)]
    # The stage of a traced model knows its units, and not all of them are modules.
    return (traced_units(stage.module) or modules)[-1]
