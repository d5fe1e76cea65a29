"""A cluster of four nodes."""

import os
import subprocess
import time
from pathlib import Path

import pytest

from tests.support.slurm import Cluster

NODES = 4


@pytest.fixture(scope="session")
def cluster():
    """Four nodes of two cores each; nothing of them is left afterwards."""
    folder = Path(f"/tmp/adl-slurm-{os.getpid()}")  # short: the path of a Unix socket may have 108 characters
    script = Path(__file__).parents[1] / "support" / "slurm_cluster.sh"

    def call(*words):
        done = subprocess.run([script, folder, *words], capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, f"cluster.sh {' '.join(words)}\n{done.stdout}{done.stderr}"

    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    try:
        call("up", str(NODES))
        yield Cluster(folder=folder, call=call)
    finally:
        call("down")
    assert not folder.exists()
    left = subprocess.run(["ip", "-brief", "link"], capture_output=True, text=True, check=True).stdout
    assert "adlbr" not in left
    assert "adl test cluster" not in Path("/etc/hosts").read_text()


@pytest.fixture
def folder(tmp_path, cluster):
    """Where a test's jobs are started; afterwards none of their processes is left."""
    yield tmp_path
    cluster.ask("scancel", "--user=root")
    deadline = time.monotonic() + 20
    while (left := cluster.processes()) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert left == [], "processes of jobs are left on the nodes"
