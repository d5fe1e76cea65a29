"""The folder of a run: its files, its identity, and its restarts.

A launch is one user command including every restart of it. A launcher restarts ranks with the arguments of the first
attempt: ``resume=never`` would refuse each restart, and ``resume=PATH`` would repeat work. So a restart by the launch
that last claimed a folder continues from what it has saved there. (torchrun's count of restarts says less: it also
counts refused attempts, and it begins at 0 for a requeued job or a replaced agent.)
"""

import contextlib
import json
import logging
import os
import shutil
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any

import yaml

from adl_dist.checkpoint import layout, storage
from adl_dist.checkpoint.ownership import Ownership
from adl_dist.checkpoint.storage import copy_small_files, on_rank, place_of, progress, working_folder
from adl_dist.distributed.parent_process import LAUNCH_ID
from adl_dist.distributed.procfs import machine, start_time
from adl_dist.errors import CheckpointError, ConfigError, DivergedError
from adl_dist.report import tell, warn
from adl_dist.report.files import write_atomically
from adl_dist.report.recorder import METRICS
from adl_dist.report.runs import flatten
from adl_dist.schedule import Method
from adl_dist.settings import REMOVED_OPTIONS, renamed, settings_of

logger = logging.getLogger("adl_dist")

CONFIG, SUMMARY, DIVERGED, LAUNCH = "config.yaml", "summary.json", "diverged.json", "launch"
CHECKPOINTS = "checkpoints"
# Settings that say where the model is cut, in the Python API and under partition.* on the command line.
CUT = "num_stages", "balance", "granularity", "speeds", "device_speeds", "links"
# Settings that may differ when a run continues: its length and place, how it is watched, and how it is cut; the clip
# scope, because a run keeps its own. (Another device, number of threads or choice of kernels may move the last bits. A
# schedule that depends on the run's length follows the new length, and another cut has a staleness of its own: these
# two the run reports.) All under runtime.* and partition.* may, but those in FIXED.
FREE = {
    *("run_dir", "resume", "init_from", "init_skip", "callbacks", "tf32", "deterministic", *CUT),
    *("data.root", "data.download", "data.num_workers", "data.persistent_workers"),
    *("train.epochs", "train.max_updates", "train.non_finite", "train.max_skipped", "non_finite", "max_skipped"),
    *("method.split_backward", "method.max_deferred", "method.stages_per_process", "train.clip_scope", "clip_scope"),
}
FIXED = {
    *("runtime.channels_last", "runtime.autocast", "runtime.codec", "runtime.gradient_codec"),
    *("runtime.checkpoint_every_updates", "partition.tied"),
}
# What a run trained with if its folder is older than one of these settings, and so does not name it.
OF_OLD = {f"method.{name}": setting.default for name, setting in settings_of(Method).items() if name != "name"}
# Names of the objects of a script; version 0.3.8 also wrote attributes of loss and schedule.
OF_SCRIPT = {"loss.name", "lr_schedule.made_by.name", "lr_schedule.name"}


def may_change(name: str) -> bool:
    """Return whether the setting ``name`` may differ when a run continues."""
    return name in FREE or (name.startswith(("runtime.", "partition.")) and name not in FIXED)


