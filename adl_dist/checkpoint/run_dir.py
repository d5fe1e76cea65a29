"""The one folder that a run leaves behind, and which run it belongs to."""

import contextlib
import fcntl
import json
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from adl_dist.checkpoint import launch_id, layout
from adl_dist.errors import CheckpointError, ConfigError, DivergedError
from adl_dist.report import tell, warn
from adl_dist.report.files import write_atomically

logger = logging.getLogger("adl_dist")

CONFIG = "config.yaml"
SUMMARY = "summary.json"
DIVERGED = "diverged.json"
LOCK = "lock"

# Settings that say where the model is cut, in the Python API and under partition.* on the command line.
CUT = ("num_stages", "balance", "granularity", "speeds")
# Settings that may differ when a run continues: its length and place, how it is watched, and how it is cut. (Another
# device, number of threads or choice of kernels may move the last bits. A schedule that depends on the run's length
# follows the new length, and another cut has a staleness of its own: these two the run reports.)
FREE_TO_CHANGE = {
    *("run_dir", "resume", "init_from", "train.epochs", "train.max_updates"),
    *("data.root", "data.download", "data.num_workers"),
    *("runtime.processes", "runtime.device", "runtime.threads", "runtime.bind_cores"),
    *("runtime.timeout_seconds", "runtime.max_restarts"),
    *("runtime.stall_seconds", "runtime.abort_seconds"),
    *("runtime.tf32", "tf32", "runtime.cudnn_benchmark", "runtime.compile"),
    *("runtime.checkpoint_every_epochs", "runtime.keep_checkpoints", "runtime.tensorboard"),
    *("runtime.keep_best", "runtime.async_save"),
    *("runtime.trace", "runtime.memory"),
    *("train.non_finite", "train.max_skipped", "non_finite", "max_skipped"),
    *CUT,
    *(f"partition.{name}" for name in CUT),
}


