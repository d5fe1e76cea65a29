"""Runs the command line as a user does, in this process or in processes of its own, and says what came of it."""

import contextlib
import hashlib
import io
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch

from adl_dist.cli.main import main

ROOT = Path(__file__).parents[2]
ADL_DIST = str(Path(sys.executable).with_name("adl-dist"))
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
PREFIX = "adl-dist: error: "
TINY = {
    **{"data": "synthetic", "data.num_samples": "32", "data.num_validation": "8", "data.image_size": "8"},
    **{"model": "resnet8", "train.batch_size": "16", "train.epochs": "1", "runtime.threads": "1"},
    **{"runtime.tensorboard": "false", "runtime.timeout_seconds": "20", "runtime.stage_records_every": "1"},
    **{"runtime.report": "false", "runtime.max_restarts": "0"},
}

# What torchrun and its like set. A test process that has them would be taken for a rank.
OF_RANKS = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
OF_RANKS |= {"ADL_DIST_RENDEZVOUS", "ADL_DIST_LAUNCHER"}


@dataclass(frozen=True)
class Outcome:
    """What a command left: its exit code and all that it wrote."""

    code: int
    out: str
    err: str

    def refusal(self, code=2):
        """The one readable line of a command that was refused, without its prefix."""
        shown = f"exit code {self.code}\n--- stderr\n{self.err}\n--- stdout\n{self.out}"
        assert "Traceback" not in self.err + self.out, shown
        assert self.err.startswith(PREFIX), shown
        assert self.err.find("\n") == len(self.err) - 1, f"expected one line\n{shown}"
        assert self.code == code, shown
        return self.err.removeprefix(PREFIX).strip()


def words(run_dir, *overrides, processes=False):
    """``train`` of a tiny run, changed by ``overrides``."""
    given = {word.partition("=")[0].lstrip("~+") for word in overrides}
    own = {node for node in ("data", "model") if given & {node, f"{node}._target_"}}
    if "data._target_" in given and "model" not in own:  # the network of TINY asks what its images are
        overrides = (*overrides, "data.num_classes=10", "data.in_channels=3")
    base = {**TINY, "runtime.processes": str(processes).lower(), "run_dir": str(run_dir)}
    kept = {k: v for k, v in base.items() if k not in given and k.partition(".")[0] not in own}
    return ["train", *(f"{k}={v}" for k, v in kept.items()), *overrides]


def shows(line, parts):
    """Assert that ``line`` has all ``parts`` in it."""
    missing = [part for part in parts if part not in line]
    assert not missing, f"{missing} not in: {line}"


def in_process(*words):
    """Run ``adl-dist *words`` here, as if this were a process of its own."""
    assert not OF_RANKS & os.environ.keys(), "main() can end the process of a rank"
    out, err = io.StringIO(), io.StringIO()
    code = "main() returned"
    with _as_in_a_new_process(), warnings.catch_warnings(record=True) as said:
        warnings.resetwarnings()
        for silent in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
            warnings.simplefilter("ignore", silent)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                main(list(words))
            except SystemExit as done:
                code = done.code
    assert isinstance(code, int), code
    shown = [warnings.formatwarning(w.message, w.category, w.filename, w.lineno) for w in said]
    return Outcome(code, out.getvalue(), err.getvalue() + "".join(shown))


def as_command(*command, cwd=ROOT, timeout_seconds=60.0, env=None):
    """Run a command line in a process of its own, with the repository on its import path; kill it if it is late."""
    clean = {name: value for name, value in os.environ.items() if name not in OF_RANKS}
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    # Files, not pipes: a process that is left behind would keep a pipe open, and this one waiting.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, cwd=cwd,
            env={**clean, "PYTHONPATH": path, **(env or {})}, start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            code = None
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        out.seek(0)
        err.seek(0)
        said = Outcome(code, out.read().decode(), err.read().decode())
    assert code is not None, f"{' '.join(command)} still ran after {timeout_seconds} s\n{said}"
    return said


def left_behind(folder, *, seconds=3.0):
    """Command lines that name ``folder``, which is the test's own, and still run after ``seconds``. Linux only."""
    assert folder.is_absolute()
    deadline = time.monotonic() + seconds
    while True:
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended meanwhile
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if str(folder) in line and int(entry.name) != os.getpid():
                    found.append(line)
        if not found or time.monotonic() >= deadline:
            return found
        time.sleep(0.02)


def weights_of(folder, run="run"):
    """What ``adl-dist export`` writes of the run in ``folder/run``: parameters and buffers at its end."""
    out = folder / f"{run}.pt"
    done = in_process("export", f"run_dir={folder / run}", f"out={out}")
    assert done.code == 0, done
    return torch.load(out, weights_only=True)


def assert_same(found, expected):
    """The same tensors, to the bit, and of the same dtype."""
    assert found.keys() == expected.keys()
    differing = [n for n, t in expected.items() if found[n].dtype != t.dtype or not torch.equal(found[n], t)]
    assert differing == []


def snapshot(folder):
    """Every path below ``folder`` with a hash of what it holds."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
        for path in sorted(folder.rglob("*"))
    }


@contextlib.contextmanager
def _as_in_a_new_process():
    """Without pytest's handlers, which hide what logging prints if it has none; all is put back afterwards."""
    root, ours = logging.getLogger(), logging.getLogger("adl_dist")
    before = root.handlers[:], ours.handlers[:], ours.level, ours.propagate
    root.handlers[:] = []
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        for handler in set(ours.handlers) - set(before[1]):
            handler.close()
        root.handlers[:], ours.handlers[:] = before[0], before[1]
        ours.setLevel(before[2])
        ours.propagate = before[3]
