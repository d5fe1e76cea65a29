"""What a model computes with and no checkpoint holds, since it does not move: compared where a run continues.

Tables that are not persistent, plain tensors, arrays and lists of numbers are computed again when the model is built. A
model that draws them, in a script that seeds nothing, would continue with others. A few elements of each tell that;
other processors may round a number differently in its last digits, so they need to be close only.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from adl_dist.checkpoint import storage
from adl_dist.checkpoint.buffers import VALUE
from adl_dist.errors import CheckpointError
from adl_dist.memory import storage_of
from adl_dist.partition.module_state import tensors_reached

NUM_SAMPLED = 4  # elements of a tensor
LEAST_NUMBERS = 16  # in a list that is a table, not a setting
Samples = dict[str, list[float]]


def sampled(tensors: Iterable[tuple[str, Tensor]]) -> Samples:
    """Return a few elements of each tensor that has some: enough to tell other random numbers, at no price."""
    samples = {}
    for name, tensor in tensors:
        if tensor.numel() and not tensor.is_meta and tensor.layout is torch.strided:
            flat = tensor.detach().flatten()
            some = flat[:: max(1, len(flat) // NUM_SAMPLED)][:NUM_SAMPLED].cpu()
            some = some.abs() if some.is_complex() else some
            samples[name] = torch.nan_to_num(some.double()).tolist()
    return samples


def are_close(some: Sequence[float], others: Sequence[float]) -> bool:
    """Return whether samples are of the same values, or of as many no more."""
    pairs = zip(some, others, strict=False)
    return all(math.isclose(a, b, rel_tol=1e-3, abs_tol=1e-6) for a, b in pairs)


def constants_of(model: nn.Module) -> Samples:
    """Return samples of what ``model`` holds next to its ``state_dict``, by names that do not depend on the cut."""
    kept = {storage_of(tensor) for tensor in (*model.parameters(), *model.state_dict(keep_vars=True).values())}
    tensors = ((name, t) for name, t in tensors_reached(model) if storage_of(t) not in kept)
    return sampled(tensors) | sampled(_tables(model))


def check_constants(path: Path, manifest: Mapping[str, Any], mine: Samples) -> None:
    """Raise CheckpointError if ``mine`` are others than those of the run that has saved the checkpoint at ``path``.

    Those that the checkpoint holds, because they have moved, may be others.
    """
    theirs: Samples = manifest["identity"].get("constants", {})
    tensors, texts = storage.scan(path, storage.BUFFERS, manifest["files"])
    moved = tensors.keys() | {name.removeprefix(VALUE) for name in texts}
    for name in sorted(mine.keys() & theirs.keys() - moved):
        if not are_close(mine[name], theirs[name]):
            raise CheckpointError(
                f"{path}: '{name}' of the model is no longer what it was in that run, and as it does not move, the "
                "checkpoint does not hold it; build the model with the same numbers (torch.manual_seed(...) before "
                "it), or register it as a persistent buffer and start a new run"
            )


def _tables(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield arrays and long lists of numbers in attributes of modules."""
    for path, module in model.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, np.ndarray) or (isinstance(value, list | tuple) and value):
                array = _as_array(value)
                if array is not None and array.size >= LEAST_NUMBERS:
                    yield f"{path}.{key}".lstrip("."), torch.from_numpy(array)


def _as_array(value: Any) -> Any:
    """Return numbers as an array; None: they are none."""
    first = value
    while isinstance(first, list | tuple) and first:
        first = first[0]
    if not isinstance(first, bool | int | float | np.ndarray | np.number):
        return None
    try:
        return np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        return None
