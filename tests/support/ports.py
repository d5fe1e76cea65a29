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
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

TCP_LISTENS = "0A"


@dataclass(frozen=True)
class Port:
    """One on which a process waits for others."""

    pid: int
    protocol: str
    address: str
    number: int

    @property
    def is_on_loopback(self) -> bool:
        return ipaddress.ip_address(self.address).is_loopback


def open_ports(pids: Iterable[int]) -> set[Port]:
    """All TCP ports on which these processes listen, and all their UDP ports."""
    by_inode = {}
    for protocol in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/net/{protocol}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if protocol.startswith("udp") or state == TCP_LISTENS:
                address, number = local.split(":")
                by_inode[f"socket:[{inode}]"] = (protocol, _address(address), int(number, 16))
    return {Port(pid, *by_inode[name]) for pid in pids for name in _open_files(pid) if name in by_inode}


def free_port() -> int:
    """One on loopback that nobody listens on now."""
    with socket.socket() as any_socket:
        any_socket.bind(("127.0.0.1", 0))
        return int(any_socket.getsockname()[1])


def _address(told: str) -> str:
    """The kernel writes an address as hexadecimal words of four bytes, each in the order of the machine."""
    words = [int(told[i : i + 8], 16).to_bytes(4, sys.byteorder) for i in range(0, len(told), 8)]
    return str(ipaddress.ip_address(b"".join(words)))


def _open_files(pid: int) -> list[str]:
    found = []
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                found.append(os.readlink(f"/proc/{pid}/fd/{name}"))
    return found


def messages(chance: random.Random) -> list[bytes]:
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


@dataclass
class Fuzzer:
    """Knocks at ports, says what nobody should, and keeps many connections half open, in a thread of its own.

    Attributes:
        ports: where; asked again and again, because processes may be restarted.
        seed: of what it says.
        per_second: attempts, at most.
        attempts: by port.
        let_in: attempts that became a connection, by port.
    """

    ports: Callable[[], set[Port]]
    seed: int = 0
    per_second: float = 300.0
    attempts: Counter[Port] = field(default_factory=Counter)
    let_in: Counter[Port] = field(default_factory=Counter)
    _over: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread = field(init=False)

    def __enter__(self) -> "Fuzzer":
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        chance = random.Random(self.seed)
        with contextlib.ExitStack() as kept:
            while not self._over.is_set():
                for port in sorted(self.ports(), key=lambda p: (p.pid, p.number)):
                    if port.protocol.startswith("tcp"):
                        self._knock(port, chance, kept)
                        time.sleep(1 / self.per_second)

    def _knock(self, port: Port, chance: random.Random, kept: contextlib.ExitStack) -> None:
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
