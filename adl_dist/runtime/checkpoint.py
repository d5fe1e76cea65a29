"""Checkpoints of a drained pipeline: torch.distributed.checkpoint files under the uncut model's own names.

    checkpoints/update-00000042/    complete, or not there: it appears by one rename
        manifest.json               position, metrics, and the size of every file
        .metadata  __0_0.distcp ... what torch.distributed.checkpoint writes
    checkpoints/.saving-...         unfinished (.removing-...: half removed); gone at the next start

How the model was cut leaves no trace in the tensors' names, see :mod:`adl_dist.runtime.stage_state`; the manifest tells
it. Learning rates are not stored: a schedule is a function of the update index and of the cut in use.
"""

import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import LoadPlan
from torch.nn.parameter import is_lazy

from adl_dist.errors import ChannelError, CheckpointError, ConfigError
from adl_dist.runtime import stage_state
from adl_dist.stage import Stage

FORMAT = 1
MANIFEST = "manifest.json"
# Where the run stood: updates made, whole epochs done, samples of the next epoch done; and its last metrics.
# "of" is what the position refers to: sizes of data and batches, length of the run, optimizer; and the cut.
FIELDS = {"format": int, "update": int, "epochs": int, "sample": int, "metrics": dict, "of": dict, "files": dict}

Signature = dict[str, list[int]]


def signature(model: nn.Module) -> Signature:
    """Names and shapes of all parameters and buffers of the uncut model.

    Raises:
        ConfigError: its state holds something that is no tensor.
    """
    lazy = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if is_lazy(tensor)]
    if lazy:
        raise ConfigError(f"{lazy[0]} of the model has no shape yet; run the model on one batch before handing it over")
    state = model.state_dict()
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise ConfigError(
                f"{name} of the model's state is a {type(value).__name__}, no tensor, and cannot be saved"
            )
    return {name: list(tensor.shape) for name, tensor in state.items()}


def save(path: Path, stages: Iterable[Stage], *, distributed: bool) -> None:
    """Write the state of this process's stages; every process calls it with the same unfinished ``path``."""
    state = {key: value for stage in stages for key, value in stage_state.saved(stage).items()}
    with _explained(path, distributed=distributed):
        dcp.save(state, checkpoint_id=path, no_dist=not distributed)


def load(path: Path, stages: Iterable[Stage], *, distributed: bool) -> None:
    """Read the state of this process's stages from a complete checkpoint, whatever cut wrote it.

    Raises:
        CheckpointError: it cannot be read, or holds local losses that do not fit.
        ChannelError: another rank has found so.
    """
    stages = list(stages)
    stored = _stored(path)
    state = stage_state.wanted(stages, stored)
    planner = _Planner(lambda: stage_state.check_heads(path, stages, stored))
    with _explained(path, distributed=distributed):
        dcp.load(state, checkpoint_id=path, planner=planner, no_dist=not distributed)
    stage_state.restore_optimizers(stages, state)


def load_weights(path: Path, module: nn.Module) -> None:
    """Read parameters and buffers of a model, or of a part of it, from a complete checkpoint."""
    state = {f"model.{name}": tensor for name, tensor in module.state_dict().items()}
    with _explained(path, distributed=False):
        dcp.load(state, checkpoint_id=path, no_dist=True)


def place(folder: Path, update: int) -> Path:
    """Where the complete checkpoint of ``update`` is."""
    return folder / f"update-{update:08d}"


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
    final = place(path.parent, manifest["update"])
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
def _explained(path: Path, *, distributed: bool) -> Iterator[None]:
    """Turn the failure of any rank into one readable error, on the rank that it is of."""
    try:
        with warnings.catch_warnings():
            # With no_dist=True one process saves alone, which is what was asked for.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as error:  # a BaseException, and it wraps whatever went wrong
        rank = min(error.failures)
        cause = error.failures[rank][0]
        if distributed and rank != dist.get_rank():
            raise ChannelError(f"{path}: rank {rank} could not read or write it; see what it says") from error
        if isinstance(cause, CheckpointError):
            raise cause from None
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


class _Planner(dcp.DefaultLoadPlanner):
    """Checks first, at a point where all ranks hear of a refusal: else the others would wait for this one."""

    def __init__(self, check: Callable[[], None]) -> None:
        super().__init__()
        self._check = check

    def create_local_plan(self) -> LoadPlan:
        self._check()
        return super().create_local_plan()


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
