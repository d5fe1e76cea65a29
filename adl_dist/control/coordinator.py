"""The coordinator: decides the next command of all stages."""

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path, PurePath
from typing import Any

from adl_dist.checkpoint import layout, state
from adl_dist.checkpoint.async_save import LAST_SAVE_SECONDS, PartReport, Saver
from adl_dist.checkpoint.identity import check_identity, identity_of, partition_change_note
from adl_dist.checkpoint.policy import CheckpointPolicy
from adl_dist.checkpoint.run_dir import RunFolder
from adl_dist.control import messages
from adl_dist.control.callback_queue import CallbackQueue
from adl_dist.control.group import RpcWorkerGroup, WorkerGroup
from adl_dist.control.messages import Done, EvaluateResult, Record, Summary
from adl_dist.control.requests import RequestKind, RequestQueue
from adl_dist.errors import AdlError, DataError, DivergedError, SaveError, StageFailed
from adl_dist.monitor.trace import TRACE, write_trace
from adl_dist.report import MetricsWriter, Progress, warn
from adl_dist.report.callbacks import Callbacks, TrainerState
from adl_dist.report.progress import TOKENS
from adl_dist.report.runs import RESUMED
from adl_dist.report.timeline import TIMELINE, Timeline
from adl_dist.report.totals import Totals, TrainResult
from adl_dist.schedule.run_plan import Plan
from adl_dist.stage.metrics import PERPLEXITY
from adl_dist.stage.stats import value_of

logger = logging.getLogger("adl_dist")

DRAIN_CHANGED_RESULT = (
    "; the pipeline was emptied for it in mid-epoch: the gradients after it are less stale, and values those of a run "
    "that ended with train.max_updates={update} and was continued"
)


@dataclass(frozen=True, kw_only=True)
class CheckpointContext:
    """The settings and objects for saving and resuming a run."""

    folder: RunFolder
    config: Mapping[str, Any]  # settings that identify the run when its folder is used again
    resume: str  # the checkpoint to resume from: "auto", "never" or a path
    policy: CheckpointPolicy
    saver: Saver
    signature: state.Signature  # the model's tensors
    optimizer: str  # name of its class
    cut: Mapping[str, Any]  # the partition
    trace: bool = False  # whether the stages record a trace, written at the end


