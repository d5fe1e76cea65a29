"""Consecutive units of a traced model as a module of its own, with the parameters' names as they were."""

import copy
import operator
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple, Self, cast

from torch import Tensor, fx, nn

from adl_dist.batch import Batch, Several
from adl_dist.errors import PartitionError
from adl_dist.partition.trace import Trace


class Crossing(NamedTuple):
    """A value that is computed before a cut and needed after it; ``is_shape``: no byte of it, only its shape."""

    node: fx.Node
    is_shape: bool


class StageModule(nn.Module):
    """One stage of a model that is no ``nn.Sequential``: takes a tensor, or several in a tuple, and returns likewise.

    It knows the names of its units: :func:`stage_units`.
    """

    def __init__(self, unit_names: Sequence[str]) -> None:
        super().__init__()
        vars(self)[_NAMES] = list(unit_names)


_NAMES, _OWN = "units of the stage", "of the stage"  # attributes; no module of a user has any of such names


@dataclass(frozen=True)
class _Own:
    """What a stage holds besides the user's modules.

    Attributes:
        forwards: in training and in evaluation.
        unlike: modules that evaluate in training, and those that train in evaluation.
    """

    forwards: Sequence[Callable[[nn.Module, Any], Any]]
    unlike: Sequence[Set[nn.Module]]


class TracedStage(StageModule):
    """One stage of a traced model; training and evaluation may run different operations."""

    def __init__(
        self,
        model: nn.Module,
        graphs: tuple[fx.Graph, fx.Graph],
        unit_names: Sequence[str],
        unlike: tuple[Set[nn.Module], Set[nn.Module]],
        *,
        held: Set[str] = frozenset(),
    ) -> None:
        """Take over from ``model`` what the graphs for training and evaluation call or read.

        ``unlike``: modules that evaluate in training, and those that train in evaluation. ``held``: names of state that
        an earlier stage holds; this one may read it, too, but it is no part of its state_dict.
        """
        super().__init__(unit_names)
        self.training = model.training
        nodes = [node for graph in graphs for node in graph.nodes]
        twins: dict[nn.Module, nn.Module] = {}
        names = {str(node.target) for node in nodes if node.op in ("call_module", "get_attr")}
        for name in sorted(names, key=lambda name: (name.count("."), name)):  # one may lie in another, taken over whole
            adopt(self, model, name, held=held, twins=twins)
        here = {*self.modules()}
        vars(self)[_OWN] = _Own(
            [_compiled(graph) for graph in graphs],
            [{twins.get(module, module) for module in modules} & here for modules in unlike],
        )

    def forward(self, acts: Any) -> Any:
        """Return what crosses the next cut, of what crosses the previous one; one value is itself, several a tuple."""
        return vars(self)[_OWN].forwards[0 if self.training else 1](self, acts)

    def train(self, mode: bool = True) -> Self:
        """Set the mode as the model's own ``train()`` does, which may leave layers frozen in the other mode."""
        super().train(mode)
        for module in vars(self)[_OWN].unlike[0 if mode else 1]:
            module.training = not mode
        return self


def as_argument(module: nn.Module, input_: Batch) -> Any:
    """Return what the first stage, or the whole model, is called with: a stage takes all tensors in a tuple."""
    if not isinstance(module, StageModule) or not isinstance(input_, Several):
        return input_
    return input_.tensors if len(input_.tensors) > 1 else input_.tensors[0]


def stage_units(module: nn.Module) -> list[str]:
    """Return the names of the units of a :class:`StageModule`, in the order they run; empty: it is none."""
    return list(vars(module).get(_NAMES, ()))


def adopt(
    piece: nn.Module,
    model: nn.Module,
    name: str,
    *,
    held: Set[str] = frozenset(),
    twins: dict[nn.Module, nn.Module] | None = None,
) -> None:
    """Let ``piece`` hold the module, parameter, buffer or attribute ``name`` of ``model`` under the same name.

    State in ``held`` is no part of its state_dict. A module that has such is replaced by a copy that shares its
    tensors, and noted in ``twins``.

    Raises:
        PartitionError: there is nothing of that name to hold.
    """
    *path, last = name.split(".")
    source, here = model, piece
    for part in path:
        source = getattr(source, part, None)  # type: ignore[assignment]
        if not isinstance(source, nn.Module):
            raise PartitionError(
                f"the model's state_dict holds '{name}', but there is no module '{'.'.join(path)}' in it: a hook gives "
                "its entries other names, which no stage could; remove that hook, and rename them after the export"
            )
        if part not in here._modules:
            _register(here, part, nn.Module().train(source.training))
        here = here._modules[part]  # type: ignore[assignment]
    if any(last in registry for registry in (here._modules, here._parameters, here._buffers, here.__dict__)):
        return
    # Not get(): a module of TorchScript has mappings of its own.
    if last in source._modules and (module := source._modules[last]) is not None:
        if not held.isdisjoint(f"{name}.{key}" for key in module.state_dict()):
            (twins if twins is not None else {})[module] = module = _twin(module, f"{name}.", held)
        _register(here, last, module)
    elif last in source._buffers:
        here._buffers[last] = source._buffers[last]
        if last in source._non_persistent_buffers_set or name in held:
            here._non_persistent_buffers_set.add(last)
    elif last in source._parameters:
        here._parameters[last] = source._parameters[last]
    elif hasattr(source, last):  # an attribute, say a plain tensor, is not registered
        vars(here)[last] = getattr(source, last)
    else:
        raise PartitionError(
            f"'{name}' of the model's state is neither a parameter nor a buffer, so no stage can hold it; use "
            "partition.granularity=block, which leaves the module that makes it whole"
        )


