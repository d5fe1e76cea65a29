"""What a plain TCP socket gets over a link: ``python -m adl_dist.cli.race.probe answer|ask ADDRESS [BYTES]``."""

import json
import socket
import statistics
import sys
import time

PORT = 29777
ROUND_TRIPS = 15
CHUNK = bytes(1 << 20)
FIRST = 0.3  # of all bytes, while TCP still finds out how fast it may send


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
            size, got, began, begun_at = int(peer.recv(64)), 0, 0.0, 0
            peer.sendall(b".")
            while got < size:
                got += len(peer.recv(1 << 20))
                if not began and got > FIRST * size:
                    began, begun_at = time.perf_counter(), got
            rate = 8 * (got - begun_at) / (time.perf_counter() - began)
            peer.sendall(str(rate).encode())


def ask(address: str, size: int) -> dict[str, float]:
    """Return the rate of ``size`` bytes to ``address``, without their beginning, and the median round trip."""
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
