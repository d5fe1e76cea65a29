"""A model's forward as one list of operations, read by torch.fx.

Values of four kinds cross a cut in four ways. *Tensors* are sent. *Shapes* (sizes, numbers of dimensions, dtypes, and
what Python computes from them) are computed again wherever they are needed. So is what is *repeated*: what depends on
shapes and on buffers that no forward moves alone, like positions, masks and the tables of a rotary embedding.
*Constants* (parameters, and what is computed from nothing else) are computed where they are first used.
"""

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from adl_dist.partition.module_state import modes_kept
from adl_dist.partition.nodes import asks_for_shape, is_check, is_light, is_of_python, is_part, may_repeat, writes
from adl_dist.partition.ran import Pair, Samples
from adl_dist.partition.state_walk import CAN_CROSS
from adl_dist.partition.ties import never_moved
from adl_dist.partition.tracer import symbolic
from adl_dist.partition.values import Values
from adl_dist.streams import streams_kept

Reading = tuple[fx.Graph, Values | None]


@dataclass(frozen=True)
class Trace:
    """One forward, with a placeholder for each tensor of its input."""

    key: tuple[Any, ...]  # what two traces of equal meaning have in common
    inputs: list[fx.Node]
    result: Any  # the returned nodes, in whatever structure
    steps: list[fx.Node]  # that compute tensors, in an order in which they can run, without shapes
    shapes: set[fx.Node]  # that compute shapes
    constants: set[fx.Node]  # steps that may be moved to where they are first used
    independent: set[fx.Node]  # all steps that do not depend on the input
    unlike: set[nn.Module]  # modules that stay in the other mode: the model's own ``train()`` wants it so
    repeated: set[fx.Node]  # steps that every stage runs for itself where it needs them
    read_only: frozenset[int]  # the ids of buffers that no forward moves
    uses: Mapping[fx.Node, Iterable[Tensor]]  # what a layer computes with, also what is not registered with it
    unsendable: Mapping[fx.Node, str]  # steps whose values cannot cross a cut, with the reason


def read(
    model: nn.Module, *, granularity: str, samples: Samples | None = None, varies: bool = False
) -> tuple[Trace, Trace]:
    """Read the forward of ``model`` in training and in evaluation; one and the same trace twice if they agree.

    At granularity ``layer`` down to single layers and operations; at ``block`` no further than what the model and its
    plain Sequentials call. ``samples``: real inputs of two different batch sizes, on the model's device, on which its
    parts run once while it is read; None: nothing is known of values. ``varies``: lengths change from one micro-batch
    to another, so what is asked about sizes is asked again each time.

    Raises:
        PartitionError: it cannot be traced; names the line.
    """
    device = samples[0].device if samples is not None else None
    readings, unlike = list[Reading](), []
    with modes_kept(model):
        for mode in (True, False):
            model.train(mode)
            with torch.set_grad_enabled(mode), streams_kept(device):
                like = readings[0][1] if readings else None
                readings.append(symbolic(model, granularity=granularity, samples=samples, like=like, varies=varies))
            unlike.append({module for module in model.modules() if module.training != mode})
    read_only = never_moved(model, _moved(model, readings))
    training, evaluation = [_trace(model, *read, read_only) for read in zip(readings, unlike, strict=True)]
    for _, values in readings:
        if values is not None:
            values.forget()
    return training, training if training.key == evaluation.key else evaluation


def _trace(model: nn.Module, reading: Reading, unlike: set[nn.Module], read_only: frozenset[int]) -> Trace:
    graph, values = reading
    moved = {id(buffer) for buffer in model.buffers()} - read_only
    kinds, place = _kinds(graph, model, moved), {node: i for i, node in enumerate(graph.nodes)}

    def plain(value: Any) -> str:
        return repr(fx.node.map_arg(value, lambda node: f"%{place[node]}"))

    independent: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op != "placeholder" and independent.issuperset(node.all_input_nodes):
            independent.add(node)
    (result,) = next(node for node in graph.nodes if node.op == "output").args
    known = values.known.items() if values is not None else ()
    sizes = values.sizes if values is not None else (0, 0)
    return Trace(
        key=([(n.op, n.target, plain(n.args), plain(n.kwargs)) for n in graph.nodes], unlike),
        inputs=[node for node in graph.nodes if node.op == "placeholder"],
        result=result,
        steps=_steps(graph, kinds),
        shapes={node for node, kind in kinds.items() if kind == "shape"},
        constants={node for node, kind in kinds.items() if kind == "constant"},
        independent=independent,
        unlike=unlike,
        repeated=_repeated(model, reading, kinds, read_only),
        read_only=read_only,
        uses={node: ran.uses for node, ran in values.ran.items()} if values is not None else {},
        unsendable={node: why for node, k in known if (why := unsendable(k.pair, sizes)) is not None},
    )


