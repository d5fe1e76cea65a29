"""Measure a plain TCP socket over a link: ``python -m benchmarks.race.probe answer|ask ADDRESS [BYTES]``."""

import json
import socket
import statistics
import sys
import time

PORT = 29777
ROUND_TRIPS = 15
CHUNK = bytes(1 << 20)


def answer(address: str) -> None:
    """Answer one ``ask``: send single bytes back, then note when the bytes came."""
    with socket.create_server((address, PORT)) as server:
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        peer, _ = server.accept()
        with peer:
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for _ in range(ROUND_TRIPS):
                peer.sendall(peer.recv(1))
            size, got = int(peer.recv(64)), 0
            began = time.perf_counter()
            peer.sendall(b".")
            while got < size:
                got += len(peer.recv(1 << 20))
            rate = 8 * got / (time.perf_counter() - began)
            peer.sendall(str(rate).encode())


def ask(address: str, size: int) -> dict[str, float]:
    """Return the rate of ``size`` bytes to ``address``, their slow beginning included, and the median round trip."""
    with socket.create_connection((address, PORT), timeout=30) as peer:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        trips = []
        for _ in range(ROUND_TRIPS):
            began = time.perf_counter()
            peer.sendall(b".")
            peer.recv(1)
            trips.append(time.perf_counter() - began)
        peer.sendall(str(size).encode())
        peer.recv(1)
        sent = 0
        while sent < size:
            peer.sendall(CHUNK[: size - sent])
            sent += len(CHUNK)
        return {"bits_per_second": float(peer.recv(64)), "round_trip_seconds": statistics.median(trips)}


if __name__ == "__main__":
    if sys.argv[1] == "answer":
        answer(sys.argv[2])
    else:
        sys.stdout.write(json.dumps(ask(sys.argv[2], int(sys.argv[3]))))
