"""The measured bandwidth and latency of links between processes.

A message of 8 bytes there and back gives the latency; messages of growing length, until one takes a quarter of a
second, give the bytes per second. Links are measured one after another, from the first stage on.
"""

import time
from collections.abc import Mapping

import torch
import torch.distributed as dist

from adl_dist.errors import ChannelError
from adl_dist.transport.process import Edge

ROUNDS = 10
FIRST, MOST, FACTOR = 1 << 18, 1 << 26, 4  # bytes
LONG_ENOUGH = 0.25  # seconds


def measure_links(
    edges: Mapping[tuple[str, int], Edge], rank: int, device: torch.device
) -> dict[int, tuple[float, float]]:
    """Return (bytes per second, one-way seconds) of each stage's link.

    Args:
        edges: the edges with an end on ``rank``; its neighbours make the same call.
        rank: the rank of this process.
        device: the device of the messages.

    Raises:
        ChannelError: If a neighbour is gone or silent.
    """
    found = {}
    for stage in sorted(sender for what, sender in edges if what == "act"):
        down, up = edges["act", stage], edges["grad", stage + 1]
        try:
            if rank == down.ranks[0]:
                found[stage] = _Ends(down, up, device).ask()
            else:
                _Ends(up, down, device).answer()
        except (torch.AcceleratorError, torch.OutOfMemoryError):  # of this process's own device
            raise
        except RuntimeError as error:
            raise ChannelError(
                f"stage {stage} -> stage {stage + 1}: the link could not be measured, the peer is gone or silent; its "
                "own log, logs/rankR.log, says why"
            ) from error
    return found


class _Ends:
    """This process's ends of the two edges between two stages."""

    def __init__(self, out: Edge, into: Edge, device: torch.device) -> None:
        self._out, self._in, self._peer = out, into, out.ranks[1]
        self._device = device if out.backend == "nccl" else torch.device("cpu")

    def ask(self) -> tuple[float, float]:
        """Return the link's (bytes per second, one-way seconds)."""
        self._round(0)  # warms up buffers and connections
        latency = min(self._round(0) for _ in range(ROUNDS)) / 2
        num_bytes, seconds = FIRST, self._round(FIRST) - 2 * latency
        while seconds < LONG_ENOUGH and num_bytes < MOST:
            num_bytes *= FACTOR
            seconds = self._round(num_bytes) - 2 * latency
        self._send(-1)
        return num_bytes / max(seconds, 1e-9), latency

    def answer(self) -> None:
        """Answer each message until the last."""
        while (num_bytes := self._receive()) >= 0:
            if num_bytes:
                wait = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
                dist.recv(wait, self._peer, group=self._in.group)
                _ = int(wait[-1])  # waits for a GPU
            self._send(0)

    def _round(self, num_bytes: int) -> float:
        message = torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)
        start = time.perf_counter()
        self._send(num_bytes)
        if num_bytes:
            dist.send(message, self._peer, group=self._out.group)
        self._receive()
        return time.perf_counter() - start

    def _send(self, number: int) -> None:
        dist.send(torch.tensor([number], device=self._device), self._peer, group=self._out.group)

    def _receive(self) -> int:
        got = torch.zeros(1, dtype=torch.int64, device=self._device)
        dist.recv(got, self._peer, group=self._in.group)
        return int(got)
