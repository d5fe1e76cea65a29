"""A snapshot of all that a trial might move: of modules, of the loss, and of the global random streams."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from adl_dist.partition.module_state import ModuleState
from adl_dist.seeds import stream_seed
from adl_dist.stage import TrainSpec
from adl_dist.streams import Streams, seed_streams


class Snapshot:
    """Everything that can be seen of some modules, and the random streams, to be put back."""

    def __init__(self, model: nn.Module, stages: Sequence[nn.Module], spec: TrainSpec, device: torch.device) -> None:
        others = [spec.loss_fn] if isinstance(spec.loss_fn, nn.Module) else []
        self._seed = stream_seed(spec.seed, "trial")
        self._is_moved = False
        modules = [model, *(stage for stage in stages if stage is not model), *others]
        loss = {"loss_fn": spec.loss_fn}
        self._state, self._streams = ModuleState.of(*modules, functions=loss), Streams(device)
        self.tensors = self._state.tensors[0]  # (name, tensor) of all that can be seen from the model
        self.of_stages = [  # the loss is part of the last
            ModuleState.of(stage, alike=self._state, functions=loss if stage is stages[-1] else {}) for stage in stages
        ]
        self._modes = [(module, module.training) for one in modules for module in one.modules()]
        self._grads = [(p, p.grad) for one in modules for p in one.parameters()]
        for parameter, _ in self._grads:
            parameter.grad = None
        self._device = device

    def put_back(self, *, gradients: bool = False) -> None:
        """Put it back; ``gradients``: also those that were there, else there are none."""
        self._state.restore()
        self._streams.restore()
        for module, mode in self._modes:
            if module.training != mode:
                module.training = mode
        for parameter, grad in self._grads:
            parameter.grad = grad if gradients else None

    def begin(self) -> None:
        """Put everything back, without gradients, and seed the streams, alike on every rank."""
        if self._is_moved:
            self.put_back()
        self._is_moved = True
        seed_streams(self._seed, self._device)


@contextmanager
def restored_after(
    model: nn.Module, stages: Sequence[nn.Module], spec: TrainSpec, device: torch.device
) -> Iterator[Snapshot]:
    """Leave everything as it was found; inside there are no gradients."""
    found = Snapshot(model, stages, spec, device)
    try:
        yield found
    finally:
        found.put_back(gradients=True)
