"""The store where the processes of a run meet.

It is a file for the ranks of our own launcher. Otherwise it is TCP, hosted by torchrun's agent or by rank 0, which
listens on one address, not on all as torch does.
"""

import datetime
import json
import os
import socket
import time
import uuid
from pathlib import Path

import torch.distributed as dist

from adl_dist.distributed import network
from adl_dist.distributed.parent_process import RENDEZVOUS_FOLDER
from adl_dist.errors import ChannelError, ConfigError
from adl_dist.report.warning import SAY_SECONDS, say

POLL_SECONDS = 0.01
LIST = "adl_dist/list"


def rendezvous(rank: int, size: int, timeout: datetime.timedelta) -> tuple[dist.Store, socket.socket | None]:
    """Meet the other processes of this attempt.

    Returns:
        The store of this attempt, and the socket on which this process hosts it, or None.

    Raises:
        ConfigError: If rank 0 cannot listen at its address.
        ChannelError: If the others do not come in time.
        RuntimeError: If the store cannot be reached.
    """
    listener = None
    if folder := os.environ.get(RENDEZVOUS_FOLDER):
        # The last process that has a file open removes it, which must not be one of the previous attempt.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        shared: dist.Store = dist.FileStore(str(Path(folder) / f"attempt{attempt}"), size)
        shared.set_timeout(timeout)
    elif dist.is_initialized() or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True):
        # The store of torchrun's agent, or of the user's own init_process_group.
        shared, _, _ = next(dist.rendezvous("env://", rank, size, timeout=timeout))
    else:
        try:
            host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        except (KeyError, ValueError):
            raise ConfigError(
                "RANK and WORLD_SIZE are set, so this is one of several processes, but MASTER_ADDR and MASTER_PORT do "
                "not say where they meet; start them with torchrun, or unset RANK and WORLD_SIZE"
            ) from None
        host = network.LOOPBACK if network.is_one_node(size) else reachable(host)
        if rank == 0:
            listener = listen_at(host, port)
            shared = store_on(listener, timeout)
        else:
            shared = dist.TCPStore(host, port, size, is_master=False, timeout=timeout)
    prefix = f"adl_dist/{barrier_on_attempt(shared, rank, size, timeout)}"
    return dist.PrefixStore(prefix, shared), listener


def reachable(host: str) -> str:
    """Return the address by which all nodes reach ``host``, the first node.

    A node's own name may mean loopback on that node. Then return the address of the user's named interface, if any.

    Raises:
        ConfigError: If ``host`` is loopback on every node.
    """
    _, address = network.address_of_host(host)
    interface = network.named_interface()
    if not network.is_loopback(address) or interface in (None, network.loopback()):
        return address
    if host == "localhost" or address == host:
        raise ConfigError(
            f"this run has several nodes, but {host} is each of them to itself, and they are to be joined by "
            f"{interface}; give the first node's name or address there, as --rdzv-endpoint or --master-addr"
        )
    return network.address_of(interface) or address


def listen_at(host: str, port: int) -> socket.socket:
    """Return a socket that listens only at the address of ``host``.

    Raises:
        ConfigError: If the address or port cannot be used; ``__cause__`` is the system's error.
    """
    family, address = network.address_of_host(host)
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the port of a run that has just ended
        listener.bind((address, port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        at = address if address == host else f"{host} ({address})"
        raise ConfigError(
            f"cannot listen at {at}, port {port}: {error.strerror}; choose a free port of an address of "
            f"{socket.gethostname()} (MASTER_ADDR, MASTER_PORT, or torchrun's --rdzv-endpoint)"
        ) from error
    return listener


def store_on(listener: socket.socket, timeout: datetime.timedelta) -> dist.TCPStore:
    """Return a store that this process hosts on a listening socket."""
    address, port = listener.getsockname()[:2]
    descriptor = os.dup(listener.fileno())  # torch closes it
    return dist.TCPStore(
        address, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=descriptor
    )


def barrier_on_attempt(store: dist.Store, rank: int, size: int, timeout: datetime.timedelta) -> str:
    """Return a new name for this attempt, equal on all its processes.

    torchrun's agents keep one store over all restarts, and each counts only its own: a replaced node begins at 0. So
    nothing in a process's environment names its attempt, and names of dead processes stay in the store. Each signs in
    under a new random name; rank 0 publishes lists of the names it sees; a process that finds its own name on a list
    confirms it. A list that all have confirmed holds only live processes. No process ever trusts a key that a dead one
    may have written without comparing names.

    Raises:
        ChannelError: If not all have come in time.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    me = uuid.uuid4().hex
    signed = [f"adl_dist/name/{one}" for one in range(size)]
    store.set(signed[rank], me)
    listed: list[str] = []
    say_at = time.monotonic() + SAY_SECONDS
    while time.monotonic() < deadline:
        if rank == 0 and store.check(signed):
            names = [store.get(key).decode() for key in signed]
            if names != listed:
                listed = names
                store.set(LIST, json.dumps({"attempt": uuid.uuid4().hex, "names": names}))
        published = json.loads(store.get(LIST)) if store.check([LIST]) else {"names": []}
        if me in published["names"]:
            confirmed = [f"adl_dist/{published['attempt']}/confirmed/{name}" for name in published["names"]]
            store.set(confirmed[rank], "")
            if store.check(confirmed):
                return str(published["attempt"])
        if rank == 0 and time.monotonic() > say_at:
            absent = ", ".join(str(one) for one, key in enumerate(signed) if not store.check([key]))
            say(f"rank 0 waits for {f'rank {absent} to start' if absent else 'the others to connect'} ...")
            say_at = time.monotonic() + 60
        time.sleep(POLL_SECONDS)
    missing = [str(one) for one, key in enumerate(signed) if not store.check([key])]
    raise ChannelError(
        f"rank {rank} waited {timeout.total_seconds():g} s for all {size} processes to sign in, and "
        + (f"rank {', '.join(missing)} never did" if missing else "one of them has died meanwhile")
        + "; its own output says why"
    )
