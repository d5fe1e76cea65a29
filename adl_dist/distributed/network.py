"""The network interface of a run."""

import fcntl
import os
import socket
import struct
import sys

from adl_dist.errors import ConfigError

# Variables of gloo, TensorPipe (RPC) and NCCL. The first may be a list, the last a prefix, exact after "=".
GLOO, RPC, NCCL = "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
LOOPBACK = "127.0.0.1"
SIOCGIFADDR = 0x8915  # <linux/sockios.h>


def choose_interface(*, size: int) -> None:
    """Choose one interface for all sockets, unless the user has named one.

    On one node this is loopback: nothing must be reachable from outside. On several it is the interface by which this
    node reaches ``MASTER_ADDR``, not the interface of the node's own name, which is often loopback.

    Raises:
        ConfigError: If a named interface does not exist, or none can be found on several nodes.
    """
    check_named_interfaces()
    chosen = named_interface()
    if chosen is None:
        chosen = loopback() if is_one_node(size) else interface_towards(os.environ.get("MASTER_ADDR", "localhost"))
    if chosen is not None:
        for variable, value in ((GLOO, chosen), (RPC, chosen), (NCCL, f"={chosen}")):
            os.environ.setdefault(variable, value)


def is_one_node(size: int) -> bool:
    """Return whether all processes of the run are on this node."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", size)) == size


def check_named_interfaces() -> None:
    """Raise ConfigError for a named interface that does not exist."""
    here = interfaces()
    for variable, name in _named():
        if name not in here:
            raise ConfigError(
                f"{variable}={os.environ[variable]}, but {socket.gethostname()} has no network interface {name}; "
                f"it has {', '.join(here)}"
            )


def named_interface() -> str | None:
    """Return the interface that the user has named for gloo or RPC, if any."""
    return next((name for _, name in _named()), None)


def interfaces() -> list[str]:
    """Return the names of this node's network interfaces."""
    return [name for _, name in socket.if_nameindex()]


def loopback() -> str | None:
    """Return the loopback interface, or None if its name is unknown."""
    return next((name for name in interfaces() if name in ("lo", "lo0")), None)


def address_of(interface: str) -> str | None:
    """Return the IPv4 address of ``interface``, or None if unknown."""
    if sys.platform != "linux":
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            answer = fcntl.ioctl(any_socket, SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


def address_of_host(host: str) -> tuple[socket.AddressFamily, str]:
    """Return (family, address) of ``host``, IPv4 if any, or raise ConfigError."""
    try:
        addresses = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(
            f"{host} is not a name or address that {socket.gethostname()} knows ({error.strerror}); give the first "
            "node's address instead of its name, as --rdzv-endpoint or --master-addr"
        ) from None
    family, _, _, _, address = min(addresses, key=lambda one: one[0] != socket.AF_INET)
    return family, str(address[0])


def is_loopback(address: str) -> bool:
    """Return whether ``address`` can only be reached on its own node."""
    return address == "::1" or address.startswith("127.")


def interface_towards(first: str) -> str:
    """Return the interface by which this node reaches the first node.

    Raises:
        ConfigError: If ``first`` cannot be reached from other nodes, or the interface has no known name (IPv6).
    """
    family, address = address_of_host(first)
    reason = "it is this node to itself"
    if not is_loopback(address):
        with socket.socket(family, socket.SOCK_DGRAM) as any_socket:
            try:
                any_socket.connect((address, 1))  # sends nothing; the kernel looks up the route
                own_address = any_socket.getsockname()[0]
                reason = f"the address towards it, {own_address}, is the IPv4 address of no interface"
            except OSError as error:
                own_address, reason = None, str(error.strerror)
        for name in interfaces() if own_address is not None else ():
            if address_of(name) == own_address:
                return name
    raise ConfigError(
        f"{socket.gethostname()} has no known way to the first node's {first} ({address}): {reason}; name the network "
        f"interface that joins the nodes: {GLOO}=NAME, one of {', '.join(interfaces())}"
    )


def _named() -> list[tuple[str, str]]:
    """Return (variable, interface) of interfaces in the environment."""
    return [(variable, name) for variable in (GLOO, RPC) for name in os.environ.get(variable, "").split(",") if name]
