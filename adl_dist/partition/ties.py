"""Which cuts would tear a tensor apart that several units use."""

from collections.abc import Collection, Iterable, Iterator, Sequence

from torch import Tensor, nn

from adl_dist.memory import shared_memory
from adl_dist.partition.module_state import tensors_reached

KEPT = "unless you untie them"  # what is said of a tensor with several names that must be on one stage
Use = tuple[int, str, object, int]  # a unit, a tensor that it uses by that name, and a number of its memory


def never_moved(model: nn.Module, moved: Collection[int]) -> frozenset[int]:
    """Return the ids of buffers that are not in ``moved``, by a forward, nor share memory with a parameter."""
    memory = shared_memory((*model.parameters(), *model.buffers()))
    trained = {memory.get(id(p)) for p in model.parameters()} - {None}
    return frozenset(id(b) for b in model.buffers() if id(b) not in moved and memory.get(id(b)) not in trained)


class Ties:
    """The tensors of a model that units use; all uses of one, unless no forward moves it, must be on one stage.

    Attributes:
        shared: of each trained parameter that several units use, and stages may hold copies of, the units by its name.
    """

    def __init__(self, model: nn.Module, read_only: Collection[int]) -> None:
        """``read_only``: the ids of buffers that no forward moves, so that several stages may hold them."""
        self._read_only = read_only
        self._memory = shared_memory((*model.parameters(), *model.buffers()))
        self._names = {id(t): name for name, t in (*model.named_buffers(), *model.named_parameters())}
        self._parameters = {id(p) for p in model.parameters()}
        self.shared: dict[str, list[int]] = {}
        self._units_of: dict[tuple[int, int], set[int]] = {}  # by a parameter and a module that registers it

    def uses(self, unit: int, name: str, used: object, reached: Iterable[Tensor] | None) -> Iterator[Use]:
        """Yield what ``unit`` uses: the tensors of a module, also those that it holds twice; or the tensor ``used``.

        ``reached``: tensors that its output was found to depend on, registered with the module or not; None: not known.
        Then parameters count that it reaches by its attributes, unless it reaches the whole model.
        """
        if not isinstance(used, nn.Module):
            yield self._use(unit, name, used)
            return
        own: set[int] = set()
        for part in used.modules():
            for parameter in part.parameters(recurse=False):
                self._units_of.setdefault((id(parameter), id(part)), set()).add(unit)
        for kind in (used.named_parameters, used.named_buffers):
            for inner, tensor in kind(prefix=name, remove_duplicate=False):
                own.add(id(tensor))
                if id(tensor) not in self._read_only:
                    yield self._use(unit, inner, tensor)
        if reached is None:
            found = {id(tensor): tensor for _, tensor in tensors_reached(used) if isinstance(tensor, nn.Parameter)}
            reached = () if found.keys() >= self._parameters else found.values()
        for tensor in reached:
            if id(tensor) not in own:
                yield self._use(unit, self._names.get(id(tensor), f"a parameter that {name} uses"), tensor)

    def in_one_module(self, parameter: nn.Parameter) -> bool:
        """Return whether several units have ``parameter`` from one module, so that none can have another."""
        return any(len(units) > 1 for (key, _), units in self._units_of.items() if key == id(parameter))

    def note_shared(self, places: Sequence[tuple[int, str, object]]) -> None:
        """Take note of the ``places`` of a parameter that may be copied."""
        units, (_, name, parameter) = sorted({unit for unit, *_ in places}), min(places, key=lambda use: use[:2])
        if len(units) > 1 and isinstance(parameter, nn.Parameter) and parameter.requires_grad:
            self.shared[name] = units

    def torn(self, uses: Iterable[Use], keeps_ties: str | None = KEPT) -> dict[int, str]:
        """Return what :func:`torn` does; ``keeps_ties`` None: stages may hold copies of parameters."""
        return torn(uses, KEPT if keeps_ties is None else keeps_ties, self if keeps_ties is None else None)

    def _use(self, unit: int, name: str, used: object) -> Use:
        return unit, name, used, self._memory.get(id(used), -id(used))


def torn(uses: Iterable[Use], keeps_ties: str, copying: Ties | None) -> dict[int, str]:
    """Return the cuts, by the unit before each, that would split one tensor, with the reason.

    ``keeps_ties``: what is said of a tensor with several names. ``copying``: the ties of which stages may hold copies.
    """
    places_of: dict[int, list[tuple[int, str, object]]] = {}
    for unit, name, tensor, memory in uses:
        places_of.setdefault(memory, []).append((unit, name, tensor))
    found: dict[int, str] = {}
    for places in places_of.values():
        if copying is not None and _may_be_copied(places, copying):
            copying.note_shared(places)
            continue
        first, last = min(places, key=lambda use: use[:2]), max(places, key=lambda use: use[:2])
        names = f"'{first[1]}' and '{last[1]}'"
        if first[1] == last[1]:
            why = f"'{first[1]}' is used on both sides of it, and must be on one stage"
        elif first[2] is last[2]:
            why = f"{names} are one and the same tensor, which must be on one stage, {keeps_ties}"
        else:
            why = f"{names} share memory, which must be on one stage, unless each gets a tensor of its own by clone()"
        for cut in range(first[0], last[0]):
            found.setdefault(cut, why)
    return found


def _may_be_copied(places: Sequence[tuple[int, str, object]], ties: Ties) -> bool:
    """Return whether units use nothing but one parameter, each by a name and in a module that no other one has."""
    unit_of: dict[str, int] = {}
    _, _, first = places[0]
    if not isinstance(first, nn.Parameter) or any(tensor is not first for _, _, tensor in places):
        return False
    apart = all(unit_of.setdefault(name, unit) == unit for unit, name, _ in places)
    return apart and not ties.in_one_module(first)


def replace_parameter(module: nn.Module, parameter: nn.Parameter, other: nn.Parameter) -> None:
    """Register ``other`` in the place of ``parameter``, wherever ``module`` has it, under the same names."""
    for part in module.modules():
        for name, known in [*part.named_parameters(recurse=False, remove_duplicate=False)]:
            if known is parameter:
                setattr(part, name, other)