@dataclass
class Coordinator:
    """The loop over epochs of one run, with requests carried out in between."""

    plan: Plan  # the segments of the run
    recorder: MetricsWriter
    progress: Progress
    totals: Totals
    saving: CheckpointContext | None = None  # if there is a run folder
    callbacks: Callbacks = field(default_factory=Callbacks)  # the user's
    callback_queue: CallbackQueue = field(default_factory=CallbackQueue)  # calls them while stages train
    requests: RequestQueue = field(default_factory=RequestQueue)  # from outside
    drain_changes_result: Callable[[int], bool] = lambda epoch: False  # whether an unplanned one in an epoch does
    skips_non_finite: bool = False  # whether validation data that are not finite leave the run going
    on_open: Callable[[], None] = lambda: None  # called once the run folder belongs to this run

    def __post_init__(self) -> None:
        self._bad_validation: DataError | None = None  # raised once the epoch is saved
        self._saved_moment: TrainerState | None = None  # of a checkpoint that has not been reported to callbacks
        # The position of the run: whole epochs done, samples of the next one done, updates done.
        self._epoch = self._sample = self._update = 0
        self._last_epoch = 0
        self._is_resumed = False  # from a checkpoint of this run folder
        self._begun_at: int | None = None  # the update of the last save, perhaps not complete yet
        self._saved_at: int | None = None
        self._saved_time = time.monotonic()
        self._evaluated_at: int | None = None
        self._failure_recorded: str | None = None
        self._is_speed_known = False  # whether the first updates have shown how long a segment takes
        self._metrics: dict[str, Any] = {}

    def train(self, workers: WorkerGroup) -> Summary:
        """Train to the end and return the summary."""
        self._workers = workers
        try:
            return self._train()
        except BaseException as error:
            if self.saving is not None:
                # A process that is gone will not write its part.
                is_lost = isinstance(error, StageFailed) and (error.is_victim or error.is_gone)
                self.saving.saver.wait(1.0 if is_lost else LAST_SAVE_SECONDS)
            raise
        finally:
            self.progress.close()

    def record(self, record: Record) -> None:
        """Write and show a record of a stage.

        Raise TakenOverError if another process owns the folder of the records now.
        """
        if self.saving is not None:
            self.saving.folder.check_not_lost()
        every_minutes = self.saving.policy.every_minutes if self.saving is not None else None
        if every_minutes is not None and record["name"] == "train/loss":
            self._note_late_saves(record, every_minutes)
        self.recorder.write_of_update(record)
        self.progress.update(record)
        if self.callbacks.any:
            self.callback_queue.put(partial(self.callbacks.take, record))
            if self.saving is not None and (path := self.saving.saver.wait(0.0)) is not None:
                self._tell_saved(path)
        self.totals.take(record)

    def _note_late_saves(self, record: Record, minutes: float) -> None:
        """Tell the user once if a segment lasts more than twice ``minutes``."""
        seconds, num_done = record["elapsed_seconds"], record["update"] + 1 - self._update
        if self._is_speed_known or seconds < min(10.0, 6 * minutes):
            return
        self._is_speed_known = True
        num_updates = self.plan.segment(self._epoch, self._sample, self._update).num_updates
        segment_minutes, every = num_updates * seconds / num_done / 60, round(60 * minutes * num_done / seconds)
        if segment_minutes > 2 * minutes and self.drain_changes_result(self._epoch):
            self.progress.note(
                f"the pipeline is empty only every {num_updates} updates, about {segment_minutes:.3g} min, and "
                f"runtime.checkpoint_every_minutes={minutes:g} saves only there; "
                f"runtime.checkpoint_every_updates={max(1, every)} saves in time, but empties it for that, which "
                "changes values (docs/runs.md)"
            )

    def part(self, part: PartReport) -> None:
        """Pass on a report on one process's part of a save, from any thread."""
        if self.saving is not None:
            self.saving.saver.take_part(part)

    def _train(self) -> Summary:
        started, origin = time.monotonic(), time.time()
        try:
            self.callbacks.open(lambda why: self.requests.ask(RequestKind.END, why))
            self._resume()
            self.callbacks.call("on_start", self._moment())
            if self.callbacks.asked is not None:
                self.progress.note(
                    f"nothing is trained: ended by {self.callbacks.asked}; change that callback to continue"
                )
            if (self._is_resumed or self._is_over) and not self._metrics and self.plan.num_validation:
                self._end_epoch()  # its evaluation had failed, or a process was killed there
                if self._is_resumed and self._evaluated_at is not None and (self._is_over or self._is_to_be_saved):
                    self._save()
            stopped = None
            while stopped is None and not self._is_over:
                self._train_one()
                self._end_epoch()
                if self._is_over or self._is_to_be_saved or self._bad_validation is not None:
                    self._save()
                if self._bad_validation is not None:
                    raise self._bad_validation
                stopped = self._carry_out_requests()
        finally:
            self.requests.close(f"the run has ended, at update {self._update}")
        summary: Summary = {
            **self._metrics,
            "epochs": self._epoch,
            "updates": self._update,
            "seconds": time.monotonic() - started,
            **self.totals.summary(),
            **({"stopped": stopped} if stopped else {}),
            **({"ended_by": self.callbacks.asked} if self.callbacks.asked else {}),
        }
        # The summary of a run that was over is kept, with its training times, unless it is missing or older.
        if self.saving and (self.totals.trained or self.saving.folder.summarised_updates != self._update):
            self.saving.folder.write_summary(summary)
        if self.saving and self.saving.trace and self.totals.trained:
            self._write_trace(self.saving.folder.path, origin)
        self.callbacks.call("on_end", replace(self._moment(), summary=summary))
        return summary

    def _end_epoch(self) -> None:
        """Evaluate, if it is planned here and not done yet, and call callbacks.

        If the user's code fails there, a due checkpoint is saved nevertheless. Of several processes the failed one can
        no longer save, and others may wait for it; so all write their parts before, and the manifest with the figures
        comes last. A single process saves afterwards, with the changes by its callbacks.
        """
        is_planned = self.plan.is_after(self.plan.eval_every_updates, self._sample)
        if self._evaluated_at == self._update or not (self._is_over or is_planned):
            return
        is_due, self._evaluated_at = self._is_over or self._is_to_be_saved, self._update
        if is_due and isinstance(self._workers, RpcWorkerGroup):
            self._begin_save()
        try:
            self._evaluate()
            mean = {} if (loss := self.progress.train_loss) is None else {"train_loss": loss}
            self.callbacks.call("on_epoch", TrainerState(self._update, self._epoch, {**mean, **self._metrics}))
        except DivergedError:  # weights that must not be saved
            raise
        except BaseException:
            with suppress(AdlError):
                if is_due:
                    self._save()
            raise

    def evaluate(self, workers: WorkerGroup) -> Summary:
        """Evaluate the present weights; return the validation figures by name."""
        self._workers = workers
        self._evaluate()
        return self._metrics

    @property
    def _is_over(self) -> bool:
        is_asked = self.callbacks.asked is not None
        return is_asked or self._epoch >= self.plan.epochs or self._update >= self.plan.total_updates

    def _moment(self) -> TrainerState:
        return TrainerState(self._update, self._epoch, dict(self._metrics))

    @property
    def _is_to_be_saved(self) -> bool:
        every = self.saving.policy.every_epochs if self.saving else 0
        is_planned = self.plan.is_after(self.plan.checkpoint_every_updates, self._sample)
        is_due = self._sample > 0 or (every > 0 and self._epoch % every == 0)
        return (is_planned and is_due) or self._is_time_to_save or self._is_best

    @property
    def _is_time_to_save(self) -> bool:
        minutes = self.saving.policy.every_minutes if self.saving else None
        return minutes is not None and time.monotonic() - self._saved_time >= 60 * minutes

    @property
    def _is_best(self) -> bool:
        """Whether the present evaluation is better than the best saved one."""
        if self.saving is None or not self.saving.policy.keep_best:
            return False
        goal, saver = self.saving.policy.goal, self.saving.saver
        if (score := goal.score(self._metrics)) is None:
            return False
        saver.wait()
        best = layout.best_of(layout.complete(saver.folder))
        return best is None or score > (goal.score(layout.read_manifest(best)["metrics"]) or ())

    @property
    def ends_segment(self) -> bool:
        """Whether the segment should end for a checkpoint that is due by time."""
        return self._is_time_to_save and not self.drain_changes_result(self._epoch)

    def _carry_out_requests(self) -> dict[str, Any] | None:
        """Carry out the requests; return ``stopped`` for the summary, or None."""
        if not (asked := self.requests.take()):
            return None
        why = [request.why for request in asked if request.what is RequestKind.STOP]
        is_planned = self._is_over or self.plan.ends_at(self._sample)
        drain_changed_result = not is_planned and self.drain_changes_result(self._epoch)
        trace = DRAIN_CHANGED_RESULT.format(update=self._update) if drain_changed_result else ""
        if drain_changed_result and not why:
            self._record("checkpoint/drain_changed_result", 1.0)
            self._note(f"a checkpoint was asked for{trace}")
        if self._saved_at != self._update:
            self._save()
        path, text = None, "nothing is saved: the run has no run_dir"
        if self.saving is not None:
            path = self._finish_saving(self.saving.saver)
            text = f"{path}{trace}" if path is not None else self.saving.saver.failure or "nothing is saved"
        for request in asked:  # a run without a folder has stopped all the same
            has_failed = path is None and (self.saving is not None or request.what is RequestKind.CHECKPOINT)
            request.answer(text, failed=has_failed)
        if why and self.saving is not None:
            self._finish_last_save(self.saving.saver, "the run was to stop, and what it learned since is lost")
        if self._is_over or not why:
            self._end_epoch()
            return None
        where = {"update": self._update, "epoch": self._epoch, "checkpoint": None if path is None else str(path)}
        return {"why": why[0], **where, "drain_changed_result": drain_changed_result}

    def _resume(self) -> None:
        path = None
        if self.saving is not None:
            candidates = self.saving.folder.open(resume=self.saving.resume)
            self.on_open()
            if candidates:
                path = self._load_newest(candidates, self.saving)
            # Only after all stages agree and the checkpoint has been read: a failed start must not block the corrected
            # command. A run that is over keeps its settings.
            if not (self._is_over and self.saving.folder.is_claimed):
                self.saving.folder.claim(self.saving.config)
        self.recorder.start(from_update=self._update, is_evaluated=bool(self._metrics))
        if path is not None:
            asked = "" if self._epoch > self.plan.epochs else f" of {self.plan.epochs}"  # fewer than it has
            done = f"update {self._update}, {self._epoch}{asked} epochs complete"
            resumed = f"{RESUMED} {path} ({done})"
            self.progress.note(resumed)
            logger.info(resumed)
            if self._is_over and self.saving is not None:
                run_dir = self.saving.folder.place
                self.progress.note(
                    f"nothing left to train: {run_dir} is complete; for a new run, choose another run_dir"
                )

    def _load_newest(self, candidates: Sequence[PurePath], saving: CheckpointContext) -> PurePath:
        path, manifest, rejected = layout.first_usable(candidates, lambda path: state.verify(path, saving.signature))
        mine = identity_of(self.plan, saving.optimizer)
        note = check_identity(path, manifest["identity"], mine)
        self._workers.call(messages.Load(str(path), manifest["update"]), Done)
        self._note(note)
        self._note(state.dropped_note(path, manifest))
        self._epoch, self._sample, self._update = manifest["epochs"], manifest["sample"], manifest["update"]
        self._last_epoch = max(0, self._epoch - (self._sample == 0))
        self._is_resumed = path.parent == saving.saver.folder
        self._metrics = dict(manifest["metrics"])
        self.callbacks.restore(manifest.get("callbacks", []), self._update)
        if not self._is_over:
            self._note(partition_change_note(manifest["identity"].get("cut", {}), saving.cut))
        for bad, error in rejected:
            warn(f"{error}; resuming from {path.name}; {bad.name} is kept as {layout.reject(bad).name}")
        return path

    def _train_one(self) -> None:
        self._metrics = {}  # those of older weights must not get into a checkpoint or summary
        segment = self.plan.segment(self._epoch, self._sample, self._update)
        goes_on = self._sample > 0 and bool(self.totals.trained)  # this process has begun the epoch
        self.progress.begin(segment.epoch, self.plan.epochs, self.plan.total_updates, goes_on=goes_on)
        start = time.perf_counter()
        with self.callback_queue.while_training():
            results = self._workers.call(messages.Train(segment), TrainResult)
            seconds = time.perf_counter() - start
        self.callbacks.tell_update()
        (num_updates,) = {result.num_updates for result in results}  # fewer if it was ended early
        segment = segment.first_updates(num_updates)
        self._sample += segment.num_samples
        self._update += segment.num_updates
        if self._sample == self.plan.num_samples:
            self._epoch, self._sample = self._epoch + 1, 0
        self._last_epoch = segment.epoch
        self._write_timeline(results)
        for record in self.totals.add(segment.num_samples, seconds, results):
            self._record(**record)

    def _evaluate(self) -> None:
        if not self.plan.num_validation:
            self.progress.end(None, None)
            return
        last = self._workers.call(messages.Evaluate(self.plan.evaluation), EvaluateResult)[-1]
        numbers, num_samples = last.numbers, self.plan.num_validation
        assert numbers["num_samples"] == num_samples, "every sample is evaluated exactly once"
        if not (num_terms := numbers.get("num_terms", num_samples)):
            raise DataError(
                f"the validation data has {num_samples} samples, but nothing that the loss averages over: it "
                "ignores all their targets; give validation data with targets that count"
            )
        loss = numbers["loss_sum"] / num_terms
        self._metrics = {"validation_loss": loss}
        if self.totals.unit == TOKENS:
            self._metrics["validation_perplexity"] = value_of(PERPLEXITY, (loss, 1.0))
        if num_classed := numbers.get("num_classed"):
            self._metrics["validation_accuracy"] = numbers["num_correct"] / num_classed
        self._metrics |= {f"validation_{name}": value for name, value in last.metrics.items()}
        for name, value in self._metrics.items():
            self._record(name.replace("_", "/", 1), value)
        self.progress.end(loss, self._metrics.get("validation_accuracy"), last.metrics)
        # The training loss belongs to the weights before the update; the present weights must not be saved either.
        if "first_bad" in numbers:
            bad = int(numbers["first_bad"])
            first = bad * self.plan.micro_batch_size
            text = (
                f"the validation loss is {loss}, because of micro-batch {bad} of the validation data, which "
                f"begins at sample {first}; look there for values that are not finite, as others are"
            )
            if self.skips_non_finite or not self.totals.trained:  # or Trainer.evaluate, which returns it
                warn(text)
            else:
                self._bad_validation = DataError(text)
        elif self.totals.trained and not math.isfinite(loss):
            where = {"stage": last.stage, "update": self._update - 1, "epoch": self._last_epoch}
            raise DivergedError(f"the validation loss is {loss}", **where)

    def _save(self) -> None:
        if self.saving is None:
            return
        saver = self.saving.saver
        self._finish_saving(saver)
        self._end_epoch()  # if a callback has ended the run at that checkpoint
        self._begin_save()
        manifest = {
            "update": self._update,
            "epochs": self._epoch,
            "sample": self._sample,
            "metrics": self._metrics,
            "goal": asdict(self.saving.policy.goal),
            "callbacks": self.callbacks.state(self._update),
            "identity": {**identity_of(self.plan, self.saving.optimizer), "cut": dict(self.saving.cut)},
        }
        self._saved_moment = self._moment()
        self.recorder.flush()  # records before a checkpoint must not be lost with the process
        saver.complete(manifest)
        self._saved_at, self._saved_time = self._update, time.monotonic()
        if self._is_over:
            self._finish_last_save(saver, "training is over, but its last weights are lost")

    def _begin_save(self) -> None:
        if self.saving is not None and self._begun_at != self._update:
            self._finish_saving(self.saving.saver)
            self.saving.saver.begin(self._write_parts, self._update)
            self._begun_at = self._update

    def _write_parts(self, path: PurePath, token: str, background: bool) -> set[int]:
        return {result.rank for result in self._workers.call(messages.Save(str(path), token, background), Done)}

    def _finish_saving(self, saver: Saver) -> PurePath | None:
        path = saver.wait()
        if saver.lost is not None:
            raise saver.lost
        if saver.failure is not None and saver.failure != self._failure_recorded:
            self._failure_recorded = saver.failure
            self._record("checkpoint/failed", 1.0, reason=saver.failure)
        self._tell_saved(path)
        return path

    def _tell_saved(self, path: PurePath | None) -> None:
        moment, self._saved_moment = self._saved_moment, None
        if path is not None and moment is not None:
            self.callback_queue.put(partial(self.callbacks.call, "on_checkpoint", replace(moment, checkpoint=path)))

    def _finish_last_save(self, saver: Saver, so: str) -> None:
        self._finish_saving(saver)
        if saver.failure is not None:
            way_out = "Make room, or fix what is wrong, and give the same command again"
            raise SaveError(f"{saver.failure}; {so}. {way_out}; checkpoints that were saved before are kept")

    def _write_timeline(self, results: Sequence[TrainResult]) -> None:
        timelines = [result.timeline for result in results if result.timeline is not None]
        if self.saving is not None and len(timelines) == len(results):
            try:
                Timeline.join(timelines).write(self.saving.folder.path)
            except OSError as error:
                warn(f"{self.saving.folder.path / TIMELINE} could not be written: {error.strerror}; the run continues")

    def _write_trace(self, run_dir: Path, origin: float) -> None:
        parts = self._workers.call(messages.Trace(origin), dict)
        try:
            path = write_trace(run_dir, parts, {"updates": self._update, "epochs": self._epoch})
        except OSError as error:
            warn(f"{run_dir / TRACE} could not be written: {error}; the run itself is complete and saved")
            return
        if left_out := {part["stage"]: part["events_left_out"] for part in parts if part["events_left_out"]}:
            self._note(
                f"{path} holds the first events only; left out by stage: {left_out}. summary.json counts all of them"
            )

    def _note(self, text: str | None) -> None:
        if text is not None:
            self.progress.note(f"note: {text}")
            logger.info("note: %s", text)

    def _record(self, name: str, value: float, **more: Any) -> None:
        where = {"update": self._update - 1, "epoch": self._last_epoch}
        self.recorder.write({"name": name, "value": value, **where, **more})
