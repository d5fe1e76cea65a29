"""The findings of the run at the start about all stages of a model."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import nn

from adl_dist.stage.traits import StageTraits
from adl_dist.transport.spec import Specs, TensorSpec


class Agreed(NamedTuple):
    """Facts about all stages, the same on every rank."""

    acts: dict[int, Specs]  # the tensors that arrive at each stage
    targets: tuple[TensorSpec, ...]  # what the loss takes besides the output
    traits: dict[int, StageTraits]
    num_classes: int | None  # classes that the model tells apart; None if its output is not [B, classes]
    num_outputs: int | None  # its output's dimension of classes; None if that has none
    learns: bool  # whether a gradient of the loss reaches the model
    loss_fault: str | None = None  # why no group of micro-batches can be trained with the loss
    size_faults: Mapping[int, str] = MappingProxyType({})  # why none of these OTHER_SIZES can be trained on

    def plain(self) -> dict[str, Any]:
        """Return the findings that must be equal on all ranks, in plain values."""
        acts = {str(k): [[str(spec) for spec in mode] for mode in specs] for k, specs in self.acts.items()}
        grads = {str(k): list(traits.gets_grad or ()) for k, traits in self.traits.items()}
        return {
            "acts": acts,
            "target": [str(spec) for spec in self.targets],
            "gradients": grads,
            "classes": self.num_classes,
        }


def units_of(module: nn.Module) -> str:
    """Return the names of the first and the last unit of a stage."""
    names = getattr(module, "units", None) or [name for name, _ in module.named_children()] or [type(module).__name__]
    return names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}"
