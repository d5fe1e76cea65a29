"""State that is no buffer and that a forward moves: its replay meets it as it was, and does not move it again."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from adl_dist.errors import ConfigError
from adl_dist.partition.module_state import ModuleState
from adl_dist.partition.state_walk import TENSORS, memory_of
from adl_dist.stage.versions import swap
from adl_dist.training.differences import largest_difference
from adl_dist.training.samples import MicroBatch
from adl_dist.training.stage_chain import StageChain

ROUNDING = 8  # units in the last place of the largest element: what normalising a weight again changes


def remembered(module: nn.Module, loss_fn: Any) -> Callable[[], AbstractContextManager[None]]:
    """Return what a replay of a forward of now has to run in: with plain tensors, counters and generators as they are.

    ``loss_fn`` is replayed, too, where there is a loss. Trained parameters and buffers are left alone.
    """
    registered = {memory_of(p) for p in module.parameters() if p.requires_grad} | {*map(memory_of, module.buffers())}
    state_of = partial(ModuleState.of, module, function=loss_fn, wanted=lambda key: key not in registered)
    then = state_of()

    @contextmanager
    def as_then() -> Iterator[None]:
        now = state_of()
        moved = [one for one in then.changes() if one.kind in TENSORS]
        if len({one.key for one in moved}) < len(moved):
            raise ConfigError(
                f"{moved[0].names[0]} shares its memory with another tensor that is no buffer, and a forward that is "
                "replayed moves it; register it as a buffer, or choose a method that replays none"
            )
        # The inside of each is exchanged, not its values: a graph may need those of now.
        tensors = [one.look() for one in moved]
        copies = [then.copies[id(tensor)] for tensor in tensors]
        then.restore(tensors=False)
        swap(tensors, copies)
        try:
            yield
        finally:
            swap(tensors, copies)
            now.restore(tensors=False)

    return as_then


def check_replays(chain: StageChain, states: Sequence[ModuleState], batch: MicroBatch) -> None:
    """Refuse that a replay would write to a weight once more: one that is trained has no older values to replay with.

    All is as at the start, of which ``states`` tell. A weight may be written to if that changes nothing the second
    time, like one that is clamped.

    Raises:
        ConfigError: it would; names the weight.
    """
    chain.forward(batch)
    written = [
        (k, one)
        for k, state in enumerate(states)
        for one in state.changes()
        if one.kind == "parameter" and one.look().requires_grad
    ]
    if not written:
        return
    before = [one.look().detach().clone() for _, one in written]
    chain.forward(batch)
    for (k, one), values in zip(written, before, strict=True):
        rounding = ROUNDING * torch.finfo(values.dtype).eps * float(values.abs().max())
        if largest_difference(one.look().detach(), values) > rounding:
            where = chain.homes.places[k]
            raise ConfigError(
                f"the forward of {where} changes its weight '{one.names[0]}' each time, and this method runs it twice "
                "for a micro-batch; choose a method that runs it once "
                "(method.recompute=never), or change the weight elsewhere, for example in the optimizer"
            )
