"""Agreement through the store before the first tensor is sent.

All hold the whole model then, and try it out with the same samples, so each finds by itself what travels where. Through
the store go only those samples, a cut that rank 0 has measured, and what all must have in common. A rank that fails
publishes why, so that the others end with the same error; in gloo a mismatch would abort the process.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from textwrap import shorten
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from adl_dist.distributed.world import World, disconnect, launched_rank
from adl_dist.errors import AdlError, ChannelError, ConfigError, StageFailed, message_of
from adl_dist.report import announced

# Keys of what rank 0 alone knows: a cut that it has measured, in the plain memory format and in channels_last, of which
# it may try both; and the run's length.
SIZES, LENGTH = ("sizes", "sizes, channels_last"), "length"
# These begin the keys of what each rank has made, and of what it has measured of links.
MADE, MEASURED = "made", "links"
CALL = "call"  # begins the keys of the method that each rank calls
SAMPLES = "samples"  # the key of what rank 0 has taken from the data
FOLDER, SEEN = "folder", "seen"  # these begin the keys of rank 0's run folder, and of the ranks that see it
ROUNDS = "given", "found"  # of :func:`check_consistent`
NUM_SAMPLED = 4  # elements of a tensor


def sampled(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, list[float]]:
    """Return a few elements of each tensor, to compare random numbers."""
    samples = {}
    for name, tensor in tensors:
        if tensor.layout is torch.strided and tensor.numel() and not tensor.is_meta and not tensor.is_quantized:
            flat = tensor.detach().flatten()
            some = flat[:: max(1, len(flat) // NUM_SAMPLED)][:NUM_SAMPLED].cpu()
            some = some.abs() if some.is_complex() else some
            samples[name] = torch.nan_to_num(some.double()).tolist()
    return samples


def are_close(some: Sequence[float], others: Sequence[float]) -> bool:
    """Return whether two samples are equal up to rounding."""
    pairs = zip(some, others, strict=True)
    return all(math.isclose(a, b, rel_tol=1e-3, abs_tol=1e-6) for a, b in pairs)


def check_consistent(
    store: dist.Store,
    rank: int,
    size: int,
    values: Mapping[str, Any],
    *,
    found: bool,
    initial: Mapping[str, Sequence[float]] = MappingProxyType({}),
) -> None:
    """Refuse to start if ranks have different jobs or trial results.

    ``initial`` are a few elements of each initial weight: other processors may round a random number differently in its
    last digits, but a different seed gives a different number.

    Raises:
        ConfigError: If two ranks differ; the text names them and the first different entry.
        StageFailed, ChannelError: If another rank has failed, or does not answer.
    """
    published = exchange(store, ROUNDS[found], rank, size, {"values": values, "initial": dict(initial)})
    mine = published[rank]["values"]
    for other, message in enumerate(published):
        if other == rank or 0 not in (rank, other):
            continue
        if (difference := first_difference(mine, message["values"])) is not None:
            name, *both = difference
            here, there = (shorten(str(value), 60, placeholder="...") for value in both)
            what, cause = "were not given the same job", "start all ranks with one command, and let all make the same"
            if found:
                what, cause = "do not find the same at the start", "the model computes something else in each process"
            raise ConfigError(f"rank {rank} and rank {other} {what}: {name} is {here} here and {there} there; {cause}")
        for name, elements in initial.items():
            theirs = message["initial"].get(name, elements)  # without any, its weights come from a checkpoint
            if not are_close(elements, theirs):
                raise ConfigError(
                    f"rank {rank} and rank {other} do not begin with the same weights: the initial {name} differs; "
                    "call torch.manual_seed(...) before the model is built, on every rank"
                )


def first_difference(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> tuple[str, Any, Any] | None:
    """Return the dotted name and both values of the first difference."""
    for name in {**mine, **theirs}:
        here, there = mine.get(name, "missing"), theirs.get(name, "missing")
        if here == there:
            continue
        if isinstance(here, dict) and isinstance(there, dict) and (inner := first_difference(here, there)):
            return f"{name} {inner[0]}" if name == "model" else f"{name}.{inner[0]}", *inner[1:]
        return name, here, there
    return None


def start_call(world: World, name: str) -> dist.Store:
    """Return the store of a call that every rank makes, once all have made it.

    Raises:
        ConfigError: If another rank makes another call.
        ChannelError: If another rank makes none in time.
    """
    store, rank = world.fresh_store(), world.rank
    if not world.is_distributed:
        return store
    with store_error_context(0):
        store.set(f"{CALL}/{rank}", name)
    for other in range(world.size):
        text = f"rank {rank} waits in {name}() for rank {other}, which has not called it: call it on every rank"
        says = rank == 0 or (rank, other) == (1, 0)
        with store_error_context(other), announced(text) if says else nullcontext():
            called = bytes(store.get(f"{CALL}/{other}")).decode()
        if called != name:
            raise ConfigError(
                f"rank {rank} calls {name}(), but rank {other} {called}(): every rank must make the same calls, also "
                "if only rank 0 uses the result"
            )
    return store


def exchange(store: dist.Store, key: str, rank: int, size: int, value: Any) -> list[Any]:
    """Publish ``value`` as ``key``, and return the values of all ranks.

    Raises:
        StageFailed, ChannelError: If a rank has failed, or does not answer.
    """
    with store_error_context(0):
        store.set(f"{key}/{rank}", json.dumps({"value": value}))
    return [read(store, f"{key}/{other}", other)["value"] for other in range(size)]


def publish_error(store: dist.Store, error: BaseException, *, rank: int) -> None:
    """Publish why there is no agreement to those that wait for ``rank``."""
    code = error.exit_code if isinstance(error, AdlError) else 1
    message = json.dumps({"failed": message_of(error, rank), "exit_code": code})
    with suppress(RuntimeError):  # rank 0, whose store it may be, is gone
        turns = *ROUNDS, MADE, MEASURED, FOLDER, SEEN
        for key in [f"{turn}/{rank}" for turn in turns] + [*SIZES, LENGTH, SAMPLES] * (rank == 0):
            store.set(key, message)


@contextmanager
def propagate_errors(store: dist.Store, *, rank: int) -> Iterator[None]:
    """Report an error inside to the ranks that would wait for this one."""
    try:
        yield
    except StageFailed:
        raise
    except BaseException as error:
        publish_error(store, error, rank=rank)
        disconnect(in_order=False)
        raise


def read(store: dist.Store, key: str, rank: int) -> dict[str, Any]:
    """Return the value of ``key`` from ``rank``.

    Raises:
        StageFailed: If that rank has failed, and published why.
        ChannelError: If there is no answer in time.
    """
    return dict(json.loads(read_bytes(store, key, rank)))


def read_bytes(store: dist.Store, key: str, rank: int) -> bytes:
    """Return the bytes of ``key`` from ``rank``; raise as :func:`read`."""
    is_rank_0 = launched_rank() == 0
    with store_error_context(rank), announced(f"rank 0 waits for rank {rank}") if is_rank_0 else nullcontext():
        message = bytes(store.get(key))
    if message.startswith(b'{"failed"'):
        failure = json.loads(message)
        raise StageFailed(failure["failed"], exit_code=failure["exit_code"])
    return message


@contextmanager
def store_error_context(rank: int) -> Iterator[None]:
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
