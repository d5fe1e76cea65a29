"""The messages between the coordinator and the stages. They travel over RPC as they are."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from adl_dist.errors import StageFailed
from adl_dist.monitor.trace import Instant
from adl_dist.schedule import Segment

Record = dict[str, Any]  # one line of metrics.jsonl
Summary = dict[str, Any]  # the content of summary.json


@dataclass(frozen=True)
class Train:
    """The command to train on ``segment``; each stage returns a :class:`TrainResult`."""

    segment: Segment


@dataclass(frozen=True)
class Evaluate:
    """The command to evaluate the first ``num_samples``; each stage returns an :class:`EvaluateResult`."""

    num_samples: int
    micro_batch_size: int


@dataclass(frozen=True)
class Load:
    """The command to read the checkpoint at ``path``, made after ``update`` updates."""

    path: str
    update: int


@dataclass(frozen=True)
class Save:
    """The command to write this process's part of a checkpoint; see :class:`~adl_dist.checkpoint.async_save.Saver`."""

    path: str
    token: str
    background: bool


@dataclass(frozen=True)
class Trace:
    """The command to write this process's part of the trace; ``origin``: time 0, taken on rank 0."""

    run_dir: str
    origin: Instant


@dataclass(frozen=True)
class Stop:
    """The decision that the running segment ends after ``after_update`` updates of the run, on all stages."""

    after_update: int


@dataclass(frozen=True)
class Finish:
    """The end of a job that went well, with its result."""

    result: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The error of one process, as the others get to know it.

    Attributes:
        rank: the process.
        text: the error in one line.
        traceback: for the log.
        exit_code: what the command ends with.
        is_victim: whether it failed only because another process did.
        is_gone: whether the process has died or is stuck, so that it cannot report anything itself.
    """

    rank: int
    text: str
    traceback: str = ""
    exit_code: int = 1
    is_victim: bool = False
    is_gone: bool = False

    def error(self) -> StageFailed:
        """Return the error that the other processes raise for it."""
        return StageFailed(self.text, exit_code=self.exit_code, is_victim=self.is_victim, is_gone=self.is_gone)


@dataclass(frozen=True)
class Abort:
    """The end of a job that failed."""

    failure: Failure


Command = Train | Evaluate | Load | Save | Trace


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """The figures of one stage over one segment.

    Attributes:
        stage: the stage.
        seconds: the time that the segment took.
        busy_seconds: the part of it spent in forward, backward and update.
        staleness_sum: the staleness of all gradients, added up, in updates.
        staleness_max: the largest of them.
        num_backwards: how many there were.
        num_updates: updates made or skipped.
        num_skipped: updates skipped.
        peak_memory_bytes: the most memory that the process has held so far.
        peak_tensor_bytes: the most bytes of tensors; None unless measured.
        spent: seconds by kind of action; empty without a trace.
    """

    stage: int
    seconds: float
    busy_seconds: float
    staleness_sum: int
    staleness_max: int
    num_backwards: int
    num_updates: int
    num_skipped: int
    peak_memory_bytes: int
    peak_tensor_bytes: int | None = None
    spent: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class EvaluateResult:
    """The figures of one stage over the validation set; all but ``stage`` on the last stage only.

    Attributes:
        stage: the stage.
        num_samples: samples evaluated.
        loss_sum: their losses, added up.
        num_correct: how many were classified correctly; None if the task has no classes.
    """

    stage: int
    num_samples: int = 0
    loss_sum: float = 0.0
    num_correct: int | None = None


@dataclass(frozen=True, kw_only=True)
class Done:
    """The result of a command that has nothing else to report: which stage, in the process of which rank."""

    stage: int
    rank: int


@dataclass(frozen=True, kw_only=True)
class TraceResult:
    """One stage's part of the trace; ``part`` is what :func:`~adl_dist.monitor.trace.write_part` returned."""

    stage: int
    part: Mapping[str, Any]


Result = TrainResult | EvaluateResult | Done | TraceResult


@dataclass(frozen=True, kw_only=True)
class Report:
    """What one process sends the coordinator.

    Attributes:
        rank: the process.
        records: lines for metrics.jsonl since its last report.
        results: the results of a command, one per stage; None: it is not done.
        failure: why the process fails; None: it does not.
    """

    rank: int
    records: list[Record] = field(default_factory=list)
    results: list[Result] | None = None
    failure: Failure | None = None
