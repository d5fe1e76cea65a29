"""Consecutive units of a traced model as a module of its own, with the parameters' names as they were."""

import operator
from collections.abc import Callable, Sequence, Set
from typing import Any, NamedTuple, Self

from torch import Tensor, fx, nn

from adl_dist.errors import PartitionError
from adl_dist.partition.trace import Trace


class Crossing(NamedTuple):
    """A value that is computed before a cut and needed after it; ``is_shape``: no byte of it, only its shape."""

    node: fx.Node
    is_shape: bool


class StageModule(nn.Module):
    """One stage of a traced model; training and evaluation may run different operations."""

    def __init__(
        self,
        model: nn.Module,
        graphs: tuple[fx.Graph, fx.Graph],
        unit_names: Sequence[str],
        unlike: tuple[Set[nn.Module], Set[nn.Module]],
    ) -> None:
        """Take over from ``model`` what the graphs for training and evaluation call or read.

        ``unlike``: modules that evaluate in training, and those that train in evaluation.
        """
        super().__init__()
        self.training = model.training
        nodes = [node for graph in graphs for node in graph.nodes]
        for op in ("call_module", "get_attr"):  # a parameter may lie in a module that is taken over whole
            for node in nodes:
                if node.op == op:
                    self.adopt(model, str(node.target))
        self._unlike = unlike[0] & {*self.modules()}, unlike[1] & {*self.modules()}
        self.unit_names = list(unit_names)
        self._forwards = _compiled(self, graphs[0]), _compiled(self, graphs[1])

    def forward(self, acts: Any) -> Any:
        """Return what crosses the next cut, of what crosses the previous one (a tensor, or a tuple of several)."""
        return self._forwards[0 if self.training else 1](self, acts)

    def train(self, mode: bool = True) -> Self:
        """Set the mode as the model's own ``train()`` does, which may leave layers frozen in the other mode."""
        super().train(mode)
        for module in self._unlike[0 if mode else 1]:
            module.training = not mode
        return self

    def adopt(self, model: nn.Module, name: str) -> None:
        """Hold the module, parameter, buffer or attribute ``name`` of ``model`` under the same name."""
        *path, last = name.split(".")
        source, here = model, self
        for part in path:
            source = getattr(source, part)
            if part not in here._modules:
                here.add_module(part, nn.Module().train(source.training))
            here = here._modules[part]  # type: ignore[assignment]
        if hasattr(here, last):
            return
        if not hasattr(source, last):
            raise PartitionError(
                f"'{name}' of the model's state is neither a parameter nor a buffer, so no stage can hold it; use "
                "partition.granularity=block, which leaves the module that makes it whole"
            )
        if last in source._buffers:
            persistent = last not in source._non_persistent_buffers_set
            here.register_buffer(last, source._buffers[last], persistent=persistent)
        else:  # a module and a parameter are registered, another attribute, say a plain tensor, is not
            setattr(here, last, getattr(source, last))


def extract(
    trace: Trace, steps: Sequence[fx.Node], arriving: Sequence[Crossing], leaving: Sequence[Crossing] | None
) -> fx.Graph:
    """Return the graph of one stage of these steps; ``leaving`` None: it returns the model's result."""
    graph = fx.Graph()
    acts = graph.placeholder("acts")
    values: dict[fx.Node, fx.Node] = {}
    tokens: dict[fx.Node, fx.Node] = {}
    proxies: dict[fx.Node, fx.Node] = {}
    if len(arriving) > 1:
        acts = graph.call_function(check_arity, (acts, len(arriving)))
    for place, (node, is_shape) in enumerate(arriving):
        got = acts if len(arriving) == 1 else graph.call_function(operator.getitem, (acts, place))
        (tokens if is_shape else values)[node] = got

    def value(node: fx.Node) -> fx.Node:
        if node not in values:  # a shape: computed again in each stage that needs it
            assert node in trace.shapes, f"{node} should have crossed the cut"
            values[node] = graph.node_copy(node, shape_of)
        return values[node]

    def shape_of(node: fx.Node) -> fx.Node:
        if node in values or node in trace.shapes:
            return value(node)
        if node not in proxies:
            proxies[node] = graph.call_function(shape_proxy, (tokens[node],))
        return proxies[node]

    def sent(crossing: Crossing) -> fx.Node:
        if not crossing.is_shape:
            return value(crossing.node)
        return tokens.get(crossing.node) or graph.call_function(shape_token, (value(crossing.node),))

    for step in steps:
        values[step] = graph.node_copy(step, value)
    if leaving is None:
        graph.output(fx.node.map_arg(trace.result, value))
    else:
        graph.output(sent(leaving[0]) if len(leaving) == 1 else tuple(map(sent, leaving)))
    return graph


def check_arity(acts: Sequence[Any], count: int) -> Sequence[Any]:
    """Return ``acts``; raise a PartitionError if a value among them holds several tensors."""
    if len(acts) != count:
        raise PartitionError(
            f"{count} values cross this cut, but {len(acts)} tensors, for one of the values is a list or a tuple; cut "
            "elsewhere, or take it apart where it is made"
        )
    return acts


def shape_token(x: Tensor) -> Tensor:
    """Return a tensor [..., 0] without elements that carries shape, dtype and device of ``x`` [...]."""
    return x.detach().new_empty((*x.shape, 0))


def shape_proxy(shape_token: Tensor) -> Tensor:
    """Return a tensor [...] of one element in memory, in place of the one that ``shape_token`` [..., 0] was made of."""
    return shape_token.detach().new_zeros(()).expand(shape_token.shape[:-1])


def _compiled(piece: StageModule, graph: fx.Graph) -> Callable[[nn.Module, Any], Any]:
    graph.lint()
    # The class that torch.fx generates; its instance is not used, because it would hold the state a second time.
    try:
        return type(fx.GraphModule(piece, graph)).forward
    except SyntaxError as error:
        line = " ".join((error.text or "").split())
        raise PartitionError(
            f"the model cannot be written down as Python ({line}): a module or tensor of it has a name that Python "
            "keeps for itself, like 'for'; rename it"
        ) from error
