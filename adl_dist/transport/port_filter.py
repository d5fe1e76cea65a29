"""Blocks new connections to the ports of a process once all its peers are connected.

torch's transports accept every connection. One line of HTTP at the port of the control plane (TensorPipe) ends the
process in ``std::bad_alloc``, and a thousand silent connections to one of gloo's in ``accept: Too many open files``
(both seen with torch 2.15). Neither library has an option to stop listening, so the kernel does it: a socket filter
drops what arrives at a listening socket before it becomes a connection. Established connections stay as they are.
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

error: OSError | None = None  # why ports of this process that were to be blocked are open; None: they are not


def block(listener: socket.socket) -> None:
    """Drop new connections, unless the kernel takes no filter (gVisor's, or one behind seccomp): see ``error``."""
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
    """Undo :func:`block`; pending attempts to connect succeed when the kernel repeats them, within a second."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # it was not blocked
            listener.setsockopt(socket.SOL_SOCKET, SO_DETACH_FILTER, 0)


@contextlib.contextmanager
def blocking_new() -> Iterator[None]:
    """Block the TCP ports on which this process begins to listen inside, once its peers have connected to them."""
    before = {identity for identity, _ in _listeners()}
    yield
    for identity, listener in _listeners():
        if identity not in before:
            block(listener)


def _listeners() -> Iterator[tuple[str, socket.socket]]:
    """Yield the listening TCP sockets of this process, each after the kernel's name of it."""
    for name in os.listdir(OPEN_FILES) if OPEN_FILES.is_dir() else ():
        with contextlib.suppress(OSError):  # closed meanwhile
            identity = os.readlink(OPEN_FILES / name)
            if identity.startswith("socket:"):
                with _socket_of(int(name)) as one:
                    is_tcp = one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM
                    if is_tcp and one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        yield identity, one


def _socket_of(descriptor: int) -> socket.socket:
    """Return a view of an open socket; with a default timeout Python would make it non-blocking for every user."""
    default, copy = socket.getdefaulttimeout(), os.dup(descriptor)
    socket.setdefaulttimeout(None)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
    finally:
        socket.setdefaulttimeout(default)
