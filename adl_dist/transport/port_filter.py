"""The ports on which a process waits to be connected. Nobody is let in any more once all its peers are.

torch's transports take in whoever connects. One line of HTTP at the port of the control plane (TensorPipe) ends the
process in ``std::bad_alloc``, and a thousand silent connections to one of gloo's in ``accept: Too many open files``
(both seen with torch 2.15). Neither library can be told to stop listening, so the kernel is: a socket filter drops what
arrives at a listening socket before a connection comes of it. Connections that are there stay as they are.
"""

import contextlib
import ctypes
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

# <asm-generic/socket.h>, <linux/filter.h>
SO_ATTACH_FILTER, SO_DETACH_FILTER = 26, 27
RETURN_CONSTANT = 0x06

# Linux keeps a process's open files there, and filters its sockets. Elsewhere the ports stay open.
OPEN_FILES = Path("/proc/self/fd")

_refused: OSError | None = None


class _Instruction(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint16), ("jt", ctypes.c_uint8), ("jf", ctypes.c_uint8), ("k", ctypes.c_uint32))


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_uint16), ("instructions", ctypes.POINTER(_Instruction)))


def shut(listener: socket.socket) -> None:
    """Let nobody in any more: an attempt to connect is not answered. Whoever is connected stays so.

    A kernel that takes no filter (gVisor's, or one behind seccomp) leaves the port open: see :func:`refused`.
    """
    global _refused
    if sys.platform == "linux":
        keep_nothing = _Instruction(RETURN_CONSTANT, 0, 0, 0)
        try:
            listener.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, bytes(_Program(1, ctypes.pointer(keep_nothing))))
        except OSError as error:
            _refused = error


def refused() -> OSError | None:
    """Why ports of this process that were to be shut are open; None if they are not."""
    return _refused


def open_again(listener: socket.socket) -> None:
    """Undo :func:`shut`; who has tried meanwhile gets in when the kernel tries for him again, within a second."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # it was not shut
            listener.setsockopt(socket.SOL_SOCKET, SO_DETACH_FILTER, 0)


@contextlib.contextmanager
def shut_behind() -> Iterator[None]:
    """Shut the TCP ports that this process has begun to listen on inside, once its peers have connected to them there.

    After an error they are left as they are: the process ends then.
    """
    before = _listening()
    yield
    for identity, descriptor in _listening().items():
        if identity not in before:
            with _socket_of(descriptor) as listener:
                shut(listener)


def _listening() -> dict[str, int]:
    """A descriptor of each TCP socket on which this process listens, by the kernel's name of the socket."""
    found = {}
    for name in os.listdir(OPEN_FILES) if OPEN_FILES.is_dir() else ():
        with contextlib.suppress(OSError):  # closed meanwhile
            identity = os.readlink(OPEN_FILES / name)
            if not identity.startswith("socket:"):
                continue
            with _socket_of(int(name)) as one:
                is_tcp = one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM
                if is_tcp and one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    found[identity] = int(name)
    return found


def _socket_of(descriptor: int) -> socket.socket:
    """The socket that is somebody's, to be looked at: with a default timeout Python would make it non-blocking for all.

    Raises:
        OSError: it is gone.
    """
    default, own = socket.getdefaulttimeout(), os.dup(descriptor)
    socket.setdefaulttimeout(None)
    try:
        return socket.socket(fileno=own)
    except OSError:
        os.close(own)
        raise
    finally:
        socket.setdefaulttimeout(default)
