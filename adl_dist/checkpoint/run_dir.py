"""The one folder that a run leaves behind, and whose run it is."""

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

logger = logging.getLogger("adl_dist")

CONFIG = "config.yaml"
SUMMARY = "summary.json"
DIVERGED = "diverged.json"
LOCK = "lock"

# What says where the model is cut: settings of the Python API, and keys of partition.* on the command line.
CUT = ("num_stages", "balance", "granularity", "speeds")
# What may differ when a run goes on: how long, where, how it is watched, and how it is cut. (Another device, number of
# threads or choice of kernels may move the last bits; a schedule that depends on the length of the run follows the new
# length, and another cut has a staleness of its own: of these two the run says so.)
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
    """Holds config.yaml, metrics.jsonl, summary.json, tensorboard/, logs/, checkpoints/, trace.json, lock, and launch.

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
            config: what defines the run, as plain nested values.
            resume: ``auto``, ``never``, or the path of a checkpoint.

        Returns:
            What to resume: ``auto`` where this launch has saved before, which it was started again to go on from.

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
                "use resume=auto to go on with it, or another run_dir"
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
                    f"run_dir={self.path} holds {saved[-1].name}, and going on from resume={resume} would write "
                    "over it; choose another run_dir to go on from there"
                )
        elif saved:
            # The content is for rank 0 to read, once. But where nothing is even whole, all can know it at once.
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
        """Make the folder, keep others out, and say where to start from; on rank 0, after :meth:`check`.

        Returns:
            The checkpoints to continue from, the first of them that is good; none for a fresh start.

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
        """Write down whose run this is, and which launch goes on with it.

        Raises:
            ConfigError: it cannot be written.
        """
        try:
            launch_id.write_launch_id(self.path)
            _write(self.path / CONFIG, yaml.safe_dump(dict(config), sort_keys=False))
        except OSError as error:
            raise ConfigError(
                f"run_dir={self.path} cannot be written: {error.strerror}; make room, or choose another run_dir"
            ) from error

    @property
    def is_claimed(self) -> bool:
        """Whether it says whose run it is."""
        return (self.path / CONFIG).is_file()

    def close(self) -> None:
        """Let others write here."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    @property
    def summarised_updates(self) -> int | None:
        """After how many updates the run of summary.json ended; None: there is none that can be read."""
        try:
            return int(json.loads((self.path / SUMMARY).read_text())["updates"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write ``summary.json``, whole or not at all; a disk that fails now must not make the run a failed one."""
        try:
            _write(self.path / SUMMARY, json.dumps(summary, indent=1) + "\n")
        except OSError as error:
            warn(f"{self.path / SUMMARY} could not be written: {error.strerror}; the run itself is complete and saved")

    def write_divergence(self, error: DivergedError) -> None:
        """Write ``diverged.json``, which ``adl-dist compare`` reads; called by the rank that found the divergence."""
        with contextlib.suppress(OSError):  # the error itself is reported anyway
            _write(self.path / DIVERGED, json.dumps({"update": error.update, "epoch": error.epoch}) + "\n")

    def _recognise(self, known: Path, config: Mapping[str, Any]) -> None:
        try:
            theirs = flatten(dict(yaml.safe_load(known.read_text())))
        except (yaml.YAMLError, UnicodeDecodeError, TypeError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise ConfigError(
                f"{known} cannot be read ({reason}), so whose run this is cannot be told; choose another run_dir"
            ) from error
        mine = flatten(config)
        names = [n for n in sorted(mine.keys() | theirs.keys()) if n not in FREE_TO_CHANGE]
        differing = [n for n in names if mine.get(n) != theirs.get(n)]
        if differing:
            shown = ", ".join(f"{n} is {theirs.get(n)!r} there and {mine.get(n)!r} here" for n in differing[:3])
            more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
            raise ConfigError(
                f"run_dir={self.path} belongs to another run: {shown}{more}; choose another run_dir, "
                "or give the run's own settings to go on with it"
            )


class _LogFile(logging.FileHandler):
    """A log that says once that it cannot be written, where logging itself would print a traceback for each line."""

    _failed = False

    def handleError(self, record: logging.LogRecord) -> None:
        if not self._failed:
            self._failed = True
            tell(sys.stderr, f"adl-dist: warning: {self.baseFilename} cannot be written: {sys.exc_info()[1]}\n")


def log_to(path: Path | None) -> None:
    """Send this process's log to a file of its own, and no longer to that of a run before; None: to none."""
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
    """Make ``path`` and what lies above it.

    Raises:
        ConfigError: it cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"run_dir: {path} cannot be made: {error.strerror}; choose another run_dir") from None


def lock(folder: Path) -> int | None:
    """Keep others out of ``folder``, on all nodes that share it.

    A file and not the folder itself: NFS has no locks of folders, where they would hold on one node only, and locks a
    file only for who may write it. The file stays: were it removed, two could hold locks of two files of that name.

    Returns:
        What to close to let others in, which the kernel does when this process ends; None if somebody holds it.

    Raises:
        ConfigError: the file system lets nobody lock.
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
    """The checkpoint that is wanted of a run.

    Args:
        run_dir: of the run.
        wanted: ``best`` by validation; the path of one, or of another run; None: the newest.

    Raises:
        CheckpointError: there is none.
    """
    if wanted == "best":
        best = layout.best_of(layout.complete(run_dir / "checkpoints"))
        if best is None:
            raise CheckpointError(
                f"checkpoint=best: {run_dir} holds no checkpoint with a validation loss; leave it away for the newest"
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
    """Nested mappings as one, with dotted names."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def _write(path: Path, text: str) -> None:
    unfinished = path.with_name(f".{path.name}.saving")
    unfinished.write_text(text)
    os.replace(unfinished, path)
