"""``torchrun --rdzv-backend=adl-dist``: c10d without open ports.

The agents' own store listens on all addresses of its node, whatever its options. Here, on one node it is in the agent's
memory; on several nodes it listens only at the endpoint's address. The ranks do not share the agents' store
(``TORCH_DISABLE_SHARE_RDZV_TCP_STORE``), so that each attempt has a store that ends with the attempt.

torchrun finds this module by the entry point ``torchrun.handlers`` in pyproject.toml.
"""

import atexit
import contextlib
import datetime
import errno
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from adl_dist.distributed import network
from adl_dist.distributed.parent_process import USER_ERROR_FILE
from adl_dist.distributed.rendezvous import listen_at, reachable, store_on
from adl_dist.distributed.rpc_errors import first_line
from adl_dist.errors import ConfigError
from adl_dist.report.warning import announced

if TYPE_CHECKING:
    from torch.distributed.elastic import rendezvous as elastic

DEFAULT_PORT = 29400  # torch's, for c10d
ERROR = "adl_dist/error"  # in the agents' store
TELL_SECONDS = 3.0  # for which the store stays after an error; the other agents read it every 0.1 s


class FirstAddress(str):
    """The address of the node that hosts the store; it sorts first.

    torch gives ranks in the order of the nodes' addresses as text, where 10.0.0.10 is before 10.0.0.9.
    """

    __slots__ = ()

    def __lt__(self, other: str) -> bool:
        return True

    def __gt__(self, other: str) -> bool:
        return False


def entry_point() -> "elastic.RendezvousHandlerCreator":
    """Return the handler's constructor; torchrun calls this first."""
    return make_handler


def make_handler(parameters: "elastic.RendezvousParameters") -> "elastic.RendezvousHandler":
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
    hosts = False
    try:
        network.check_named_interfaces()
        if parameters.max_nodes == 1:
            store: dist.Store = dist.HashStore()
            parameters.local_addr = network.LOOPBACK
        else:
            store, hosts = _store_of_agents(parameters)
            if parameters.local_addr is None:
                interface = network.named_interface() or network.interface_towards(_endpoint(parameters)[0])
                parameters.local_addr = network.address_of(interface)
    except ConfigError as error:
        raise _ending(str(error)) from None
    if hosts and parameters.local_addr:
        parameters.local_addr = FirstAddress(parameters.local_addr)
    handler = create_handler(store, Backend(store, parameters.run_id), parameters)
    _end_in_lines(handler, parameters, store, hosts=hosts)
    return handler


def _end_in_lines(
    handler: "elastic.RendezvousHandler", parameters: "elastic.RendezvousParameters", store: dist.Store, *, hosts: bool
) -> None:
    """Make ``handler`` announce its waits, and end the agent in one line.

    A user's error on one node ends the agents of all nodes with its text, and no restart follows.
    """
    from torch.distributed.elastic import rendezvous as elastic

    descriptor, path = tempfile.mkstemp(prefix="adl-dist-")
    os.close(descriptor)
    os.environ[USER_ERROR_FILE] = path
    atexit.register(os.unlink, path)
    nodes = f"{parameters.min_nodes} nodes at {parameters.endpoint}"
    join, num_waiting, close = handler.next_rendezvous, handler.num_nodes_waiting, handler.shutdown

    def next_rendezvous() -> "elastic.RendezvousInfo":
        if Path(path).read_text():
            raise _ending("a restart would meet the same error, so there is none")
        try:
            with announced(f"waiting for all {nodes}"):
                return join()
        except elastic.RendezvousTimeoutError:
            more = "start the others, or wait longer by --rdzv-conf=join_timeout=SECONDS"
            raise _ending(f"not all {nodes} have joined in time; {more}") from None
        except (elastic.RendezvousClosedError, elastic.RendezvousConnectionError):
            raise _ending("the run has ended on another node, whose output says why") from None

    def num_nodes_waiting() -> int:  # asked again and again while ranks run
        try:
            if store.check([ERROR]):
                raise _ending(store.get(ERROR).decode())
            return num_waiting()
        except (dist.DistNetworkError, elastic.RendezvousConnectionError):
            way_out = "give the same command again on all nodes; it continues from the newest checkpoint"
            raise _ending(f"the node at {parameters.endpoint}, where all others meet, is gone; {way_out}", 1) from None

    def shutdown() -> bool:
        has_error = False
        with contextlib.suppress(RuntimeError):  # the store is gone
            if text := Path(path).read_text():
                store.set(ERROR, text)
            has_error = store.check([ERROR])
        is_closed = close()
        time.sleep(TELL_SECONDS if hosts and has_error else 0)
        return is_closed

    for replacement in (next_rendezvous, num_nodes_waiting, shutdown):
        setattr(handler, replacement.__name__, replacement)


def _ending(text: str, code: int = ConfigError.exit_code) -> SystemExit:
    """Print an error, and return the SystemExit that ends this agent."""
    sys.stderr.write(f"adl-dist: error: {text}\n")
    return SystemExit(code)


def _store_of_agents(parameters: "elastic.RendezvousParameters") -> tuple[dist.TCPStore, bool]:
    """Return the store of all nodes, and whether this one hosts it."""
    host, port = _endpoint(parameters)
    host = reachable(host)
    timeout = datetime.timedelta(seconds=parameters.get_as_int("read_timeout", 60) or 60)
    try:
        with listen_at(host, port) as listener:
            return store_on(listener, timeout), True
    except ConfigError as error:
        number = getattr(error.__cause__, "errno", None)
        if number not in (errno.EADDRNOTAVAIL, errno.EADDRINUSE):
            raise
    # The address of another node, or another agent of this node hosts it already.
    try:
        with announced(f"waiting for the first node at {parameters.endpoint}"):
            return dist.TCPStore(host, port, is_master=False, timeout=timeout), False
    except RuntimeError as error:
        raise ConfigError(
            f"no answer from the first node at --rdzv-endpoint={parameters.endpoint} within "
            f"{timeout.total_seconds():g} s ({first_line(error)}); is torchrun running there, and is that its "
            "address on the network that joins the nodes?"
        ) from error


def _endpoint(parameters: "elastic.RendezvousParameters") -> tuple[str, int]:
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

    try:
        if not parameters.endpoint:
            raise ValueError("it is not given")
        return parse_rendezvous_endpoint(parameters.endpoint, default_port=DEFAULT_PORT)
    except ValueError as error:
        raise ConfigError(
            f"several nodes need --rdzv-endpoint=HOST:PORT of the first one, for example node1:{DEFAULT_PORT}: {error}"
        ) from None