class RunFolder:
    """The folder of config.yaml, metrics.jsonl, summary.json, tensorboard/, logs/, checkpoints/, trace.json and locks.

    Only rank 0 writes here, except ``logs/rank{r}.log``, ``trace/rank{r}.jsonl``, the checkpoint's own files, and
    ``diverged.json``, which the rank that has diverged writes.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self._lock: int | None = None

    def check(self, config: Mapping[str, Any], *, resume: str) -> str:
        """Refuse a folder that this run must not write to. Changes nothing, so every rank may call it.

        Args:
            config: the settings that define the run, as plain nested values.
            resume: ``auto``, ``never``, or the path of a checkpoint.

        Returns:
            What to resume: ``auto`` if this launch has saved here before, since then it is a restart.

        Raises:
            ConfigError: the folder belongs to a run of another configuration.
            CheckpointError: it holds a run and ``resume=never``; ``resume`` names no checkpoint.
        """
        self._check_place()
        saved = layout.complete(self.checkpoints)
        if saved and launch_id.is_this_launch(self.path):
            resume = "auto"
        if resume == "never" and saved:
            raise CheckpointError(
                f"run_dir={self.path} already holds a run ({saved[-1].name}) and resume=never would write over it; "
                "use resume=auto to continue it, or another run_dir"
            )
        if self.is_claimed:
            self._recognise(self.path / CONFIG, config)
        if resume not in ("auto", "never"):
            if not Path(resume).is_dir():
                raise CheckpointError(
                    f"resume={resume} is neither 'auto' nor 'never' nor the folder of a checkpoint, "
                    "like runs/NAME/checkpoints/update-00000042"
                )
            layout.read_manifest(Path(resume))
            if saved and Path(resume).resolve() != saved[-1].resolve():
                raise CheckpointError(
                    f"run_dir={self.path} holds {saved[-1].name}, and continuing from resume={resume} would write "
                    "over it; choose another run_dir to continue from there"
                )
        elif saved:
            # Rank 0 reads the content, once. But where no checkpoint is even whole, all ranks find it out at once.
            layout.newest_whole(saved)
        return resume

    def _check_place(self) -> None:
        try:
            above = next(p for p in (self.path, *self.path.absolute().parents) if p.exists())
        except OSError as error:
            raise ConfigError(f"run_dir={self.path} cannot be made: {error.strerror}; choose another run_dir") from None
        if not above.is_dir() or not os.access(above, os.W_OK):
            raise ConfigError(
                f"run_dir={self.path} cannot be made: {above} is {'not writable' if above.is_dir() else 'a file'}; "
                "choose another run_dir"
            )

    def open(self, *, resume: str) -> list[Path]:
        """Make the folder, keep others out, and find out where to start from; on rank 0, after :meth:`check`.

        Returns:
            The checkpoints of which the first good one is to be continued from; none for a fresh start.

        Raises:
            ConfigError: the folder cannot be made, or another process is training there.
        """
        make_folder(self.checkpoints)
        self._lock = lock(self.path)
        if self._lock is None:
            raise ConfigError(
                f"run_dir={self.path}: another process is training here; wait for it, or choose another run_dir"
            )
        layout.clean(self.checkpoints)
        if resume in ("auto", "never"):
            return layout.complete(self.checkpoints)[::-1]
        return [Path(resume)]

    def claim(self, config: Mapping[str, Any]) -> None:
        """Write down which run the folder belongs to, and which launch continues it.

        Raises:
            ConfigError: it cannot be written.
        """
        try:
            launch_id.write_launch_id(self.path)
            with write_atomically(self.path / CONFIG) as unfinished:
                unfinished.write_text(yaml.safe_dump(dict(config), sort_keys=False))
        except OSError as error:
            raise ConfigError(
                f"run_dir={self.path} cannot be written: {error.strerror}; make room, or choose another run_dir"
            ) from error

    @property
    def is_claimed(self) -> bool:
        """Whether the folder says which run it belongs to."""
        return (self.path / CONFIG).is_file()

    def close(self) -> None:
        """Let others write here."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    @property
    def summarised_updates(self) -> int | None:
        """The number of updates after which the run of summary.json ended; None: no summary can be read."""
        try:
            return int(json.loads((self.path / SUMMARY).read_text())["updates"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write ``summary.json``, whole or not at all; a disk that fails now must not make the run a failed one."""
        try:
            with write_atomically(self.path / SUMMARY) as unfinished:
                unfinished.write_text(json.dumps(summary, indent=1) + "\n")
        except OSError as error:
            warn(f"{self.path / SUMMARY} could not be written: {error.strerror}; the run itself is complete and saved")

    def write_divergence(self, error: DivergedError) -> None:
        """Write ``diverged.json``, which ``adl-dist compare`` reads; called by the rank that found the divergence."""
        # A disk that fails now hides nothing: the error itself is reported anyway.
        with contextlib.suppress(OSError), write_atomically(self.path / DIVERGED) as unfinished:
            unfinished.write_text(json.dumps({"update": error.update, "epoch": error.epoch}) + "\n")

    def _recognise(self, known: Path, config: Mapping[str, Any]) -> None:
        try:
            theirs = flatten(dict(yaml.safe_load(known.read_text())))
        except (yaml.YAMLError, UnicodeDecodeError, TypeError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise ConfigError(
                f"{known} cannot be read ({reason}), so it is unknown which run this is; choose another run_dir"
            ) from error
        mine = flatten(config)
        names = [n for n in sorted(mine.keys() | theirs.keys()) if n not in FREE_TO_CHANGE]
        differing = [n for n in names if mine.get(n) != theirs.get(n)]
        if differing:
            shown = ", ".join(f"{n} is {theirs.get(n)!r} there and {mine.get(n)!r} here" for n in differing[:3])
            more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
            raise ConfigError(
                f"run_dir={self.path} belongs to another run: {shown}{more}; choose another run_dir, "
                "or give the run's own settings to continue it"
            )


class _LogFile(logging.FileHandler):
    """A log that says once that it cannot be written, where logging itself would print a traceback for each line."""

    _failed = False

    def handleError(self, record: logging.LogRecord) -> None:
        if not self._failed:
            self._failed = True
            tell(sys.stderr, f"adl-dist: warning: {self.baseFilename} cannot be written: {sys.exc_info()[1]}\n")


def log_to(path: Path | None) -> None:
    """Send this process's log to the file ``path``, and no longer to that of an earlier run; None: to no file."""
    if path is not None:
        make_folder(path.parent)
    for old in [h for h in logger.handlers if isinstance(h, logging.FileHandler)]:
        logger.removeHandler(old)
        old.close()
        logger.propagate = True
    if path is None:
        return
    try:
        handler = _LogFile(path.resolve())
    except OSError as error:
        warn(f"{path} cannot be written: {error.strerror}; this process writes no log")
        return
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


def make_folder(path: Path) -> None:
    """Make the folder ``path`` and the folders above it.

    Raises:
        ConfigError: it cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"run_dir: {path} cannot be made: {error.strerror}; choose another run_dir") from None


def lock(folder: Path) -> int | None:
    """Lock ``folder`` against other processes, on all nodes that share it.

    A file is locked and not the folder itself: NFS would lock a folder on one node only, and locks a file only for
    those who may write it. The file stays: if it were removed, two processes could lock two files of that name.

    Returns:
        The descriptor to close to unlock, which the kernel does when this process ends; None if it is locked.

    Raises:
        ConfigError: the file system has no locks.
    """
    descriptor = None
    try:
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if descriptor is not None:
            os.close(descriptor)
        if isinstance(error, BlockingIOError):
            return None
        raise ConfigError(
            f"run_dir={folder}: {LOCK} in it cannot be locked: {error.strerror}; choose another run_dir"
        ) from None
    return descriptor


def chosen_checkpoint(run_dir: Path, wanted: str | None) -> Path:
    """Return a checkpoint of a run.

    Args:
        run_dir: the run's folder.
        wanted: ``best`` by validation; the path of a checkpoint, or of another run; None: the newest.

    Raises:
        CheckpointError: there is no such checkpoint.
    """
    if wanted == "best":
        best = layout.best_of(layout.complete(run_dir / "checkpoints"))
        if best is None:
            raise CheckpointError(
                f"checkpoint=best: {run_dir} holds no checkpoint with a validation loss; omit it for the newest"
            )
        return best
    path = Path(wanted or run_dir)
    if (path / layout.MANIFEST).is_file():
        return path
    saved = layout.complete(path / "checkpoints")
    if not saved:
        raise CheckpointError(f"{path} holds no complete checkpoint; train first: adl-dist train run_dir={path}")
    return saved[-1]


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested mappings as one, with dotted names."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat
