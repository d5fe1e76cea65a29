"""Carries out the coordinator's commands on the stages that live in this process."""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adl_dist import engine
from adl_dist.batch import Batch, tensors_of
from adl_dist.checkpoint import data_state
from adl_dist.checkpoint.async_save import PartWriter
from adl_dist.checkpoint.state import FreshStage, check_storable, load, state_of
from adl_dist.control import messages
from adl_dist.control.messages import (
    Command,
    EvaluateResult,
    Record,
    Reporter,
    Result,
    command_name,
)
from adl_dist.control.stop import EarlyStop
from adl_dist.control.user_code import UserCode
from adl_dist.data.stream import Stream
from adl_dist.distributed.world import World
from adl_dist.engine import BatchSource, StageContext
from adl_dist.errors import ConfigError
from adl_dist.monitor.activity import FINISHING, USER_CODE, ActivityLog, Window
from adl_dist.monitor.memory import MemoryMeter, peak_memory
from adl_dist.monitor.trace import write_part
from adl_dist.optim import fast_forward
from adl_dist.report.totals import CodedResult, TiedResult, TrainResult
from adl_dist.schedule import (
    Action,
    Op,
    Pipeline,
    Segment,
    StageWork,
    downstream_first,
    evaluation_work,
    replay,
    training_work,
)
from adl_dist.schedule.actions import BACKWARDS
from adl_dist.schedule.replay import in_turns
from adl_dist.schedule.work import turns_of
from adl_dist.stage import Stage, StepStats
from adl_dist.stage.loss import LossTerms, counted
from adl_dist.stage.stats import value_of
from adl_dist.stage.tied import TiedWeights
from adl_dist.streams import streams_kept
from adl_dist.transport.channel import LocalChannel
from adl_dist.transport.coding import Coder
from adl_dist.transport.process import POSTED_AHEAD, ProcessSender


