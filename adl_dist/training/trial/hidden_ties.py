"""State that stages share without a tensor of the model that tells: found, and refused by name.

In one process two stages may reach one counter, list or plain tensor through a closure, a class attribute or a
reference in a list. As two processes each has a copy of its own, and what one stage writes the other never reads. Two
things are looked for: state that one stage moves and another reaches (:class:`SharedState`), and parameters and buffers
of one stage that another computes with, also without a gradient (:func:`check_reads`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from adl_dist.errors import ConfigError, PartitionError
from adl_dist.memory import memory_of
from adl_dist.partition.module_state import ModuleState
from adl_dist.partition.state_walk import Found, Key, are_alike, values_of
from adl_dist.stage import TrainSpec
from adl_dist.training.trial.differences import Comparison
from adl_dist.training.trial.homes import Around, Homes
from adl_dist.training.trial.outcome import Outcome

# Runs all stages forward from the state at the start, within ``around``, and returns what came of it.
Run = Callable[[Around], Outcome]
_READ_BY_PYTHON = {Tensor.numpy, Tensor.tolist, Tensor.__array__}  # of which no operation of torch tells


class SharedState:
    """What more than one stage reaches, but for tensors that one stage holds: those have a home.

    Attributes:
        moved: what of it has been moved, by its key: the first stage that did, and a name.
    """

    def __init__(
        self, homes: Homes, stages: Sequence[nn.Module], states: Sequence[ModuleState], spec: TrainSpec
    ) -> None:
        """Take the ``states`` of the ``stages``, as they are now; the loss is part of the last."""
        self._homes, self._stages, self._spec = homes, stages, spec
        by_key: dict[Key, dict[int, Found]] = {}
        for k, state in enumerate(states):
            elsewhere = {key for key, *_ in homes.reached_of_others(k, state)}
            for found in state.found:
                if found.key not in elsewhere:
                    by_key.setdefault(found.key, {})[k] = found
        self._shared = {key: found for key, found in by_key.items() if len(found) > 1}
        self.moved: dict[Key, tuple[int, str]] = {}
        self._alone: list[ModuleState] = []

    @contextmanager
    def watched(self, k: int) -> Iterator[None]:
        """Note what has been moved once stage ``k`` has run."""
        yield
        for key, of_stages in self._shared.items():
            if key not in self.moved and (changed := [one for one in of_stages.values() if one.has_changed()]):
                self.moved[key] = (k if k in of_stages else min(of_stages), changed[0].names[0])

    def check(self, run: Run) -> None:
        """Refuse what is moved if a stage that runs alone leaves, or makes, something else of it.

        Such a stage meets what it left itself. A table that each makes for itself when it is first needed is the same.

        Raises:
            PartitionError: it does; names both stages.
        """
        if not self.moved:
            return
        together = run(lambda k: nullcontext())
        places = [(key, k, found) for key in self.moved for k, found in self._shared[key].items()]
        expected = [values_of(found.look()) for _, _, found in places]
        self._alone = []
        try:
            apart = run(self._alone_with)
        except ConfigError:  # it counts on what another one left
            self._refuse(next(iter(self.moved)))
        for (key, k, found), values in zip(places, expected, strict=True):
            with self._alone_with(k):
                if not are_alike(values_of(found.look()), values):
                    self._refuse(key)
        if Comparison(self._spec, together).first_difference(apart) is not None:
            self._refuse(next(iter(self.moved)))

    def refuse_moved(self) -> None:
        """Refuse all that has been moved, where it cannot be tried whether that makes a difference.

        Raises:
            PartitionError: something has been; names both stages.
        """
        for key in self.moved:
            self._refuse(key)

    @contextmanager
    def _alone_with(self, k: int) -> Iterator[None]:
        """Have stage ``k`` meet what it left when it ran last."""
        if not self._alone:
            self._alone = [self._state(stage) for stage in range(len(self._stages))]
        self._alone[k].restore()
        yield
        self._alone[k] = self._state(k)

    def _state(self, k: int) -> ModuleState:
        functions = {"loss_fn": self._spec.loss_fn} if k == len(self._stages) - 1 else {}
        return ModuleState.of(self._stages[k], wanted=self.moved.__contains__, functions=functions)

    def _refuse(self, key: Key) -> NoReturn:
        writer, name = self.moved[key]
        reader = next(k for k in self._shared[key] if k != writer)
        places = self._homes.places
        raise PartitionError(
            f"{places[writer]} writes to '{name}', which {places[reader]} reaches, too; as processes of their own each "
            "would have a copy, and not see what the other writes: cut elsewhere (partition.balance), so that both are "
            "on one stage, give each unit a state of its own, or hand the value on from unit to unit"
        )


def check_reads(homes: Homes, states: Sequence[ModuleState], run: Run) -> None:
    """Refuse that a stage computes with a parameter or buffer of another one, also where no gradient tells it.

    Raises:
        PartitionError: a stage does; names both.
    """
    foreign = [
        {key: (name, tensor) for key, name, tensor in homes.reached_of_others(k, state)}
        for k, state in enumerate(states)
    ]
    if not any(foreign):
        return
    read: list[set[Key]] = [set() for _ in states]

    @contextmanager
    def watched(k: int) -> Iterator[None]:
        if not foreign[k]:
            yield
            return
        with noting_reads(foreign[k], read[k]):
            yield

    run(watched)
    for k, keys in enumerate(read):
        for key in foreign[k]:
            if key in keys:
                homes.check(*foreign[k][key], k)


@contextmanager
def noting_reads(wanted: Mapping[Key, Any], read: set[Key]) -> Iterator[None]:
    """Add to ``read`` what inside is computed with of the ``wanted`` memory."""
    with _Operations(wanted, read), _Calls(wanted, read):
        yield


class _Operations(TorchDispatchMode):
    """Notes which of some memory the operations inside take as an argument."""

    def __init__(self, wanted: Mapping[Key, Any], read: set[Key]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._wanted, self._read = wanted, read

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _note(self._wanted, self._read, (args, kwargs))
        return func(*args, **(kwargs or {}))


class _Calls(TorchFunctionMode):
    """The same for what Python reads without an operation."""

    def __init__(self, wanted: Mapping[Key, Any], read: set[Key]) -> None:
        super().__init__()
        self._wanted, self._read = wanted, read

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READ_BY_PYTHON:
            _note(self._wanted, self._read, args)
        return func(*args, **(kwargs or {}))


def _note(wanted: Mapping[Key, Any], read: set[Key], arguments: Any) -> None:
    keys = (memory_of(leaf) for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor))
    read.update(key for key in keys if key in wanted)
