"""The processes of one run and their connections.

Rank k is stage k, or, if a method has several stages in each of P processes, stages k, k + P, and so on. The data plane
is gloo or NCCL point-to-point (transport/), the control plane is RPC (control/rpc.py); both meet through one store
(rendezvous.py). Once all are connected, new connections are dropped.
"""

import atexit
import contextlib
import datetime
import json
import os
import socket
import sys
import threading
import uuid
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc

from adl_dist.distributed.affinity import cores_here, own_cores
from adl_dist.distributed.device import choose_device, message_backend, set_for_nccl
from adl_dist.distributed.network import choose_interface
from adl_dist.distributed.parent_process import end_with_torchrun
from adl_dist.distributed.rendezvous import rendezvous
from adl_dist.distributed.rpc_errors import first_line
from adl_dist.errors import AdlError, ChannelError, ConfigError
from adl_dist.report import warn
from adl_dist.schedule import Pipeline
from adl_dist.transport import port_filter
from adl_dist.transport.port_filter import block, blocking_new, unblock
from adl_dist.transport.process import Edge, abort, connect_edges

COORDINATOR_RANK = 0


@dataclass
class World:
    """The place of this process in the run, and its connections."""

    rank: int  # also its first stage, if there is more than one process
    size: int  # number of processes
    num_stages: int  # of all processes together
    device: torch.device  # where this process computes
    store: dist.Store  # shared by all processes of this attempt
    edges: dict[tuple[str, int], Edge] = field(default_factory=dict)  # those with an end in this process
    backend: str = "gloo"  # of the edges that stay on ``device``
    timeout: datetime.timedelta = dist.default_pg_timeout  # of one message
    cores: Sequence[int] | None = None  # this process's share of its node, if it is bound
    listener: socket.socket | None = None  # the blocked socket on which this process hosts the store, if it does
    owns_group: bool = True  # whether the default process group was created here, not by the user
    num_jobs: int = 0  # begun so far, equal on all processes
    has_left: bool = False  # whether it has left the others, after an error that they may not have met
    is_aborted: bool = False  # whether its edges were aborted
    _connected: set[tuple[str, int, int]] = field(default_factory=set)  # all edges, also those between other processes
    _abort: threading.Lock = field(default_factory=threading.Lock)  # torch's abort may be called once
    _group: Any = None  # ours, if it was created here
    _set_aside: Any = None  # the default process group that is not in use: ours, the script's own, or None

    @property
    def is_distributed(self) -> bool:
        """Whether there is more than one process."""
        return self.size > 1

    def connect_more(self, triples: Iterable[tuple[str, int, int]]) -> None:
        """Connect missing edges (kind, sender, receiver), the same on all ranks.

        Raise ChannelError if a peer is gone or silent.
        """
        missing = [triple for triple in triples if triple not in self._connected]
        if not missing:
            return
        try:
            if self.listener is not None:
                unblock(self.listener)  # a new group may need a new connection to the store
            self.edges |= connect_edges(missing, backend=self.backend, device=self.device, timeout=self.timeout)
            dist.barrier()  # only now have all connected
            if self.listener is not None:
                block(self.listener)
        except RuntimeError as error:
            names = ", ".join(dict.fromkeys(what for what, _, _ in missing))
            raise ChannelError(
                f"rank {self.rank} could not connect the edges for {names}: {first_line(error)}; a peer "
                "is gone or silent, and its own log, logs/rankR.log, says why"
            ) from error
        self._connected |= {*missing}

    def abort_edges(self) -> None:
        """Abort the messages of all edges, which would never arrive; only once."""
        with self._abort:
            if not self.is_aborted:
                abort(self.edges.values())
            self.is_aborted = True

    def use_group(self, *, works: bool) -> None:
        """Make our process group torch's default if ``works``, or undo that."""
        if self.owns_group and works == (dist.GroupMember.WORLD is not self._group):
            dist.GroupMember.WORLD, self._set_aside = self._set_aside, dist.GroupMember.WORLD

    def fresh_store(self) -> dist.Store:
        """Return the store of the next job, without the keys of earlier jobs."""
        self.num_jobs += 1
        return dist.PrefixStore(f"job{self.num_jobs}", self.store)


def common_edges(num_stages: int) -> list[tuple[str, int, int]]:
    """Return (kind, sending stage, receiving stage) of edges of all methods."""
    last = num_stages - 1
    edges = [("target", 0, last)] if last > 0 else []
    return edges + [edge for k in range(last) for edge in (("act", k, k + 1), ("grad", k + 1, k))]


