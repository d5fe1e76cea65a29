"""Which weights a delayed backward sees: the weight policies.

A micro-batch that is in flight holds a graph, and the graph holds the parameter tensors of its forward. An
optimizer steps them in place, so autograd would refuse the backward ("modified by an inplace operation"),
or, with ``fused=True`` or through ``.data``, silently mix old activations with new weights. A whole-model
optimizer never shows this, because nothing is in flight when it steps. A policy decides what happens instead.
"""

from collections.abc import Collection
from typing import Protocol

import torch
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from adl_dist.errors import ConfigError


class WeightPolicy(Protocol):
    """Steps the optimizer of a stage while graphs are in flight."""

    def step(self, version: int, *, in_flight: Collection[int]) -> None:
        """Apply the accumulated gradients and turn weight version ``version`` into the next.

        Args:
            version: updates applied to the stage so far.
            in_flight: the versions that micro-batches not yet back-propagated were forwarded with.
        """
        ...


class Latest:
    """The present weights over old activations: PACI, and what the authors' code did.

    The weights change under the graphs in flight on purpose. The gradient is then exact for the topmost
    weights of a stage only, and a hybrid below.
    """

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._parameters = tuple(module.parameters())
        self._optimizer = optimizer

    def step(self, version: int, *, in_flight: Collection[int]) -> None:
        """Step in place, without telling autograd; see :class:`WeightPolicy`."""
        # The one private call of the project. Public ways to the same values are slower (identity
        # saved_tensors_hooks around every forward) or touch .data; a test on each torch version guards it.
        with _unsafe_preserve_version_counter(self._parameters):
            self._optimizer.step()
        self._optimizer.zero_grad()


class Stash:
    """The weights of the forward (paper, Eq. 15): a graph in flight keeps the tensors it was built on.

    An update moves the module and its optimizer on to fresh tensors if the present ones are in use, so all
    micro-batches of one version share one copy, and the last stage, where nothing is in flight at an update,
    never copies. At most ceil(d / M) versions are alive beside the present one.
    """

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._current = [p for p in module.parameters() if p.requires_grad]
        place = {id(p): i for i, p in enumerate(self._current)}
        # (owner, attribute, position): a parameter used twice within the stage has two slots.
        self._slots = [
            (owner, name, place[id(p)])
            for owner in module.modules()
            for name, p in owner.named_parameters(recurse=False, remove_duplicate=False)
            if id(p) in place
        ]
        self._retired: dict[int, list[nn.Parameter]] = {}

    def step(self, version: int, *, in_flight: Collection[int]) -> None:
        """Gather the gradients of all versions, then step the newest; see :class:`WeightPolicy`."""
        for old in self._retired.values():
            for mine, theirs in zip(self._current, old, strict=True):
                mine.grad, theirs.grad = _sum(mine.grad, theirs.grad), None
        self._retired = {v: kept for v, kept in self._retired.items() if v in in_flight}
        if version in in_flight:
            self._retired[version] = self._current
            self._move_to([nn.Parameter(p.detach().clone()) for p in self._current])
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _move_to(self, fresh: list[nn.Parameter]) -> None:
        successor = dict(zip(self._current, fresh, strict=True))
        for old, new in successor.items():
            new.grad, old.grad = old.grad, None
        for owner, name, position in self._slots:
            setattr(owner, name, fresh[position])  # not _parameters[name]: nn.RNN keeps aliases up to date here
        for group in self._optimizer.param_groups:
            group["params"] = [successor.get(p, p) for p in group["params"]]
        state = self._optimizer.state
        for old, new in successor.items():
            if old in state:
                state[new] = state.pop(old)
        self._current = fresh


POLICIES: dict[str, type[Latest] | type[Stash]] = {"stash": Stash, "latest": Latest}


def weight_policy(name: str, module: nn.Module, optimizer: torch.optim.Optimizer) -> WeightPolicy:
    """Build the policy called ``name``.

    Raises:
        ConfigError: the optimizer keeps parameters of its own beside ``param_groups`` (LBFGS).
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError("optimizer: LBFGS evaluates the loss itself, which no pipeline can do; choose another")
    return POLICIES[name](module, optimizer)


def _sum(a: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return a.add_(b)
