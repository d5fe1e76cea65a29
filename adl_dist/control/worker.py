"""Carries out the coordinator's commands on the stages that live in this process."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from adl_dist import engine
from adl_dist.checkpoint.async_save import PartWriter
from adl_dist.checkpoint.state import load, state_of
from adl_dist.control.group import Reporter, command_name
from adl_dist.control.messages import (
    Command,
    Done,
    Evaluate,
    EvaluateResult,
    Load,
    Record,
    Result,
    Save,
    Trace,
    TraceResult,
    Train,
    TrainResult,
)
from adl_dist.control.stop import EarlyStop
from adl_dist.distributed.world import World
from adl_dist.engine import BatchSource, StageContext
from adl_dist.monitor.activity import ActivityRecorder
from adl_dist.monitor.chrome_trace import write_part
from adl_dist.monitor.memory import MemoryMeter, forget_peak, peak_memory_bytes
from adl_dist.monitor.trace import Tracer
from adl_dist.optim import fast_forward
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
from adl_dist.seeds import stream_seed
from adl_dist.stage import Stage, StepStats

Choose = Callable[[Any], int]


@dataclass
class LocalWorker:
    """The stages of one process: one of K, or all K.

    Attributes:
        world: this process among the others.
        pipeline: the method and K.
        seed: of the turns that stages take, where the method has them.
        dtype: of the loss.
        contexts: this process's stages with their channels, by stage.
        train_loader: micro-batches for training; on stage 0's process only.
        validation_loader: likewise for evaluation.
        pick_next: which of several local stages goes on; any choice gives the same values.
        tracer: records when each action began and ended; None: nobody does.
        meter: measures the memory of the one stage of this process; None: nobody does.
        stop: where the running segment of training ends early.
        beacon: shows what this process does now.
    """

    world: World
    pipeline: Pipeline
    seed: int
    dtype: torch.dtype
    contexts: Mapping[int, StageContext]
    train_loader: BatchSource | None = None
    validation_loader: BatchSource | None = None
    pick_next: Choose = downstream_first
    tracer: Tracer | None = None
    meter: MemoryMeter | None = None
    stop: EarlyStop = field(default_factory=EarlyStop)
    beacon: ActivityRecorder = field(init=False)

    def __post_init__(self) -> None:
        on_device = self.world.is_distributed and self.world.backend == "nccl"
        self.beacon = ActivityRecorder(self.pipeline.num_stages, device=self.world.device, runs_ahead=on_device)
        forget_peak(self.world.device)

    @property
    def stages(self) -> list[Stage]:
        """This process's stages, in order."""
        return [self.contexts[k].stage for k in sorted(self.contexts)]

    def execute(self, command: Command, reporter: Reporter) -> list[Result]:
        """See :class:`adl_dist.control.group.Worker`."""
        with self.beacon.during(command_name(command)):
            match command:
                case Train():
                    return [*self._train(command.segment, reporter.record)]
                case Evaluate():
                    return [*self._evaluate(command.num_samples, command.micro_batch_size)]
                case Load():
                    self._load(command.path, command.update)
                case Save():
                    part = PartWriter(self.world.rank, reporter.part)
                    tensors = state_of(self.stages)
                    part.write(Path(command.path), tensors, token=command.token, background=command.background)
                case Trace():
                    assert self.tracer is not None
                    stages = sorted(self.contexts)
                    parts = write_part(self.tracer, Path(command.run_dir), stages, origin=command.origin)
                    return [TraceResult(stage=part["stage"], part=part) for part in parts]
        return [Done(stage=stage.index, rank=self.world.rank) for stage in self.stages]

    def _train(self, segment: Segment, emit: Callable[[Record], None]) -> list[TrainResult]:
        for context in self.contexts.values():
            context.stage.begin(segment.epoch, training=True, first_micro_batch=segment.first_micro_batch)
        seed = stream_seed(self.seed, "turns", segment.epoch, segment.first_sample)
        work = training_work(self.pipeline, segment, stages=self.contexts, seed=seed)
        totals = {k: _Totals() for k in self.contexts}
        start = time.perf_counter()
        order = self._watched(self._until_stop(self._order(work), segment), segment, totals, start, emit)
        if self.meter is not None:
            order = self.meter.measured(order, self.stages[0])
        try:
            order = self.beacon.followed(self._traced(order, segment, training=True), self.contexts, segment, totals)
            self._run(order, work, segment, self.train_loader, training=True)
        finally:
            if self.meter is not None:
                self.meter.stop()
        seconds = time.perf_counter() - start
        return [
            TrainResult(
                stage=k,
                seconds=seconds,
                peak_memory_bytes=peak_memory_bytes(),
                peak_tensor_bytes=self.meter.peak_bytes if self.meter is not None else None,
                spent=self.tracer.spent(k, seconds) if self.tracer is not None else {},
                **totals[k].result(),
            )
            for k in sorted(self.contexts)
        ]

    def _evaluate(self, num_samples: int, micro_batch_size: int) -> list[EvaluateResult]:
        # Evaluation has no groups; a segment of groups of one gives the sizes of its micro-batches.
        segment = Segment(
            epoch=0, first_update=0, num_samples=num_samples, micro_batch_size=micro_batch_size, accumulation_steps=1
        )
        for context in self.contexts.values():
            context.stage.begin(0, training=False)
        work = evaluation_work(segment, num_stages=self.pipeline.num_stages, stages=self.contexts)
        order = self.beacon.followed(
            self._traced(self._order(work), segment, training=False), self.contexts, segment, {}
        )
        self._run(order, work, segment, self.validation_loader, training=False)
        results = []
        for stage in self.stages:
            numbers = stage.tally.numbers()
            correct = numbers.get("num_correct")
            results.append(
                EvaluateResult(
                    stage=stage.index,
                    num_samples=int(numbers["num_samples"]),
                    loss_sum=numbers.get("loss_sum", 0.0),
                    num_correct=None if correct is None else int(correct),
                )
            )
        return results

    def _load(self, path: str, update: int) -> None:
        load(Path(path), self.stages)
        for stage in self.stages:
            stage.version = update
            if stage.lr_schedule is not None:
                done = update if stage.lr_updates is None else min(update, stage.lr_updates)
                fast_forward(stage.lr_schedule, done)

    def _order(self, work: Mapping[int, StageWork]) -> Iterator[tuple[int, Action]]:
        """Return the actions in order: one stage's own list, or an interleaving of all of them."""
        if len(work) == self.pipeline.num_stages:
            return replay([work[k].actions for k in sorted(work)], pick_next=self.pick_next)
        ((stage, of_stage),) = work.items()
        return ((stage, action) for action in of_stage.actions)

    def _until_stop(self, order: Iterator[tuple[int, Action]], segment: Segment) -> Iterator[tuple[int, Action]]:
        return self.stop.applied(order, segment, self.pipeline, self.contexts, is_distributed=self.world.is_distributed)

    def _traced(
        self, order: Iterator[tuple[int, Action]], segment: Segment, *, training: bool
    ) -> Iterator[tuple[int, Action]]:
        return order if self.tracer is None else self.tracer.traced(order, self.contexts, segment, training=training)

    def _run(
        self,
        order: Iterable[tuple[int, Action]],
        work: Mapping[int, StageWork],
        segment: Segment,
        feed: BatchSource | None,
        *,
        training: bool,
    ) -> None:
        batches = None
        if feed is not None:
            batches = feed.batches(segment.epoch, segment.sizes, first_sample=segment.first_sample)
            self.contexts[0].batches = batches
        # Dropout streams are seeded in place; the caller's own streams go on untouched.
        with torch.random.fork_rng(devices=[self.world.device] if self.world.device.type == "cuda" else []):
            try:
                for k, context in self.contexts.items():
                    weights = work[k].loss_weights if context.stage.has_loss else []
                    # One tensor for all that are alike: there may be a million micro-batches.
                    made = {w: torch.tensor(w, dtype=self.dtype, device=self.world.device) for w in set(weights)}
                    context.loss_grads = [made[w] for w in weights]
                    context.open(work[k], training=training)
                engine.run(order, self.contexts)
                for k in sorted(self.contexts, reverse=True):  # of one fault the stage nearest the loss knows most
                    self.contexts[k].stage.faults.check()
                    self.contexts[k].drain()
            finally:
                for context in self.contexts.values():
                    context.stage.end()
                if batches is not None:
                    batches.close()

    def _watched(
        self,
        order: Iterable[tuple[int, Action]],
        segment: Segment,
        totals: "dict[int, _Totals]",
        start: float,
        emit: Callable[[Record], None],
    ) -> Iterator[tuple[int, Action]]:
        """Hand ``order`` through; after each update, report the group that it closed."""
        closed: deque[tuple[Iterator[Record], Record]] = deque()
        # The figures of a GPU are read an update later: to read them at once would be to wait for all that is launched.
        lag = len(self.contexts) if self.world.device.type == "cuda" else 0

        def report(but: int) -> None:
            while len(closed) > but:
                records, where = closed.popleft()
                for record in records:  # read from the tally now, not when the group was closed
                    emit({**record, **where})

        for k, action in order:
            if action.op is not Op.UPDATE:
                yield k, action
            else:
                stage = self.contexts[k].stage
                learning_rate = stage.learning_rate
                yield k, action
                tally, stage.tally = stage.tally, StepStats()
                totals[k].add(tally)
                where = {"stage": k, "update": segment.first_update + action.number, "epoch": segment.epoch}
                seconds = time.perf_counter() - start
                closed.append((_records(tally, learning_rate, seconds, is_last=stage.is_last), where))
                report(but=lag)
        report(but=0)


