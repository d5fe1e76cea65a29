"""Checkpoints of a drained pipeline: torch.distributed.checkpoint files under the uncut model's own names.

    checkpoints/update-00000042/    complete, or not there: it appears by one rename
        manifest.json               position, metrics, and the size of every file
        .metadata  __0_0.distcp ... what torch.distributed.checkpoint writes
    checkpoints/.saving-...         unfinished (.removing-...: half removed); gone at the next start

Keys are ``model.<name>`` for parameters and buffers and ``optimizer.<name>.<state>`` for optimizer state, so
how the model was cut leaves no trace in them; only the heads of local losses are a stage's own, and their names
begin with ``head<k>:``. Learning rates are not stored: a schedule is a function of the update index alone.
"""

import json
import os
import shutil
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException

from adl_dist.errors import CheckpointError, ConfigError
from adl_dist.stage import Stage

FORMAT = 1
MANIFEST = "manifest.json"
# Where the run stood: updates made, whole epochs done, samples of the next epoch done; and its last metrics.
# "of" is what the position refers to: sizes of data and batches, length of the run, optimizer.
FIELDS = {"format": int, "update": int, "epochs": int, "sample": int, "metrics": dict, "of": dict, "files": dict}

Signature = dict[str, list[int]]


def signature(model: nn.Module) -> Signature:
    """Names and shapes of all parameters and buffers of the uncut model.

    Raises:
        ConfigError: its state holds something that is no tensor.
    """
    state = model.state_dict()
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise ConfigError(
                f"{name} of the model's state is a {type(value).__name__}, no tensor, and cannot be saved"
            )
    return {name: list(tensor.shape) for name, tensor in state.items()}


def save(path: Path, stages: Iterable[Stage], *, distributed: bool) -> None:
    """Write the state of this process's stages; every process calls it with the same unfinished ``path``."""
    state: dict[str, Any] = {}
    for stage in stages:
        state |= _tensors(stage)
        state |= _optimizer_state(stage)
    with _explained(path):
        dcp.save(state, checkpoint_id=path, no_dist=not distributed)


def load(path: Path, stages: Iterable[Stage], *, distributed: bool) -> None:
    """Read the state of this process's stages from a complete checkpoint, whatever cut wrote it."""
    stages = list(stages)
    stored = _stored(path)
    state: dict[str, Any] = {}
    for stage in stages:
        state |= _tensors(stage)
        for name, _ in stage.named_parameters():
            prefix = f"optimizer.{name}."
            for key in (k for k in stored if k.startswith(prefix) and "." not in k[len(prefix) :]):
                state[key] = torch.empty(stored[key].size, dtype=stored[key].properties.dtype)
    for name, tensor in state.items():
        if name.startswith("head") and (name not in stored or stored[name].size != tensor.shape):
            raise CheckpointError(
                f"{path} holds local losses of another cut or head ({name} does not fit); go on with the partition and "
                "method.head that it was made with, or start anew with init_from= in another run_dir"
            )
    with _explained(path):
        dcp.load(state, checkpoint_id=path, no_dist=not distributed)
    for stage in stages:
        _restore_optimizer(stage, state)


def load_weights(path: Path, module: nn.Module) -> None:
    """Read parameters and buffers of a model, or of a part of it, from a complete checkpoint."""
    state = {f"model.{name}": tensor for name, tensor in module.state_dict().items()}
    with _explained(path):
        dcp.load(state, checkpoint_id=path, no_dist=True)


def begin(folder: Path, update: int) -> Path:
    """A fresh place for an unfinished checkpoint of ``update``."""
    path = folder / f".saving-{update:08d}"
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    return path


def commit(path: Path, manifest: Mapping[str, Any], *, keep: int) -> Path:
    """Turn an unfinished checkpoint into a complete one by one rename, and drop all but the newest ``keep``."""
    files = {file.name: file.stat().st_size for file in sorted(path.iterdir())}
    told = {"format": FORMAT, **manifest, "files": files}
    with (path / MANIFEST).open("w") as out:
        json.dump(told, out, indent=1)
        out.flush()
        os.fsync(out.fileno())
    final = path.with_name(f"update-{manifest['update']:08d}")
    if final.exists():  # the same update, saved by an attempt whose successor started before it
        _remove(final)
    path.rename(final)
    _sync_folder(final.parent)
    for old in complete(final.parent)[:-keep]:
        _remove(old)
    return final


def _remove(path: Path) -> None:
    """Remove a complete checkpoint: gone by one rename, as it came, so no reader finds half of it."""
    going = path.with_name(f".removing-{path.name}")
    path.rename(going)
    shutil.rmtree(going)


def complete(folder: Path) -> list[Path]:
    """All complete checkpoints in a ``checkpoints`` folder, oldest first."""
    return sorted(path for path in folder.glob("update-*") if path.is_dir())


