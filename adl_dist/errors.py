"""The exceptions of adl_dist; exit code 2 for user errors, 1 for others."""

import difflib
import logging
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

from adl_dist.wording import worded

# In what torch says of a GPU, of its driver, and of a host.
OUT_OF_MEMORY = "out of memory", "can't allocate memory", "Cannot allocate memory", "STATUS_ALLOC_FAILED"
NEED_LESS_MEMORY = (
    "smaller micro-batches need less (train.batch_size, method.accumulation_steps), as do more stages "
    "(partition.num_stages) and method.weights=recompute; adl-dist plan predicts it"
)

HERE = f"{Path(__file__).parent}/"  # files of adl_dist


class Exit(SystemExit):
    """The silent end of a command with its exit code.

    Every other SystemExit comes from the user's code.
    """


class AdlError(Exception):
    """Base of every error raised on purpose."""

    exit_code = 2  # of the process, if the error is not caught

    def __str__(self) -> str:
        return worded(super().__str__())


class ConfigError(AdlError, ValueError):
    """The request cannot be run; fix the command line or the YAML."""


class PartitionError(AdlError, ValueError):
    """The model cannot be cut as asked."""


class DataError(AdlError, ValueError):
    """A dataset that is missing, empty, too small, or unfit for the loss."""


class CheckpointError(AdlError, RuntimeError):
    """A checkpoint or run folder is damaged, foreign, or would be overwritten."""


class UnusableError(CheckpointError):
    """A damaged or unsuitable checkpoint; an older one may be good."""


class CallbackError(AdlError, RuntimeError):
    """An exception in a user's callback, with its name, occasion and error."""

    exit_code = 1


class SaveError(AdlError, RuntimeError):
    """A failure to write the last checkpoint of a run."""

    exit_code = 1


class TakenOverError(AdlError, RuntimeError):
    """The takeover of a silent process's run folder by another process."""

    exit_code = 1


class DivergedError(AdlError, ArithmeticError):
    """A loss or gradient that is not finite.

    ``update`` and ``epoch`` count from 0, as in metrics.jsonl.
    """

    def __init__(self, what: str, *, stage: int, update: int, epoch: int) -> None:
        self.stage, self.update, self.epoch = stage, update, epoch
        way_out = "no rate has acted yet: look in the data for NaN, or for an update without targets"
        if what.startswith("no target"):
            way_out = "leave out samples without targets, or skip such updates: train.non_finite=skip"
        elif update or "validation" in what:  # which comes after the update
            way_out = (
                "lower the learning rate, lengthen its warm-up or, if the method has staleness, raise "
                "method.accumulation_steps, in a new run_dir; or is there an update without targets, or NaN in the "
                "data? The last checkpoint, if any, is kept"
            )
            if "validation" not in what and "skipped" not in what:
                way_out += "; train.non_finite=skip continues from it without such updates"
        super().__init__(f"stage {stage}: {what} at update {update} (epoch {epoch + 1}); {way_out}")


class ScheduleError(AdlError, RuntimeError):
    """A list of actions that cannot be executed: a bug, not the user's fault."""

    exit_code = 1


class ChannelError(AdlError, RuntimeError):
    """A wrong, late or missing message; the peer's log has the cause."""

    exit_code = 1


class StageFailed(AdlError, RuntimeError):
    """The failure of another process, with its error as the text.

    Attributes:
        exit_code: the exit code of the failed process.
        is_victim: whether it failed only because of a third process, whose own error is unknown.
        is_gone: whether rank 0 found the process dead or stuck.
    """

    def __init__(self, text: str, *, exit_code: int, is_victim: bool = False, is_gone: bool = False) -> None:
        super().__init__(text)
        self.exit_code, self.is_victim, self.is_gone = exit_code, is_victim, is_gone


def place_of(error: BaseException) -> str:
    """Return the line of the user's code that raised ``error``.

    It is text like `` at mine.py:12``: the last line outside of packages, otherwise the last line of the traceback.
    """
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if "site-packages" not in f.filename and not f.filename.startswith(HERE)]
    return "".join(f" at {frame.filename}:{frame.lineno}" for frame in [*frames, *own][-1:])


def without_own_frames(error: AdlError) -> AdlError:
    """Return ``error`` without frames of adl_dist, also in its causes.

    The error's text says where the mistake is, so a script's traceback ends with a line of the script.
    """
    one: BaseException | None = error
    seen = set[int]()
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        frames, kept = [], None
        trace = one.__traceback__
        while trace is not None:
            frames.append(trace)
            trace = trace.tb_next
        for trace in reversed(frames):
            if not trace.tb_frame.f_code.co_filename.startswith(HERE):
                kept = TracebackType(kept, trace.tb_frame, trace.tb_lasti, trace.tb_lineno)
        one.__traceback__, one = kept, one.__cause__
    return error


def describe(error: BaseException) -> str:
    """Return the text of an unexpected error, with its traceback or log file."""
    handlers = logging.getLogger("adl_dist").handlers
    log = next((handler.baseFilename for handler in handlers if isinstance(handler, logging.FileHandler)), None)
    where = f"the traceback is in {log}" if log else "".join(traceback.format_exception(error))
    said = in_one_line(error)
    if isinstance(error, MemoryError) or any(words in said for words in OUT_OF_MEMORY):
        return f"no memory left: {said}; {NEED_LESS_MEMORY}; {where}"
    return f"unexpected {said}; {where}"


def in_one_line(error: BaseException) -> str:
    """Return the type and the text of an error in one line."""
    said, name = text_of(error), type(error).__name__
    return name if said == name else f"{name}: {said}"


def text_of(error: BaseException) -> str:
    """Return the text of an error without line breaks, or its type.

    Errors of the user's code are converted to text only here, because their ``__str__`` may raise.
    """
    try:
        return " ".join(str(error).split()) or type(error).__name__
    except Exception as failed:
        return f"its text cannot be made, because of a {type(failed).__name__}"


def did_you_mean(word: str, known: Iterable[str], form: str = "{}") -> str:
    """Return a hint at the closest of ``known`` names, or an empty text."""
    close = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {form.format(close[0])}?" if close else ""


def message_of(error: BaseException, rank: int) -> str:
    """Return the line that other processes show for an error of ``rank``."""
    return str(error) if isinstance(error, AdlError) else f"rank {rank}: {describe(error)}"
