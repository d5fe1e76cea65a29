#!/usr/bin/env python3
"""What a message between two processes costs through this project's channels, and through bare isend and irecv.

    torchrun --rdzv-backend=adl-dist --nnodes=1 --nproc-per-node=2 benchmarks/messages.py [ROUNDS]

Both play ping-pong on the same process groups, one for each direction: rank 0 sends, rank 1 answers with as much. Bare:
isend, irecv, wait. Ours: ProcessSender and ProcessReceiver, which check what is sent, post receives ahead and keep
buffers until they have left. They take turns; medians of the rounds.
"""

import os
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from adl_dist.transport.process import Edge, ProcessReceiver, ProcessSender, connect_edges
from adl_dist.transport.spec import Specs, TensorSpec
from adl_dist.transport.wire import Wire

NUM_MESSAGES = {8: 2000, 64 << 10: 1000, 2 << 20: 200}  # bytes -> there and back, so often
CPU = torch.device("cpu")


def bare(there: Edge, back: Edge, num_bytes: int, number: int) -> None:
    """Rank 0 sends ``number`` messages and gets one back for each."""
    message = torch.zeros(num_bytes // 4)
    for _ in range(number):
        if dist.get_rank() == 0:
            sent = dist.isend(message, 1, group=there.group)
            got = torch.empty_like(message)
            dist.irecv(got, 1, group=back.group).wait()
        else:
            got = torch.empty_like(message)
            dist.irecv(got, 0, group=there.group).wait()
            sent = dist.isend(got, 0, group=back.group)
        sent.wait()


def ours(there: Edge, back: Edge, num_bytes: int, number: int) -> None:
    """Exchange the same messages through the channels of an edge."""
    specs = Specs.always([TensorSpec((num_bytes // 4,), "float32")])
    rank = dist.get_rank()
    out, into = (there, back) if rank == 0 else (back, there)
    sender = ProcessSender(out, Wire(specs, "act"), max_pending=4, max_pending_in_evaluation=4)
    receiver = ProcessReceiver(into, Wire(specs, "act"), device=CPU)
    sizes = [1] * number
    sender.open(sizes, training=True)
    receiver.open(sizes, range(number), training=True)
    message: tuple[Tensor, ...] = (torch.zeros(1, num_bytes // 4),)
    for b in range(number):
        if rank == 0:
            sender.send(b, message)
            receiver.recv(b)
        else:
            sender.send(b, receiver.recv(b))
    sender.drain()


def seconds(play: Callable[[Edge, Edge, int, int], None], there: Edge, back: Edge, num_bytes: int) -> float:
    """Return the seconds of one message."""
    number = NUM_MESSAGES[num_bytes]
    dist.barrier()
    start = time.perf_counter()
    play(there, back, num_bytes, number)
    return (time.perf_counter() - start) / (2 * number)


def main() -> None:
    """Measure both by turns, and print medians."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo")
    edges = connect_edges([("act", 0, 1), ("grad", 1, 0)], backend="gloo", device=CPU, timeout=timedelta(seconds=60))
    there, back = edges["act", 0], edges["grad", 1]
    if dist.get_rank() == 0:
        print(f"us per message, medians of {rounds} rounds (least .. most)")
        print(f"{'bytes':>9}  {'bare isend, irecv':<26}{'our channels':<26}ratio, median (least .. most)")
    for num_bytes in NUM_MESSAGES:
        pairs = [[seconds(play, there, back, num_bytes) * 1e6 for play in (bare, ours)] for _ in range(rounds + 1)][1:]
        if dist.get_rank() == 0:
            shown = [f"{statistics.median(c):.1f} ({min(c):.1f} .. {max(c):.1f})" for c in zip(*pairs, strict=True)]
            ratios = [b / a for a, b in pairs]
            text = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} .. {max(ratios):.2f})"
            print(f"{num_bytes:>9,}  {shown[0]:<26}{shown[1]:<26}{text}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
