"""The exponential moving average of a stage's weights.

It is torch's own, see :mod:`torch.optim.swa_utils`. After each update that is not skipped E <- decay E + (1 - decay) W;
the first update makes E = W. Only trained parameters are averaged. Everything else, such as running statistics, is
the model's own, as torch's ``AveragedModel`` with ``use_buffers=False`` copies it.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn


class WeightAverage:
    """The moving average of trained parameters, in separate tensors."""

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], decay: float) -> None:
        """Average the trained parameters among the ``named`` ones.

        A parameter may have several names. Nothing is averaged before the first update.
        """
        self._names: dict[nn.Parameter, list[str]] = {}
        for name, parameter in named:
            if parameter.requires_grad:
                self._names.setdefault(parameter, []).append(name)
        self._parameters = [*self._names]
        self._averages: list[Tensor] = []  # none before the first update
        self._average = get_ema_multi_avg_fn(decay)

    @torch.no_grad()
    def update(self) -> None:
        """Add the present weights to the average, once after each update."""
        if self._averages:
            # torch's function keeps no count: it is for an AveragedModel to copy the first weights.
            self._average(self._averages, [p.detach() for p in self._parameters], 1)
        else:
            self._averages = [p.detach().clone() for p in self._parameters]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The averages by parameter name; empty before the first update."""
        pairs = zip(self._parameters, self._averages, strict=False)
        return {self._names[parameter][0]: average for parameter, average in pairs}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore averages by name.

        Without averages, the next update copies the weights, like the first one.
        """
        by_name = {name: p for p, names in self._names.items() for name in names}
        found = {by_name[name]: tensor for name, tensor in tensors.items() if name in by_name}
        self._averages = []
        if found:  # what was not trained so far has no average yet, which would be of equal values: its present one
            present = (found.get(p, p.detach()) for p in self._parameters)
            pairs = zip(self._parameters, present, strict=True)
            self._averages = [torch.empty_like(p, requires_grad=False).copy_(tensor) for p, tensor in pairs]

    @property
    def names(self) -> set[str]:
        """All names of the averaged parameters."""
        return {name for names in self._names.values() for name in names}

    @contextmanager
    def in_place_of_weights(self) -> Iterator[None]:
        """Put the averages into the parameters in the block.

        No micro-batch may be in flight. Before the first update the parameters keep their weights.
        """
        before = [p.detach().clone() for p in self._parameters[: len(self._averages)]]
        self._write(self._averages)
        try:
            yield
        finally:
            self._write(before)

    @torch.no_grad()
    def _write(self, tensors: list[Tensor]) -> None:
        for parameter, tensor in zip(self._parameters, tensors, strict=False):
            parameter.copy_(tensor)
