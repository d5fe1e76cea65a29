"""Agreement through the store before the first tensor is sent.

Every rank then holds the whole model, and tries it out with the same samples, so each finds by itself which tensors are
sent where. Only these samples, a cut that rank 0 has measured, and values that must be equal on all ranks go through
the store. A rank that fails publishes its error, so that the others end with the same one; in gloo a mismatch would
abort the process.
"""

import atexit
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from textwrap import shorten
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from adl_dist.distributed.world import World, disconnect
from adl_dist.errors import AdlError, ChannelError, ConfigError, StageFailed, message_of
from adl_dist.report import announced
from adl_dist.report.runs import flatten

TURNS_AHEAD = 64  # more than a call still has, when an error ends it
NUM_SAMPLED = 4  # elements of a tensor


def sampled(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, list[float]]:
    """Return a few elements of each tensor by name, to compare random numbers."""
    samples = {}
    for name, tensor in tensors:
        if tensor.layout is torch.strided and tensor.numel() and not tensor.is_meta and not tensor.is_quantized:
            flat = tensor.detach().flatten()
            some = flat[:: max(1, len(flat) // NUM_SAMPLED)][:NUM_SAMPLED].cpu()
            some = some.abs() if some.is_complex() else some
            samples[name] = torch.nan_to_num(some.double()).tolist()
    return samples


class Agreement:
    """The values that ranks publish in the store of one call, in turns.

    Every rank makes the same turns in the same order. A turn raises StageFailed if a rank that it waits for has failed,
    and ChannelError if that rank does not answer in time.
    """

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        """Begin with the first turn of ``size`` ranks, of which this is ``rank``."""
        self.rank, self.size = rank, size
        self._store, self._turn = store, 0

    def all(self, value: Any, *, call: str = "") -> list[Any]:
        """Publish ``value``, and return the values of all ranks.

        If a call of the trainer begins with this turn, ``call`` is its name, for messages.
        """
        self._turn += 1
        self._publish({"value": value})
        return [self._read(other, call) for other in range(self.size)]

    def first(self, value: Any = None) -> Any:
        """Return the ``value`` of rank 0; the values of other ranks are ignored."""
        self._turn += 1
        if self.rank == 0:
            self._publish({"value": value})
        return self._read(0)

    @contextmanager
    def propagate_errors(self) -> Iterator[None]:
        """Publish an error of the block to the ranks that wait for this one."""
        try:
            yield
        except StageFailed:
            raise
        except BaseException as error:
            code = error.exit_code if isinstance(error, AdlError) else 1
            with suppress(ChannelError):  # rank 0, whose store it may be, is gone
                for _ in range(TURNS_AHEAD):
                    self.fail(message_of(error, self.rank), code)
            disconnect(in_order=False)
            raise

    def fail(self, text: str, exit_code: int) -> None:
        """Publish an error in place of the value of the next turn."""
        self._turn += 1
        self._publish({"failed": text, "exit_code": exit_code})

    def _publish(self, message: dict[str, Any]) -> None:
        with _store_error_context(0):
            self._store.set(f"{self._turn}/{self.rank}", json.dumps(message))

    def _read(self, other: int, call: str = "") -> Any:
        text, says = f"rank {self.rank} waits for rank {other}", self.rank == 0
        if call:
            text = (
                f"rank {self.rank} waits in {call}() for rank {other}, which has not called it: call it on every rank"
            )
            says |= (self.rank, other) == (1, 0)
        with _store_error_context(other), announced(text) if says else nullcontext():
            message = json.loads(self._store.get(f"{self._turn}/{other}"))
        if "failed" in message:
            raise StageFailed(message["failed"], exit_code=message["exit_code"])
        return message["value"]


def start_call(world: World, name: str) -> Agreement:
    """Wait until every rank has made the call; return its Agreement.

    Raises:
        ConfigError: If a rank makes a different call.
        ChannelError: If a rank makes no call in time.
        StageFailed: If a rank fails before its call.
    """
    if world.is_distributed and not world.num_jobs:
        atexit.register(_leave, world)
    agreement = Agreement(world.fresh_store(), world.rank, world.size)
    for other, called in enumerate(agreement.all(name, call=name)):
        if called != name:
            raise ConfigError(
                f"rank {world.rank} calls {name}(), but rank {other} {called}(): every rank must make the same calls, "
                "also if only rank 0 uses the result"
            )
    return agreement


def _leave(world: World) -> None:
    """Tell the ranks that make a further call that this rank has ended."""
    text = (
        f"rank {world.rank} has ended without this call; every rank must make it, also if only rank 0 uses the result"
    )
    if not world.has_left:
        with suppress(ChannelError):
            Agreement(world.fresh_store(), world.rank, world.size).fail(text, ConfigError.exit_code)


def check_consistent(
    agreement: Agreement,
    values: Mapping[str, Any],
    initial: Mapping[str, Sequence[float]] = MappingProxyType({}),
) -> None:
    """Refuse to start if ranks have different jobs or cuts.

    ``initial`` are a few elements of each initial weight: other processors may round a random number differently in its
    last digits, but a different seed gives a different number.

    Raises:
        ConfigError: If two ranks differ; the text names them and the first different entry.
    """
    rank, published = agreement.rank, agreement.all({"values": values, "initial": dict(initial)})
    mine = flatten(published[rank]["values"])
    for other, message in enumerate(published):
        if other == rank or 0 not in (rank, other):
            continue
        theirs = flatten(message["values"])
        for name in (n for n in {**mine, **theirs} if mine.get(n, "missing") != theirs.get(n, "missing")):
            both = (values.get(name, "missing") for values in (mine, theirs))
            own, foreign = (shorten(str(value), 60, placeholder="...") for value in both)
            raise ConfigError(
                f"the ranks were not given the same job: {name} is {own} on rank {rank} and {foreign} on rank {other}; "
                "start all ranks with one command, and let all make the same"
            )
        for name, elements in initial.items():
            others = message["initial"].get(name, elements)  # without any, its weights come from a checkpoint
            if not all(map(partial(math.isclose, rel_tol=1e-3, abs_tol=1e-6), elements, others)):
                raise ConfigError(
                    f"rank {rank} and rank {other} do not begin with the same weights: the initial {name} differs; "
                    "call torch.manual_seed(...) before the model is built, on every rank"
                )


@contextmanager
def _store_error_context(rank: int) -> Iterator[None]:
    """Turn an error of the store inside into a ChannelError about ``rank``."""
    # The store ends with the process that holds it, rank 0's unless torchrun's: that may have ended with an error.
    try:
        yield
    except RuntimeError:
        text = (
            f"no word from rank {rank}: its own log, logs/rank{rank}.log, says why, or it has not made the same call; "
            "every rank must make it, also if only rank 0 saves the result"
        )
        raise ChannelError(text) from None
