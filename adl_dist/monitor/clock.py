"""One clock for all processes: that of rank 0, read with ``time.perf_counter``."""

import os
import time
from pathlib import Path

import torch.distributed.rpc as rpc

from adl_dist.distributed.rpc_errors import Call
from adl_dist.distributed.world import COORDINATOR_RANK, World, name_of

ROUNDS = 20  # of which the quickest says most

Told = tuple[str, float]


def seconds_to_rank_0(world: World) -> float:
    """What to add to this process's clock for rank 0's; 0 on rank 0's own machine, whose processes share one.

    Otherwise rank 0 is asked over the control plane, and what it tells is taken for the middle of the quickest round
    trip; so the error is at most half of that. Clocks drift apart by microseconds per second: ask now and then.

    Raises:
        ChannelError: rank 0 is gone, or does not answer in time.
    """
    if world.rank == COORDINATOR_RANK:
        return 0.0
    quickest, shift = float("inf"), 0.0
    for _ in range(ROUNDS):
        asked = time.perf_counter()
        whose, theirs = _ask()
        answered = time.perf_counter()
        if whose == _whose_clock():
            return 0.0
        if answered - asked < quickest:
            quickest, shift = answered - asked, theirs - (asked + answered) / 2
    return shift


def _ask() -> Told:
    call: Call[Told] = Call(
        "rank 0", lambda limit: rpc.rpc_async(name_of(COORDINATOR_RANK), _tell, timeout=limit), 60.0
    )
    return call.wait()


def _tell() -> Told:
    return _whose_clock(), time.perf_counter()


def _whose_clock() -> str:
    """The same for two processes only if they read the same clock: one kernel since it started, one time namespace."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/time')}"
    except OSError:  # no Linux, or an old one: nothing is known to be shared but this process
        return f"process {os.getpid()} of {os.uname().nodename}"
