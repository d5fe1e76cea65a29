"""Starts the K local processes of a run with torch's elastic launcher, without opening a port.

The launcher's rendezvous and the processes' own store are files in a private folder, so nothing listens
beyond the loopback connections of the data and control planes.
"""

import ctypes
import logging
import os
import shutil
import signal
import sys
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from adl_dist.runtime.world import RENDEZVOUS_FOLDER

PR_SET_PDEATHSIG = 1


def launch_local(arguments: Sequence[str], *, num_processes: int, max_restarts: int) -> int:
    """Run ``python -m adl_dist *arguments`` as ``num_processes`` ranks and wait for them.

    Returns:
        The exit code of the run: 0, or that of a rank whose user can mend the cause (2), or 1.
    """
    # The agent repeats what the ranks and we ourselves say, at length.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    folder = tempfile.mkdtemp(prefix="adl-dist-")
    os.environ[RENDEZVOUS_FOLDER] = folder
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # the ranks rendezvous in the folder
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_processes,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint=str(Path(folder) / "agent"),
        rdzv_configs={"store_type": "file"},
        max_restarts=max_restarts,
        monitor_interval=0.1,
        local_addr="127.0.0.1",
    )
    try:
        elastic_launch(config, sys.executable)("-m", "adl_dist", *arguments)
    except ChildFailedError as failed:
        return _report(failed)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


def _report(failed: ChildFailedError) -> int:
    """Say which rank was killed, which nobody else can, and find the exit code that tells most."""
    codes = []
    for rank, failure in sorted(failed.failures.items()):
        codes.append(failure.exitcode)
        if failure.exitcode < 0 and failure.exitcode not in (-signal.SIGTERM, -signal.SIGINT):
            name = signal.Signals(-failure.exitcode).name
            sys.stderr.write(f"adl-dist: rank {rank} was killed by {name}; the same command resumes the run\n")
    return 2 if 2 in codes else 1


def die_with_parent() -> None:
    """Have the kernel end this process if its launcher is killed; on Linux only."""
    if sys.platform == "linux" and RENDEZVOUS_FOLDER in os.environ:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
