"""Starts the command line as a user does, kills parts of it, and compares what a run leaves behind. Linux only."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import torch
from torch import nn

from adl_dist.checkpoint import layout
from tests.support.toys import FixedImages, batch_norm_net

ROOT = Path(__file__).parents[2]
ADL_DIST = (str(Path(sys.executable).with_name("adl-dist")),)

NUM_SAMPLES = 126  # the last micro-batch is smaller than the others
SECONDS_PER_SAMPLE = 0.005
MOST_SAMPLES = int(2.5 * NUM_SAMPLES)
HOLD = "hold"  # a file in the working directory
# The run on images that can be held: eight updates an epoch, with dropout, fresh noise on every image and BatchNorm.
HELD_RUN = (
    *("model._target_=tests.support.kill.net_with_dropout", "data._target_=tests.support.kill.held_images"),
    *("train.batch_size=16", "optimizer.lr=0.05", "runtime.threads=1", "runtime.tensorboard=false"),
    *("runtime.stage_records_every=1", "runtime.report=false", "runtime.max_restarts=0"),
)
POLL_SECONDS = 0.02

TIMINGS = ("train/samples_per_second", "stage/busy_share")  # the only values that may differ
OF_PROCESSES = "process/"  # as many records as there are processes
UNREADABLE = "unreadable"
OF_FAILURES = (UNREADABLE, "checkpoint/failed")


class HeldImages(FixedImages):
    """Images with fresh noise each time, from the stream that the loader seeds.

    While the file ``hold`` exists they come slowly, and after 2.5 epochs not at all, so that a run can be killed in
    mid-epoch on a machine of any speed.
    """

    def __init__(self, num_samples):
        super().__init__(num_samples)
        self._num_served = 0

    def __getitem__(self, index):
        self._num_served += 1
        if os.path.exists(HOLD):
            time.sleep(SECONDS_PER_SAMPLE)
        while self._num_served > MOST_SAMPLES and os.path.exists(HOLD):
            time.sleep(0.01)
        image, label = super().__getitem__(index)
        return image + 0.5 * torch.randn(image.shape, dtype=torch.float64).to(image.dtype), label


def net_with_dropout():
    """For ``model._target_``: eight units, with dropout in both halves and BatchNorm."""
    stem, *rest = batch_norm_net(dropout=0.2)
    return nn.Sequential(stem, nn.Dropout(0.2), *rest)


def held_images():
    """For ``data._target_``: training images that can be held, and others to validate."""
    return HeldImages(NUM_SAMPLES), FixedImages(20, seed=1)


class Command:
    """``adl-dist train WORDS run_dir=FOLDER/run`` with a process group, a TMPDIR and output files of its own.

    Everything is written to ``folder``: a second command there is the same command again. ``start`` stands before
    ``train``: our own launcher, or torchrun's. ``node``: a folder in ``folder`` for what one of several commands of the
    same run prints. Leaving it kills whatever of it is still there.
    """

    def __init__(self, words, *, folder, start=ADL_DIST, node="."):
        self.run_dir = folder / "run"
        self.temporary = folder / "tmp"
        self.temporary.mkdir(exist_ok=True)
        (folder / node).mkdir(exist_ok=True)
        self._output = [folder / node / "stdout", folder / node / "stderr"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(self.temporary)}
        with self._output[0].open("w") as out, self._output[1].open("w") as err:
            self._process = subprocess.Popen(
                [*start, "train", *words, f"run_dir={self.run_dir}"],
                stdout=out, stderr=err, env=environment, cwd=folder,
                start_new_session=True,  # a Ctrl-C at the terminal reaches a process group
                # As from a terminal, also where the tests themselves run in the background with SIGINT ignored.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )  # fmt: skip

    def __enter__(self):
        return self

    def __exit__(self, *_):
        # Those that are starting another process may do so before they die.
        while left := [*self.processes(), *([self._process.pid] if self._process.poll() is None else [])]:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.005)

    @property
    def out(self):
        return self._output[0].read_text()

    @property
    def err(self):
        return self._output[1].read_text()

    def processes(self):
        """All its processes, found by their command line: the rank of each process id, None for the launcher."""
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended meanwhile
                words = (entry / "cmdline").read_bytes().split(b"\0")  # empty for what is dead and not yet reaped
                if f"run_dir={self.run_dir}".encode() in words:
                    variables = (entry / "environ").read_bytes().split(b"\0")
                    ranks = [int(v.removeprefix(b"RANK=")) for v in variables if v.startswith(b"RANK=")]
                    found[int(entry.name)] = ranks[0] if ranks else None
        return found

    def wait_for(self, what, condition, *, seconds=240):
        """Wait, while it runs, for ``condition``, which ``what`` describes."""

        def holds():
            assert self._process.poll() is None, f"it ended before {what}\n{self.out}\n{self.err}"
            return condition()

        self._wait(what, holds, seconds)

    def wait_for_update(self, update, *, seconds=60):
        """Wait until metrics.jsonl holds ``update`` or a later one."""
        self.wait_for(
            f"update {update}", lambda: any(made["update"] >= update for made in records(self.run_dir)), seconds=seconds
        )

    def wait_until_gone(self, *, seconds):
        """Wait until none of its processes is left."""
        self._wait("all processes gone", lambda: not self.processes(), seconds)
        self._process.wait()

    def send(self, number, *, rank):
        """Send a signal to one rank, or to the launcher (None)."""
        pid = next(p for p, r in self.processes().items() if r == rank) if rank is not None else self._process.pid
        os.kill(pid, number)

    def interrupt(self):
        """Do what a terminal does on Ctrl-C."""
        os.killpg(self._process.pid, signal.SIGINT)

    def finish(self, *, seconds=240):
        """Wait for its end; return the exit code, which of a process killed by signal n is -n."""
        self._wait("the end", lambda: self._process.poll() is not None, seconds)
        return self._process.wait()

    def left_in_tmp(self):
        """Return what launchers have left in TMPDIR."""
        return [f.name for f in self.temporary.iterdir() if f.name.startswith(("adl-dist", "torchelastic"))]

    def _wait(self, what, condition, seconds):
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"{what}: not within {seconds} s\n{self.out}\n{self.err}"
            time.sleep(POLL_SECONDS)


class RunEnd:
    """What a run has left in the end.

    Attributes:
        checkpoints: their names, oldest first.
        newest: the files of tensors of the newest one, optimizer state among them.
        values: of metrics.jsonl by (name, stage, update, how often that came before); those of TIMINGS are 0.
    """

    def __init__(self, run_dir):
        saved = layout.complete(run_dir / "checkpoints")
        self.run_dir, self.checkpoints = run_dir, [path.name for path in saved]
        self.newest = {file.name: file.read_bytes() for file in saved[-1].glob("*.safetensors")}
        self.values = {}
        times = Counter()
        for line in (run_dir / "metrics.jsonl").read_text().splitlines():
            try:
                record = json.loads(line)
            except ValueError:
                record = {"name": UNREADABLE, "update": 0, "value": 0.0}
            if record["name"].startswith(OF_PROCESSES):
                continue
            key = record["name"], record.get("stage"), record["update"]
            self.values[*key, times[key]] = record["value"] if record["name"] not in TIMINGS else 0.0
            times[key] += 1

    def differences(self, expected, *, is_whole=True):
        """Return what is not as in ``expected``; ``is_whole``: every checkpoint and every record must be there."""
        wrong = []
        if self.checkpoints[-1] != expected.checkpoints[-1] or self.newest != expected.newest:
            wrong.append(f"newest checkpoint: another {self.checkpoints[-1]}")
        # One that was due to be removed when the process died, or could not be, stays until the next save.
        saved, due = set(self.checkpoints), set(expected.checkpoints)
        if is_whole and (due - saved or len(saved - due) > 1):
            wrong.append(f"checkpoints: {self.checkpoints} instead of {expected.checkpoints}")
        lost = [key for key in expected.values if key not in self.values]
        wrong += [f"metrics: {key} lost" for key in lost if is_whole]
        there = {key: value for key, value in self.values.items() if is_whole or key[0] not in OF_FAILURES}
        wrong += [f"metrics: {key}" for key, value in there.items() if expected.values.get(key) != value]
        for place in (self.run_dir, self.run_dir / "checkpoints"):
            wrong += [f"left behind: {path.name}" for path in place.glob(".*")]
        return wrong if (self.run_dir / "summary.json").is_file() else [*wrong, "no summary.json"]


def newest(run_dir):
    """Return the newest complete checkpoint of a run."""
    return layout.complete(run_dir / "checkpoints")[-1]


def records(run_dir):
    """All complete lines of metrics.jsonl, so far."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]