class RunFolder:
    """The folder of a run, with its records, logs and checkpoints.

    It holds config.yaml, metrics.jsonl, summary.json, tensorboard/, logs/, checkpoints/ and trace.json. Only rank 0
    writes here, except ``logs/rank{r}.log``, the checkpoint's own files, and ``diverged.json``, which the rank that has
    diverged writes.

    Checkpoints are written into the storage of the run folder. All other files are small, and some are appended to. If
    the run folder is a URL, each process writes its small files in a working folder, and copies them at each checkpoint
    and at the end.

    Attributes:
        place: where the run folder is.
        path: where this process writes all files but checkpoints: ``place``, or the working folder.
        is_shared: whether this process sees the run folder of rank 0, or is rank 0.
        identity: the identity of the checkpoint that the run continues from, set by :meth:`check`; None without a
            checkpoint.
    """

    is_shared = True

    def __init__(self, run_dir: str | os.PathLike[str]) -> None:
        """Prepare the folder at a local path or a URL, without reading or writing."""
        self.place = place_of(run_dir)
        self.checkpoints = self.place / CHECKPOINTS
        self._has_copy = "://" in os.fspath(run_dir)
        self.path = working_folder() if self._has_copy else Path(self.place)
        self.identity: dict[str, Any] | None = None
        self._copied: dict[PurePath, object] = {}  # files that are the same in both, each with size and time
        self._ownership = Ownership(self.place, _launch_id())

    def check(self, config: Mapping[str, Any], *, resume: str, later: Collection[str] = (), waits: bool = True) -> str:
        """Refuse a folder that this run must not write to, and change nothing.

        Settings under ``later`` are not known yet; :meth:`recognise` compares them when they are. With ``waits=False``
        an owner on another machine is left to the check of the process that trains.

        Return ``resume`` (``auto``, ``never`` or the path of a checkpoint), or ``auto`` if this launch has saved here
        before, since then this is a restart.

        Raises:
            ConfigError: If the folder cannot be used, another process trains there, or its run has other settings.
            CheckpointError: If ``resume`` would write over a run in the folder, or gives no usable checkpoint.
        """
        with self._explained():
            above = next(p for p in (self.path, *self.path.parents) if p.exists())
            if not above.is_dir() or not os.access(above, os.W_OK):
                raise OSError(f"{above} is {'not writable' if above.is_dir() else 'a file'}")
            if self._ownership.is_held(waits=waits):
                raise self._taken()
        self.pull()
        saved = layout.complete(self.checkpoints)
        with contextlib.suppress(OSError):
            if saved and (self.path / LAUNCH).read_text() == _launch_id():
                resume = "auto"
        if resume == "never" and saved:
            raise CheckpointError(
                f"run_dir={self.place} already holds a run ({saved[-1].name}) and resume=never would write over it; "
                "use resume=auto to continue it, or another run_dir"
            )
        self.recognise(config, without=later)
        if resume in ("auto", "never"):
            if saved:  # the content is read later, once
                self.identity = layout.first_usable(saved[::-1], layout.read_manifest)[1]["identity"]
            return resume
        start = place_of(resume)
        if not storage.names(start):
            raise CheckpointError(
                f"resume={resume} is neither 'auto' nor 'never' nor the folder of a checkpoint, "
                "like runs/NAME/checkpoints/update-00000042"
            )
        self.identity = layout.read_manifest(start)["identity"]
        if saved and _resolved(start) != _resolved(saved[-1]):
            raise CheckpointError(
                f"run_dir={self.place} holds {saved[-1].name}, and continuing from resume={resume} would write "
                "over it; choose another run_dir to continue from there"
            )
        return resume

    def reach(self, place: str) -> PurePath:
        """Return the path by which this process reaches ``place`` of rank 0."""
        path = place_of(place)
        return on_rank(0, path) if isinstance(path, Path) and not self.is_shared else path

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn an OSError into a ConfigError that run_dir cannot be used."""
        try:
            yield
        except OSError as error:
            raise ConfigError(
                f"run_dir={self.place} cannot be used: {error.strerror or error}; choose another run_dir"
            ) from error

    def open(self, *, resume: str) -> list[PurePath]:
        """Take the folder; return the checkpoints to resume from, newest first."""
        make_folder(self.path)
        with self._explained():
            if not self._ownership.take():
                raise self._taken()
        layout.clean(self.checkpoints)
        return layout.complete(self.checkpoints)[::-1] if resume in ("auto", "never") else [place_of(resume)]

    def _taken(self) -> ConfigError:
        return ConfigError(
            f"run_dir={self.place}: {self._ownership.holder} is training here; wait for it, or choose another run_dir"
        )

    def claim(self, config: Mapping[str, Any]) -> None:
        """Record the settings of the folder's run, and the id of this launch."""
        with self._explained():
            (self.path / LAUNCH).unlink(missing_ok=True)
            if (launch := _launch_id()) is not None:
                (self.path / LAUNCH).write_text(launch)
            with write_atomically(self.path / CONFIG) as unfinished:
                unfinished.write_text(yaml.safe_dump(dict(config), sort_keys=False))
            self.push()

    @property
    def is_claimed(self) -> bool:
        """Whether the folder holds the settings of a run."""
        return (self.path / CONFIG).is_file()

    def close(self) -> None:
        """Copy the last small files, and let other processes write here."""
        with contextlib.suppress(OSError):
            if self._ownership.lost is None:
                self.push()
        self._ownership.release()
        if self._has_copy:
            log_to(None)
            shutil.rmtree(self.path, ignore_errors=True)

    def check_owner(self) -> None:
        """Raise TakenOverError if another process owns the folder now."""
        self._ownership.check()

    def check_not_lost(self) -> None:
        """Raise TakenOverError if the loss of the folder is known; read no files."""
        if self._ownership.lost is not None:
            raise self._ownership.lost

    def push(self) -> None:
        """Copy changed files of the working folder, if any, to the storage."""
        for file in self.path.rglob("[!.]*") if self._has_copy else ():
            name, known = file.relative_to(self.path), _version(file)
            if known is not None and name.parts[0] != CHECKPOINTS and self._copied.get(name) != known:
                storage.write(self.place / name, file.read_bytes())
                progress.count()
                self._copied[name] = known

    def pull(self) -> None:
        """Copy missing small files from the storage to the working folder, if any."""
        if self._has_copy:
            self._copied |= {name: _version(self.path / name) for name in copy_small_files(self.place, self.path)}

    @property
    def summarised_updates(self) -> int | None:
        """The number of updates in ``summary.json``, or None if it has none."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            return int(json.loads((self.path / SUMMARY).read_text())["updates"])
        return None

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write ``summary.json`` atomically; only warn if that fails."""
        try:
            with write_atomically(self.path / SUMMARY) as unfinished:
                unfinished.write_text(json.dumps(summary, indent=1) + "\n")
        except OSError as error:
            warn(f"{self.path / SUMMARY} could not be written: {error.strerror}; the run itself is complete and saved")

    def write_divergence(self, error: DivergedError) -> None:
        """Write ``diverged.json`` for ``adl-dist compare``, on the diverged rank."""
        with contextlib.suppress(OSError):
            text = json.dumps({"update": error.update, "epoch": error.epoch}) + "\n"
            storage.write(self.place / DIVERGED, text.encode())

    @property
    def clip_scope(self) -> str | None:
        """The ``train.clip_scope`` of the run that continues, if there is one."""
        theirs = self._settings()
        before = "stage"  # before 0.4.0 the only one
        return None if theirs is None else theirs.get("train.clip_scope", theirs.get("clip_scope", before))

    def _settings(self) -> dict[str, Any] | None:
        """Return the settings of the run that continues by dotted names, or None."""
        records = self.path / METRICS
        has_trained = (records.is_file() and records.stat().st_size) or layout.complete(self.checkpoints)
        if not (self.is_claimed and has_trained):
            return None  # a run that failed before its first update leaves nothing to continue
        try:
            return renamed(flatten(dict(yaml.safe_load((self.path / CONFIG).read_text()))))
        except (yaml.YAMLError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{self.path / CONFIG} cannot be read ({' '.join(str(error).split())}), so it is unknown which run "
                "this is; choose another run_dir"
            ) from error

    def recognise(self, config: Mapping[str, Any], *, without: Collection[str] = ()) -> None:
        """Raise ConfigError if settings of the run differ from ``config``.

        Settings that may change, and the groups in ``without``, are not compared.
        """
        if (theirs := self._settings()) is None:
            return
        mine = flatten(config)
        if "loss.name" in theirs and "loss._target_" not in theirs:
            theirs = {n: v for n, v in theirs.items() if not n.startswith(("loss.", "lr_schedule.")) or n in OF_SCRIPT}
        mine = {f"method.{name}": value for name, value in REMOVED_OPTIONS.items() if f"method.{name}" in theirs} | mine
        theirs |= {name: OF_OLD[name] for name in mine.keys() & OF_OLD.keys() - theirs.keys()}
        names = {n for n in mine.keys() | theirs.keys() if not may_change(n) and n.split(".")[0] not in without}
        # Of another optimizer most keys are there on one side only; its name says more.
        in_order = sorted(names, key=lambda n: (n not in mine or n not in theirs, n))
        if differing := [n for n in in_order if mine.get(n) != theirs.get(n)]:
            shown = ", ".join(f"{n} is {theirs.get(n)!r} there and {mine.get(n)!r} here" for n in differing[:3])
            more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
            raise ConfigError(
                f"run_dir={self.place} belongs to another run: {shown}{more}; choose another run_dir "
                "(with init_from=CHECKPOINT to begin with the weights of this one), or give the run's own settings to "
                "continue it"
            )


