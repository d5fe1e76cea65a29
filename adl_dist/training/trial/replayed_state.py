"""State that is no buffer and that a forward moves: its replay meets it as it was, and does not move it again."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from adl_dist.errors import ConfigError
from adl_dist.memory import memory_of, shared_memory
from adl_dist.partition.module_state import ModuleState
from adl_dist.partition.state_walk import TENSORS, Key, are_alike, values_of
from adl_dist.stage.calls import takes_gradient
from adl_dist.stage.versions import swap
from adl_dist.training.trial.differences import largest_difference
from adl_dist.training.trial.samples import MicroBatch
from adl_dist.training.trial.snapshot import Snapshot
from adl_dist.training.trial.stage_chain import StageChain

ROUNDING = 8  # units in the last place of the largest element


def remembered(module: nn.Module, loss_fn: Any) -> Callable[[], AbstractContextManager[None]]:
    """Return what a replay of a forward of now has to run in: with plain tensors, counters and generators as they are.

    ``loss_fn`` is replayed, too, where there is a loss. Trained parameters and buffers are left alone.
    """
    registered = {memory_of(p) for p in module.parameters() if p.requires_grad} | {*map(memory_of, module.buffers())}
    state_of = partial(ModuleState.of, module, functions={"loss_fn": loss_fn}, wanted=lambda key: key not in registered)
    then = state_of()

    @contextmanager
    def as_then() -> Iterator[None]:
        now = state_of()
        moved = [one for one in then.changes() if one.kind in TENSORS]
        numbers = shared_memory(one.look() for one in moved)
        if len({*numbers.values()}) < len(numbers):
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


def asking_for_graph(chain: StageChain, start: Snapshot, batch: MicroBatch) -> frozenset[int]:
    """Return the stages that do something else where no gradients are wanted, which is where a first forward runs.

    ``torch.is_grad_enabled()`` tells a loss, for example, whether it is trained with. All weights of ``start`` are left
    as after one forward of ``batch`` in training.
    """
    found = []
    for graph in (False, True):
        start.begin()
        passage = chain.forward(batch, graph=graph)
        found.append((passage, _moved(start)))
    (first, moved), (replay, moved_again) = found
    unlike = {k for k, _ in moved.keys() ^ moved_again.keys()}
    unlike |= {k for k, key in moved.keys() & moved_again.keys() if not are_alike(moved[k, key], moved_again[k, key])}
    unlike |= {k for k, ends in enumerate(zip(first.ends, replay.ends, strict=True)) if not all(map(_is_close, *ends))}
    return frozenset(unlike)


def check_weights(chain: StageChain, start: Snapshot, batch: MicroBatch) -> None:
    """Refuse that a replay would write to a trained weight once more: there are no older values to replay with.

    ``batch`` has gone forward once. A weight may be written to if that changes nothing the second time, like one that
    is clamped.

    Raises:
        ConfigError: it would; names stage and weight.
    """
    written = [
        (k, one)
        for k, state in enumerate(start.of_stages)
        for one in state.changes()
        if one.kind == "parameter" and one.look().requires_grad
    ]
    before = [one.look().detach().clone() for _, one in written]
    if written:
        chain.forward(batch)
    for (k, one), values in zip(written, before, strict=True):
        if not _is_close(one.look().detach(), values):
            where = chain.homes.places[k]
            raise ConfigError(
                f"the forward of {where} changes its weight '{one.names[0]}' each time, and this method runs it twice "
                "for a micro-batch; choose a method that runs it once (method.recompute=never), or change the weight "
                "elsewhere, for example in the optimizer"
            )


def _moved(start: Snapshot) -> dict[tuple[int, Key], Any]:
    """Return the values of what has changed since the start, by stage and key."""
    changes = ((k, one) for k, state in enumerate(start.of_stages) for one in state.changes())
    return {(k, one.key): values_of(one.look()) for k, one in changes}


def _is_close(one: Tensor, other: Tensor) -> bool:
    """Return whether two results differ by rounding at most."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not takes_gradient(one) or not one.numel():
        return torch.equal(one, other)
    rounding = ROUNDING * torch.finfo(one.dtype).eps * float(one.detach().abs().nan_to_num(0.0).max())
    return largest_difference(one.detach(), other.detach()) <= rounding