def _records(tally: StepStats, learning_rate: float | None, seconds: float, *, is_last: bool) -> Iterator[Record]:
    by_offset = tally.staleness
    yield {
        "name": "stage/staleness",
        "value": sum(by_offset) / len(by_offset),
        "unit": "updates",
        "max": max(by_offset),
        "by_offset": by_offset,
    }
    if tally.skipped is not None:
        if is_last:  # loss and hits of what is thrown away would be no figures of the run
            yield {"name": "train/skipped_updates", "value": 1, "unit": "updates", "why": tally.skipped}
        return
    numbers = tally.numbers()
    if "gradient_norm" in numbers:
        yield {"name": "stage/gradient_norm", "value": numbers["gradient_norm"]}
    if "loss_sum" in numbers and not is_last:
        yield {"name": "stage/local_loss", "value": numbers["loss_sum"] / numbers["num_samples"]}
    elif "loss_sum" in numbers:
        n = numbers["num_samples"]
        yield {"name": "train/loss", "value": numbers["loss_sum"] / n, "num_samples": n, "elapsed_seconds": seconds}
        if learning_rate is not None:
            yield {"name": "train/learning_rate", "value": learning_rate}
        if "num_correct" in numbers:
            yield {"name": "train/accuracy", "value": numbers["num_correct"] / n}


class _Totals:
    """Sums over a segment of what the stage counted per group."""

    def __init__(self) -> None:
        self._busy_seconds = 0.0
        self._staleness_sum = 0
        self._staleness_max = 0
        self._num_backwards = 0
        self._num_updates = 0
        self._num_skipped = 0

    def add(self, tally: StepStats) -> None:
        self._busy_seconds += tally.busy_seconds
        self._staleness_sum += sum(tally.staleness)
        self._staleness_max = max(self._staleness_max, *tally.staleness)
        self._num_backwards += len(tally.staleness)
        self._num_updates += 1
        self._num_skipped += tally.skipped is not None

    def result(self) -> dict[str, Any]:
        return {
            "busy_seconds": self._busy_seconds,
            "staleness_sum": self._staleness_sum,
            "staleness_max": self._staleness_max,
            "num_backwards": self._num_backwards,
            "num_updates": self._num_updates,
            "num_skipped": self._num_skipped,
        }