@dataclass
class LocalWorker:
    """The stages of one process: one of K, or several, or all K."""

    world: World
    pipeline: Pipeline
    dtype: torch.dtype  # of the loss
    contexts: Mapping[int, StageContext]  # this process's stages with their channels, by stage
    train_loader: BatchSource | None = None  # on stage 0's process only
    validation_loader: BatchSource | None = None  # likewise
    terms: LossTerms | None = None  # what the loss averages over, where that is not samples
    pick_next: Callable[[Any], int] = downstream_first  # of several local stages; any choice gives the same values
    is_plain: bool = True  # whether input and target are a tensor each
    unit: str = "images"  # what samples are, or "tokens", if the loss counts many in a sample
    fresh: Mapping[int, FreshStage] = field(default_factory=dict)  # what each stage was; empty: nothing is saved
    meter: MemoryMeter | None = None  # of the one stage of this process; None: its memory is not measured
    stop: EarlyStop = field(default_factory=EarlyStop)
    user_code: UserCode | None = None  # called between two actions of training; None: there is none
    wants_timeline: bool = False  # whether a few steady updates are still to be recorded, for the report
    activity: ActivityLog = field(init=False)

    def __post_init__(self) -> None:
        on_device = self.world.is_distributed and self.world.backend == "nccl"
        self.activity = ActivityLog(self.pipeline.num_stages, device=self.world.device, runs_ahead=on_device)
        if self.world.device.type == "cuda":  # measuring the model, or an earlier run, may have taken more
            torch.cuda.reset_peak_memory_stats(self.world.device)

    @property
    def stages(self) -> list[Stage]:
        """This process's stages, in order."""
        return [self.contexts[k].stage for k in sorted(self.contexts)]

    def close(self) -> None:
        """End the processes that load data."""
        for loader in (self.train_loader, self.validation_loader):
            if loader is not None:
                loader.close()

    def execute(self, command: Command, reporter: Reporter) -> list[Result]:
        """Carry out ``command``; return its results, in the order of stages."""
        with self.activity.during(command_name(command)):
            match command:
                case messages.Train():
                    return [*self._train(command.segment, reporter.record)]
                case messages.Evaluate():
                    return [*self._evaluate(command.num_samples, command.micro_batch_size)]
                case messages.Load():
                    self._load(command.path, command.update)
                case messages.Save():
                    part = PartWriter(self.world.rank, reporter.part)
                    tensors = state_of(self.stages, self.pipeline.num_stages, self.fresh)
                    if (place := self._stream.place() if self._stream is not None else None) is not None:
                        tensors[data_state.FILE] = data_state.shard_of(place)
                    part.write(Path(command.path), tensors, token=command.token, background=command.background)
                case messages.Trace():
                    folder, stages = Path(command.run_dir), sorted(self.contexts)
                    return [*write_part(self.activity, self.world, folder, stages, origin=command.origin)]
        return [messages.Done(self.world.rank)]

    def _train(self, segment: Segment, emit: Callable[[Record], None]) -> list[TrainResult]:
        for context in self.contexts.values():
            context.stage.begin(segment.epoch, training=True, first_micro_batch=segment.first_micro_batch)
        work = training_work(self.pipeline, segment, stages=self.contexts)
        start = time.perf_counter()
        reports = _UpdateReports(self, segment, emit)
        self._run(work, segment, self.train_loader, reports)
        seconds, held = time.perf_counter() - start, peak_memory()
        timelines = {k: self.activity.timeline(k) for k in self.contexts}
        self.wants_timeline &= not all(timeline is not None and timeline.is_steady for timeline in timelines.values())
        return [
            TrainResult(
                stage=k,
                rank=self.world.rank,
                seconds=seconds,
                peak_memory=held,
                peak_tensor_bytes=self.meter.peak_bytes if self.meter is not None else None,
                spent=activity.spent(seconds) if self.activity.most_events else {},
                busy_seconds=activity.busy_seconds,
                staleness_sum=activity.staleness_sum,
                staleness_max=activity.staleness_max,
                num_backwards=sum(activity.counts[op] for op in BACKWARDS),
                num_updates=activity.counts[Op.UPDATE],
                num_skipped=activity.num_skipped,
                tied=[_tied_result(tied) for tied in self.contexts[k].stage.ties.values()],
                coded=[
                    _coded_result(what, coder)
                    for what, sender in self.contexts[k].senders.items()
                    if isinstance(sender, LocalChannel | ProcessSender) and (coder := sender.wire.coder) is not None
                ],
                timeline=timelines[k],
            )
            for k, activity in sorted(self.activity.stages.items())
        ]

    def _evaluate(self, num_samples: int, micro_batch_size: int) -> list[EvaluateResult]:
        segment = Segment.without_groups(num_samples, micro_batch_size)
        for context in self.contexts.values():
            context.stage.begin(0, training=False)
        work = evaluation_work(segment, num_stages=self.pipeline.num_stages, stages=self.contexts)
        self._run(work, segment, self.validation_loader)
        return [
            EvaluateResult(
                stage=stage.index,
                num_samples=int(numbers["num_samples"]),
                num_terms=numbers.get("num_terms", numbers["num_samples"]),
                loss_sum=numbers.get("loss_sum", 0.0),
                num_correct=int(numbers["num_correct"]) if "num_correct" in numbers else None,
                num_classed=int(numbers.get("num_classed", numbers["num_samples"])),
                metrics={name: value_of(name, pair) for name, pair in stage.tally.sums(stage.metrics).items()},
            )
            for stage in self.stages
            for numbers in [stage.tally.numbers()]
        ]

    @property
    def _stream(self) -> Stream | None:
        """The iterable dataset that this process trains on, if it does."""
        return self.train_loader.stream if self.train_loader is not None else None

    def _load(self, path: str, update: int) -> None:
        load(Path(path), self.stages, self.fresh)
        if self._stream is not None and (place := data_state.read(Path(path))) is not None:
            self._stream.resume(place)
        for learner in (learner for stage in self.stages for learner in stage.learners):
            learner.version = update
            if learner.lr_schedule is not None:
                done = update if learner.lr_updates is None else min(update, learner.lr_updates)
                fast_forward(learner.lr_schedule, done)

    def _batches(
        self, feed: BatchSource, segment: Segment, *, training: bool
    ) -> Generator[tuple[Tensor, ...], None, None]:
        """Return the source of stage 0's micro-batches, with counts if the loss counts its terms."""
        batches = feed.batches(segment.epoch, segment.sizes, first_sample=segment.first_sample)
        if self.terms is not None:
            group_sizes = segment.group_sizes if training else None
            counts = counted(batches, self.terms, group_sizes, reduction=self.pipeline.method.reduction)
            return counts if self.is_plain else _taken_apart(counts)
        return batches if self.is_plain else _taken_apart(batches)  # type: ignore[return-value]

    def _run(
        self,
        work: Mapping[int, StageWork],
        segment: Segment,
        feed: BatchSource | None,
        reports: "_UpdateReports | None" = None,
    ) -> None:
        """Carry out ``work``, and report each update; None: this is evaluation."""
        training, batches = reports is not None, None
        if feed is not None:
            batches = self.contexts[0].batches = self._batches(feed, segment, training=training)
        with _draws_seeded(self.stages, self.world.device):
            try:
                for k, context in self.contexts.items():
                    weights = work[k].loss_weights if context.stage.has_loss else []
                    # One tensor for all that are alike: there may be a million micro-batches.
                    made = {w: torch.tensor(w, dtype=self.dtype, device=self.world.device) for w in set(weights)}
                    context.loss_grads = [made[w] for w in weights]
                    context.open(work[k], training=training)
                window = Window.of(self.pipeline, segment) if training and self.wants_timeline else None
                self.activity.open(self.contexts, segment, training=training, window=window)
                lists = {k: work[k].actions for k in sorted(work)}
                if len(work) == self.pipeline.num_stages:
                    order = replay([*lists.values()], pick_next=self.pick_next)
                elif len(work) == 1:
                    order = ((k, action) for k, actions in lists.items() for action in actions)
                else:
                    order = in_turns(lists, turns_of(self.pipeline, segment, self.world.rank, training=training))
                if training:
                    if self.user_code is not None:  # in front of what looks whether the run is to end
                        order = self._with_calls(order, self.user_code)
                    order = self.stop.applied(
                        order, segment, self.pipeline, self.contexts, posted_ahead=self.posted_ahead
                    )
                with self.meter.segment(self.stages[0]) if training and self.meter else contextlib.nullcontext():
                    engine.run(order, self.contexts, self.activity, reports.add if reports is not None else None)
                if reports is not None:
                    reports.send(keep=0)
                self.activity.enter(FINISHING)
                for k in sorted(self.contexts, reverse=True):  # of one fault the stage nearest the loss knows most
                    self.contexts[k].stage.faults.check()
                    self.contexts[k].drain()
            finally:
                if batches is not None:
                    batches.close()

    @property
    def posted_ahead(self) -> int:
        """The most receives that any process has posted beyond one that it awaits."""
        if not self.world.is_distributed:
            return 0
        return self.pipeline.most_received_ahead if self.world.backend == "gloo" else POSTED_AHEAD

    def _with_calls(self, order: Iterable[tuple[int, Action]], code: UserCode) -> Iterator[tuple[int, Action]]:
        """Hand ``order`` through, and make the calls of the user's code that wait before the next action."""
        for one in order:
            if code.is_waiting:
                self.activity.enter(USER_CODE)
                code.catch_up()
            yield one


