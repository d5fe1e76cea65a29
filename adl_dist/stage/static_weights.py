"""Weight versions and gradients in memory that never moves, as CUDA graphs need it.

A graph computes with addresses. So the V versions of a stage's weights lie in V slots, and each of them has gradients
of its own, which a backward adds to, replayed or not; where there are none yet they are zeros, and no parameter has
them as its ``.grad``, as everywhere else. Values are those of :class:`~adl_dist.stage.weights.Stash`: the gradients of
one version are added up by themselves, and those of older versions are then added to the newest's.
"""

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from adl_dist.stage.mitigation import Mitigation
from adl_dist.stage.weights import NEWEST, Stash


class StaticWeights(Stash):
    """The weights of the forward in one of V slots; an update reads one slot and writes the next.

    The parameters themselves always are the newest version, with the memory of its slot. With one slot updates are in
    place: that of a stage where nothing is in flight then, or of ``method.weights=latest``.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        mitigation: Mitigation | None = None,
        *,
        num_slots: int,
        hidden: bool = False,
    ) -> None:
        """Take over ``module``; ``hidden``: autograd is not told when weights are written, as its graphs want it.

        Until :meth:`prepare` no parameter gets a gradient that stays where it is.
        """
        super().__init__(module, optimizer, mitigation)
        self._is_hidden = hidden
        own = self._exchange.parameters
        others = (self._exchange.versions_of([p.detach().clone() for p in own]) for _ in range(1, num_slots))
        # Of each slot the tensors that have its memory now; None: the parameters themselves have.
        self._slots: list[Sequence[Tensor] | None] = [None, *others]
        self._present = 0
        self._places: dict[int, int] = {}  # the slots of older versions
        self._gradients: list[list[Tensor | None]] = [[None] * len(own) for _ in self._slots]
        self._used: set[int] = set()  # slots whose gradients are in use: they are the ``.grad`` of its tensors

    @property
    def parameters(self) -> Sequence[Tensor]:
        """What is trained."""
        return self._exchange.parameters

    def prepare(self, gets_gradient: Sequence[bool]) -> None:
        """Make room for the gradients of those parameters that get one."""
        pairs = list(zip(self.parameters, gets_gradient, strict=True))
        for slot in range(len(self._slots)):
            self._gradients[slot] = [torch.zeros_like(p, requires_grad=False) if gets else None for p, gets in pairs]

    def slot_of(self, version: int) -> int:
        """Return the slot of ``version``, which is the newest or one that is still kept."""
        return self._places.get(version, self._present)

    def in_other_slots(self) -> tuple[Tensor, ...]:
        """Return the weights in all slots but that of the newest."""
        return tuple(tensor for others in self._slots if others is not None for tensor in others)

    def weights_in(self, slot: int) -> AbstractContextManager[None]:
        """Have the module compute with the memory of ``slot`` inside, and its gradients end there."""
        others = self._slots[slot]
        return NEWEST if others is None else self._exchange.swapped(others)

    def collect_in(self, slot: int) -> None:
        """Have a backward that comes now add the gradients of ``slot`` to those that are in their places."""
        if slot in self._used:
            return
        self._used.add(slot)
        for tensor, gradient in zip(self._tensors_in(slot), self._gradients[slot], strict=True):
            tensor.grad = gradient

    def with_strange_gradient(self, version: int) -> int | None:
        """Return the place of a parameter that has got a gradient but has no place for one; None: there is none."""
        slot = self.slot_of(version)
        pairs = zip(self._tensors_in(slot), self._gradients[slot], strict=True)
        return next((n for n, (tensor, own) in enumerate(pairs) if own is None and tensor.grad is not None), None)

    def gather(self) -> list[nn.Parameter]:
        """Move the gradients of older versions to the newest, and return the parameters that have some."""
        for version, old in self._older.items():
            slot = self._places[version]
            if slot not in self._used:
                continue
            if self._mitigation is not None and self._mitigation.compensates:
                self._mitigation.compensate(self._exchange.parameters, old)
            is_first = self._present not in self._used
            self.collect_in(self._present)
            sums, added = self._in_use(self._present), self._in_use(slot)
            torch._foreach_copy_(sums, added) if is_first else torch._foreach_add_(sums, added)
            self._clear(slot)
        return super(Stash, self).gather()

    def step(self, version: int, *, in_flight: Collection[int], skip: bool = False) -> None:
        """Gather the gradients of all versions, and write the next one to the next slot; see :meth:`Stash.step`."""
        self.gather()
        if len(self._slots) > 1:
            self._older[version], self._places[version] = self._moved_to((self._present + 1) % len(self._slots))
        with self._written(self.parameters):
            self._finish(skip=skip)

    def _written(self, tensors: Sequence[Tensor]) -> AbstractContextManager[None]:
        return _unsafe_preserve_version_counter(tuple(tensors)) if self._is_hidden else NEWEST

    def forget(self, *, keep: Collection[int] = ()) -> None:
        """Drop all older versions and gradients, and have the newest in slot 0."""
        for slot in [*self._used]:
            self._clear(slot)
        for gradients in self._gradients:  # an interrupted backward may have left something
            if some := [g for g in gradients if g is not None]:
                torch._foreach_zero_(some)
        if self._present != 0:
            self._moved_to(0)
        self._older.clear()
        self._places.clear()

    def _finish(self, *, skip: bool) -> None:
        if self._optimizer is not None and not skip:
            self._optimizer.step() if self._mitigation is None else self._mitigation.step()
        for slot in [*self._used]:
            self._clear(slot)
        for parameter in self.parameters:
            parameter.grad = None

    def _moved_to(self, slot: int) -> tuple[list[nn.Parameter], int]:
        """Give the parameters the memory of ``slot``, with the same values, and return what they had, and its slot.

        Their gradients stay with them. What was in ``slot`` is lost.
        """
        others, before = self._slots[slot], self._present
        assert others is not None, "there is more than one slot"
        for lost in [version for version, at in self._places.items() if at == slot]:
            del self._places[lost], self._older[lost]
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass(), self._written(others):
            if others:
                torch._foreach_copy_(tuple(others), tuple(self.parameters))
            for parameter, other in zip(self.parameters, others, strict=True):
                other.grad, parameter.grad = parameter.grad, None
        self._exchange.swap(others)
        self._slots[before], self._slots[slot], self._present = others, None, slot
        return others, before  # type: ignore[return-value]

    def _tensors_in(self, slot: int) -> Sequence[Tensor]:
        others = self._slots[slot]
        return self.parameters if others is None else others

    def _in_use(self, slot: int) -> list[Tensor]:
        return [gradient for gradient in self._gradients[slot] if gradient is not None]

    def _clear(self, slot: int) -> None:
        """Make the gradients of ``slot`` zeros, for the next backward that adds to them."""
        self._used.discard(slot)
        if some := self._in_use(slot):
            torch._foreach_zero_(some)
        for tensor in self._tensors_in(slot):
            tensor.grad = None
