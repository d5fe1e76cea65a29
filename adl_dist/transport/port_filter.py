"""A filter against new connections to the ports of a process.

torch's transports accept every connection. One line of HTTP at the port of the control plane (TensorPipe) ends the
process in ``std::bad_alloc``, and a thousand silent connections to one of gloo's in ``accept: Too many open files``
(both seen with torch 2.15). Neither library has an option to stop listening, so the kernel does it: a socket filter
drops packets at a listening socket before they become a connection. Established connections do not change.
"""

import contextlib
import ctypes
import os
import socket
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

# <asm-generic/socket.h>, <linux/filter.h>
SO_ATTACH_FILTER, SO_DETACH_FILTER = 26, 27
RETURN_CONSTANT = 0x06

OPEN_FILES = Path("/proc/self/fd")  # on Linux, which filters sockets; elsewhere the ports stay open

error: OSError | None = None  # of the kernel, if ports of this process could not be blocked


def block(listener: socket.socket) -> None:
    """Drop new connections; set ``error`` if the kernel cannot."""
    global error
    if sys.platform == "linux":
        # struct sock_filter {code, jt, jf, k}, which keeps 0 bytes; struct sock_fprog {length, pointer to filters}
        keep_nothing = ctypes.create_string_buffer(struct.pack("HBBI", RETURN_CONSTANT, 0, 0, 0))
        program = struct.pack("HP", 1, ctypes.addressof(keep_nothing))
        try:
            listener.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)
        except OSError as caught:
            error = caught


def unblock(listener: socket.socket) -> None:
    """Undo :func:`block`; pending connections succeed within a second."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # it was not blocked
            listener.setsockopt(socket.SOL_SOCKET, SO_DETACH_FILTER, 0)


@contextlib.contextmanager
def blocking_new() -> Iterator[None]:
    """Block the TCP ports opened inside, when the context ends."""
    before = {identity for identity, _ in _listeners()}
    yield
    for identity, listener in _listeners():
        if identity not in before:
            block(listener)


def _listeners() -> Iterator[tuple[str, socket.socket]]:
    """Yield (kernel's name, socket) of each listening TCP socket."""
    for name in os.listdir(OPEN_FILES) if OPEN_FILES.is_dir() else ():
        with contextlib.suppress(OSError):  # closed meanwhile
            identity = os.readlink(OPEN_FILES / name)
            if identity.startswith("socket:"):
                with socket.socket(fileno=os.dup(int(name))) as one:
                    is_tcp = one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM
                    if is_tcp and one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        yield identity, one
