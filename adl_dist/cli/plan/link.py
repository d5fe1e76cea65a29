"""The measured cost of a message between two local processes (gloo)."""

import os
import statistics
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist

from adl_dist.cli.subprocesses import apart
from adl_dist.distributed.network import GLOO, loopback
from adl_dist.errors import ChannelError, in_one_line
from adl_dist.transport.coding_speed import CACHES

SMALL, LARGE = 8, 4 << 20  # bytes
ROUNDS = 20
SECONDS = 60.0  # after which the measurement is given up
# PCIe 4, cautiously, of each GPU to all others; a link between GPUs is not measured
GPU_LINK = {"bandwidth": 12e9, "latency": 1e-5, "shares_link": True}


def link_figures(device: str) -> dict[str, Any]:
    """Return the keyword arguments of a :class:`Machine` for these links.

    On CPUs two processes of this machine measure it, which takes a few seconds, mostly to start them.

    Raises:
        ChannelError: If they did not finish in time.
    """
    if device == "cuda":
        return GPU_LINK
    with tempfile.TemporaryDirectory(prefix="adl-dist-link-") as folder:
        try:
            return apart(measure, [(folder, rank) for rank in range(2)], seconds=SECONDS)[0]
        except Exception as error:
            raise ChannelError(
                f"two processes could not send each other messages over loopback ({in_one_line(error)}); describe the "
                "link instead: --links 8gbit,0.1ms"
            ) from error


def measure(folder: str, rank: int) -> dict[str, float]:
    """Exchange messages with the other process, and return their costs."""
    torch.set_num_threads(1)
    if (interface := loopback()) is not None:
        os.environ[GLOO] = interface
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    elsewhere = torch.zeros(CACHES, dtype=torch.uint8)

    def exchange(num_bytes: int, *, works: bool) -> tuple[float, float]:
        """Return wall-clock and busy seconds of one message, from round trips.

        They are half of the least and of the median round trip. With ``works`` each does something else before, as a
        stage does, so that nothing of it is in the caches.
        """
        message, walls, busy = torch.zeros(num_bytes, dtype=torch.uint8), [], []
        for _ in range(ROUNDS):
            if works:
                elsewhere.add_(1)
            wall, cpu = time.perf_counter(), time.process_time()
            if rank == 0:
                dist.send(message, 1)
                dist.recv(message, 1)
            else:
                dist.recv(message, 0)
                dist.send(message, 0)
            walls.append((time.perf_counter() - wall) / 2)
            busy.append((time.process_time() - cpu) / 2)
        return min(walls), statistics.median(busy)

    exchange(LARGE, works=False)
    (latency, _), (wall, _) = exchange(SMALL, works=False), exchange(LARGE, works=False)
    (_, per_message), (_, cpu) = exchange(SMALL, works=True), exchange(LARGE, works=True)
    dist.destroy_process_group()
    link = {"bandwidth": LARGE / wall, "latency": latency, "seconds_per_message": per_message}
    return {**link, "seconds_per_byte": max(cpu - per_message, 0.0) / LARGE}
