"""The device of a process, and the backend of its messages."""

import os

import torch
import torch.distributed as dist

from adl_dist.errors import ConfigError

# What NCCL, torch's side of it and the driver read. The first four: a receive that was posted ahead is a kernel that
# waits on the GPU for its peer, next to the stage's own work.
FOR_NCCL = {
    # 1 would begin a kernel of NCCL only when the one launched before it has begun, whatever its communicator. Receives
    # of one edge begin one after the other, so a send behind them would wait for messages that answer it.
    "NCCL_LAUNCH_ORDER_IMPLICIT": "0",
    # Thread blocks of one transfer: what waits occupies that many multiprocessors.
    "NCCL_MAX_CTAS": "4",
    # Hardware queues. With fewer than streams, two streams share one, and work after a receive that waits would wait.
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    # Transfers in queues of their own, ahead of the blocks of a large kernel that do not run yet.
    "TORCH_NCCL_HIGH_PRIORITY": "1",
    # torch's watchdog, once it has seen that a peer is gone, sleeps four times as long, so that records may be dumped,
    # and then ends the process; and to destroy a group waits for it. torch has 15000: a minute.
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1500",
}
LEAST_CONNECTIONS = 8  # compute, copies, and up to five communicators


def set_for_nccl() -> None:
    """Set what is read when NCCL and the driver start, where the user has not: before torch asks for a GPU.

    Raises:
        ConfigError: the environment has a value with which processes would wait for each other for ever.
    """
    if os.environ.get("NCCL_LAUNCH_ORDER_IMPLICIT", "0") != "0":
        raise ConfigError(
            f"NCCL_LAUNCH_ORDER_IMPLICIT={os.environ['NCCL_LAUNCH_ORDER_IMPLICIT']} is in the environment; expected 0, "
            "because receives that are posted ahead would hold up the sends behind them for ever: unset it"
        )
    connections = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", str(LEAST_CONNECTIONS))
    if not connections.isdecimal() or int(connections) < LEAST_CONNECTIONS:
        raise ConfigError(
            f"CUDA_DEVICE_MAX_CONNECTIONS={connections} is in the environment; expected a number of at least "
            f"{LEAST_CONNECTIONS}, or a stage's work would wait behind a receive that waits for its peer: unset it"
        )
    for variable, value in FOR_NCCL.items():
        os.environ.setdefault(variable, value)


def check_device(device_type: str) -> None:
    """Raise ConfigError if CUDA is asked for and missing; touches no GPU, which the parent of the ranks must not."""
    if device_type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("runtime.device=cuda, but torch finds no CUDA device here; use runtime.device=cpu")


def choose_device(device_type: str) -> torch.device:
    """Return ``cpu``, or the GPU with the number of the local rank; raise ConfigError if there is no GPU."""
    check_device(device_type)
    if device_type == "cpu":
        return torch.device("cpu")
    # Explicit, never left to the backend: torch 2.15's NCCL takes LOCAL_RANK modulo the device count itself.
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def message_backend(device: torch.device, rank: int, size: int, store: dist.Store) -> str:
    """Return ``nccl`` if each of ``size`` ranks has a GPU of its own, else ``gloo``, which goes through host memory.

    All ranks call it and take the same, since an edge may join a node that has GPUs enough with one that has not. GPUs
    are told apart by their own numbers, not counted: a launcher may show each process one of them alone.
    """
    store.set(f"gpu/{rank}", _identity(device))
    gpus = {store.get(f"gpu/{one}") for one in range(size)}
    return "nccl" if len(gpus) == size and all(gpu.startswith(b"nccl ") for gpu in gpus) else "gloo"


def ranks_on_gpu(rank: int, size: int, store: dist.Store) -> int:
    """Return how many of ``size`` ranks are on the GPU of ``rank``; all have called :func:`message_backend`.

    1 on a CPU. A GPU is known by its number alone here: NCCL_HOSTID makes two machines of one, not two memories.
    """
    gpus = [store.get(f"gpu/{one}").rpartition(b" ")[2] for one in range(size)]
    return gpus.count(gpus[rank]) if gpus[rank] else 1


def _identity(device: torch.device) -> str:
    """Return which GPU it is, as NCCL sees it: ranks with another NCCL_HOSTID are on another machine; "" on a CPU.

    The first word says whether torch has NCCL at all.
    """
    if device.type == "cpu":
        return ""
    transport = "nccl" if dist.is_nccl_available() else "-"
    return f"{transport} {os.environ.get('NCCL_HOSTID', '')} {torch.cuda.get_device_properties(device).uuid}"
