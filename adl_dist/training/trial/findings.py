"""What the trial at the start finds out about the stages of a model."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from adl_dist.errors import PartitionError
from adl_dist.stage.traits import StageTraits, Takes
from adl_dist.transport.spec import Specs, TensorSpec


class Agreed(NamedTuple):
    """What is known of all stages, the same on every rank."""

    acts: dict[int, Specs]  # what arrives at each stage
    targets: tuple[TensorSpec, ...]  # what the loss takes besides the output
    traits: dict[int, StageTraits]
    num_classes: int | None  # classes that the model tells apart; None if its output is not [B, classes]
    num_outputs: int | None  # its output's dimension of classes; None if that has none
    learns: bool  # whether a gradient of the loss reaches the model
    loss_fault: str | None = None  # why no group of micro-batches can be trained with the loss
    output: Any = None  # of the samples, where a group has several micro-batches: a tensor [n, ...], or containers
    size_faults: Mapping[int, str] = MappingProxyType({})  # why none of these OTHER_SIZES can be trained on
    replay_fault: str | None = None  # why the method, which runs forwards twice, cannot train it
    constants: frozenset[str] = frozenset()  # of the model's, those that forwards compute with and do not move

    def plain(self) -> dict[str, Any]:
        """Return in plain values what all ranks must have found alike."""
        acts = {str(k): [[str(spec) for spec in mode] for mode in specs] for k, specs in self.acts.items()}
        grads = {str(k): list(traits.gets_grad or ()) for k, traits in self.traits.items()}
        return {
            "acts": acts,
            "target": [str(spec) for spec in self.targets],
            "gradients": grads,
            "classes": self.num_classes,
        }


class CutImpossible(PartitionError):
    """What a stage returns cannot cross a cut.

    Attributes:
        stage: the stage, after which the cut is.
        reason: why not.
    """

    def __init__(self, text: str, *, stage: int, reason: str) -> None:
        super().__init__(text)
        self.stage, self.reason = stage, reason


@dataclass
class Seen:
    """What was seen of one stage in one mode."""

    specs: list[tuple[TensorSpec, ...]] = field(default_factory=list)  # what arrived, each time
    takes: list[Takes | None] = field(default_factory=list)  # its structure
    overwrites: list[list[bool]] = field(default_factory=list)
    needs_grad: list[list[bool]] = field(default_factory=list)
    gets_grad: list[list[bool]] = field(default_factory=list)
    lies_in_stage: list[list[bool]] = field(default_factory=list)  # for each tensor that it returns