def _moved(model: nn.Module, readings: Iterable[Reading]) -> set[int]:
    """Return the ids of all buffers that a forward may move; without samples, of all that a layer holds."""
    moved: set[int] = set()
    for graph, values in readings:
        moved |= {buffer for ran in (values.ran.values() if values is not None else ()) for buffer in ran.moved}
        written = _written(graph, values)
        for node in graph.nodes:
            if node.op == "get_attr" and node in written:
                moved.add(id(attrgetter(str(node.target))(model)))
            elif node.op == "call_module" and values is None:
                moved |= {id(buffer) for buffer in model.get_submodule(str(node.target)).buffers()}
    return moved


def _repeated(
    model: nn.Module, reading: Reading, kinds: Mapping[fx.Node, str], read_only: frozenset[int]
) -> set[fx.Node]:
    """Return steps that compute the same wherever they run, from shapes and buffers that stay as they are."""
    graph, values = reading
    repeated, buffers = set[fx.Node](), {id(buffer) for buffer in model.buffers()}
    placed = _written(graph, values) | (values.drawing if values is not None else set())
    for node in graph.nodes:
        if node in placed or kinds[node] == "shape":
            continue
        if node.op == "get_attr":
            held = attrgetter(str(node.target))(model)
            is_parameter = not isinstance(held, Tensor) or isinstance(held, nn.Parameter) or held.requires_grad
            may = not is_parameter and (id(held) in read_only or id(held) not in buffers)
        elif node.op == "call_module":
            may = values is not None and node in values.repeatable
            may = may and all(id(buffer) in read_only for buffer in model.get_submodule(str(node.target)).buffers())
        else:
            may = node.op.startswith("call") and may_repeat(node)
            may = may and all(source in repeated or kinds[source] == "shape" for source in node.all_input_nodes)
        if may:
            repeated.add(node)
    return repeated


def unsendable(pair: Pair, sizes: tuple[int, int]) -> str | None:
    """Return why a value cannot cross a cut; None: it can."""
    for leaves in zip(*map(tree_leaves, pair), strict=False):
        if isinstance(leaves[0], Tensor) and isinstance(leaves[1], Tensor):
            if tuple(tuple(leaf.shape[:1]) for leaf in leaves) != tuple((size,) for size in sizes):
                return f"a tensor {list(leaves[0].shape)} would cross it, whose first dimension is not the batch"
        elif type(leaves[0]) is not type(leaves[1]):
            kinds = [f"{type(leaf).__name__} for {size} samples" for leaf, size in zip(leaves, sizes, strict=True)]
            return f"a {' and a '.join(kinds)} would cross it; what crosses must be of one kind for every batch"
        elif not isinstance(leaves[0], CAN_CROSS) or leaves[0] != leaves[1]:
            return (
                f"a value of type {type(leaves[0]).__name__} would cross it; only tensors, and numbers and texts that "
                "never change, can"
            )
    return None


def _kinds(graph: fx.Graph, model: nn.Module, moved: Set[int]) -> dict[fx.Node, str]:
    kinds: dict[fx.Node, str] = {}
    written = {node for node in _written(graph, None) if node.op == "get_attr"}
    # A layer may move a buffer of its own, which the model reads before, or after, it runs.
    reads = (node for node in graph.nodes if node.op == "get_attr")
    written |= {node for node in reads if id(attrgetter(str(node.target))(model)) in moved}
    for node in graph.nodes:
        kinds_in = {kinds[n] for n in node.all_input_nodes}
        if node.op in ("placeholder", "output", "call_module") or is_check(node) or node in written:
            kinds[node] = "tensor"
        elif node.op == "get_attr" or (kinds_in <= {"constant"} and not writes(node)):
            kinds[node] = "constant"
        elif asks_for_shape(node) or (kinds_in == {"shape"} and is_of_python(node)):
            kinds[node] = "shape"
        else:
            kinds[node] = "tensor"
    return kinds


def _written(graph: fx.Graph, values: Values | None) -> set[fx.Node]:
    """Return what the forward writes to: values computed from one of these have their place."""
    seen: set[fx.Node] = set()
    for node in graph.nodes:
        if writes(node):
            waiting = [node.kwargs.get("out", node.args[0] if node.args else None)]
            while waiting:
                node_in = waiting.pop()
                if isinstance(node_in, fx.Node) and node_in not in seen:
                    seen.add(node_in)
                    waiting += node_in.all_input_nodes if is_light(node_in) or writes(node_in) else []
    return seen | (values.written() if values is not None else set())


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
            if is_part(user, node):
                take(user)

    for node in graph.nodes:
        if node.op == "output":  # it may return a constant
            for source in node.all_input_nodes:
                take(source)
        elif kinds[node] == "tensor":
            take(node)
    return steps
