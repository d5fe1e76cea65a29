"""DiLoCo (Douillard et al., 2023): replicas that average rarely."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

OUTER_LR, OUTER_MOMENTUM = 0.7, 0.9  # the authors' choice, with Nesterov's momentum


class OuterStep:
    """DiLoCo's outer optimizer on one of several replicas.

    The replicas have joined each other and begin with equal weights. Each replica takes ``inner_updates`` steps of its
    own optimizer, which keeps its state, on its own share of the data. Then the last common weights minus the average
    of the replicas' weights are the gradient for SGD with Nesterov's momentum. Its step gives the next common weights,
    from which all replicas continue. Floating-point buffers, which are BatchNorm's statistics, are averaged.
    """

    def __init__(
        self, model: nn.Module, *, inner_updates: int, lr: float = OUTER_LR, momentum: float = OUTER_MOMENTUM
    ) -> None:
        """Begin with ``model``, and take an outer step every ``inner_updates``."""
        self.num_updates = 0  # inner ones so far
        self.last = 0  # the inner updates that the common weights know of
        self._inner_updates = inner_updates
        self._buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
        self._weights = [weight for weight in model.parameters() if weight.requires_grad]
        self._common = [weight.detach().clone() for weight in [*self._weights, *self._buffers]]
        outer = self._common[: len(self._weights)]
        self._optimizer = torch.optim.SGD(outer, lr=lr, momentum=momentum, nesterov=momentum > 0)

    def __call__(self) -> None:
        """Count an inner update, and step after every ``inner_updates``."""
        self.num_updates += 1
        if self.num_updates % self._inner_updates == 0:
            self.exchange()

    @torch.no_grad()
    def exchange(self) -> None:
        """Average over the replicas, and take the outer step to common weights."""
        own = [*self._weights, *self._buffers]
        flat = torch.cat([tensor.flatten() for tensor in own]) / dist.get_world_size()
        dist.all_reduce(flat)
        for place, (common, mean) in enumerate(zip(self._common, _views(flat, own), strict=True)):
            if place < len(self._weights):
                common.grad = common - mean
            else:
                common.copy_(mean)
        self._optimizer.step()
        self._hold(self._common)
        self.last = self.num_updates

    @contextmanager
    def common_weights(self) -> Iterator[None]:
        """Exchange the model's weights for the common weights inside the block."""
        own = [*self._weights, *self._buffers]
        kept = [tensor.detach().clone() for tensor in own]
        try:
            self._hold(self._common)
            yield
        finally:
            self._hold(kept)

    @torch.no_grad()
    def _hold(self, values: list[Tensor]) -> None:
        for tensor, value in zip([*self._weights, *self._buffers], values, strict=True):
            tensor.copy_(value)


def _views(flat: Tensor, like: list[Tensor]) -> list[Tensor]:
    parts = flat.split([tensor.numel() for tensor in like])
    return [part.view_as(tensor) for part, tensor in zip(parts, like, strict=True)]
