"""Looks at the ports of processes from outside, and knocks at them. Linux only."""

import contextlib
import ipaddress
import os
import random
import socket
import struct
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

TCP_LISTENS = "0A"


class Port(NamedTuple):
    """One on which a process waits for others."""

    pid: int
    protocol: str
    address: str
    number: int

    @property
    def is_on_loopback(self):
        return ipaddress.ip_address(self.address).is_loopback


def open_ports(pids):
    """All TCP ports on which these processes listen, and all their UDP ports."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended
            by_inode = _ports_in_the_namespace_of(pid)
            for name in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError, KeyError):  # closed meanwhile, or no such port
                    found.add(Port(pid, *by_inode[os.readlink(f"/proc/{pid}/fd/{name}")]))
    return found


def _ports_in_the_namespace_of(pid):
    by_inode = {}
    for protocol in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/{pid}/net/{protocol}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if protocol.startswith("udp") or state == TCP_LISTENS:
                address, number = local.split(":")
                # The kernel writes an address as hexadecimal words of four bytes, each in the order of the machine.
                words = [int(address[i : i + 8], 16).to_bytes(4, sys.byteorder) for i in range(0, len(address), 8)]
                by_inode[f"socket:[{inode}]"] = protocol, str(ipaddress.ip_address(b"".join(words))), int(number, 16)
    return by_inode


def free_port():
    """One on loopback on which no process listens now."""
    with socket.socket() as any_socket:
        any_socket.bind(("127.0.0.1", 0))
        return int(any_socket.getsockname()[1])


def messages(chance):
    """What a stranger may say: noise, another protocol, silence, and beginnings of what the peers say."""
    return [
        chance.randbytes(chance.randrange(1, 4096)),
        b"GET / HTTP/1.1\r\nHost: somebody\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + chance.randbytes(32),  # TLS
        b"",  # says nothing and stays
        bytes(64),
        b"\xff" * 64,
        struct.pack("<Q", chance.randrange(1, 64)),  # gloo: the number of a connection that is waited for
        struct.pack("<QQ", 1 << 40, 0) + chance.randbytes(64),  # TensorPipe: the length of a packet, then the packet
        b"\x00" + struct.pack("<I", 0x3C85F7CE),  # TCPStore: a greeting, and no more
        b"\x00" + struct.pack("<I", 0x3C85F7CE) + chance.randbytes(64),
    ]


class Fuzzer:
    """Knocks at ``ports()``, says what no peer says, and keeps many connections half open, in a thread of its own.

    The ports are asked for again and again, because processes may be restarted. ``attempts``, and those of them that
    were ``let_in``, are counted by port.
    """

    def __init__(self, ports, *, per_second=300.0):
        self._ports, self._per_second = ports, per_second
        self.attempts, self.let_in = Counter(), Counter()
        self._over, self._thread = threading.Event(), threading.Thread(target=self._run)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *error):
        self._over.set()
        self._thread.join()

    def _run(self):
        chance = random.Random(0)
        with contextlib.ExitStack() as kept:
            while not self._over.is_set():
                for port in sorted(self._ports(), key=lambda p: (p.pid, p.number)):
                    if port.protocol.startswith("tcp"):
                        self._knock(port, chance, kept)
                        time.sleep(1 / self._per_second)

    def _knock(self, port, chance, kept):
        self.attempts[port] += 1
        family = socket.AF_INET6 if port.protocol == "tcp6" else socket.AF_INET
        address = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(port.address, port.address)
        stranger = socket.socket(family, socket.SOCK_STREAM)
        with contextlib.suppress(OSError):
            stranger.settimeout(0.01)
            stranger.connect((address, port.number))
            self.let_in[port] += 1
            stranger.sendall(chance.choice(messages(chance)))
            if chance.random() < 0.5:
                kept.enter_context(stranger)
                return
            if chance.random() < 0.5:  # an end without a farewell
                stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        stranger.close()
