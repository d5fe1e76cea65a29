"""Jobs of the cluster that the tests bring up, as a user submits, watches and cancels them."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from adl_dist.checkpoint import layout
from adl_dist.checkpoint.run_dir import chosen_checkpoint
from tests.support.commands import ROOT, assert_same, weights_of

SLURMS_OWN = ("slurmd", "slurmstepd")
DONE = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


@dataclass(frozen=True)
class Cluster:
    """The cluster. Nodes share the file system, the processes and the cores of this machine."""

    folder: Path
    call: Callable[..., None]

    @property
    def environment(self):
        """The environment of what speaks to it, and of the jobs that are submitted from there."""
        return {
            **os.environ,
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        }

    def ask(self, *command):
        """What a command of SLURM prints."""
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=30, check=True)
        return done.stdout.strip()

    def submit(self, words, *, folder, options=(), variables=None):
        """``sbatch launch/slurm.sbatch`` in ``folder``."""
        done = subprocess.run(
            ["sbatch", "--parsable", "--cpus-per-task=2", *options, ROOT / "launch" / "slurm.sbatch", *words],
            env={**self.environment, **(variables or {})}, cwd=folder,
            capture_output=True, text=True, timeout=30, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return SlurmJob(self, done.stdout.strip(), folder)

    def nodes_of(self, job):
        """That run it at this moment, the first one first."""
        names = self.ask("squeue", "--noheader", "--format=%N", f"--jobs={job.number}")
        return self.ask("scontrol", "show", "hostnames", names).split() if names else []

    def processes(self):
        """Command lines of all that runs on the nodes, SLURM's own aside."""
        found = []
        for node in (self.folder / "nodes").read_text().split():
            for pid in subprocess.run(["ip", "netns", "pids", node], capture_output=True, text=True).stdout.split():
                try:
                    line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                except OSError:  # it has ended meanwhile
                    continue
                if line and Path(line.split()[0].rstrip(":")).name not in SLURMS_OWN:
                    found.append(f"{node}: {line}")
        return found


@dataclass(frozen=True)
class SlurmJob:
    """A job that was submitted."""

    cluster: Cluster
    number: str
    folder: Path

    @property
    def said(self):
        """All output so far."""
        return "".join(path.read_text() for path in sorted(self.folder.glob(f"adl-dist-{self.number}*.out")))

    @property
    def states(self):
        """The state of the job, or of each task of an array."""
        shown = self.cluster.ask("scontrol", "--oneliner", "show", "job", self.number)
        return {word.removeprefix("JobState=") for word in shown.split() if word.startswith("JobState=")}

    @property
    def starts(self):
        """How often the script has begun."""
        return self.said.count(f"slurm.sbatch: job {self.number}, start ")

    def wait_for(self, what, condition, *, seconds=240):
        """Wait, while it is not over, for ``condition``, which ``what`` describes."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"{what}: not within {seconds} s; {self.states}\n{self.said}"
            assert not self.states <= set(DONE), f"{self.states} before {what}\n{self.said}"
            time.sleep(0.1)

    def finish(self, *, seconds=240):
        """Wait for the end, which must be a good one."""
        deadline = time.monotonic() + seconds
        while not self.states <= set(DONE):
            assert time.monotonic() < deadline, f"the end: not within {seconds} s; {self.states}\n{self.said}"
            time.sleep(0.2)
        assert self.states == {"COMPLETED"}, f"{self.states}\n{self.said}"


def saved(run_dir):
    """How many complete checkpoints there are."""
    return len(layout.complete(run_dir / "checkpoints")) if run_dir.is_dir() else 0


def assert_same_end(run_dir, other):
    """The weights, running statistics and number of updates of both runs are the same, to the bit."""
    assert chosen_checkpoint(run_dir, None).name == chosen_checkpoint(other, None).name
    assert_same(*(weights_of(run.parent, run.name) for run in (run_dir, other)))
