"""What a model computes with and no checkpoint holds, since it does not move: compared where a run continues.

Tables that are not persistent, plain tensors, arrays and lists of numbers are computed again when the model is built. A
model that draws them, in a script that seeds nothing, would continue with others. A few elements of each tell that;
other processors may round a number differently in its last digits, so they need to be close only.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from adl_dist.checkpoint import storage
from adl_dist.checkpoint.buffers import VALUE
from adl_dist.errors import CheckpointError
from adl_dist.memory import has_plain_memory, storage_of
from adl_dist.partition.module_state import tensors_reached

NUM_SAMPLED = 4  # elements of a tensor
LEAST_NUMBERS = 16  # in a list that is a table, not a setting
Elements = dict[str, list[float]]  # a few of each tensor, by its name


def sampled(tensors: Iterable[tuple[str, Tensor]]) -> Elements:
    """Return a few elements of each tensor that has some: enough to tell other random numbers, at no price."""
    samples = {}
    for name, tensor in tensors:
        if tensor.layout is torch.strided and tensor.numel() and not tensor.is_meta and not tensor.is_quantized:
            at_least_1d = torch.atleast_1d(tensor.detach())
            places = np.unravel_index(_places(tensor.numel()), tuple(at_least_1d.shape))
            some = at_least_1d[tuple(torch.from_numpy(place) for place in places)].cpu()
            some = some.abs() if some.is_complex() else some
            samples[name] = torch.nan_to_num(some.double()).tolist()
    return samples


def are_close(some: Sequence[float], others: Sequence[float]) -> bool:
    """Return whether samples are of the same values, or of as many no more."""
    pairs = zip(some, others, strict=False)
    return all(math.isclose(a, b, rel_tol=1e-3, abs_tol=1e-6) for a, b in pairs)


def constants_of(model: nn.Module) -> Elements:
    """Return samples of what ``model`` holds next to its ``state_dict``, by names that do not depend on the cut.

    The first number is that of the elements.
    """
    kept = {storage_of(tensor) for tensor in (*model.parameters(), *model.state_dict(keep_vars=True).values())}
    reached = ((name, tensor) for name, tensor in tensors_reached(model) if has_plain_memory(tensor))
    tensors = {name: tensor for name, tensor in reached if storage_of(tensor) not in kept}
    samples = sampled(tensors.items())
    return {name: [float(tensors[name].numel()), *some] for name, some in samples.items()} | _tables(model)


def unlike_those_of(path: Path, manifest: Mapping[str, Any], mine: Elements) -> str | None:
    """Return the name of one of ``mine`` that is another than in the run that has saved the checkpoint at ``path``.

    Those that the checkpoint holds, because they have moved, may be others, and so may those of another size.
    """
    tensors, texts = storage.scan(path, storage.BUFFERS, manifest["files"])
    moved = tensors.keys() | {name.removeprefix(VALUE) for name in texts}
    theirs: Elements = manifest["identity"].get("constants", {})
    pairs = ((name, mine[name], theirs[name]) for name in sorted(mine.keys() & theirs.keys() - moved))
    return next((name for name, a, b in pairs if a[:1] == b[:1] and not are_close(a, b)), None)


def check_constants(path: Path, manifest: Mapping[str, Any], mine: Elements) -> None:
    """Raise CheckpointError if ``mine`` are others than those of the run that continues from ``path``."""
    if (name := unlike_those_of(path, manifest, mine)) is not None:
        raise CheckpointError(
            f"{path}: '{name}' of the model is no longer what it was in that run, and as it does not move, the "
            "checkpoint does not hold it; build the model with the same numbers (torch.manual_seed(...) before "
            "it), or register it as a persistent buffer and start a new run"
        )


def _places(size: int) -> NDArray[np.int64]:
    """Return a few places among ``size`` elements."""
    return np.arange(0, size, max(1, size // NUM_SAMPLED))[:NUM_SAMPLED]


def _tables(model: nn.Module) -> Elements:
    """Return samples of arrays and long lists of numbers in attributes of modules."""
    found: Elements = {}
    for path, module in model.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, np.ndarray) and value.dtype.kind in "biuf" and value.size >= LEAST_NUMBERS:
                some: list[float] | None = [
                    float(value[place])
                    for place in zip(*np.unravel_index(_places(value.size), value.shape), strict=True)
                ]
            elif isinstance(value, list | tuple):
                some = _numbers_in(value)
            else:
                continue
            if some is not None:
                found[f"{path}.{key}".lstrip(".")] = [float(len(value)), *map(_finite, some)]
    return found


def _numbers_in(value: Sequence[Any]) -> list[float] | None:
    """Return some of the numbers in a list of them, or of lists of them; None: it is none, or a short one."""
    picked = [value[place] for place in _places(len(value))]
    if picked and all(isinstance(each, list | tuple) and each for each in picked):
        picked, size = [each[place % len(each)] for place, each in enumerate(picked)], len(value) * len(picked[0])
    else:
        size = len(value)
    if size < LEAST_NUMBERS or not picked or not all(isinstance(each, bool | int | float) for each in picked):
        return None
    return [float(each) for each in picked]


def _finite(number: float) -> float:
    return number if math.isfinite(number) else 0.0