def _tied_result(tied: TiedWeights) -> TiedResult:
    stale = tied.staleness
    return TiedResult(
        name=tied.name, staleness_sum=sum(stale), staleness_max=max(stale, default=0), num_backwards=len(stale)
    )


def _coded_result(what: str, coder: Coder) -> CodedResult:
    return CodedResult(
        what=what,
        codec=coder.codec,
        num_bytes=coder.num_bytes,
        plain_bytes=coder.plain_bytes,
        error=coder.relative_error(),
    )


def _taken_apart(batches: Generator[tuple[Batch, ...], None, None]) -> Generator[tuple[Tensor, ...], None, None]:
    """Yield the tensors of each micro-batch, one after the other."""
    with contextlib.closing(batches):
        for batch in batches:
            yield tuple(tensor for part in batch for tensor in tensors_of(part))


@contextlib.contextmanager
def _draws_seeded(stages: Sequence[Stage], device: torch.device) -> Iterator[None]:
    """Leave the caller's random streams as they were found: stages seed those that they draw from in place.

    Raises:
        ConfigError: one has moved at the end that none of them seeds.
    """
    with streams_kept(device) as streams:
        yield
        moved = streams.moved() - {"torch"} - frozenset().union(*(stage.draws for stage in stages))
    if moved:
        where = f"stage{'s' * (len(stages) > 1)} {', '.join(str(stage.index) for stage in stages)}"
        which = " and ".join("Python's" if name == "python" else f"{name}'s" for name in sorted(moved))
        raise ConfigError(
            f"{where}: something drew from {which} global random stream, but nothing did in the trial at the start, so "
            "that it was not seeded and cannot be repeated; draw from torch's stream, or, where it is no part of the "
            "model, from a generator of its own"
        )


