"""A model's forward as one list of operations, read by torch.fx.

Values of three kinds cross a cut in three ways. *Tensors* are sent. *Shapes* (sizes,
numbers of dimensions, dtypes, and what Python computes from them) are computed again wherever they are needed.
*Constants* (parameters, buffers, and what is computed from nothing else, like a table of position biases) are computed
where they are first used.
"""

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from adl_dist.partition.tracer import IN_PLACE, symbolic

_SHAPE_ATTRIBUTES = {"shape", "ndim", "dtype", "device", "is_cuda", "layout"}
_SHAPE_METHODS = {"size", "dim", "ndimension", "numel", "nelement", "is_floating_point", "element_size", "type"}
_OF_PYTHON = {"_operator", "builtins", "math"}
# What computes nothing worth a unit of its own: views, bookkeeping, containers.
_LIGHT = {
    *("getitem", "getattr", "flatten", "reshape", "view", "view_as", "permute", "transpose", "movedim", "contiguous"),
    *("expand", "expand_as", "squeeze", "unsqueeze", "chunk", "split", "unbind", "narrow", "select", "detach", "to"),
    *("float", "type_as", "_assert", "unflatten", "swapaxes"),
}


@dataclass(frozen=True)
class Trace:
    """One forward, with one placeholder, its input."""

    key: tuple[Any, ...]  # what two traces of equal meaning have in common
    input: fx.Node
    result: Any  # the returned nodes, in whatever structure
    steps: list[fx.Node]  # that compute tensors, in an order in which they can run, without shapes
    shapes: set[fx.Node]  # that compute shapes
    constants: set[fx.Node]  # steps that may be moved to where they are first used
    independent: set[fx.Node]  # all steps that do not depend on the input
    unlike: set[nn.Module]  # modules that stay in the other mode: the model's own ``train()`` wants it so


def read(model: nn.Module, *, granularity: str) -> tuple[Trace, Trace]:
    """Read the forward of ``model`` in training and in evaluation; one and the same trace twice if they agree.

    At granularity ``layer`` down to single layers and operations; at ``block`` no further than what the model and its
    plain Sequentials call.

    Raises:
        PartitionError: it cannot be traced; names the line.
    """
    modes = {module: module.training for module in model.modules()}
    try:
        with torch.enable_grad():
            training = _trace(model.train(), granularity)
        with torch.no_grad():
            evaluation = _trace(model.eval(), granularity)
    finally:
        for module, mode in modes.items():
            module.training = mode
    return training, training if training.key == evaluation.key else evaluation


def is_light(node: fx.Node) -> bool:
    """Return whether ``node`` computes too little to be worth a unit of its own."""
    if node.op == "call_module":
        return False
    return node.op == "get_attr" or _function_name(node) in _LIGHT or isinstance(node.target, type)


def _function_name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def _trace(model: nn.Module, granularity: str) -> Trace:
    graph = symbolic(model, granularity=granularity)
    kinds, place = _kinds(graph), {node: i for i, node in enumerate(graph.nodes)}
    unlike = {module for module in model.modules() if module.training != model.training}

    def plain(value: Any) -> str:
        return repr(fx.node.map_arg(value, lambda node: f"%{place[node]}"))

    independent: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op != "placeholder" and independent.issuperset(node.all_input_nodes):
            independent.add(node)
    (result,) = next(node for node in graph.nodes if node.op == "output").args
    return Trace(
        key=([(n.op, n.target, plain(n.args), plain(n.kwargs)) for n in graph.nodes], unlike),
        input=next(iter(graph.nodes)),
        result=result,
        steps=_steps(graph, kinds),
        shapes={node for node, kind in kinds.items() if kind == "shape"},
        constants={node for node, kind in kinds.items() if kind == "constant"},
        independent=independent,
        unlike=unlike,
    )


def _kinds(graph: fx.Graph) -> dict[fx.Node, str]:
    kinds: dict[fx.Node, str] = {}
    written = _written_attributes(graph)
    for node in graph.nodes:
        kinds_in = {kinds[n] for n in node.all_input_nodes}
        if node.op in ("placeholder", "output", "call_module") or node.target is torch._assert or node in written:
            kinds[node] = "tensor"
        elif node.op == "get_attr" or (kinds_in <= {"constant"} and not _writes(node)):
            kinds[node] = "constant"
        elif _asks_for_shape(node) or (
            kinds_in == {"shape"}
            and (node.op == "call_method" or getattr(node.target, "__module__", None) in _OF_PYTHON)
        ):
            kinds[node] = "shape"
        else:
            kinds[node] = "tensor"
    return kinds


def _writes(node: fx.Node) -> bool:
    """Return whether ``node`` writes to an existing tensor, and so has its place."""
    if node.op not in ("call_function", "call_method"):
        return False
    name = _function_name(node)
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name in (*IN_PLACE, "setitem") or bool(node.kwargs.get("inplace")) or "out" in node.kwargs


def _written_attributes(graph: fx.Graph) -> set[fx.Node]:
    """Return parameters and buffers that the forward writes to: values computed from one have their place."""
    written: set[fx.Node] = set()
    for node in graph.nodes:
        if _writes(node):
            waiting = [node.kwargs.get("out", node.args[0] if node.args else None)]
            while waiting:
                node_in = waiting.pop()
                if isinstance(node_in, fx.Node) and node_in not in written:
                    if node_in.op == "get_attr":
                        written.add(node_in)
                    waiting += node_in.all_input_nodes if is_light(node_in) or _writes(node_in) else []
    return written


def _asks_for_shape(node: fx.Node) -> bool:
    if node.op == "call_method":
        asks = node.target != "type" or len(node.args) + len(node.kwargs) == 1  # with a dtype, it converts
        return asks and node.target in _SHAPE_METHODS and len(node.all_input_nodes) == 1
    return node.op == "call_function" and node.target is getattr and node.args[1] in _SHAPE_ATTRIBUTES


def _steps(graph: fx.Graph, kinds: Mapping[fx.Node, str]) -> list[fx.Node]:
    steps: list[fx.Node] = []
    taken: set[fx.Node] = set()

    def take(node: fx.Node) -> None:
        if node in taken or node.op in ("placeholder", "output") or kinds[node] == "shape":
            return
        taken.add(node)
        for source in node.all_input_nodes:  # constants stand where they are first used
            take(source)
        steps.append(node)
        for user in node.users:  # what a layer returns is taken apart at once, so that no container crosses a cut
            part = user.target in (operator.getitem, getattr) and user.args[0] is node
            if part and type(user.args[1]) in (int, str):
                take(user)

    for node in graph.nodes:
        if node.op == "output":  # it may return a constant
            for source in node.all_input_nodes:
                take(source)
        elif kinds[node] == "tensor":
            take(node)
    return steps
