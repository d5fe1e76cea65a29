"""Pipeline parallelism by torch.distributed.pipelining on our own stages."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleavedZeroBubble

from adl_dist.baselines.loop import Batches, Training


def _zero_bubble(stage: PipelineStage, **options: Any) -> ScheduleInterleavedZeroBubble:
    """Return the ZB-H1 schedule: one stage per process, 1F1B's messages."""
    return ScheduleInterleavedZeroBubble([stage], **options)


SCHEDULES: Mapping[str, Any] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "zb": _zero_bubble}


class _Convert(torch.autograd.Function):
    """A conversion to one memory format, and to another in the backward.

    Thus kernels never meet both formats at once.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: torch.memory_format, back: torch.memory_format) -> Tensor:
        ctx.back = back
        out = x.contiguous(memory_format=there)
        return out.clone() if x._is_view() and out is x else out  # zero bubbles detach it, which no view allows

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0].contiguous(memory_format=ctx.back), None, None


class Bordered(nn.Module):
    """A stage that takes and returns contiguous tensors, as gloo demands."""

    def __init__(self, stage: nn.Module, *, channels_last: bool) -> None:
        """Wrap ``stage``; if ``channels_last``, it computes images in that format."""
        super().__init__()
        self.stage = stage
        self._channels_last = channels_last

    def forward(self, *acts: Tensor) -> Any:
        """Run the stage; return its output tensor, or a tuple of several."""
        out = self.stage(*(_Convert.apply(act, self._inside(act), torch.contiguous_format) for act in acts))
        leaving = [self._leave(each) for each in ([out] if isinstance(out, Tensor) else out)]
        return leaving[0] if len(leaving) == 1 else tuple(leaving)

    def _leave(self, out: Tensor) -> Any:
        return _Convert.apply(out, torch.contiguous_format, self._inside(out))

    def _inside(self, tensor: Tensor) -> torch.memory_format:
        return torch.channels_last if self._channels_last and tensor.ndim == 4 else torch.contiguous_format


def train_stage(
    module: nn.Module,
    batches: Batches | None,
    training: Training,
    *,
    schedule: str,
    channels_last: bool,
    target: Tensor,
) -> None:
    """Train the stage of this rank, after all ranks have joined.

    Args:
        module: the stage.
        batches: on rank 0 whole batches (input on the device, target), which torch splits; None elsewhere.
        training: the length of the training and the optimizer.
        schedule: a key of SCHEDULES; ``1f1b`` and ``zb`` need a micro-batch per rank or more.
        channels_last: whether stages compute images in channels_last.
        target: a tensor like the target of a whole batch, any values; rank 0 sends each batch's to the last rank.
    """
    rank, num_stages = dist.get_rank(), dist.get_world_size()
    last = num_stages - 1
    # Targets stay on the CPU. A group of all ranks, of which two use it: next to NCCL those that are no members of a
    # smaller one would split the default group, and wait for the members for ever (older torch).
    targets: Any = dist.new_group(backend="gloo")
    stage = PipelineStage(Bordered(module, channels_last=channels_last), rank, num_stages, training.device)
    pipeline = SCHEDULES[schedule](stage, n_microbatches=training.micro_batches, loss_fn=training.loss_fn)
    module.train()
    for _ in range(training.num_updates):
        inputs: list[Tensor] = []
        if batches is not None:
            input_, target = next(batches)
            inputs = [input_]
        if rank == 0:
            dist.send(target, last, group=targets)
        elif rank == last:
            dist.recv(target, 0, group=targets)
        wanted = target.to(training.device, non_blocking=True) if rank == last else None
        pipeline.step(*inputs, target=wanted, return_outputs=False)
        training.update()
