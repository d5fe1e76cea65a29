"""The worker of a process: carries out the coordinator's commands."""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

import torch
from torch import Tensor

from adl_dist import engine
from adl_dist.batch import Batch, tensors_of
from adl_dist.checkpoint.async_save import PartReport, PartWriter
from adl_dist.checkpoint.state import load, read_place, shard_of_place, state_of
from adl_dist.checkpoint.storage import place_of
from adl_dist.control import messages
from adl_dist.control.callback_queue import CallbackQueue
from adl_dist.control.messages import (
    Command,
    EvaluateResult,
    Record,
    Result,
    command_name,
)
from adl_dist.control.stop import EarlyStop
from adl_dist.data.stream import Stream
from adl_dist.distributed.world import World
from adl_dist.engine import StageContext
from adl_dist.monitor.activity import FINISHING, USER_CODE, ActivityLog, Window
from adl_dist.monitor.memory import MemoryMeter, peak_memory
from adl_dist.monitor.trace import parts_of
from adl_dist.optim import fast_forward
from adl_dist.report.totals import CodedResult, TiedResult, TrainResult
from adl_dist.schedule import (
    Action,
    Op,
    Pipeline,
    Segment,
    StageWork,
    evaluation_work,
    interleave,
    training_work,
)
from adl_dist.schedule.actions import BACKWARDS
from adl_dist.schedule.interleaving import in_turns
from adl_dist.schedule.work import turns_of
from adl_dist.stage import Stage, StepStats
from adl_dist.stage.loss import LossTerms, counted
from adl_dist.stage.metrics import computed
from adl_dist.stage.stats import value_of
from adl_dist.streams import streams_kept
from adl_dist.transport.process import POSTED_AHEAD


@dataclass
class UpdateReports:
    """The reports of the updates of a segment, on a GPU some updates late."""

    contexts: Mapping[int, StageContext]  # the stages of this process
    segment: Segment
    emit: Callable[[Record], None]  # takes each record
    device: torch.device  # of the stages
    meter: MemoryMeter | None  # counts updates, if memory is measured
    saves: bool  # whether checkpoints are saved
    splits: bool  # whether backwards are split

    def __post_init__(self) -> None:
        self._start = time.perf_counter()
        self._begin: torch.cuda.Event | None = None  # the same on the clock of the GPU
        if self.device.type == "cuda":
            self._begin = torch.cuda.current_stream(self.device).record_event(torch.cuda.Event(enable_timing=True))
        self._pending: deque[tuple[Iterator[Record], Record]] = deque()
        # The figures of a GPU are read an update later: a read at once would wait for all launched work. The figures
        # of a split backward are not checked earlier.
        self._lag = len(self.contexts) if self.device.type == "cuda" or self.splits else 0
        # State that no checkpoint can hold is refused after the first update, before a whole epoch is lost.
        self._unchecked = {*self.contexts} if self.saves else set()

    def add(self, k: int, group: int) -> None:
        """Take the figures of stage ``k``'s update with ``group``."""
        if self.meter is not None:
            self.meter.count_update()
        stage, stats = self.contexts[k].stage, self.contexts[k].stage.tally
        if k in self._unchecked:
            self._unchecked.remove(k)
            state_of([stage], 1)  # as for a save, but without a copy
        stage.tally = StepStats()
        where = {"stage": k, "update": self.segment.first_update + group, "epoch": self.segment.epoch}
        seconds = time.perf_counter() - self._start
        self._pending.append((_records(stats, seconds, self._begin, stage), where))
        self.send(keep=self._lag)

    def send(self, *, keep: int) -> None:
        """Report all but the last ``keep`` updates."""
        while len(self._pending) > keep:
            records, where = self._pending.popleft()
            for record in records:  # the figures are read now, not when the update was made
                self.emit({**record, **where})


def _records(stats: StepStats, seconds: float, begin: torch.cuda.Event | None, stage: Stage) -> Iterator[Record]:
    """Yield an update's records; ``seconds`` are since the segment's start."""
    offsets, is_last = stats.staleness, stage.is_last
    mean = {"name": "stage/staleness", "value": sum(offsets) / len(offsets), "unit": "updates"}
    yield {**mean, "max": max(offsets), "by_offset": offsets}
    if stats.skipped is not None:
        if is_last:  # loss and hits of a skipped update are not figures of the run
            yield {"name": "train/skipped_updates", "value": 1, "unit": "updates", "why": stats.skipped}
        return
    numbers = stats.numbers()
    n = numbers["num_samples"]
    num_terms, num_classed = numbers.get("num_terms", n), numbers.get("num_classed", 0)
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
        if stats.model_norm is not None:  # a GPU is waited for, but has emptied the pipeline for it
            yield {"name": "train/gradient_norm", "value": float(stats.model_norm)}
        if stats.learning_rate is not None:
            yield {"name": "train/learning_rate", "value": stats.learning_rate}
        measured = stats.sums(stage.metrics) if stage.metrics else {}
        for name, pair in measured.items():
            yield {"name": f"train/{name}", "value": value_of(name, pair), "num_targets": pair[1], "is_metric": True}
        if num_classed and "accuracy" not in measured:
            more: Record = {"num_targets": num_classed} if num_classed != n else {}
            yield {"name": "train/accuracy", "value": numbers["num_correct"] / num_classed, **more}


