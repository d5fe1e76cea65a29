"""Deferred weight gradients of linear layers and convolutions.

Autograd computes the gradients of a layer's input and of its weights in one step. Here the layer's backward returns
only the gradient of the input. It keeps the input and the gradient of the output, from which the gradients of the
weights follow. The weights themselves are not needed for this, so it may be done at any time before the gradients are
used.

    with gradients.deferrable([loss.grad_fn]) as pending:
        loss.backward()
    gradients.compute(pending)  # adds to the ``.grad`` of the parameters, as the backward would have done

The bias of such a layer goes with its weight: oneDNN computes both in one kernel. All else (norms, embeddings, other
layers, parameters with hooks or used by several layers) is left to autograd. As autograd does,
:meth:`DeferredGradients.compute` refuses tensors that were written to in the meantime.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import Node

from adl_dist.batch import Tensors, version_of
from adl_dist.errors import ConfigError
from adl_dist.stage.calls import Call

Wanted = tuple[bool, bool, bool]  # of input, weight and bias
PLAIN = nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d
CONVOLVE: dict[int, Callable[..., Tensor]] = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}  # by dimensions of the weight


class DeferredGrad(NamedTuple):
    """A call of a layer with gradients of weights still to be computed."""

    layer: "_Layer"
    x: Tensor
    grad: Tensor  # of the output
    with_bias: bool
    versions: tuple[int, int]  # of ``x`` and ``grad``: how often they had been written to


class DeferredGradients:
    """The layers of a module with deferrable gradients of their weights.

    Attributes:
        names: the names of the parameters of these layers.
    """

    def __init__(self, module: nn.Module, where: str = "the model") -> None:
        """Find the layers of ``module``; errors name ``where``."""
        self.where = where
        users = Counter(id(p) for owner in module.modules() for p in owner._parameters.values() if p is not None)
        found = {name: layer for name, layer in module.named_modules() if _is_plain(layer, users)}
        self.names = [f"{name}.{own}".lstrip(".") for name, m in found.items() for own, _ in m.named_parameters()]
        self._forwards = [(vars(layer), _Layer(name, layer, self)) for name, layer in found.items()]
        self._pending: list[DeferredGrad] | None = None  # of a backward; None: it computes all at once
        self._task: int | None = None  # torch's number of that backward

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Let the layers build graphs with deferrable gradients."""
        # Not once and for all: the module is the user's, who may copy it, save it or call it.
        for attributes, layer in self._forwards:
            attributes["forward"] = layer
        try:
            yield
        finally:
            for attributes, _ in self._forwards:
                del attributes["forward"]

    def while_ready(self, call: Call) -> Call:
        """Return a function that makes ``call`` inside :meth:`ready`."""

        def ready_call(acts: Tensors, buffers: dict[str, Tensor] | None, tape: Any) -> Any:
            with self.ready():
                return call(acts, buffers, tape)

        return ready_call

    @contextmanager
    def deferrable(self, roots: Iterable[Node]) -> Iterator[list[DeferredGrad]]:
        """Yield a list for gradients that a backward from ``roots`` defers.

        The backward runs inside the context. Further backwards that the user's code calls within it are not split,
        because their results are used at once.
        """
        pending: list[DeferredGrad] = []
        self._pending, self._task = pending, None
        handles = [root.register_prehook(self._begin) for root in roots]
        try:
            with self.ready():
                yield pending
        finally:
            self._pending = None
            for handle in handles:
                handle.remove()

    @property
    def pending(self) -> list[DeferredGrad] | None:
        """Gradients deferred by the present backward; None if it is not split."""
        if self._pending is None or torch._C._current_graph_task_id() != self._task:
            return None
        return self._pending

    def _begin(self, grads: Sequence[Tensor]) -> None:
        if self._task is None:
            self._task = torch._C._current_graph_task_id()

    @torch.no_grad()
    def compute(self, pending: list[DeferredGrad]) -> None:
        """Compute the ``pending`` gradients and add them to the parameters.

        ``pending`` is empty afterwards.

        Raises:
            ConfigError: If an input or an output gradient has been written to.
        """
        calls_left = Counter(one.layer for one in pending)
        sums: dict[nn.Parameter, Tensor] = {}
        if len(calls_left) < len(pending):
            pending.reverse()  # calls of one layer are added up in the order in which autograd does it
        while pending:  # the last one first: it may be in the cache; and each is freed as soon as it is used
            layer, x, grad, with_bias, versions = pending.pop()
            if versions != (version_of(x), version_of(grad)):
                written, kind = "input" if versions[0] != version_of(x) else "gradient of the output", layer.kind
                raise ConfigError(
                    f"{self.where}: the {written} of layer '{layer.name or kind}' ({kind}) was written to in place "
                    "between the two parts of its backward, so the gradients of its weights would be wrong; set "
                    "method.split_backward=false, or have the forward write to a copy"
                )
            calls_left[layer] -= 1
            for parameter, gradient in layer.of_parameters(x, grad, with_bias):
                # As autograd does it: first the sum over all calls, then the sum over micro-batches.
                total = sums.pop(parameter) + gradient if parameter in sums else gradient
                if calls_left[layer]:
                    sums[parameter] = total
                elif parameter.grad is not None:
                    parameter.grad.add_(total)
                else:
                    is_alike = total.stride() == parameter.stride()
                    parameter.grad = total if is_alike else torch.empty_like(parameter).copy_(total)


