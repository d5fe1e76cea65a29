"""What a stage returns in the trial: whether it can cross a cut, and in which form."""

from collections.abc import Hashable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from adl_dist.batch import Tensors
from adl_dist.errors import ConfigError
from adl_dist.memory import memory_of, shared_memory, storage_of
from adl_dist.partition.module_state import tensors_reached
from adl_dist.partition.state_walk import CAN_CROSS
from adl_dist.stage.traits import Structure
from adl_dist.training.trial.findings import CutImpossible, Seen
from adl_dist.training.trial.samples import SIZES
from adl_dist.transport.spec import TensorSpec


def crossing(
    k: int, out: Any, size: int, gets: str, behind: Seen, *, varies: bool = False
) -> tuple[Tensors, Structure | None]:
    """Return the tensors in ``out``, and how they stand in it; None: it is one tensor or a tuple of several.

    ``out`` is what stage ``k`` returns for ``size`` samples, ``gets`` says in errors what it is given, and ``behind``
    is what the next stage got before, which must be alike, but for lengths if the data ``varies`` in them.

    Raises:
        CutImpossible: it cannot cross the cut.
    """

    def refuse(found: str) -> CutImpossible:
        reason = f"returns {found} for {size} samples"
        return CutImpossible(
            f"{gets} and {reason}; expected tensors whose first dimension is the batch, and numbers that stay; "
            "cut elsewhere: partition.balance=even finds where",
            stage=k,
            reason=f"what would cross it has no batch dimension or changes: stage {k} {reason}",
        )

    leaves = tree_leaves(out)
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            if leaf.shape[:1] != (size,):
                raise refuse(str(list(leaf.shape)))
        elif not isinstance(leaf, CAN_CROSS):
            raise refuse(type(leaf).__name__)
    tensors = tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))
    of_tensors = type(out) is tuple and len(out) > 1 and all(isinstance(each, Tensor) for each in out)
    is_plain = isinstance(out, Tensor) or of_tensors
    structure = None if is_plain else Structure.of(out)
    specs = tuple(map(TensorSpec.of, tensors))
    shapes, before = (
        [(len(spec.shape) if varies else spec.shape, spec.dtype) for spec in some]
        for some in (specs, behind.specs[0] if behind.specs else specs)
    )
    if behind.takes and (behind.takes[0] != structure or before != shapes):
        now = f"{structure or ''} {', '.join(map(str, specs))}".strip()
        other = f"{behind.takes[0] or ''} {', '.join(map(str, behind.specs[0]))}".strip()
        raise refuse(f"{other} for {SIZES[0]} samples, but {now}")
    return tensors, structure


def share_memory(outs: Sequence[Tensor], acts: Sequence[Tensor], shared: Sequence[bool]) -> list[bool]:
    """Return for each of ``outs`` whether it shares memory with another tensor that crosses a cut.

    Behind the cut they are two: a write to one would not be seen in the other.
    """
    memory = [_memory(out) for out in outs]
    of_acts = {_memory(act) for act, is_shared in zip(acts, shared, strict=True) if is_shared}
    pairs = zip(outs, memory, strict=True)
    return [bool(out.numel()) and (memory.count(mine) > 1 or mine in of_acts) for out, mine in pairs]


def _memory(tensor: Tensor) -> Hashable:
    return storage_of(tensor) if tensor.is_meta else memory_of(tensor)  # on meta all have the address 0


def lie_in(outs: Sequence[Tensor], module: nn.Module, earlier: Sequence[Tensor]) -> list[bool]:
    """Return for each of ``outs`` whether it lies in memory that ``module`` keeps, like a view of a buffer.

    That is seen from the module, or from what it has returned ``earlier``, which is still there: the same memory was
    used again, also if something else keeps it.
    """
    own = {storage_of(tensor) for _, tensor in tensors_reached(module)}
    numbers = shared_memory([*outs, *earlier])
    used = {numbers.get(id(tensor)) for tensor in earlier} - {None}
    return [storage_of(out) in own or numbers.get(id(out)) in used for out in outs]


def check_output(out: Any, size: int, gets: str) -> None:
    """Raise a ConfigError if ``out`` of the last stage is not of ``size`` samples."""
    for leaf in tree_leaves(out):  # numbers, like a penalty next to the output, are for the loss to take
        if isinstance(leaf, Tensor) and leaf.ndim and len(leaf) != size:
            raise ConfigError(
                f"{gets} and returns {list(leaf.shape)} for {size} samples; expected an output of the model whose "
                "first dimension is the batch"
            )
