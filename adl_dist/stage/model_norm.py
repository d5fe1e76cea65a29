"""The gradient norm of the whole model, equal to that of one process.

``clip_grad_norm_`` takes the norm of the vector of all tensors' norms, in the order of ``model.parameters()``. Each
stage puts the norms of its own tensors into that vector, which travels from the last stage to stage 0, and stage 0
sends the result back. So the result is torch's to the bit, which a sum of the stages' squared norms would not be.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from adl_dist.batch import Tensors
from adl_dist.stage.stats import norms_of
from adl_dist.stage.tied import TiedWeights

MISSING = -1.0  # the norm of a tensor without a gradient, or of a different stage


class ModelNorm:
    """One stage's part in the norm of the whole model's gradient.

    Attributes:
        norms: [1, number of parameters of the model], the norms for the complete group, MISSING where unknown here.
    """

    def __init__(
        self,
        names: Sequence[str],
        named: Iterable[tuple[str, nn.Parameter]],
        ties: Iterable[TiedWeights],
        missing: Tensor,
    ) -> None:
        """Prepare the norms of one stage.

        Args:
            names: the first names of the uncut model's parameters, in its order.
            named: the stage's own parameters, by all names.
            ties: its copies of tied weights; the first stage of a tie adds the norm of their summed gradient.
            missing: ``MISSING``, in the dtype and on the device of norms.
        """
        self._ties, self._missing = [tie for tie in ties if tie.is_first], [missing] * len(names)
        place_of = {name: place for place, name in enumerate(names)}
        of_ties = (pair for tie in self._ties for pair in tie.named_parameters())
        self._places = {id(p): place_of[name] for name, p in (*named, *of_ties) if name in place_of}
        self.begin((), ())

    def begin(self, parameters: Sequence[nn.Parameter], norms: Iterable[Tensor]) -> None:
        """Begin a group, with the ``norms`` of the gradients of ``parameters``."""
        self.norms = self._vector(parameters, norms)
        self._whole: Tensor | None = None

    def add(self, part: Tensors) -> None:
        """Add the norms of other tensors, such as those from downstream."""
        self.norms = torch.maximum(self.norms, part[0])  # of which one is MISSING; NaN stays

    def part(self) -> Tensors:
        """Return the norms of this stage and those downstream."""
        for tie in self._ties:
            self.add((self._vector([p for _, p in tie.named_parameters()], norms_of(tie.total())),))
        return (self.norms,)

    def whole(self) -> Tensor:
        """Return the norm of the whole gradient, which stage 0 computes."""
        if self._whole is None:
            (norms,) = self.part()[0]
            # Places matter to the rounding. A GPU would have to be waited for, so there zeros stay in between.
            norms = norms.clamp(min=0.0) if norms.is_cuda else norms[norms != MISSING]
            self._whole = torch.linalg.vector_norm(norms)
        return self._whole

    def total(self) -> Tensors:
        """Return the norm of the whole gradient, [1], for other stages."""
        return (self.whole().unsqueeze(0),)

    def take(self, total: Tensors) -> None:
        """Store the norm of the whole gradient from stage 0."""
        self._whole = total[0][0]

    def _vector(self, parameters: Sequence[nn.Parameter], norms: Iterable[Tensor]) -> Tensor:
        vector = list(self._missing)
        for parameter, norm in zip(parameters, norms, strict=True):
            vector[self._places[id(parameter)]] = norm
        return torch.stack(vector).unsqueeze(0)
