"""``torchrun --rdzv-backend=adl-dist``: c10d without open ports.

The agents' own store listens on all addresses of its node, whatever its options. Here it is in the agent's memory
on one node, and listens only at the endpoint's address on several. The ranks do not share the agents' store
(``TORCH_DISABLE_SHARE_RDZV_TCP_STORE``), so that each attempt has a store that ends with it.

torchrun finds this by the entry point ``torchrun.handlers`` in pyproject.toml.
"""

import datetime
import errno
import os
import sys
from typing import TYPE_CHECKING

import torch.distributed as dist

from adl_dist.distributed import network
from adl_dist.distributed.rendezvous import listen_at, reachable, store_on
from adl_dist.distributed.rpc_errors import first_line
from adl_dist.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousHandlerCreator, RendezvousParameters

DEFAULT_PORT = 29400  # torch's, for c10d


def entry_point() -> "RendezvousHandlerCreator":
    """Return the handler's constructor; torchrun calls this first."""
    return make_handler


def make_handler(parameters: "RendezvousParameters") -> "RendezvousHandler":
    """Join this agent with the others, or exit with one line and code 2.

    ``parameters`` are torchrun's flags: ``--nnodes``, ``--rdzv-id``, ``--rdzv-endpoint=HOST:PORT`` (on several nodes
    the address of the first, whose agent hosts the store), ``--local-addr``.
    """
    # Not at the top: torch imports this module while it imports these.
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

    class Backend(C10dRendezvousBackend):
        name = parameters.backend  # torch compares it with the requested one

    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    try:
        network.check_named_interfaces()
        if parameters.max_nodes == 1:
            store: dist.Store = dist.HashStore()
            parameters.local_addr = network.LOOPBACK
        else:
            store = _store_of_agents(parameters)
            if parameters.local_addr is None:
                interface = network.named_interface() or network.interface_towards(_endpoint(parameters)[0])
                parameters.local_addr = network.address_of(interface)
    except ConfigError as error:
        sys.stderr.write(f"adl-dist: error: {error}\n")
        raise SystemExit(2) from None
    return create_handler(store, Backend(store, parameters.run_id), parameters)


def _store_of_agents(parameters: "RendezvousParameters") -> dist.TCPStore:
    host, port = _endpoint(parameters)
    host = reachable(host)
    timeout = datetime.timedelta(seconds=parameters.get_as_int("read_timeout", 60) or 60)
    try:
        return store_on(listen_at(host, port), timeout)
    except ConfigError as error:
        number = getattr(error.__cause__, "errno", None)
        if number not in (errno.EADDRNOTAVAIL, errno.EADDRINUSE):
            raise
    # The address of another node, or another agent of this node hosts it already.
    try:
        return dist.TCPStore(host, port, is_master=False, timeout=timeout)
    except RuntimeError as error:
        raise ConfigError(
            f"no answer from the first node at --rdzv-endpoint={parameters.endpoint} within "
            f"{timeout.total_seconds():g} s ({first_line(error)}); is torchrun running there, and is that its "
            "address on the network that joins the nodes?"
        ) from error


def _endpoint(parameters: "RendezvousParameters") -> tuple[str, int]:
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

    try:
        if not parameters.endpoint:
            raise ValueError("it is not given")
        return parse_rendezvous_endpoint(parameters.endpoint, default_port=DEFAULT_PORT)
    except ValueError as error:
        raise ConfigError(
            f"several nodes need --rdzv-endpoint=HOST:PORT of the first one, for example node1:{DEFAULT_PORT}: {error}"
        ) from None
