"""The weight policies: the weights that a delayed backward sees.

A micro-batch that is in flight holds a graph, and the graph holds the parameter tensors of its forward. An
optimizer steps them in place, so autograd would refuse the backward ("modified by an inplace operation"),
or, with ``fused=True`` or through ``.data``, silently mix old activations with new weights. A whole-model
optimizer never shows this, because nothing is in flight when it steps. A policy decides what happens instead.
"""

from collections.abc import Collection

import torch
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from adl_dist.errors import ConfigError


class _Policy:
    """What all policies share: the optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def gather(self) -> list[nn.Parameter]:
        """Return the parameters of the next step, each with the whole gradient of the group if it has one."""
        return [p for group in self._optimizer.param_groups for p in group["params"] if p.grad is not None]

    def forget(self) -> None:
        """Drop what the policy keeps for micro-batches in flight: there are none now."""

    def _finish(self, *, skip: bool) -> None:
        if not skip:
            self._optimizer.step()
        self._optimizer.zero_grad()


class Latest(_Policy):
    """The present weights over old activations: PACI, and what the authors' code did.

    The weights change under the graphs in flight on purpose. The gradient is then exact for the topmost
    weights of a stage only, and a hybrid below.
    """

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer)
        self._parameters = tuple(module.parameters())

    def step(self, version: int, *, in_flight: Collection[int], skip: bool = False) -> None:
        """Step in place, without telling autograd; see :meth:`Stash.step`."""
        # A private call: public ways to the same values are slower (identity saved_tensors_hooks around every forward)
        # or touch .data; a test on each torch version guards it.
        with _unsafe_preserve_version_counter(self._parameters):
            self._finish(skip=skip)


class Stash(_Policy):
    """The weights of the forward (paper, Eq. 15): a graph in flight keeps the tensors it was built on.

    An update moves the module and its optimizer on to fresh tensors if the present ones are in use, so all
    micro-batches of one version share one copy, and the last stage, where nothing is in flight at an update,
    never copies. At most ceil(d / M) versions are alive in addition to the present one.
    """

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer)
        self._newest = [p for p in module.parameters() if p.requires_grad]
        place = {id(p): i for i, p in enumerate(self._newest)}
        # (owner, attribute, position): a parameter used twice within the stage has two slots.
        self._slots = [
            (owner, name, place[id(p)])
            for owner in module.modules()
            for name, p in owner.named_parameters(recurse=False, remove_duplicate=False)
            if id(p) in place
        ]
        self._older: dict[int, list[nn.Parameter]] = {}  # the versions alive next to the newest

    def gather(self) -> list[nn.Parameter]:
        """Move the gradients of older versions to the newest, and return the parameters that have some."""
        for old in self._older.values():
            sums, added = [], []
            for newest, older in zip(self._newest, old, strict=True):
                if newest.grad is None:
                    newest.grad = older.grad
                elif older.grad is not None:
                    sums.append(newest.grad)
                    added.append(older.grad)
                older.grad = None
            if sums:
                torch._foreach_add_(sums, added)  # on a GPU a few kernels, not one for each parameter
        return super().gather()

    def step(self, version: int, *, in_flight: Collection[int], skip: bool = False) -> None:
        """Gather the gradients of all versions, step the newest, and so turn ``version`` into the next.

        ``in_flight`` are the versions that graphs not yet back-propagated were built with. With ``skip`` the gradients
        are dropped, and the next version is a copy of this one.
        """
        self.gather()
        self.forget(keep=in_flight)
        if version in in_flight:
            self._older[version] = self._newest
            self._move_optimizer()
            self._install(self._newest)
        self._finish(skip=skip)

    def forget(self, *, keep: Collection[int] = ()) -> None:
        """Drop all older versions except those to ``keep``."""
        self._older = {version: kept for version, kept in self._older.items() if version in keep}

    def _move_optimizer(self) -> None:
        """Put copies in the place of the newest weights, for the optimizer to step."""
        copies = [torch.empty_like(old) for old in self._newest]
        if copies:  # the stage may be frozen
            with torch.no_grad():
                torch._foreach_copy_(copies, tuple(self._newest))
        successor = {old: nn.Parameter(copy) for old, copy in zip(self._newest, copies, strict=True)}
        for old, new in successor.items():
            new.grad, old.grad = old.grad, None
        for group in self._optimizer.param_groups:
            group["params"] = [successor.get(p, p) for p in group["params"]]
        state = self._optimizer.state
        for old, new in successor.items():
            if old in state:
                state[new] = state.pop(old)
        self._newest = list(successor.values())

    def _install(self, weights: list[nn.Parameter]) -> None:
        """Have the module compute with ``weights``."""
        for owner, name, position in self._slots:
            setattr(owner, name, weights[position])  # not _parameters[name]: nn.RNN keeps aliases up to date here


class TwoVersions(Stash):
    """Computing with the weights that the schedule names, one update old: PipeDream-2BW.

    Two versions are alive, the newest and the one before it, whatever the number of micro-batches in flight.
    """

    def use(self, version: int, *, newest: int) -> None:
        """Have the module compute with ``version``, which is the newest or the one before."""
        self._install(self._newest if version == newest else self._older[version])

    def step(self, version: int, *, in_flight: Collection[int], skip: bool = False) -> None:
        """Gather the gradients, then make the version after ``version``; see :meth:`Stash.step`."""
        self.gather()
        self.forget(keep=in_flight)
        self._older[version] = self._newest
        self._move_optimizer()
        self._finish(skip=skip)


def weight_policy(name: str, module: nn.Module, optimizer: torch.optim.Optimizer) -> Latest | Stash:
    """Build the policy called ``name``: ``stash``, ``latest``, ``recompute`` or ``2bw``.

    Raises:
        ConfigError: the optimizer is LBFGS, which calls the loss itself.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError("optimizer: LBFGS evaluates the loss itself, which no pipeline can do; choose another")
    # With ``recompute`` no graph outlives an update, so there is nothing to stash.
    kinds: dict[str, type[Latest | Stash]] = {"latest": Latest, "2bw": TwoVersions}
    return kinds.get(name, Stash)(module, optimizer)
