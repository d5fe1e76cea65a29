"""A switch that takes its time: ``python -m benchmarks.race.relay SECONDS PORT...`` passes each frame on that late.

For kernels without netem. Frames are read from and written to the interfaces as they are, with the header by which the
kernel tells that 64 KiB are still one frame and that checksums are not computed yet (``PACKET_VNET_HDR``): a frame
costs some 50 us, whatever its size. The rate is limited elsewhere: on the interfaces themselves.
"""

import contextlib
import os
import select
import socket
import sys
import time
from collections import deque
from collections.abc import Sequence

SOL_PACKET, PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING = 263, 15, 23  # <linux/if_packet.h>
SO_RCVBUFFORCE = 33  # <asm-generic/socket.h>
ETH_P_ALL = 3
HEADER = 10  # bytes of struct virtio_net_hdr, in front of each frame
MOST = HEADER + 14 + (64 << 10)
BUFFER = 64 << 20
TICK = 0.0005  # seconds
AT_ONCE = 64  # frames that are read before those that are due are written
GROUP_BIT = 1  # of an address for several, as of ARP's question who has an address


def relay(seconds: float, ports: Sequence[str]) -> None:
    """Pass frames on between ``ports`` for ever, each ``seconds`` after it came."""
    sockets = [_opened(port) for port in ports]
    known: dict[bytes, socket.socket] = {}  # by the address of the interface behind a port
    waiting: deque[tuple[float, bytes, list[socket.socket]]] = deque()  # all wait equally long, so in their order
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    seconds -= TICK  # half of one until a frame is read, and half of one until it is seen to be due, on average
    while True:
        time.sleep(TICK)  # or each frame would wake this process twice
        left = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        readable, _, _ = select.select(sockets, [], [], left)
        for port in readable:
            with contextlib.suppress(OSError):  # there is no more; or the port has just gone down
                for _ in range(AT_ONCE):
                    frame = port.recv(MOST)
                    known[frame[HEADER + 6 : HEADER + 12]] = port
                    there = known.get(frame[HEADER : HEADER + 6])
                    if there is not None:
                        waiting.append((time.monotonic() + seconds, frame, [there]))
                    elif frame[HEADER] & GROUP_BIT:
                        waiting.append((time.monotonic() + seconds, frame, [s for s in sockets if s is not port]))
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, frame, targets = waiting.popleft()
            for target in targets:
                with contextlib.suppress(OSError):  # a full queue, or a link that is down: the frame is lost
                    target.send(frame)


def _opened(port: str) -> socket.socket:
    opened = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
    opened.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    opened.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    opened.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, BUFFER)
    opened.bind((port, ETH_P_ALL))
    opened.setblocking(False)
    return opened


if __name__ == "__main__":
    with contextlib.suppress(OSError):  # to be on time also while all cores compute
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    relay(float(sys.argv[1]), sys.argv[2:])
