"""The device of a process, and the backend of its messages."""

import os

import torch
import torch.distributed as dist

from adl_dist.errors import ConfigError

# Variables of NCCL, torch and the driver. The first four are needed because a receive posted ahead is a kernel that
# waits on the GPU for its peer, next to the stage's own work.
FOR_NCCL = {
    # With 1 a kernel of NCCL begins only after the one launched before it, on any communicator. Receives of one edge
    # begin one after another, so a send after them would wait for messages that answer it.
    "NCCL_LAUNCH_ORDER_IMPLICIT": "0",
    # Thread blocks of one transfer: a waiting one occupies that many multiprocessors.
    "NCCL_MAX_CTAS": "4",
    # Hardware queues. With fewer queues than streams, two streams share one, and work behind a waiting receive waits.
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    # Transfers in separate queues, ahead of the blocks of a large kernel that have not started.
    "TORCH_NCCL_HIGH_PRIORITY": "1",
    # torch's watchdog sleeps four times as long when a peer is gone, to dump records, and then ends the process; the
    # destruction of a group waits for it. torch's default of 15000 is a minute.
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1500",
}
LEAST_CONNECTIONS = 8  # compute, copies, and up to five communicators


def set_for_nccl() -> None:
    """Set the variables of NCCL and the driver that ranks need.

    The user's own values stay, unless ranks would deadlock with them.
    """
    os.environ["NCCL_LAUNCH_ORDER_IMPLICIT"] = FOR_NCCL["NCCL_LAUNCH_ORDER_IMPLICIT"]
    connections = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "")
    if not connections.isdecimal() or int(connections) < LEAST_CONNECTIONS:
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = FOR_NCCL["CUDA_DEVICE_MAX_CONNECTIONS"]
    for variable, value in FOR_NCCL.items():
        os.environ.setdefault(variable, value)


def check_device(device_type: str) -> None:
    """Raise ConfigError if CUDA is missing, without touching a GPU."""
    if device_type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("runtime.device=cuda, but torch finds no CUDA device here; use runtime.device=cpu")


def choose_device(device_type: str) -> torch.device:
    """Return ``cpu`` or the GPU of the local rank."""
    check_device(device_type)
    if device_type == "cpu":
        return torch.device("cpu")
    # Explicit, never left to the backend: torch 2.15's NCCL takes LOCAL_RANK modulo the device count itself.
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def message_backend(device: torch.device, rank: int, size: int, store: dist.Store) -> str:
    """Return ``nccl`` if no two ranks share a GPU, otherwise ``gloo``.

    All ranks call it and get the same result, because an edge may join a node with enough GPUs and a node without. GPUs
    are compared by their identity, not counted: a launcher may show only one of them to each process.
    """
    store.set(f"gpu/{rank}", _identity(device))
    gpus = {store.get(f"gpu/{one}") for one in range(size)}
    return "nccl" if len(gpus) == size and all(gpu.startswith(b"nccl ") for gpu in gpus) else "gloo"


def _identity(device: torch.device) -> str:
    """Return the identity of a GPU for NCCL, or "" on a CPU.

    Its first word is ``nccl`` if torch has NCCL, otherwise ``-``.
    """
    if device.type == "cpu":
        return ""
    transport = "nccl" if dist.is_nccl_available() else "-"
    return f"{transport} {os.environ.get('NCCL_HOSTID', '')} {torch.cuda.get_device_properties(device).uuid}"