def _is_plain(layer: nn.Module, users: Counter[int]) -> bool:
    """Return whether ``layer`` is unchanged torch code and shares no weight."""
    kind = next((kind for kind in PLAIN if isinstance(layer, kind)), None)
    if kind is None or "forward" in vars(layer) or type(layer).forward is not cast(Any, kind).forward:
        return False
    if isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        if "_conv_forward" in vars(layer) or type(layer)._conv_forward is not cast(Any, kind)._conv_forward:
            return False
        if layer.padding_mode != "zeros" or isinstance(layer.padding, str):
            return False
    weight, bias = (layer._parameters.get(name) for name in ("weight", "bias"))
    if weight is None or (bias is None and getattr(layer, "bias", None) is not None):
        return False  # made of others, as by a parametrization
    own = [weight] if bias is None else [weight, bias]
    return all(type(p) is nn.Parameter and p.is_floating_point() and users[id(p)] == 1 for p in own)


class _Layer:
    """A replacement of a layer's forward, with deferrable gradients."""

    def __init__(self, name: str, module: Any, owner: DeferredGradients) -> None:
        self.name, self.kind, self.module, self.owner = name, type(module).__name__, module, owner
        self._weight: nn.Parameter = module.weight
        self._bias: nn.Parameter | None = module.bias
        self._forward, self._convolve = type(module).forward, CONVOLVE.get(module.weight.ndim)

    def __call__(self, input: Tensor) -> Tensor:
        weight, bias = self.module.weight, self.module.bias
        if not self._applies(input, weight, bias):
            return cast(Tensor, self._forward(self.module, input))
        narrow = torch.get_autocast_dtype(input.device.type) if torch.is_autocast_enabled(input.device.type) else None
        x = input if narrow is None else input.to(narrow)
        return cast(Tensor, _Split.apply(x, weight, bias, self, narrow))

    def _applies(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
        """Return whether this is a plain call of a batch with trained parameters."""
        return (
            torch.is_grad_enabled()
            and weight.requires_grad
            and weight is self._weight
            and bias is self._bias
            and type(x) is Tensor
            and x.is_floating_point()
            and (x.ndim >= 2 if self._convolve is None else x.ndim == weight.ndim)
            and not torch._C._are_functorch_transforms_active()
        )

    def of_parameters(self, x: Tensor, grad: Tensor, with_bias: bool) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield (parameter, gradient) for one call; ``grad`` is of its output."""
        weight: Tensor = self._weight
        if weight.dtype != x.dtype:  # under autocast; of the weight only shape and format count
            weight = torch.empty_like(weight, dtype=x.dtype)
        _, of_weight, of_bias = self.gradients(grad, x, weight, (False, True, with_bias))
        for parameter, gradient in ((self._weight, of_weight), (self._bias, of_bias)):
            if parameter is not None and gradient is not None:
                yield parameter, gradient.to(parameter.dtype)

    def has_hooks(self) -> bool:
        """Return whether a hook reads the gradients of the parameters."""
        own = [self._weight] if self._bias is None else [self._weight, self._bias]
        return any(p._backward_hooks or p._post_accumulate_grad_hooks for p in own)

    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return x [..., in] W' + b of a linear layer, or a convolution of ``x``."""
        if self._convolve is None:
            return F.linear(x, weight, bias)
        m = self.module
        return self._convolve(x, weight, bias, m.stride, m.padding, m.dilation, m.groups)

    def gradients(self, grad: Tensor, x: Tensor, weight: Tensor, wanted: Wanted) -> tuple[Tensor | None, ...]:
        """Return the gradients of (input, weight, bias), None unless ``wanted``.

        ``grad`` is the gradient of the output for the input ``x``.
        """
        if self._convolve is None:
            rows = grad.flatten(0, -2)
            of_weight = rows.t().mm(x.flatten(0, -2)) if wanted[1] else None
            return grad.matmul(weight) if wanted[0] else None, of_weight, rows.sum(0) if wanted[2] else None
        m, bias_shape = self.module, [weight.shape[0]] if wanted[2] else None
        how = m.stride, m.padding, m.dilation, False, [0] * len(m.stride), m.groups
        found: tuple[Tensor | None, ...] = torch.ops.aten.convolution_backward.default(
            grad, x, weight, bias_shape, *how, wanted
        )
        return found


class _Split(torch.autograd.Function):
    """A layer with a backward that can defer gradients of parameters."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: _Layer, narrow: torch.dtype | None
    ) -> Tensor:
        ctx.layer, ctx.dtype = layer, weight.dtype
        ctx.set_materialize_grads(False)
        if narrow is not None:
            weight, bias = weight.to(narrow), None if bias is None else bias.to(narrow)
        ctx.save_for_backward(x, weight)
        return layer.output(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 5
        x, weight = ctx.saved_tensors
        layer, wanted = ctx.layer, ctx.needs_input_grad[:3]
        pending = layer.owner.pending
        if pending is None or layer.has_hooks():
            of_x, *of_own = layer.gradients(grad, x, weight, wanted)
            return of_x, *(None if g is None else g.to(ctx.dtype) for g in of_own), None, None
        pending.append(DeferredGrad(layer, x, grad, wanted[2], (version_of(x), version_of(grad))))
        of_x = layer.gradients(grad, x, weight, (True, False, False))[0] if wanted[0] else None
        return of_x, None, None, None, None
