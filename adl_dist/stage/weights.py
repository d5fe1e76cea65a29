"""The weight policies: the weights that a delayed backward sees.

A micro-batch that is in flight holds a graph, and the graph holds the parameter tensors of its forward. An
optimizer steps them in place, so autograd would refuse the backward ("modified by an inplace operation"),
or, with ``fused=True`` or through ``.data``, silently mix old activations with new weights. A whole-model
optimizer never shows this, because nothing is in flight when it steps. A policy decides what happens instead.

Whatever it decides, the module, its optimizer and its user hold the same Parameter objects for ever, and between any
two calls of a policy the newest weights are in them; see :mod:`adl_dist.stage.versions`.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from adl_dist.stage.mitigation import Mitigation
from adl_dist.stage.versions import Exchange

Ahead = Callable[[int], Mapping[nn.Parameter, Tensor]]  # from an update to the predicted weights of its forwards
NEWEST: AbstractContextManager[None] = nullcontext()


class _Policy:
    """The base class of weight policies, with optimizer and mitigation.

    Attributes:
        forwards_ahead: whether forwards of the newest version see predicted weights instead of the newest.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        mitigation: Mitigation | None = None,
        ahead: Ahead | None = None,
    ) -> None:
        """Keep versions for ``optimizer``; None if all that is trained is tied."""
        self._optimizer, self._mitigation, self._ahead = optimizer, mitigation, ahead
        self.forwards_ahead = ahead is not None
        self._module, self._trained = module, [p for p in module.parameters() if p.requires_grad]

    def gather(self) -> list[nn.Parameter]:
        """Return the parameters of the next step, with complete gradients."""
        if self._optimizer is None:
            return []
        return [p for group in self._optimizer.param_groups for p in group["params"] if p.grad is not None]

    def in_place(self) -> AbstractContextManager[None]:
        """Return the context of an optimizer's step."""
        return NEWEST  # no graph refers to the memory that the parameters have since the version began

    def _weights_ahead(self, version: int) -> list[Tensor]:
        """Return each parameter's predicted weights, or a copy of the present."""
        assert self._ahead is not None
        predicted = self._ahead(version)
        return [predicted[p] if p in predicted else p.detach().clone() for p in self._trained]


class Latest(_Policy):
    """The present weights over old activations: PACI, and the authors' code.

    The weights change under the graphs in flight on purpose. The gradient is then exact for the topmost
    weights of a stage only; below, it mixes old activations with new weights.

    Weights ahead are written into the memory of the parameters for each forward, and the present ones back afterwards,
    so that graphs refer to that memory. That keeps two copies of the weights.
    """

    _copies: tuple[list[Tensor], list[Tensor]] | None = None  # of the trained ones: ahead, and present

    def next_version(self, version: int, in_flight: Collection[int]) -> list[nn.Parameter]:
        """Drop copies; return the parameters to step in place, with gradients."""
        self.forget()
        return self.gather()

    def forget(self) -> None:
        """Drop the copies, because the weights may have changed."""
        self._copies = None

    def in_place(self) -> AbstractContextManager[None]:
        """Return a context that hides writes to the parameters from autograd."""
        # A private call: public ways to the same values are slower (identity saved_tensors_hooks around every forward)
        # or touch .data; a test on each torch version guards it.
        return _unsafe_preserve_version_counter(tuple(self._trained))

    def weights_of(self, version: int) -> AbstractContextManager[None]:
        """Return an empty context: backwards see the present weights."""
        return NEWEST

    @contextmanager
    def forward_weights(self, version: int) -> Iterator[None]:
        """Set the module to weights ahead of the newest ``version`` in the block."""
        if self._ahead is None:
            yield
            return
        if self._copies is None:
            self._copies = self._weights_ahead(version), [p.detach().clone() for p in self._trained]
        ahead, present = self._copies
        self._write(ahead)
        try:
            yield
        finally:
            self._write(present)

    def _write(self, weights: list[Tensor]) -> None:
        with torch.no_grad(), self.in_place():
            torch._foreach_copy_(tuple(self._trained), weights)


class Stash(_Policy):
    """The forward's weights (paper, Eq. 15) or older ones (PipeDream-2BW).

    A graph in flight keeps the tensors that it was built on. An update moves the parameters on to fresh memory if the
    present one is in use, so all micro-batches of one version share one copy, and the last stage, where nothing is in
    flight at an update, never copies. At most ceil(d / M) versions are alive in addition to the present one.

    With 2BW forwards to come compute with the version before the newest, so two versions are alive. Where forwards see
    weights ahead, graphs hold copies and no parameter, so that no update moves the parameters on, and at most
    ceil(d / M) + 1 copies are alive.
    """

    def __init__(self, *of_policy: Any, keeps_two: bool = False) -> None:
        super().__init__(*of_policy)
        self._keeps_two, self._exchange = keeps_two, Exchange(self._trained, [self._module])
        self._older: dict[int, list[nn.Parameter]] = {}  # the versions alive next to the newest

    def gather(self) -> list[nn.Parameter]:
        """Add older versions' gradients; return the parameters that have any."""
        for old in self._older.values():
            if self._mitigation is not None and self._mitigation.compensates:
                self._mitigation.compensate(self._exchange.parameters, old)
            sums, added = [], []
            for newest, older in zip(self._exchange.parameters, old, strict=True):
                if newest.grad is None:
                    newest.grad = older.grad
                elif older.grad is not None:
                    sums.append(newest.grad)
                    added.append(older.grad)
                older.grad = None
            if sums:
                torch._foreach_add_(sums, added)  # on a GPU a few kernels, not one for each parameter
        return super().gather()

    def next_version(self, version: int, in_flight: Collection[int]) -> list[nn.Parameter]:
        """Begin the version after ``version``; return parameters with gradients.

        ``in_flight`` are the versions of the graphs with a backward still to come.
        """
        parameters = self.gather()
        self.forget(keep=in_flight)
        if self._keeps_two or (version in in_flight and not self.forwards_ahead):
            self._older[version] = self._exchange.start_version()
        return parameters

    def forget(self, *, keep: Collection[int] = ()) -> None:
        """Drop all older versions except those to ``keep``."""
        self._older = {version: kept for version, kept in self._older.items() if version in keep}

    def weights_of(self, version: int) -> AbstractContextManager[None]:
        """Put ``version`` into the module in the block, with its gradients."""
        older = self._older.get(version)
        return NEWEST if older is None else self._exchange.swapped(older)

    def forward_weights(self, version: int) -> AbstractContextManager[None]:
        """Put a forward's weights in ``version`` into the module in the block."""
        if self.forwards_ahead and version not in self._older:
            self._older[version] = self._exchange.versions_of(self._weights_ahead(version))
        return self.weights_of(version)


def weight_policy(
    name: str,
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    mitigation: Mitigation | None = None,
    ahead: Ahead | None = None,
) -> Latest | Stash:
    """Build the policy ``stash``, ``latest``, ``recompute`` or ``2bw``.

    ``ahead`` predicts the weights that forwards see; None if they see the newest.
    """
    # With ``recompute`` no graph outlives an update, so there is nothing to stash; but a forward that is replayed is
    # replayed with the present weights, not with those ahead.
    if name == "latest" or (name == "recompute" and ahead is not None):
        return Latest(module, optimizer, mitigation, ahead)
    return Stash(module, optimizer, mitigation, ahead, keeps_two=name == "2bw")
