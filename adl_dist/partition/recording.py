"""The record of a model's runs: calls, data flow and side effects."""

import copy
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from adl_dist.errors import PartitionError, in_one_line
from adl_dist.partition.absent import RecordedResults
from adl_dist.partition.functions import LIGHT
from adl_dist.partition.value import Label

INPUT, STATE = "input", "state"  # names in the labels of values that no call makes
Count = int | tuple[str, int, int]  # of a module; of a function: the module called last, its count, and how many since
Key = tuple[str, str, Count]  # path of the calling forward, name, how many calls before


@dataclass(eq=False)
class Call:
    """One call, as seen in the runs of one mode.

    Attributes:
        name: the module's name in the model, or the function's own name.
        parent: the call that makes this one in its forward, or None for the model itself.
        where: the user's line that calls a function.
        is_open: whether the calls inside are also recorded; otherwise it runs as a whole.
        is_block: whether a cut between blocks may lie between the calls inside.
        is_tainted: whether it computes with values of the batch or with parameters.
        reads: labels of the values that it computes with.
        makes: labels of its results and of the tensors that it writes to.
        results: label of each tensor in its result; it may come from a call inside.
        uses: names of the parameters and buffers that it computes with.
        moves: names of the buffers that a module as a whole changes.
        common: places of the whole-number inputs that it computes with.
        writes: numbers of the memory that it writes to.
        draws: whether it draws random numbers.
        varies: whether its caller sets attributes that its results may depend on.
        has_effects: whether it changes more than its results, so that every stage must run it.
        is_hidden: whether it computes with a value that is not among its arguments.
        answers: the numbers that it returned to Python in all runs.
        checkpoint: the call of torch.utils.checkpoint that it is in, or 0.
        recorded: shapes and dtypes of its results.
        flops, nbytes: floating-point operations, and bytes read and written, of one forward.
    """

    key: Key
    name: str
    parent: "Call | None"
    is_module: bool
    where: str = ""
    is_open: bool = False
    is_block: bool = False
    is_tainted: bool = False
    reads: dict[Label, None] = field(default_factory=dict)
    makes: dict[Label, None] = field(default_factory=dict)
    results: list[Label] = field(default_factory=list)
    uses: set[str] = field(default_factory=set)
    moves: set[str] = field(default_factory=set)
    common: set[int] = field(default_factory=set)
    writes: set[int] = field(default_factory=set)
    draws: bool = False
    varies: bool = False
    has_effects: bool = False
    is_hidden: bool = False
    answers: list[Any] = field(default_factory=list)
    checkpoint: int = 0
    recorded: RecordedResults = field(default_factory=RecordedResults)
    flops: float = 0.0
    nbytes: float = 0.0

    @property
    def path(self) -> str:
        """The path of the call's own forward, as ``CALLER/NAME#COUNT``."""
        path, name, count = self.key
        return f"{path}/{name}#{count}"

    @property
    def answer(self) -> Any:
        """The call's answer if it is the same in all runs, otherwise None."""
        first = self.answers[0] if self.answers else None
        return first if all(type(one) is type(first) and one == first for one in self.answers) else None

    @property
    def is_unit(self) -> bool:
        """True if a cut may lie before the call."""
        if self.is_open or self.name.endswith("*"):
            return False
        if not self.makes:  # it returns what it was given
            return self.is_module and self.parent is None
        if not self.is_tainted:
            return False
        if self.parent is None or self.parent.is_block:
            return self.is_module or (self.name not in LIGHT and not self.writes)
        return bool(self.uses) or self.draws

    @property
    def caller(self) -> str:
        """The name of the module that makes the call in its forward."""
        return "" if self.parent is None else self.parent.name


