"""Which cuts would tear a tensor apart that several units use."""

from collections.abc import Collection, Iterable, Iterator

from torch import Tensor, nn

from adl_dist.partition.module_state import tensors_reached

Use = tuple[int, str, object]  # a unit, and a tensor that it uses by that name


class Ties:
    """The tensors of a model that units use; all uses of one, unless no forward moves it, must be on one stage."""

    def __init__(self, model: nn.Module, read_only: Collection[int]) -> None:
        """``read_only``: the ids of buffers that no forward moves, so that several stages may hold them."""
        self._read_only = read_only
        self._names = {id(t): name for name, t in (*model.named_buffers(), *model.named_parameters())}
        self._parameters = {id(p) for p in model.parameters()}

    def uses(self, unit: int, name: str, used: object, reached: Iterable[Tensor] | None) -> Iterator[Use]:
        """Yield what ``unit`` uses: the tensors of a module, also those that it holds twice; or the tensor ``used``.

        ``reached``: tensors that its output was found to depend on, registered with the module or not; None: not known.
        Then parameters count that it reaches by its attributes, unless it reaches the whole model.
        """
        if not isinstance(used, nn.Module):
            yield unit, name, used
            return
        own: set[int] = set()
        for kind in (used.named_parameters, used.named_buffers):
            for inner, tensor in kind(prefix=name, remove_duplicate=False):
                own.add(id(tensor))
                if id(tensor) not in self._read_only:
                    yield unit, inner, tensor
        if reached is None:
            found = {id(tensor): tensor for _, tensor in tensors_reached(used) if isinstance(tensor, nn.Parameter)}
            reached = () if found.keys() >= self._parameters else found.values()
        for tensor in reached:
            if id(tensor) not in own:
                yield unit, self._names.get(id(tensor), f"a parameter that {name} uses"), tensor


def torn(uses: Iterable[Use]) -> dict[int, str]:
    """Return the cuts, by the unit before each, that would split one tensor, with the reason."""
    units_of: dict[int, list[tuple[int, str]]] = {}
    for unit, name, tensor in uses:
        units_of.setdefault(id(tensor), []).append((unit, name))
    found: dict[int, str] = {}
    for places in units_of.values():
        (first, name), (last, other) = min(places), max(places)
        tied = f"'{name}' and '{other}' are one and the same tensor, which must be on one stage, unless you untie them"
        why = f"'{name}' is used on both sides of it, and must be on one stage" if name == other else tied
        for cut in range(first, last):
            found.setdefault(cut, why)
    return found