def launched_world_size() -> int | None:
    """Return the number of processes of the launcher, or None without one."""
    return int(os.environ["WORLD_SIZE"]) if {"RANK", "WORLD_SIZE"} <= os.environ.keys() else None


def launched_rank() -> int:
    """Return this process's rank, 0 without a launcher."""
    return int(os.environ.get("RANK", 0))


def check_world_size(pipeline: Pipeline, *, processes: bool) -> None:
    """Raise ConfigError if the launcher started a wrong number of processes."""
    started = launched_world_size()
    expected = pipeline.num_processes if processes else 1
    if started is not None and started != expected:
        v = pipeline.stages_per_process if processes else 1
        how = " with runtime.processes=false" * (not processes) + f" with method.stages_per_process={v}" * (v > 1)
        raise ConfigError(
            f"partition.num_stages={pipeline.num_stages}{how} needs {expected} process{'es' * (expected > 1)}, but "
            f"torchrun started {started}: pass --nproc-per-node={expected}, or partition.num_stages={started * v}"
        )


def single_process(device: torch.device, num_stages: int = 1) -> World:
    """Return a world of one process, without a network."""
    return World(0, 1, num_stages, device, dist.HashStore())


END_SECONDS = 2.0  # limit for all processes to agree that they leave

# One in a process, like torch's default process group and RPC, which it wraps.
_world: World | None = None


def world_of_process() -> World | None:
    """Return the world that this process has joined, or None."""
    return _world


def connect(num_stages: int, *, size: int | None = None, device_type: str, timeout_seconds: float) -> World:
    """Join the other processes; later calls return the same world.

    The ``size`` processes, by default one for each stage, hold ``num_stages`` together. ``timeout_seconds`` limits
    the start, a message, and an answer over the control plane.

    Raises:
        ConfigError: If this rank has no CUDA device, a network interface, address or port cannot be used, the user's
            process group has no backend for the CPU, or the processes were joined differently before.
        ChannelError: If the others cannot be reached in time.
    """
    global _world
    size = num_stages if size is None else size
    if _world is not None:
        if _world.has_left:
            raise ConfigError("this process has left the others after an error; start the script again")
        if _world.device.type != device_type or (_world.size, _world.num_stages) != (size, num_stages):
            raise ConfigError(
                f"these processes were joined as {_world.num_stages} stages on {_world.device.type}; a second "
                f"trainer in them cannot be {num_stages} on {device_type}"
            )
        _world.use_group(works=True)
        return _world
    if dist.is_initialized() and "cpu:" not in (backends := dist.get_backend_config()):
        raise ConfigError(
            f"the process group that is there has no backend for the CPU (it is {backends}), which the ranks need to "
            "agree on the run; let adl_dist make it, or make it by init_process_group('cpu:gloo,cuda:nccl')"
        )
    if device_type == "cuda":
        set_for_nccl()
    rank, device = launched_rank(), choose_device(device_type)
    choose_interface(size=size)
    os.environ["TORCH_GLOO_LAZY_INIT"] = "0"  # connect eagerly: after start-up new connections are dropped
    end_with_torchrun()  # for a user's own script; the command line has done so before
    try:
        _world = _join(rank, size, num_stages, device, timeout_seconds)
    except AdlError:
        raise
    except (RuntimeError, OSError, ValueError) as error:
        where = f"{os.environ.get('MASTER_ADDR', 'this machine')}:{os.environ.get('MASTER_PORT', '-')}"
        raise ChannelError(
            f"rank {rank} could not join the other {size - 1} processes at {where} within {timeout_seconds:g} s: "
            f"{first_line(error)}; is the port free, is the interface right "
            f"(GLOO_SOCKET_IFNAME={os.environ.get('GLOO_SOCKET_IFNAME', 'unset')}), did every rank start?"
        ) from error
    # After an uncaught exception do not wait for the others, which may wait for this process.
    atexit.register(lambda: disconnect(in_order=not hasattr(sys, "last_value")))
    return _world


def disconnect(*, in_order: bool = True) -> None:
    """Leave the world; with ``in_order`` wait for all others to leave too."""
    global _world
    if _world is None or _world.has_left:
        return
    world = _world
    world.has_left = True
    world.use_group(works=True)
    if in_order:
        _world = None
    else:
        world.abort_edges()  # before the groups are destroyed, which would wait for all messages under way
    if in_order:
        with contextlib.suppress(RuntimeError):  # a peer is gone
            if _has_group():  # the user's code may have destroyed its own group, and ours with it
                dist.barrier()
            _quieten_rpc()
    rpc.shutdown(graceful=False)
    if _has_group():
        for group in [None] if world.owns_group else [edge.group for edge in world.edges.values()]:
            # On a failed GPU this fails too, which must not hide the cause.
            with contextlib.nullcontext() if in_order else contextlib.suppress(RuntimeError):
                dist.destroy_process_group(group)


