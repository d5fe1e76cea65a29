"""How the outcome of a cut model may differ from that of the uncut one: not at all, or by rounding."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from adl_dist.stage import TrainSpec
from adl_dist.stage.calls import takes_gradient
from adl_dist.training.trial.outcome import EVALUATION, FIRST, SECOND, THIRD, Outcome

STATE = "after that"
# Differences are reported in this order: the first is nearest to its cause.
TIMES, KINDS = (FIRST, SECOND, THIRD, EVALUATION, STATE), ("output", "loss", "gradient", "state")
SHARE = 30  # of the rounding allowed: so much less of the largest gradient of the model counts as zero


class Difference(NamedTuple):
    """One value that is not the same."""

    when: str
    what: str
    name: str
    text: str

    def __str__(self) -> str:
        of = f" of '{self.name}'" if self.what == "gradient" else f" '{self.name}'" if self.what == "state" else ""
        what = "what a forward moves," if self.what == "state" else f"the {self.what}{of}"
        return f"{what}{of if self.what == 'state' else ''} {self.text} in {self.when}".replace(" in after", " after")


def first_of(unlike: Sequence[Difference]) -> Difference | None:
    """Return the difference that is nearest to its cause."""
    if not unlike:
        return None
    first = min(unlike, key=lambda one: (TIMES.index(one.when), KINDS.index(one.what)))
    same = [one for one in unlike if (one.when, one.what) == (first.when, first.what)]
    # Parameters are in the order in which they are used, mostly: the last is the nearest to the loss.
    return same[-1] if first.what == "gradient" else first


class Comparison:
    """What is expected, and how much may be rounding."""

    def __init__(self, spec: TrainSpec, expected: Outcome) -> None:
        self._expected = expected.values
        dtypes = [spec.precision.dtype, *([spec.precision.autocast] if spec.precision.autocast else [])]
        self._eps = max(torch.finfo(dtype).eps for dtype in dtypes)
        self._largest: dict[str, float] = {}
        for (when, what, _), value in self._expected.items():
            if what == "gradient" and value is not None and value.numel():
                largest = float(_dense(value).abs().max())
                if math.isfinite(largest):
                    self._largest[when] = max(self._largest.get(when, 0.0), largest)

    def first_difference(self, found: Outcome) -> Difference | None:
        """Return the first in the order of the causes; None: all is the same."""
        unlike = []
        for key in {**self._expected, **found.values}:
            text = self._unlike(key, self._expected.get(key), found.values.get(key))
            if text:
                unlike.append(Difference(*key, text))
        return first_of(unlike)

    def _unlike(self, key: tuple[str, str, str], expected: Tensor | None, found: Tensor | None) -> str:
        if expected is None or found is None:
            if (expected is None) is (found is None):
                return ""
            return "is missing, but was expected" if found is None else "is there, but none was expected"
        if expected.shape != found.shape or expected.dtype != found.dtype:
            return f"is {_kind(found)}, expected {_kind(expected)}"
        expected, found = _dense(expected), _dense(found)
        if torch.equal(expected, found) or not expected.numel():
            return ""
        difference, scale = largest_difference(expected, found), _scale(expected, found)
        eps = max(self._eps, torch.finfo(expected.dtype).eps if takes_gradient(expected) else 0.0)
        allowed = math.sqrt(eps) * scale if takes_gradient(expected) else 0.0
        if key[1] == "gradient":
            allowed += math.sqrt(eps) / SHARE * self._largest.get(key[0], 0.0)
        if difference <= allowed:
            return ""
        place = int((_wide(expected) - _wide(found)).abs().nan_to_num(math.inf).argmax())
        pair = [f"{x.flatten()[place].item():.6g}" for x in (expected, found)]
        share = f"{difference / scale:.2g} of its largest element" if scale and math.isfinite(difference) else "NaN"
        return f"differs by {share} (expected {pair[0]}, found {pair[1]})"


def _dense(tensor: Tensor) -> Tensor:
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def largest_difference(a: Tensor, b: Tensor) -> float:
    """Return the largest difference of two tensors of one shape; equal infinities and NaN do not differ."""
    if not a.numel() or torch.equal(a, b):
        return 0.0
    same = (a == b) | ((a != a) & (b != b))
    return float((_wide(a) - _wide(b)).abs().masked_fill(same, 0.0).nan_to_num(math.inf).max())


def _scale(a: Tensor, b: Tensor) -> float:
    sizes = torch.stack([_wide(a).abs(), _wide(b).abs()])
    return float(sizes.masked_fill(~sizes.isfinite(), 0.0).max())


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


class Compared(Outcome):
    """An outcome that is compared with the ``found`` one as it comes, so that never both are whole in memory.

    Attributes:
        unlike: the differences so far.
    """

    def __init__(self, spec: TrainSpec, found: Outcome) -> None:
        super().__init__()
        self._spec, self._found = spec, found
        self.unlike: list[Difference] = []

    def add(self, when: str, what: str, values: Mapping[str, Tensor | None]) -> None:
        """Compare ``values``, which are expected, and forget them and those that were found."""
        expected, found = Outcome(), Outcome()
        expected.add(when, what, values)
        keys = [key for key in self._found.values if key[:2] == (when, what)]
        found.values = {key: self._found.values.pop(key) for key in keys}
        difference = Comparison(self._spec, expected).first_difference(found)
        self.unlike += [difference] if difference is not None else []