def _launch_id() -> str | None:
    """Return an id of one launch and its restarts, or None if it has none."""
    if LAUNCH_ID in os.environ:
        return os.environ[LAUNCH_ID]
    # "none" is torchrun's --rdzv-id where none is given: the same in all commands
    if (run_id := os.environ.get("TORCHELASTIC_RUN_ID")) != "none":
        return run_id
    agent = os.getppid()  # it stays when it restarts its ranks; on several nodes each has one of its own
    return f"torchrun {machine()} {agent} {start_time(agent)}"


class _LogFile(logging.FileHandler):
    """A log file that reports only its first failed write, in one line."""

    _failed = False

    def handleError(self, record: logging.LogRecord) -> None:
        if not self._failed:
            self._failed = True
            tell(sys.stderr, f"adl-dist: warning: {self.baseFilename} cannot be written: {sys.exc_info()[1]}\n")


def log_to(path: Path | None) -> None:
    """Send this process's log only to ``path``, or to no file if it is None."""
    for old in [h for h in logger.handlers if isinstance(h, logging.FileHandler)]:
        logger.removeHandler(old)
        old.close()
        logger.propagate = True
    if path is None:
        return
    make_folder(path.parent)
    try:
        handler = _LogFile(path.resolve(), encoding="utf-8", errors="backslashreplace")  # names of files may be others
    except OSError as error:
        warn(f"{path} cannot be written: {error.strerror}; this process writes no log")
        return
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


def make_folder(path: Path) -> None:
    """Make the folder ``path`` and its parents, or raise ConfigError."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"run_dir: {path} cannot be made: {error.strerror}; choose another run_dir") from None


def _resolved(place: PurePath) -> PurePath:
    return place.resolve() if isinstance(place, Path) else place


def _version(file: Path) -> object:
    """Return size and time of a file, or None for anything else."""
    status = file.stat()
    return (status.st_size, status.st_mtime_ns) if file.is_file() else None


def chosen_checkpoint(run_dir: str | os.PathLike[str], wanted: str | None) -> PurePath:
    """Return the ``wanted`` checkpoint: ``best``, ``newest`` (None) or a path."""
    folder = place_of(run_dir)
    path = folder if wanted in (None, "best", "newest") else place_of(str(wanted))
    saved = [path] if layout.is_complete(path) else layout.complete(path / CHECKPOINTS)
    found = layout.best_of(saved) if wanted == "best" else saved[-1] if saved else None
    if found is None:
        raise CheckpointError(
            f"checkpoint={wanted or 'newest'}: {path} holds no complete checkpoint like that; expected best, which "
            "needs a validation, newest, or a checkpoint folder, like runs/NAME/checkpoints/update-00000042"
        )
    return found
