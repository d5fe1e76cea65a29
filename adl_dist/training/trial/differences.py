"""Differences between the stages' results and those of the uncut model."""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from adl_dist.batch import is_equal
from adl_dist.stage import TrainSpec
from adl_dist.stage.calls import flatten_output, takes_gradient
from adl_dist.training.trial.stage_run import STATE, Results

SHARE = 30  # of the rounding allowed: so much less of the largest gradient of the model counts as zero


class Difference(NamedTuple):
    """A value that differs between the stages and the uncut model."""

    when: str
    what: str
    name: str
    text: str

    def __str__(self) -> str:
        of = f" of '{self.name}'" if self.what == "gradient" else f" '{self.name}'" if self.what == "buffer" else ""
        where = self.when if self.when == STATE else f"in {self.when}"
        return f"the {self.what}{of} {self.text} {where}"


def first_difference(spec: TrainSpec, expected: Iterable[Results], found: Iterable[Results]) -> Difference | None:
    """Return the first difference between the stages and the uncut model.

    Outputs and losses must be equal to the bit on a CPU. Gradients may differ by rounding, because they are summed in a
    different order where stages use one value or one weight.
    """
    dtypes = [spec.precision.dtype, *([spec.precision.autocast] if spec.precision.autocast else [])]
    eps = max(torch.finfo(dtype).eps for dtype in dtypes)
    for (_, _, others), (when, what, values) in zip(found, expected, strict=True):
        largest = max((_largest(value) for value in values.values() if value is not None), default=0.0)
        texts = {
            name: _describe(what, values.get(name), others.get(name), eps, largest) for name in {**values, **others}
        }
        if differing := [name for name, text in texts.items() if text]:
            # Parameters are in the order in which they are used, mostly: the last is the nearest to the loss.
            name = differing[-1 if what == "gradient" else 0]
            return Difference(when, what, name, texts[name])
    return None


def _describe(what: str, expected: Tensor | None, found: Tensor | None, eps: float, largest: float) -> str:
    """Return how two values of one name differ, or empty text."""
    if expected is None or found is None:
        if expected is found:
            return ""
        return "is missing, but was expected" if found is None else "is there, but none was expected"
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return f"is {_kind(found)}, expected {_kind(expected)}"
    if is_equal(expected, found):
        return ""
    wide = [_wide(tensor) for tensor in (expected, found)]
    gaps = (wide[0] - wide[1]).abs()
    same = (wide[0] == wide[1]) | (wide[0].isnan() & wide[1].isnan())  # infinities of one sign, too
    gaps = gaps.masked_fill(same, 0.0).nan_to_num(math.inf)
    difference, scale = float(gaps.max()), max(_largest(expected), _largest(found))
    is_exact = not takes_gradient(expected) or (what != "gradient" and expected.device.type == "cpu")
    rounding = 0.0 if is_exact else math.sqrt(max(eps, torch.finfo(expected.dtype).eps))
    if difference <= rounding * (scale + (largest / SHARE if what == "gradient" else 0.0)):
        return ""
    place = int(gaps.argmax())
    pair = [f"{tensor.flatten()[place].item():.6g}" for tensor in wide]
    share = f"{difference / scale:.2g} of its largest element" if scale and math.isfinite(difference) else "NaN"
    return f"differs by {share} (expected {pair[0]}, found {pair[1]})"


def _wide(tensor: Tensor) -> Tensor:
    dense = tensor if tensor.layout is torch.strided else tensor.to_dense()
    return dense.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _largest(tensor: Tensor) -> float:
    """Return the magnitude of the largest finite element."""
    sizes = _wide(tensor).abs()
    return float(sizes.masked_fill(~sizes.isfinite(), 0.0).max()) if sizes.numel() else 0.0


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


Calls = dict[tuple[str, int], list[Tensor]]  # by module and how often it was called before: the tensors it returned


@contextmanager
def record_calls(models: Sequence[nn.Module]) -> Iterator[Calls]:
    """Yield a dictionary that collects the results of all calls of modules.

    The ``models`` are copies, or parts of copies, of one model.
    """
    calls: Calls = {}
    names = {id(module): name for model in models for name, module in model.named_modules() if name}
    counts = dict.fromkeys(names, 0)

    def hook(module: nn.Module, args: Any, out: Any) -> None:
        if id(module) not in names:
            return
        with torch._C.DisableTorchFunctionSubclass():
            leaves = flatten_output(out)
            if leaves and not any(leaf.is_meta for leaf in leaves):
                key = names[id(module)], counts[id(module)]
                calls[key] = [leaf.detach().clone().as_subclass(Tensor) for leaf in leaves]
        counts[id(module)] += 1

    handle = register_module_forward_hook(hook)
    try:
        yield calls
    finally:
        handle.remove()


def describe_first_difference(expected: Calls, found: Calls) -> str:
    """Return a clause that names the first module with a different result."""
    before = ""
    for key in (key for key in expected if key in found):
        pairs = zip(expected[key], found[key], strict=False)
        if not all(a.shape == b.shape and is_equal(a, b) for a, b in pairs):
            return f"; the first module whose result differs is '{key[0]}'" + f", right after '{before}'" * bool(before)
        before = key[0]
    return "; the results of its modules are equal, so it is a computation between them" if before else ""
