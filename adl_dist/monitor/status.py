"""What one process tells of itself when it is asked, as the doctor and ``adl-dist status`` see it. No torch."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

STARTING = "start"  # the phase of a process whose stages are not built yet
IDLE = "idle"  # of one that waits for the coordinator's next command
AWAITING = "wait for the next command"
FAILED = "failed"  # of one whose command raised
COORDINATOR = -1  # whom an idle stage waits for


@dataclass(frozen=True, kw_only=True)
class StageStatus:
    """One stage.

    Attributes:
        stage: its index.
        doing: its present action in words.
        op: of that action, as schedules print it; "" where there is none.
        number: of the action's micro-batch or group within the segment.
        seconds: since when.
        waits_for: stages that the action waits for.
        last: the number of the last finished action of each op.
        counts: how many actions of each op are finished in the segment.
        segment: how many segments, of training or evaluation, the process has begun; the same on all of them.
        epoch: of the segment, counted from 0.
        update: updates done over the run.
        micro_batch: of the last finished forward; None: none yet.
        images_per_second: over the segment.
        busy_share: of the segment's time, in forward, backward and update up to the last finished group.
        staleness_mean: over the segment, in updates; None: no group is finished.
    """

    stage: int
    doing: str = IDLE
    op: str = ""
    number: int = 0
    seconds: float = 0.0
    waits_for: list[int] = field(default_factory=list)
    last: dict[str, int] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    segment: int = 0
    epoch: int = 0
    update: int = 0
    micro_batch: int | None = None
    images_per_second: float = 0.0
    busy_share: float = 0.0
    staleness_mean: float | None = None


@dataclass(frozen=True, kw_only=True)
class ProcessStatus:
    """One process.

    Attributes:
        host: name of its machine.
        pid: its process id there.
        machine: equal for two processes only if each sees the other in /proc.
        born: when the process began, in the kernel's ticks, against a process id that is used again; 0: not known.
        phase: the command that it carries out, or ``start``, ``idle`` or ``failed``.
        seconds: since when.
        mark: changes with everything that it does.
        stages: that live in it.
        at: where its main thread is in the program; only if asked closely.
        loaders: process id and state of each process that loads data for it, while it waits for them.
        memory_bytes: that it holds now, on the GPU if it computes there.
        saving: what a thread of it does beside, for a checkpoint: ``saving``, ``committing`` or, mostly, "" (nothing).
        saving_at: where that thread is in the program; only if asked closely.
        is_debugged: whether a Python debugger follows it; only if asked closely.
        runs_ahead: whether its actions are launched on a GPU that also sends and receives, so that what it has done,
            the device may have yet to do.
    """

    host: str
    pid: int
    machine: str = ""
    start_time: int = 0
    phase: str = IDLE
    seconds: float = 0.0
    mark: str = ""
    stages: list[StageStatus] = field(default_factory=list)
    at: str = ""
    loaders: list[tuple[int, str]] = field(default_factory=list)
    memory_bytes: int = 0
    saving: str = ""
    saving_at: str = ""
    is_debugged: bool = False
    runs_ahead: bool = False

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> "ProcessStatus":
        """Back from plain values."""
        stages = [StageStatus(**stage) for stage in told["stages"]]
        return cls(**{**told, "stages": stages, "loaders": [(pid, state) for pid, state in told["loaders"]]})


@dataclass(frozen=True, kw_only=True)
class RankStatus:
    """One process of the job, as rank 0 knows it.

    Attributes:
        rank: of it.
        seen: the last that it told; None: nothing yet.
        silent_seconds: since when it has not answered; 0: it answers.
        state: of a silent one that can be looked at: the kernel's letter for it, or ``gone``; "": cannot be told.
    """

    rank: int
    seen: ProcessStatus | None = None
    silent_seconds: float = 0.0
    state: str = ""

    @property
    def name(self) -> str:
        """For messages."""
        where = f" ({self.seen.host}, pid {self.seen.pid})" if self.seen else ""
        several = self.seen is not None and len(self.seen.stages) > 1
        return f"{'the process of all stages' if several else f'stage {self.rank}'}{where}"


@dataclass(frozen=True)
class CoordinatorStatus:
    """What the coordinator on rank 0 is at.

    Attributes:
        command: given last; "": none yet.
        is_waiting: for the stages' results of it, or at work of its own after it.
        seconds: since when.
        at: where its thread is in the program; only if asked closely.
    """

    command: str = ""
    is_waiting: bool = False
    seconds: float = 0.0
    at: str = ""

    @property
    def doing(self) -> str:
        """In words."""
        if not self.command:
            return "at work before its first command"
        return f"{'waits for the results of' if self.is_waiting else 'at work after'} '{self.command}'"
