"""What a stage keeps of a micro-batch between its forward and its backward."""

from dataclasses import dataclass

from torch import Tensor

from adl_dist.stage.calls import Tensors


@dataclass
class InFlight:
    """A micro-batch between its forward and its backward."""

    acts: Tensors  # what came in; their .grad is sent upstream
    target: Tensor | None  # where there is a loss
    version: int  # updates that had led to the weights of the forward
    outs: Tensors | None = None  # what went out, or the scalar loss, with the graph behind it; None: to be recomputed
    scored: tuple[Tensor | None, Tensor] | None = None  # the model's output if this is its end, and the loss
    buffers: dict[str, Tensor] | None = None  # those that the forward met, for its replay
