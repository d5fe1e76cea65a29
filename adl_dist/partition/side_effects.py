"""What a forward does, while it is read, besides computing: undone, and refused if a cut model would not do it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import fx, nn

from adl_dist.errors import PartitionError
from adl_dist.partition.module_state import ModuleState
from adl_dist.partition.nodes import writes
from adl_dist.partition.stand_in import is_instance
from adl_dist.streams import Streams


@contextmanager
def as_before(model: nn.Module, granularity: str) -> Iterator[None]:
    """Undo the side effects of the forward, and refuse those that a cut model would have to repeat each time."""
    whole = ", or use partition.granularity=block, which leaves blocks as they are" if granularity == "layer" else ""
    device = next((tensor.device for tensor in model.parameters() if tensor.is_cuda), None)
    streams, state = Streams(device), ModuleState.of(model)
    holders = [(name, held, {**held}) for name, m in model.named_modules() for held in (m.__dict__, m._buffers)]
    constants: dict[str, Any] = {}
    try:
        yield
    finally:
        draws = streams.moved()
        streams.restore()
        for name, holder, before in holders:
            for key, value in [*holder.items()]:
                if key.startswith("_tensor_constant") and key not in before:
                    constants[key] = holder.pop(key)
                elif is_instance(value, fx.Proxy) and _is_written(value.node, f"{name}.{key}".lstrip(".")):
                    holder[key] = before[key]
                elif is_instance(value, fx.Proxy) and before.get(key) is None:
                    # What it leaves where nothing was is nothing that a later forward counts on.
                    holder.update({key: None}) if key in before else holder.pop(key)
        changed = state.changed_names()
        state.restore()
        model.__dict__.update(constants)  # the graph reads them
    if draws:
        raise PartitionError(
            f"{type(model).__name__}.forward draws random numbers that do not depend on its input, and tracing would "
            f"draw them once and for all: hide the function that draws them from tracing by torch.fx.wrap{whole}"
        )
    if changed:
        raise PartitionError(
            f"{type(model).__name__}.forward changes {', '.join(changed)}, which a cut model would not: write to "
            f"a buffer in place, or do it in a layer of its own, a module without children{whole}"
        )


def _is_written(node: fx.Node, name: str) -> bool:
    """Return whether ``node`` is the tensor ``name``, written to in place: what self.calls += 1 assigns to self."""
    while writes(node) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node.op == "get_attr" and node.target == name