def _has_group() -> bool:
    """Return whether there is a default process group that was not destroyed."""
    with contextlib.suppress(ValueError):
        return bool(dist.get_backend())
    return False


def _quieten_rpc() -> None:
    """Prepare RPC for the others to disconnect, so that it logs no error."""
    agent = rpc.api._get_current_rpc_agent()

    def expect_end() -> None:
        with contextlib.suppress(RuntimeError):
            agent.join(shutdown=True, timeout=END_SECONDS)

    # It exceeds its own time limit (torch 2.15) if a process is killed just now.
    thread = threading.Thread(target=expect_end, daemon=True)
    thread.start()
    thread.join(END_SECONDS)


def _join(rank: int, size: int, num_stages: int, device: torch.device, timeout_seconds: float) -> World:
    timeout = datetime.timedelta(seconds=timeout_seconds)
    owns_group = not dist.is_initialized()
    store, listener = rendezvous(rank, size, timeout)
    if owns_group:
        # No device_id: this group is gloo and stays on the CPU; the NCCL group of each edge has its own. Bound to a
        # GPU, gloo would connect eagerly there, and torch would split the edges' groups from it.
        with blocking_new():
            dist.init_process_group(
                "gloo", store=dist.PrefixStore("world", store), rank=rank, world_size=size, timeout=timeout
            )
    backend = message_backend(device, rank, size, store)
    triples = common_edges(num_stages)
    edges = connect_edges(triples, backend=backend, device=device, timeout=timeout)
    with blocking_new():
        _start_rpc(rank, size, store, timeout_seconds)
    store.set(f"cores/{rank}", json.dumps(cores_here()))
    local_rank, local_size = int(os.environ.get("LOCAL_RANK", rank)), int(os.environ.get("LOCAL_WORLD_SIZE", size))
    of_node = range(rank - local_rank, rank - local_rank + local_size)
    cores = own_cores([json.loads(store.get(f"cores/{one}")) for one in of_node], local_rank)
    if backend == "nccl":  # which may connect to the store again
        listener = None
    if listener is not None:
        block(listener)
    if local_rank == 0 and (why := port_filter.error) is not None:
        warn(
            f"the ports of {socket.gethostname()} stay open: its kernel takes no socket filter ({why.strerror}); let "
            "only those reach it whom you trust (SECURITY.md)"
        )
    world = World(rank, size, num_stages, device, store, edges, backend, timeout, cores, listener, owns_group)
    world._group, world._connected = dist.GroupMember.WORLD, {*triples}
    return world


def _start_rpc(rank: int, size: int, store: dist.Store, timeout_seconds: float) -> None:
    """Connect rank 0 with every rank, in both directions."""
    dist.barrier()  # the port of RPC is only open from here to the next barrier
    # A new name, because a process can register a scheme only once.
    scheme = f"adl-dist-{uuid.uuid4().hex}"

    def use_our_store(url: str, **_: Any) -> Iterator[tuple[dist.Store, int, int]]:
        yield dist.PrefixStore("rpc", store), rank, size

    dist.register_rendezvous_handler(scheme, use_our_store)
    # TCP, because TensorPipe's shared-memory transport polls: one core lost per process while training.
    options = rpc.TensorPipeRpcBackendOptions(
        _transports=["uv"],
        _channels=["basic"],
        num_worker_threads=2 + size,  # one for each rank that keeps its files here, see rank_files.py
        init_method=f"{scheme}://",
        rpc_timeout=timeout_seconds,
    )
    with warnings.catch_warnings():
        # RPC's own use of gloo for its start-up (torch 2.15).
        warnings.filterwarnings("ignore", message="You are using a Backend")
        level = dist.get_debug_level()
        dist.set_debug_level(dist.DebugLevel.OFF)  # at DETAIL this start fails over a group that it does not register
        rpc.init_rpc(name_of(rank), rank=rank, world_size=size, rpc_backend_options=options)
        dist.set_debug_level(level)
    for other in range(size) if rank == 0 else [0]:
        rpc.rpc_sync(name_of(other), os.getpid)  # the first call makes the connection
    dist.barrier()


def name_of(rank: int) -> str:
    """Return the RPC name of a rank."""
    return f"stage{rank}"
