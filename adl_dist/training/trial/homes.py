"""Which stage each tensor of a model belongs to, and what a stage reaches of another one's."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

from torch import Tensor, nn

from adl_dist.errors import PartitionError
from adl_dist.memory import memory_of
from adl_dist.partition.module_state import ModuleState
from adl_dist.partition.piece import stage_units
from adl_dist.partition.state_walk import Key

Around = Callable[[int], AbstractContextManager[None]]  # what the forward of each stage runs in


class Homes:
    """The parameters and buffers of stages.

    Attributes:
        places: what each stage is called in errors.
    """

    def __init__(self, stages: Sequence[nn.Module], name: str = "") -> None:
        """Take the ``stages``; ``name``: what they are called in errors; empty: each by its index and units."""
        self.places = [name or f"stage {k} ({units_of(stage)})" for k, stage in enumerate(stages)]
        self._stages = stages
        self._held = [{id(t) for t in (*stage.parameters(), *stage.buffers())} for stage in stages]

    def holds(self, k: int, tensor: Tensor) -> bool:
        """Return whether ``tensor`` is registered on stage ``k``."""
        return id(tensor) in self._held[k]

    def reached_of_others(self, k: int, state: ModuleState) -> Iterator[tuple[Key, str, Tensor]]:
        """Yield (memory, name, tensor) of those of other stages that stage ``k``, whose ``state`` is given, reaches."""
        own = {memory_of(t) for t in (*self._stages[k].parameters(), *self._stages[k].buffers())}
        reached = {memory_of(tensor) for some in state.tensors for _, tensor in some} - own
        for home, stage in enumerate(self._stages):
            for name, tensor in (*stage.named_parameters(), *stage.named_buffers()) if home != k and reached else ():
                if tensor.numel() and memory_of(tensor) in reached:
                    yield memory_of(tensor), name, tensor

    def check(self, name: str, tensor: Tensor, k: int) -> None:
        """Raise a PartitionError if stage ``k`` computes with ``tensor``, called ``name``, and that is another's."""
        homes = [stage for stage in range(len(self._stages)) if self.holds(stage, tensor)]
        if homes and k not in homes:
            raise PartitionError(
                f"'{name}' is a tensor of {self.places[homes[0]]}, but {self.places[k]} computes with it, too, by "
                "a reference that is not registered; assign the module or parameter to an attribute there, so that it "
                "counts as shared, or cut elsewhere (partition.balance), so that both are on one stage"
            )


def units_of(module: nn.Module) -> str:
    """Return the names of the first and the last unit of a stage."""
    names = stage_units(module) or [name for name, _ in module.named_children()] or [type(module).__name__]
    return names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}"