def clean(folder: Path) -> None:
    """Remove what an interrupted save left behind."""
    for path in (*folder.glob(".saving-*"), *folder.glob(".removing-*")):
        shutil.rmtree(path, ignore_errors=True)


def read_manifest(path: Path) -> dict[str, Any]:
    """Read and check a checkpoint's manifest.

    Raises:
        CheckpointError: not a checkpoint, a damaged one, or one of a newer format.
    """
    file = path / MANIFEST
    if not file.is_file():
        if path in complete(path.parent):
            raise _damaged(path, f"it has no {MANIFEST}")
        raise CheckpointError(
            f"{path} is not a checkpoint: it has no {MANIFEST}; expected a folder like "
            "runs/NAME/checkpoints/update-00000042"
        )
    try:
        manifest = dict(json.loads(file.read_text()))
    except (ValueError, TypeError) as error:
        raise _damaged(path, f"its {MANIFEST} cannot be read ({error})") from None
    for name, kind in FIELDS.items():
        if type(manifest.get(name)) is not kind:
            found = repr(manifest[name]) if name in manifest else "nothing"
            raise _damaged(path, f"its {MANIFEST} should tell '{name}' as {kind.__name__}, found {found}")
    if manifest["format"] != FORMAT:
        raise CheckpointError(
            f"{path} has format {manifest['format']}; this version of adl_dist reads format {FORMAT}: use the version "
            "that wrote it"
        )
    for name, size in manifest["files"].items():
        there = (path / name).stat().st_size if (path / name).is_file() else "no such file"
        if there != size:
            raise _damaged(path, f"{name} should hold {size} bytes, found {there}")
    return manifest


def check_signature(path: Path, expected: Signature) -> None:
    """Refuse a checkpoint of another model.

    Raises:
        CheckpointError: names the first parameter or buffer that differs.
    """
    stored = _stored(path)
    found = {k.removeprefix("model."): list(v.size) for k, v in stored.items() if k.startswith("model.")}
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            here, there = expected.get(name, "missing"), found.get(name, "missing")
            raise CheckpointError(
                f"{path} is of another model: {name} is {here} in this model and {there} in the checkpoint; "
                "use the run's own model= and data=, or another run_dir"
            )


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turn the failure of any rank into one readable error."""
    try:
        with warnings.catch_warnings():
            # With no_dist=True one process saves alone, which is what was asked for.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as error:  # a BaseException, and it wraps whatever went wrong
        rank, (cause, _) = next(iter(error.failures.items()))
        raise CheckpointError(
            f"{path} cannot be read or written: rank {rank}: {type(cause).__name__}: {cause}; an older checkpoint "
            "beside it, if there is one, is untouched"
        ) from error


def _stored(path: Path) -> dict[str, Any]:
    try:
        return dict(dcp.FileSystemReader(path).read_metadata().state_dict_metadata)
    except Exception as error:  # the reader unpickles, and a damaged pickle can raise anything
        raise _damaged(path, f"its .metadata cannot be read ({type(error).__name__}: {error})") from None


def _damaged(path: Path, what: str) -> CheckpointError:
    others = [other.name for other in complete(path.parent) if other != path]
    way_out = f"remove {path.name} to go on from {others[-1]}" if others else "start again with another run_dir"
    return CheckpointError(f"{path} is damaged: {what}; {way_out}")


def _tensors(stage: Stage) -> dict[str, Tensor]:
    state = {f"model.{name}": tensor for name, tensor in stage.module.state_dict().items()}
    if stage.head is not None:
        state |= {f"{stage.head_prefix}{name}": tensor for name, tensor in stage.head.state_dict().items()}
    return state


def _optimizer_state(stage: Stage) -> dict[str, Tensor]:
    if stage.optimizer is None:
        return {}
    return {
        f"optimizer.{name}.{key}": value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
        for name, parameter in stage.named_parameters()
        for key, value in stage.optimizer.state.get(parameter, {}).items()
        if value is not None
    }


def _restore_optimizer(stage: Stage, state: Mapping[str, Tensor]) -> None:
    if stage.optimizer is None:
        return
    names = {id(parameter): name for name, parameter in stage.named_parameters()}
    groups = stage.optimizer.param_groups
    restored: dict[int, dict[str, Tensor]] = {}
    for place, parameter in enumerate(p for group in groups for p in group["params"]):
        prefix = f"optimizer.{names[id(parameter)]}."
        kept = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
        kept = {key: value for key, value in kept.items() if "." not in key}
        if kept:
            restored[place] = kept
    # torch knows which state belongs on which device, and which counters stay on the CPU.
    stage.optimizer.load_state_dict({"state": restored, "param_groups": stage.optimizer.state_dict()["param_groups"]})


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
