"""Measure with gloo over loopback what a message between two processes of this machine costs."""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from adl_dist.errors import ChannelError

SMALL, LARGE = 8, 4 << 20  # bytes
ROUNDS = 20
SECONDS = 60.0  # after which the measurement is given up


class Link(NamedTuple):
    """The cost of messages between two processes.

    Attributes:
        bandwidth: bytes per second.
        latency: seconds that an empty message takes.
        seconds_per_byte: that each of the two processes is busy with.
        seconds_per_message: the same for each message, independent of its size.
    """

    bandwidth: float
    latency: float
    seconds_per_byte: float
    seconds_per_message: float


def measure_link() -> Link:
    """Start two processes that send each other messages; this takes a few seconds, mostly to start them.

    Raises:
        ChannelError: they did not finish.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "adl_dist.cli.plan.link", str(Path(folder) / "store")]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        both = [
            subprocess.Popen([*command, str(rank)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            for rank in range(2)
        ]
        try:
            reply, _ = both[0].communicate(timeout=SECONDS)
            both[1].communicate(timeout=SECONDS)
            return Link(*json.loads(reply))
        except (subprocess.TimeoutExpired, ValueError) as error:
            raise ChannelError(
                f"two processes could not send each other messages over loopback ({type(error).__name__}); describe "
                "the link instead: --bandwidth 1e9 --latency 1e-4"
            ) from error
        finally:
            for process in both:
                process.kill()
                process.communicate()


def _measure(store: str, rank: int) -> Link:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)

    def exchange(num_bytes: int) -> tuple[float, float]:
        """Return wall-clock and busy seconds of one message: the least of several round trips, halved."""
        message, walls, busy = torch.zeros(num_bytes, dtype=torch.uint8), [], []
        for _ in range(ROUNDS):
            wall, cpu = time.perf_counter(), time.process_time()
            if rank == 0:
                dist.send(message, 1)
                dist.recv(message, 1)
            else:
                dist.recv(message, 0)
                dist.send(message, 0)
            walls.append((time.perf_counter() - wall) / 2)
            busy.append((time.process_time() - cpu) / 2)
        return min(walls), min(busy)

    exchange(LARGE)
    (latency, per_message), (wall, cpu) = exchange(SMALL), exchange(LARGE)
    dist.destroy_process_group()
    return Link(
        bandwidth=LARGE / wall,
        latency=latency,
        seconds_per_byte=max(cpu - per_message, 0.0) / LARGE,
        seconds_per_message=per_message,
    )


if __name__ == "__main__":
    link = _measure(sys.argv[1], int(sys.argv[2]))
    if sys.argv[2] == "0":
        sys.stdout.write(json.dumps(link))
