"""The messages between the coordinator and the stages, over RPC."""

import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from adl_dist.errors import AdlError, ChannelError, StageFailed, message_of
from adl_dist.report.totals import TrainResult
from adl_dist.schedule import Segment

Record = dict[str, Any]  # one line of metrics.jsonl
Summary = dict[str, Any]  # the content of summary.json


@dataclass(frozen=True)
class Train:
    """The command to train; each stage returns a :class:`TrainResult`."""

    segment: Segment


@dataclass(frozen=True)
class Evaluate:
    """The command to evaluate; each stage returns :class:`EvaluateResult`."""

    segment: Segment


@dataclass(frozen=True)
class Load:
    """The command to read a checkpoint made after ``update`` updates."""

    path: str
    update: int


@dataclass(frozen=True)
class Save:
    """The command to write this process's part of a checkpoint."""

    path: str
    token: str
    background: bool


@dataclass(frozen=True)
class Trace:
    """The command to return a part of the trace; ``origin`` is its time 0."""

    origin: float


@dataclass(frozen=True)
class Stop:
    """The decision that the segment ends after ``after_update`` updates."""

    after_update: int


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The error of one process, as the other processes receive it."""

    rank: int
    text: str  # the error in one line
    traceback: str = ""  # for the log
    exit_code: int = 1  # of the command
    is_victim: bool = False  # whether it failed only because another process did
    is_gone: bool = False  # whether the process has died or is stuck, so that it cannot report anything itself

    @classmethod
    def of(cls, error: BaseException, rank: int) -> "Failure":
        """Return the failure for ``error``, which ends the job on ``rank``."""
        return cls(
            rank=rank,
            text=message_of(error, rank),
            traceback="".join(traceback.format_exception(error)),
            exit_code=error.exit_code if isinstance(error, AdlError) else 1,
            is_victim=getattr(error, "is_victim", isinstance(error, ChannelError)),
            is_gone=getattr(error, "is_gone", False),
        )

    def error(self) -> StageFailed:
        """Return the error that the other processes raise for it."""
        return StageFailed(self.text, exit_code=self.exit_code, is_victim=self.is_victim, is_gone=self.is_gone)


@dataclass(frozen=True)
class Finish:
    """The end of a job that went well, with its result."""

    result: Summary


@dataclass(frozen=True)
class Abort:
    """The end of a job that failed."""

    failure: Failure


Command = Train | Evaluate | Load | Save | Trace


def command_name(command: Command) -> str:
    """Return the name of a command, for messages."""
    return type(command).__name__.lower()


@dataclass(frozen=True, kw_only=True)
class EvaluateResult:
    """One stage's validation figures; the run's are those of the last stage."""

    stage: int
    # num_samples; loss_sum over num_terms, or samples; num_correct of num_classed, if there are classes;
    # first_bad, the first micro-batch whose loss is not finite, if those of others are
    numbers: Mapping[str, float]
    metrics: Mapping[str, float]  # the requested ones, by name


@dataclass(frozen=True)
class Done:
    """The result of a command without figures, by the process ``rank``."""

    rank: int


Result = TrainResult | EvaluateResult | Done | dict[str, Any]  # the last: one stage of monitor.trace.parts_of


@dataclass(frozen=True, kw_only=True)
class Report:
    """A report of one process to the coordinator."""

    rank: int
    records: list[Record] = field(default_factory=list)  # for metrics.jsonl, since its last report
    results: list[Result] | None = None  # of a command, once it is done
    failure: Failure | None = None
