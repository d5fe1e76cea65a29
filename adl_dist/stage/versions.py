"""Versions of a stage's weights under permanent Parameter objects.

A micro-batch in flight holds a graph, and the graph holds the weights of its forward, which therefore must stay as they
are. The Parameter must also stay: an optimizer, a user's list, a hook or another module may hold it, and has to meet
the present weights there. So only the inside of the Python object is exchanged, torch's TensorImpl: memory,
gradient, and the place where autograd adds to it.

    exchange = Exchange(parameters)
    older = exchange.start_version()  # the Parameters now hold copies; graphs in flight refer to ``older``
    loss.backward()                   # of a graph built before: adds to the ``.grad`` of ``older``
    with exchange.swapped(older):     # the Parameters are as when that graph was built, gradients too
        ...
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from adl_dist.errors import ConfigError
from adl_dist.memory import has_plain_memory, span


class Exchange:
    """The exchange of parameter versions, also inside TorchScript modules.

    A ScriptModule refers to the inside of its parameters, not to the Python objects, so each exchange assigns them
    to it again.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], modules: Iterable[nn.Module] = ()) -> None:
        """Find the TorchScript modules with these ``parameters``."""
        self.parameters = parameters
        by_id = {id(p): p for p in parameters}
        self._scripted = [  # (module, name in it, parameter)
            (owner, name, by_id[id(p)])
            for module in modules
            for owner in module.modules()
            if isinstance(owner, torch.jit.ScriptModule)
            for name, p in owner.named_parameters(recurse=False, remove_duplicate=False)
            if id(p) in by_id
        ]

    def start_version(self) -> list[nn.Parameter]:
        """Put copies into the parameters, and return the older version.

        Graphs built before refer to the older version, and their backward adds gradients to it. Its gradients so far
        have moved to the parameters; hooks are called for both, and removed from both. To undo it: :meth:`swap`.
        """
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            copies = [torch.empty_like(p) for p in self.parameters]
            if copies:
                torch._foreach_copy_(copies, tuple(self.parameters))
            older = self.versions_of(copies)
            for p, other in zip(self.parameters, older, strict=True):
                other.grad, p.grad = p.grad, None
        self.swap(older)
        return older

    def versions_of(self, weights: Sequence[Tensor]) -> list[nn.Parameter]:
        """Return ``weights`` as a version of the parameters."""
        return [like_parameter(p, other) for p, other in zip(self.parameters, weights, strict=True)]

    def swap(self, others: Sequence[Tensor]) -> None:
        """Exchange memory, gradient and graph node with those of ``others``.

        The Python objects keep their identity, type and attributes.
        """
        # A private call. The public torch.utils.swap_tensors refuses a tensor that a graph refers to, which is what
        # this is for, and would exchange type and attributes as well. ``.data`` is no way: graphs would see the new
        # values.
        for one, other in zip(self.parameters, others, strict=True):
            torch._C._swap_tensor_impl(one, other)
        for owner, name, parameter in self._scripted:
            setattr(owner, name, parameter)

    @contextmanager
    def swapped(self, others: Sequence[Tensor]) -> Iterator[None]:
        """Exchange weights and gradients with ``others`` inside the block."""
        self.swap(others)
        try:
            yield
        finally:
            self.swap(others)


def check_versions(module: nn.Module, where: str) -> None:
    """Check that versions of trained parameters can be kept.

    Raises:
        ConfigError: If two tensors share memory; the text begins with ``where`` and names them.
    """
    named = [
        (n, t) for n, t in (*module.named_parameters(), *module.named_buffers()) if t.numel() and has_plain_memory(t)
    ]
    of_all = of_trained = (0, "")  # how far memory is taken so far, and by which of them
    for (start, end), name, trained in sorted((span(t), n, t.requires_grad) for n, t in named):
        taken, other = of_all if trained else of_trained
        if start < taken:
            raise ConfigError(
                f"{where}: '{other}' and '{name}' share memory, which a new version of one would not do; register one "
                "tensor under both names, or choose method=bp, gpipe or 1f1b, which need no older versions"
            )
        of_all = max(of_all, (end, name))
        of_trained = max(of_trained, (end, name)) if trained else of_trained


def like_parameter(parameter: nn.Parameter, copy: Tensor) -> nn.Parameter:
    """Return ``copy`` with the parameter's type and hooks."""
    other = torch.Tensor._make_subclass(type(parameter), copy, parameter.requires_grad)
    if parameter._backward_hooks is not None:
        other._backward_hooks = parameter._backward_hooks
    if parameter._post_accumulate_grad_hooks is not None:
        other._post_accumulate_grad_hooks = parameter._post_accumulate_grad_hooks
    return other