class _UpdateReports:
    """The records of each update: its loss, its gradient's norm, its staleness."""

    def __init__(self, worker: LocalWorker, segment: Segment, emit: Callable[[Record], None]) -> None:
        self._contexts, self._meter, self._segment, self._emit = worker.contexts, worker.meter, segment, emit
        self._start, device = time.perf_counter(), worker.world.device
        self._begin: torch.cuda.Event | None = None  # the same on the clock of the GPU
        if device.type == "cuda":
            self._begin = torch.cuda.current_stream(device).record_event(torch.cuda.Event(enable_timing=True))
        self._pending: deque[tuple[Iterator[Record], Record]] = deque()
        # A GPU's figures are read an update later: reading them at once would wait for all that is launched.
        # So are those of a split backward, which are not checked before.
        is_late = device.type == "cuda" or worker.pipeline.method.splits
        self._lag = len(worker.contexts) if is_late else 0
        # State that no checkpoint can hold is refused after the first update, before a whole epoch is lost.
        self._unchecked = {*worker.contexts} if worker.fresh else set()
        self._fresh = worker.fresh

    def add(self, k: int, group: int) -> None:
        """Take the figures of stage ``k``'s update with ``group``, and let it begin to count the next one's."""
        if self._meter is not None:
            self._meter.count_update()
        stage, stats = self._contexts[k].stage, self._contexts[k].stage.tally
        if k in self._unchecked:
            self._unchecked.remove(k)
            check_storable(stage, self._fresh[k])
        stage.tally = StepStats()
        where = {"stage": k, "update": self._segment.first_update + group, "epoch": self._segment.epoch}
        seconds = time.perf_counter() - self._start
        self._pending.append((_records(stats, seconds, self._begin, stage), where))
        self.send(keep=self._lag)

    def send(self, *, keep: int) -> None:
        """Report all but the last ``keep`` updates."""
        while len(self._pending) > keep:
            records, where = self._pending.popleft()
            for record in records:  # read from the figures now, not when the update was made
                self._emit({**record, **where})


def _records(stats: StepStats, seconds: float, begin: torch.cuda.Event | None, stage: Stage) -> Iterator[Record]:
    """Yield the records of an update that was ``seconds`` after the beginning, of which a GPU has taken note."""
    offsets, is_last = stats.staleness, stage.is_last
    mean = {"name": "stage/staleness", "value": sum(offsets) / len(offsets), "unit": "updates"}
    yield {**mean, "max": max(offsets), "by_offset": offsets}
    if stats.skipped is not None:
        if is_last:  # loss and hits of a skipped update are not figures of the run
            yield {"name": "train/skipped_updates", "value": 1, "unit": "updates", "why": stats.skipped}
        return
    numbers = stats.numbers()
    n = numbers["num_samples"]
    num_terms, num_classed = numbers.get("num_terms", n), numbers.get("num_classed", n)
    if "gradient_norm" in numbers:
        yield {"name": "stage/gradient_norm", "value": numbers["gradient_norm"]}
    if "prediction_error" in numbers:
        yield {"name": "stage/prediction_error", "value": numbers["prediction_error"]}
    if "loss_sum" in numbers and not is_last:
        yield {"name": "stage/local_loss", "value": numbers["loss_sum"] / num_terms}
    elif "loss_sum" in numbers:
        sizes: Record = {name: numbers[name] for name in ("num_samples", "num_terms") if name in numbers}
        if begin is not None and (computed := stats.seconds_since(begin)) is not None:
            seconds = computed
        yield {"name": "train/loss", "value": numbers["loss_sum"] / num_terms, **sizes, "elapsed_seconds": seconds}
        if stats.learning_rate is not None:
            yield {"name": "train/learning_rate", "value": stats.learning_rate}
        measured = stats.sums(stage.metrics) if stage.metrics else {}
        for name, pair in measured.items():
            yield {"name": f"train/{name}", "value": value_of(name, pair), "num_targets": pair[1], "is_metric": True}
        if "num_correct" in numbers and num_classed and "accuracy" not in measured:
            more: Record = {"num_targets": num_classed} if "num_classed" in numbers else {}
            yield {"name": "train/accuracy", "value": numbers["num_correct"] / num_classed, **more}
