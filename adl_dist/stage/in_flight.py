"""The state that a stage keeps of a micro-batch between its forward and its backward."""

from dataclasses import dataclass

from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from adl_dist.stage.calls import Tensors, takes_gradient

GradEdges = tuple[GradientEdge | None, ...]  # one for each tensor that takes a gradient; None: nothing here computed it


@dataclass
class InFlight:
    """A micro-batch between its forward and its backward."""

    acts: Tensors  # what came in; their .grad is sent upstream
    target: Tensor | None  # where there is a loss
    version: int  # updates that had led to the weights of the forward
    grad_edges: GradEdges | None = None  # where the graph begins to go backward; None: to be recomputed
    output_and_loss: tuple[Tensor | None, Tensor] | None = None  # the model's output if this is its end, and the loss
    buffers: dict[str, Tensor] | None = None  # those that the forward met, for its replay


def grad_edges_of(outs: Tensors) -> GradEdges:
    """Return the starts of the backward of ``outs`` without the tensors, which are free once they have been sent."""
    return tuple(get_gradient_edge(out) if out.requires_grad else None for out in filter(takes_gradient, outs))
