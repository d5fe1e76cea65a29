"""What is saved of the stages, under the uncut model's own names, and how it gets back into them.

How the model was cut leaves no trace in the tensors' names, see :mod:`adl_dist.checkpoint.stage_state`; the manifest
tells it. Learning rates are not stored: a schedule is a function of the update index and of the cut in use.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.nn.parameter import is_lazy

from adl_dist.checkpoint import layout, stage_state, storage
from adl_dist.errors import CheckpointError, ConfigError, UnusableError
from adl_dist.stage import Stage

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


def state_of(stages: Iterable[Stage]) -> dict[str, Tensor]:
    """All that is to be saved of this process's stages; the tensors are their own."""
    return {key: value for stage in stages for key, value in stage_state.saved(stage).items()}


def load(path: Path, stages: Iterable[Stage]) -> None:
    """Read the state of this process's stages from a complete checkpoint, whatever cut wrote it.

    Raises:
        CheckpointError: it cannot be read, or holds local losses that do not fit.
    """
    stages = list(stages)
    stored = _stored(path)
    stage_state.check_heads(path, stages, stored)
    with _explained(path):
        state = stage_state.wanted(stages, stored)
        storage.read(path, state)
        stage_state.restore_optimizers(stages, state)


def load_weights(path: Path, module: nn.Module) -> None:
    """Read parameters and buffers of a model, or of a part of it, from a complete checkpoint.

    Raises:
        CheckpointError: it cannot be read.
    """
    with _explained(path):
        storage.read(path, {f"model.{name}": tensor for name, tensor in module.state_dict().items()})


def newest_good(
    candidates: Sequence[Path], expected: Signature
) -> tuple[Path, dict[str, Any], list[tuple[Path, UnusableError]]]:
    """The first of ``candidates`` that is whole and of this model. Changes nothing.

    Args:
        candidates: complete checkpoints, the newest first; at least one.
        expected: the model's signature.

    Returns:
        It, its manifest, and those before it with what is wrong with each.

    Raises:
        CheckpointError: none is, or one is of another format.
    """
    rejected: list[tuple[Path, UnusableError]] = []
    for path in candidates:
        try:
            manifest = layout.verify(path)
            check_signature(path, expected)
            return path, manifest, rejected
        except UnusableError as error:
            rejected.append((path, error))
    if len(rejected) == 1:
        raise rejected[0][1]
    raise CheckpointError(
        f"none of the {len(rejected)} checkpoints in {candidates[0].parent} can be used, and nothing was changed: "
        f"{'; '.join(str(error).rpartition(';')[0] for _, error in rejected)}; bring back a copy of one, or start "
        "again with another run_dir"
    )


def check_signature(path: Path, expected: Signature) -> None:
    """Refuse a checkpoint of another model.

    Raises:
        UnusableError: names the first parameter or buffer that differs.
    """
    stored = _stored(path)
    found = {k.removeprefix("model."): list(v.size) for k, v in stored.items() if k.startswith("model.")}
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            here, there = expected.get(name, "missing"), found.get(name, "missing")
            raise UnusableError(
                f"{path} is of another model: {name} is {here} in this model and {there} in the checkpoint; "
                "use the run's own model= and data=, or another run_dir"
            )


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turn whatever goes wrong into one readable error."""
    try:
        yield
    except CheckpointException as failed:  # a BaseException, and it wraps the cause
        cause = failed.failures[min(failed.failures)][0]
        raise _unreadable(path, cause) from failed
    except Exception as error:  # sizes and dtypes that no tensor can have, state that an optimizer refuses
        raise _unreadable(path, error) from error


def _unreadable(path: Path, cause: BaseException) -> CheckpointError:
    return CheckpointError(
        f"{path} cannot be read: {type(cause).__name__}: {' '.join(str(cause).split())}; an older checkpoint beside "
        "it, if there is one, is untouched"
    )


def _stored(path: Path) -> dict[str, Any]:
    try:
        return dict(storage.read_index(path / storage.INDEX).state_dict_metadata)
    except Exception as error:  # what is no pickle, or not of an index, can raise anything
        what = f"its {storage.INDEX} cannot be read ({type(error).__name__}: {error})"
        raise layout.damaged(path, what) from None