def _register(holder: nn.Module, name: str, module: nn.Module) -> None:
    holder._modules[name] = module  # not add_module, which refuses names that user's code may well have


def _twin(module: nn.Module, prefix: str, held: Set[str]) -> nn.Module:
    twin = copy.copy(module)
    vars(twin).update(_parameters={**module._parameters}, _buffers={**module._buffers}, _modules={})
    hidden = {key for key in module._buffers if prefix + key in held}
    vars(twin)["_non_persistent_buffers_set"] = {*module._non_persistent_buffers_set, *hidden}
    for key, child in module._modules.items():
        twin._modules[key] = child if child is None else _twin(child, f"{prefix}{key}.", held)
    return twin


def extract(
    trace: Trace, steps: Sequence[fx.Node], arriving: Sequence[Crossing], leaving: Sequence[Crossing] | None
) -> fx.Graph:
    """Return the graph of one stage of these steps; ``leaving`` None: it returns the model's result."""
    graph = fx.Graph()
    acts = graph.placeholder("acts")
    values: dict[fx.Node, fx.Node] = {}
    tokens: dict[fx.Node, fx.Node] = {}
    proxies: dict[fx.Node, fx.Node] = {}
    for place, (node, is_shape) in enumerate(arriving):
        got = acts if len(arriving) == 1 else graph.call_function(operator.getitem, (acts, place))
        (tokens if is_shape else values)[node] = got

    def value(node: fx.Node) -> fx.Node:
        if node not in values:  # computed again in each stage that needs it
            assert node in trace.shapes or node in trace.repeated, f"{node} should have crossed the cut"
            values[node] = graph.node_copy(node, value_or_shape)
        return values[node]

    def value_or_shape(node: fx.Node) -> fx.Node:
        if node in values or node in trace.shapes or node in trace.repeated:
            return value(node)
        if node not in proxies:
            proxies[node] = graph.call_function(shape_proxy, (tokens[node],))
        return proxies[node]

    def sent(crossing: Crossing) -> fx.Node:
        if not crossing.is_shape:
            return value(crossing.node)
        return tokens.get(crossing.node) or graph.call_function(shape_token, (value(crossing.node),))

    for step in steps:
        if step not in trace.repeated:
            values[step] = graph.node_copy(step, value)
    if leaving is None:
        graph.output(fx.node.map_arg(trace.result, value))
    else:
        graph.output(sent(leaving[0]) if len(leaving) == 1 else tuple(map(sent, leaving)))
    return graph


def shape_token(x: Tensor) -> Tensor:
    """Return a tensor [..., 0] without elements that carries shape, dtype and device of ``x`` [...]."""
    return x.detach().new_empty((*x.shape, 0))


def shape_proxy(shape_token: Tensor) -> Tensor:
    """Return a tensor [...] of one element in memory, in place of the one that ``shape_token`` [..., 0] was made of."""
    return shape_token.detach().new_zeros(()).expand(shape_token.shape[:-1])


def _compiled(graph: fx.Graph) -> Callable[[nn.Module, Any], Any]:
    graph.lint()
    for node in graph.nodes:
        node.meta.pop("is_wrapped", None)  # or torch.fx would register the function under a name that the code lacks
    # Not an fx.GraphModule, which would hold the state a second time, and has names of its own.
    code = graph.python_code(root_module="self")
    try:
        exec(compile(code.src, "<stage>", "exec"), names := {**code.globals})
    except SyntaxError as error:
        line = " ".join((error.text or "").split())
        raise PartitionError(
            f"the model cannot be written down as Python ({line}): a module or tensor of it has a name that Python "
            "keeps for itself, like 'for'; rename it"
        ) from error
    return cast(Callable[[nn.Module, Any], Any], names["forward"])