@dataclass
class LocalWorker:
    """The stages of one process: one of K, or several, or all K."""

    world: World
    pipeline: Pipeline
    dtype: torch.dtype  # of the loss
    contexts: Mapping[int, StageContext]  # this process's stages with their channels, by stage
    train_loader: Any = None  # a DeviceLoader, on stage 0's process only
    validation_loader: Any = None  # likewise
    terms: LossTerms | None = None  # the terms of the loss's mean, unless that is over samples
    unit: str = "images"  # of samples, or "tokens", if the loss counts many in a sample
    saves: bool = False  # whether there is a run folder
    meter: MemoryMeter | None = None  # of the one stage of this process, if its memory is measured
    stop: EarlyStop = field(default_factory=EarlyStop)
    callback_queue: CallbackQueue | None = None  # emptied between two actions of training
    reach: Callable[[str], PurePath] = place_of  # makes of a place of rank 0 one that this process can use
    wants_timeline: bool = False  # whether a few steady updates must still be recorded, for the report
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
        for loader in filter(None, (self.train_loader, self.validation_loader)):
            loader.close()

    def execute(
        self, command: Command, record: Callable[[Record], None], report_part: Callable[[PartReport], None]
    ) -> list[Result]:
        """Carry out ``command``; return its results, in the order of stages.

        Meanwhile ``record`` takes the records. ``report_part`` takes the end of this process's part of a save, in any
        thread.
        """
        with self.activity.during(command_name(command)):
            match command:
                case messages.Train():
                    return [*self._train(command.segment, record)]
                case messages.Evaluate():
                    return [*self._evaluate(command.segment)]
                case messages.Load():
                    self._load(command.path, command.update)
                case messages.Save():
                    part = PartWriter(self.world.rank, report_part)
                    for stage in self.stages:
                        stage.take_changes()  # of callbacks
                    tensors = state_of(self.stages, self.pipeline.num_stages)
                    if (place := self._stream.place() if self._stream is not None else None) is not None:
                        tensors |= shard_of_place(place)
                    part.write(self.reach(command.path), tensors, token=command.token, background=command.background)
                case messages.Trace():
                    return [*parts_of(self.activity, self.world, sorted(self.contexts), origin=command.origin)]
        return [messages.Done(self.world.rank)]

    def _train(self, segment: Segment, emit: Callable[[Record], None]) -> list[TrainResult]:
        for context in self.contexts.values():
            context.stage.begin(segment.epoch, training=True, first_micro_batch=segment.first_micro_batch)
        work = training_work(self.pipeline, segment, stages=self.contexts)
        start = time.perf_counter()
        reports = UpdateReports(
            self.contexts,
            segment,
            emit,
            device=self.world.device,
            meter=self.meter,
            saves=self.saves,
            splits=self.pipeline.method.splits,
        )
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
                tied=[
                    TiedResult(
                        name=tied.name,
                        staleness_sum=sum(tied.staleness),
                        staleness_max=max(tied.staleness, default=0),
                        num_backwards=len(tied.staleness),
                    )
                    for tied in self.contexts[k].stage.ties.values()
                ],
                coded=[
                    CodedResult(
                        what=what,
                        codec=coder.codec,
                        num_bytes=coder.num_bytes,
                        plain_bytes=coder.plain_bytes,
                        error=coder.relative_error(),
                    )
                    for what, sender in self.contexts[k].senders.items()
                    if (coder := sender.wire.coder) is not None
                ],
                timeline=timelines[k],
            )
            for k, activity in sorted(self.activity.stages.items())
        ]

    def _evaluate(self, segment: Segment) -> list[EvaluateResult]:
        for context in self.contexts.values():
            context.stage.begin(0, training=False)
        work = evaluation_work(segment, num_stages=self.pipeline.num_stages, stages=self.contexts)
        self._run(work, segment, self.validation_loader)
        self.activity.enter(USER_CODE)  # epoch metrics may take long
        return [
            EvaluateResult(
                stage=stage.index,
                numbers=stage.tally.numbers(),
                metrics={name: value_of(name, pair) for name, pair in stage.tally.sums(stage.metrics).items()}
                | computed(stage.epoch_metrics, stage.tally.outputs),
            )
            for stage in self.stages
        ]

    @property
    def _stream(self) -> Stream | None:
        """The iterable dataset that this process trains on, if any."""
        return self.train_loader.stream if self.train_loader is not None else None

    def _load(self, path: str, update: int) -> None:
        load(self.reach(path), self.stages)
        if self._stream is not None and (place := read_place(self.reach(path))) is not None:
            self._stream.resume(place)
        for learner in (learner for stage in self.stages for learner in stage.learners):
            learner.version = update
            if learner.lr_schedule is not None:
                done = update if learner.lr_updates is None else min(update, learner.lr_updates)
                fast_forward(learner.lr_schedule, done)

    def _batches(self, feed: Any, segment: Segment, *, training: bool) -> Generator[tuple[Tensor, ...], None, None]:
        """Return a generator of stage 0's micro-batches, as tuples of tensors.

        If the loss counts terms, the counts come last.
        """
        batches = feed.batches(segment.epoch, segment.sizes, first_sample=segment.first_sample)
        if self.terms is not None:
            group_sizes = segment.group_sizes if training else None
            return _flatten(counted(batches, self.terms, group_sizes, reduction=self.pipeline.method.reduction))
        return _flatten(batches)

    def _run(
        self,
        work: Mapping[int, StageWork],
        segment: Segment,
        feed: Any,
        reports: UpdateReports | None = None,
    ) -> None:
        """Carry out ``work``; without ``reports`` this is evaluation."""
        training, batches = reports is not None, None
        if feed is not None:
            batches = self.contexts[0].batches = self._batches(feed, segment, training=training)
        with streams_kept(self.world.device):  # which stages seed in place
            try:
                for k, context in self.contexts.items():
                    weights = work[k].loss_weights if context.stage.has_loss else []
                    # One tensor for all equal ones: there may be a million micro-batches.
                    made = {w: torch.tensor(w, dtype=self.dtype, device=self.world.device) for w in set(weights)}
                    context.loss_grads = [made[w] for w in weights]
                    context.open(work[k], training=training)
                window = Window.of(self.pipeline, segment) if training and self.wants_timeline else None
                self.activity.open(self.contexts, segment, training=training, window=window)
                order = self._order(work, segment, training=training)
                with self.meter.segment(self.stages[0]) if training and self.meter else contextlib.nullcontext():
                    engine.run(order, self.contexts, self.activity, reports.add if reports is not None else None)
                if reports is not None:
                    reports.send(keep=0)
                self.activity.enter(FINISHING)
                for k in sorted(self.contexts, reverse=True):  # the stage nearest the loss knows most of one fault
                    self.contexts[k].stage.faults.check()
                    self.contexts[k].drain()
                    self.contexts[k].stage.end()
            finally:
                if batches is not None:
                    batches.close()

    def _order(
        self, work: Mapping[int, StageWork], segment: Segment, *, training: bool
    ) -> Iterable[tuple[int, Action]]:
        """Return (stage, action) in this process's order, perhaps cut by a stop."""
        lists = {k: work[k].actions for k in sorted(work)}
        order: Iterable[tuple[int, Action]]
        if len(work) == self.pipeline.num_stages:
            order = interleave([*lists.values()])
        elif len(work) == 1:
            order = ((k, action) for k, actions in lists.items() for action in actions)
        else:
            order = in_turns(lists, turns_of(self.pipeline, segment, self.world.rank, training=training))
        if not training:
            return order
        if self.callback_queue is not None:  # before the check whether the run must end
            order = self._with_callbacks(order, self.callback_queue)
        ahead = 0
        if self.world.is_distributed:
            ahead = self.pipeline.most_received_ahead if self.world.backend == "gloo" else POSTED_AHEAD
        return self.stop.applied(order, segment, self.pipeline, self.contexts, posted_ahead=ahead)

    def _with_callbacks(
        self, order: Iterable[tuple[int, Action]], queue: CallbackQueue
    ) -> Iterator[tuple[int, Action]]:
        """Yield ``order``, and make waiting calls before the next action."""
        for action in order:
            if queue.is_waiting:
                self.activity.enter(USER_CODE)
                queue.run_waiting()
            yield action


def _flatten(batches: Generator[tuple[Batch, ...], None, None]) -> Generator[tuple[Tensor, ...], None, None]:
    """Yield each micro-batch as one flat tuple of tensors."""
    with contextlib.closing(batches):
        for batch in batches:
            yield tuple(tensor for part in batch for tensor in tensors_of(part))