@dataclass(eq=False)
class ModeRecord:
    """The runs of a model in training, or in evaluation.

    Attributes:
        calls: the calls of all runs by key, in the order in which they begin.
        shapes: of each label, the shapes in the runs.
        inputs, dtypes: the shapes of the inputs in the runs, and their dtypes.
        nbytes: of each label, its bytes for one sample.
        tensors: of each label, its dtype, and whether it is part of a graph.
        memory: of each label, a number of the memory that it lies in.
        outputs: labels of the values in the model's result.
        readers: for each run the calls that compute with each label; None stands for the result.
        uses, common: names of parameters, and places of whole-number inputs, that the result also depends on.
        asked: places of whole-number inputs whose elements Python asks for.
        state: for each tensor of the model that is a value of the batch after a run, by name, the label of that value.
        decides: whether micro-batches may take different paths.
        deciders: paths of forwards that ask for random numbers, which may decide what they call.
        draws: the random streams of draws that do not depend on the batch.
        draws_own: the random streams from which calls draw.
    """

    calls: dict[Key, Call] = field(default_factory=dict)
    shapes: dict[Label, list[torch.Size]] = field(default_factory=dict)
    inputs: list[list[torch.Size]] = field(default_factory=list)
    dtypes: list[torch.dtype] = field(default_factory=list)
    nbytes: dict[Label, float] = field(default_factory=dict)
    tensors: dict[Label, tuple[torch.dtype, bool]] = field(default_factory=dict)
    memory: dict[Label, int] = field(default_factory=dict)
    outputs: dict[Label, None] = field(default_factory=dict)
    readers: list[dict[Label, set[Key | None]]] = field(default_factory=list)
    uses: set[str] = field(default_factory=set)
    common: set[int] = field(default_factory=set)
    asked: set[int] = field(default_factory=set)
    state: dict[str, Label] = field(default_factory=dict)
    decides: bool = False
    deciders: set[str] = field(default_factory=set)
    draws: set[str] = field(default_factory=set)
    draws_own: set[str] = field(default_factory=set)


@dataclass(eq=False)
class Recording:
    """The recorded behaviour of a model in training and in evaluation.

    Attributes:
        modes: the runs in training (True) and in evaluation (False).
        state: names of tensors of the model that the forward writes values of the batch to, and reads.
        births: for each of these modes, keys of functions whose results the forward writes values of the batch to.
        whole: by the name of a module, why its forward cannot be followed.
        closed: the same, as found in the last runs; added to ``whole`` once nothing else is new.
        refused: why the model's own forward cannot be followed; empty if it can.
        opened: names of modules without children that are followed because of their effects.
        hooked: names of modules with forward hooks, which run around what is recorded; the first forward may add some.
        glue: names of buffers, and of tensors that are plain attributes, that every stage needs.
        moved: the tensors that a forward changes independently of the batch, by name, each with the names of the
            modules that change it.
        predicted: keys of calls with shapes that meta tensors have predicted.
        templates: absent results of equal layers, for all stages and copies of them.
        device: the model's device.
    """

    modes: dict[bool, ModeRecord] = field(default_factory=dict)
    state: set[str] = field(default_factory=set)
    births: dict[bool, set[Key]] = field(default_factory=lambda: {True: set(), False: set()})
    whole: dict[str, str] = field(default_factory=dict)
    closed: dict[str, str] = field(default_factory=dict)
    refused: str = ""
    opened: set[str] = field(default_factory=set)
    hooked: set[str] = field(default_factory=set)
    glue: set[str] = field(default_factory=set)
    moved: dict[str, set[str]] = field(default_factory=dict)
    predicted: set[Any] = field(default_factory=set)
    templates: dict[Any, Any] = field(default_factory=dict)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def _known(self) -> tuple[int, ...]:
        return len(self.state), *map(len, (*self.births.values(), self.whole, self.opened, self.hooked))


def copied(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Return a deep copy of ``model``, or raise a PartitionError.

    ``memo`` is that of :func:`copy.deepcopy`: by the id of an object, the copy that replaces it.
    """
    for module in model.modules():  # most dictionaries of a module are empty, and deepcopy takes its time for each
        memo |= {id(d): type(d)() for d in vars(module).values() if type(d) in (dict, OrderedDict) and not d}
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        raise PartitionError(
            f"{type(model).__name__} cannot be copied ({in_one_line(error)}), and each stage needs a copy of its "
            "Python objects; give the class whose object cannot be copied a __deepcopy__, or use num_stages=1"
        ) from error


def held_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of distinct parameters, buffers and attributes."""
    seen = set[int]()
    for tensors in (model.named_parameters(), model.named_buffers(), _attributes(model)):
        for name, tensor in tensors:
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield name, tensor


def _attributes(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, Tensor):
                yield f"{name}.{key}".lstrip("."), value


def state_label(name: str) -> Label:
    """Return the label of the model's tensor ``name`` before a forward."""
    return "", f"{STATE} {name}", 0, 0


def put_tensor(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Replace the model's buffer or attribute ``name``, held by ``module``."""
    key = name.rpartition(".")[2]
    (module._buffers if key in module._buffers else vars(module))[key] = tensor


def tensor_named(module: nn.Module, name: str) -> Any:
    """Return the tensor ``name`` in ``module``, or None if it is missing."""
    path, _, key = name.rpartition(".")
    return getattr(module_named(module, path), key, None)


def module_named(module: nn.Module, path: str) -> nn.Module:
    """Return the module at ``path`` in ``module``, or raise a KeyError."""
    for part in path.split(".") if path else ():
        module = module._modules[part]  # type: ignore[assignment]
    return module
