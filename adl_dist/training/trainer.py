"""The Python API: one object that trains a model as K stages, in this process or across torchrun's."""

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

from adl_dist.checkpoint import layout, state
from adl_dist.checkpoint.async_save import Saver
from adl_dist.checkpoint.run_dir import RunFolder, log_to
from adl_dist.control import job
from adl_dist.control.coordinator import Coordinator, Saving
from adl_dist.control.messages import Summary
from adl_dist.control.requests import Ask, Requests
from adl_dist.control.worker import LocalWorker
from adl_dist.distributed.affinity import bound_to, num_cores, tune_malloc
from adl_dist.distributed.device import choose_device
from adl_dist.distributed.world import (
    World,
    check_world_size,
    connect,
    launched_rank,
    launched_world_size,
    single_process,
)
from adl_dist.errors import ConfigError
from adl_dist.launch import signals
from adl_dist.monitor.memory import MemoryMeter
from adl_dist.monitor.timeouts import WatchdogTimeouts
from adl_dist.monitor.trace import MOST_EVENTS
from adl_dist.report import Progress, Recorder
from adl_dist.schedule import Method, Pipeline, downstream_first, forget_actions
from adl_dist.schedule.run_plan import Plan, check_lengths
from adl_dist.stage import GradientPolicy
from adl_dist.training import shape_inference, wiring
from adl_dist.training.build import Job, LossFn, OptimizerFactory, assemble
from adl_dist.training.input import DeviceLoader, make_loader
from adl_dist.training.partitioned_model import PartitionedModel
from adl_dist.training.precision import Precision


class Trainer:
    """Trains ``model`` cut into K stages: one process each under torchrun, all in this process otherwise.

    Example:
        >>> trainer = Trainer(model, loss_fn=nn.CrossEntropyLoss(),
        ...                   optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        ...                   method=adl_dist.method("adl", accumulation_steps=4), num_stages=4)
        >>> trainer.fit(train_dataset, epochs=10, batch_size=128, val_dataset=val_dataset, run_dir="runs/mine")
        >>> state = trainer.full_state_dict()

    Under torchrun every rank runs the same script and makes the same calls.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        loss_fn: LossFn,
        optimizer: OptimizerFactory,
        method: Method | None = None,
        num_stages: int = 1,
        balance: str | Sequence[int] | Sequence[str] = "even",
        granularity: str | None = None,
        speeds: Sequence[float] | None = None,
        lr_schedule: Callable[..., LRScheduler] | None = None,
        clip_norm: float | None = None,
        non_finite: str = "stop",
        max_skipped: int = 10,
        seed: int = 0,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        channels_last: bool = False,
        autocast: torch.dtype | None = None,
        wire_dtype: torch.dtype | None = None,
        compile: bool = False,
        tf32: bool = False,
        cudnn_benchmark: bool = False,
        threads: int | None = None,
        bind_cores: bool = True,
        processes: bool | None = None,
        timeout_seconds: float = 300.0,
        stall_seconds: float = 60.0,
        abort_seconds: float | str | None = "auto",
    ) -> None:
        """Cut the model. Of K processes each keeps only its own stage.

        Args:
            model: any module that torch.fx can trace, or an ``nn.Sequential`` of whatever blocks; it takes one tensor.
            loss_fn: (output, target) to the mean loss over the samples.
            optimizer: makes a torch optimizer from the parameters of one stage.
            method: from :func:`adl_dist.method`; None: ADL with M = 4.
            num_stages: K.
            balance: ``even``; ``auto``: measured before the first step, once; units of each stage; or the names of the
                units where stages 1..K-1 begin.
            granularity: ``layer``, also inside blocks, or ``block``; None: ``layer`` if ``balance`` is ``auto``
                or names, else ``block``.
            speeds: of the stages' devices, relative to the one that measures; None: all equal.
            lr_schedule: makes a torch LR scheduler from an optimizer; stepped once per update. It is also given
                ``updates_per_epoch`` and ``total_updates`` if it takes them.
            clip_norm: the norm that the gradient of each stage is scaled down to if it is longer; None: it never is.
            non_finite: what a loss or gradient that is not finite does: ``stop`` the run, or ``skip`` its update.
            max_skipped: updates that may be skipped in a row.
            seed: of data order, augmentation and dropout. Initial weights are the model's own.
            device: ``cpu`` or ``cuda`` (the GPU of the local rank).
            dtype: of parameters and floating-point inputs.
            autocast: ``torch.bfloat16``: forward and loss run under torch.autocast; parameters stay in ``dtype``.
            wire_dtype: ``torch.bfloat16``: wider activations and gradients travel in it from stage to stage.
            compile: compile each stage with torch.compile.
            tf32: on a GPU, let matrix products and convolutions round float32 to TF32.
            cudnn_benchmark: let cuDNN choose kernels by timing them, which no seed repeats.
            channels_last: compute and send images [B, C, H, W] in memory as [B, H, W, C].
            threads: per process; None: cores / K, whether the stages share a process or not, because sums over
                several threads round differently.
            bind_cores: with one process per stage on CPUs, each computes on its own share of the node's cores, if there
                is at least one for each.
            processes: one process per stage; None: if torchrun started this script.
            timeout_seconds: how long to wait for one message of a peer.
            stall_seconds: without progress of any stage, until what all of them do is printed, and the likely cause.
            abort_seconds: likewise, until the process ends, with exit code 1, unless it is in a debugger; None: never;
                ``auto``: 600 with one process per stage, never where all stages share yours.

        Raises:
            ConfigError: the number of processes is not K, a value is out of range, or the method does not fit K.
            PartitionError: the model cannot be cut like that.
        """
        pipeline = Pipeline(method or Method(), num_stages)
        if seed < 0:
            raise ConfigError(f"seed must be >= 0, got {seed}")
        if not timeout_seconds > 0:
            raise ConfigError(f"timeout_seconds must be above 0, got {timeout_seconds}")
        self._distributed = launched_world_size() is not None if processes is None else processes
        self._distributed = self._distributed and num_stages > 1
        self._limits = WatchdogTimeouts.of(stall_seconds, abort_seconds, distributed=self._distributed)
        if self._distributed and launched_world_size() is None:
            raise ConfigError(
                f"processes=True, but this script was started plainly: start it with torchrun "
                f"--nproc-per-node={num_stages}, or leave processes away to train in one process"
            )
        check_world_size(num_stages, processes=self._distributed)
        precision = Precision(
            dtype=dtype,
            autocast=autocast,
            wire_dtype=wire_dtype,
            compile=compile,
            tf32=tf32,
            cudnn_benchmark=cudnn_benchmark,
        )
        precision.check(pipeline.method)
        guard = GradientPolicy(non_finite=non_finite, max_skipped=max_skipped, clip_norm=clip_norm)
        guard.check(pipeline)
        self._job = Job(
            pipeline=pipeline,
            seed=seed,
            loss_fn=loss_fn,
            optimizer=optimizer,
            precision=precision,
            guard=guard,
            channels_last=channels_last,
            balance=balance if isinstance(balance, str) else list(balance),
            partitioned=PartitionedModel(
                model.to(dtype),
                num_stages=num_stages,
                balance=balance,
                granularity=granularity,
                speeds=speeds,
                own=[launched_rank()] if self._distributed else range(num_stages),
            ),
        )
        self._lr_schedule, self._device_type = lr_schedule, device
        self._threads, self._timeout_seconds = threads or max(1, num_cores() // num_stages), timeout_seconds
        self._bind_cores = bind_cores
        self.requests = Requests()  # of the run that trains now, or did last; to ask it to stop or to save

    @property
    def needs_data(self) -> bool:
        """Whether this process feeds the pipeline; the others need no dataset."""
        return 0 in self._job.partitioned.modules

    def fit(
        self,
        train_dataset: Dataset[Any] | None,
        *,
        epochs: int,
        batch_size: int,
        val_dataset: Dataset[Any] | None = None,
        run_dir: str | os.PathLike[str] | None = None,
        resume: str = "auto",
        max_updates: int | None = None,
        shuffle: bool = True,
        num_workers: int = 0,
        checkpoint_every_epochs: int = 1,
        checkpoint_every_updates: int | None = None,
        keep_checkpoints: int = 2,
        keep_best: bool = False,
        async_save: bool = True,
        tensorboard: bool = True,
        trace: bool = False,
        memory: bool = False,
        quiet: bool = False,
        handle_signals: bool = False,
        config: Mapping[str, Any] | None = None,
        pick_next: Callable[[Sequence[int]], int] = downstream_first,
    ) -> Summary:
        """Train, evaluating and saving between epochs.

        Args:
            train_dataset: map-style, of (input, target); may be None where ``needs_data`` is False.
            epochs: passes over it.
            batch_size: samples of one update; micro-batches hold floor(batch_size / M).
            val_dataset: evaluated after each epoch, every sample exactly once.
            run_dir: the run's folder; None: nothing is written.
            resume: ``auto`` (go on from the newest checkpoint in ``run_dir``), ``never``, or a checkpoint's path.
                Started again by its launcher, a process goes on from what it has saved, whatever it was told.
            max_updates: stop after so many updates, if that comes first.
            shuffle: a new order of samples each epoch, a function of (seed, epoch) alone.
            num_workers: processes that load data; 0: the first stage loads between its actions.
            checkpoint_every_epochs: 0: only at the end.
            checkpoint_every_updates: also save after every so many updates of an epoch, with an empty pipeline, which
                is part of what the run computes; None: only between epochs.
            keep_checkpoints: how many of the newest to keep.
            keep_best: keep besides the one with the best validation accuracy or, where there is none, loss.
            async_save: train on while a checkpoint is being written; costs a copy of the state in host memory.
            tensorboard: write ``run_dir/tensorboard``.
            trace: write ``run_dir/trace.json``, what each stage did and when, and the shares of its time.
            memory: measure the most bytes of tensors that each stage's process held; slows the first updates.
            quiet: no live line.
            handle_signals: at SIGTERM, SIGINT or SIGUSR1 empty the pipeline, save and return; at a second one end the
                process. For the calling thread only if it is the main one.
            config: what ``run_dir`` is recognised by when it is used again; None: this trainer's settings.
            pick_next: with all stages in one process, which goes on next. Any choice gives the same values.

        Returns:
            The summary, as in ``summary.json``; the same on every rank. Of a run that was asked to stop it has
            ``stopped``: ``why``, after how many updates (``update``), in which ``epoch``, the path of its
            ``checkpoint`` (None without a ``run_dir``), and whether ``drain_changed_result``, the values of the run.

        Raises:
            ConfigError, PartitionError, DataError, CheckpointError: before training starts.
            DivergedError: a loss or a gradient is not finite.
            StageFailed, ChannelError: another process failed.
            SaveError: the last checkpoint could not be written.
        """
        pipeline = self._job.pipeline
        steps, num_stages = pipeline.micro_batches_per_update, pipeline.num_stages
        micro_batch_size = check_lengths(
            epochs=epochs,
            max_updates=max_updates,
            checkpoint_every_updates=checkpoint_every_updates,
            batch_size=batch_size,
            steps=steps,
        )
        if run_dir is None and resume != "auto":
            raise ConfigError(f"resume={resume} needs a run_dir to go on in; without one nothing is saved or resumed")
        if trace and run_dir is None:
            raise ConfigError("trace=True writes run_dir/trace.json, but there is no run_dir; pass one, or no trace")
        if memory and num_stages > 1 and not self._distributed:
            raise ConfigError(
                f"memory=True (runtime.memory) measures a process, but all {num_stages} stages share one; start "
                "one for each stage (runtime.processes=true, torchrun), or leave it away"
            )
        if keep_checkpoints < 1 or checkpoint_every_epochs < 0:
            raise ConfigError(
                f"keep_checkpoints must be at least 1 and checkpoint_every_epochs at least 0, got {keep_checkpoints} "
                f"and {checkpoint_every_epochs}"
            )
        told = config
        if told is None:
            told = {**self._job.settings, "batch_size": batch_size, "shuffle": shuffle}
            told["checkpoint_every_updates"] = checkpoint_every_updates
        folder = RunFolder(Path(run_dir)) if run_dir is not None else None
        if folder is not None:
            resume = folder.check(told, resume=resume)
        log_to(folder.path / "logs" / f"rank{launched_rank()}.log" if folder is not None else None)
        tune_malloc()
        world = self._join()
        store = world.fresh_store()
        running = job.Job(world, self._limits, folder.path if folder is not None else None)
        self.requests = running.requests
        with self._job.precision.apply(threads=self._threads), self._refusals_told(store):
            num_samples, train_loader = self._feed(
                train_dataset, "training", world, shuffle=shuffle, num_workers=num_workers, min_samples=batch_size
            )
            num_validation, val_loader = (
                self._feed(val_dataset, "validation", world, shuffle=False, num_workers=num_workers)
                if val_dataset is not None
                else (0, None)
            )
            plan = Plan(
                epochs=epochs,
                max_updates=max_updates,
                checkpoint_every_updates=checkpoint_every_updates,
                num_samples=num_samples,
                num_validation=num_validation,
                micro_batch_size=micro_batch_size,
                accumulation_steps=steps,
            )
            if self.needs_data:
                wiring.check_sizes(pipeline, plan.first_epoch.sizes)
            with self._bound(world):  # with the threads that the first forward starts
                worker = assemble(
                    self._job,
                    world,
                    store,
                    train_loader=train_loader,
                    val_loader=val_loader,
                    micro_batch_size=micro_batch_size,
                    folder=folder.path if folder is not None else None,
                    pick_next=pick_next,
                )
        saving = None
        if folder is not None and world.rank == 0:
            saving = Saving(
                folder=folder,
                config=told,
                resume=resume,
                every_epochs=checkpoint_every_epochs,
                saver=Saver(folder.checkpoints, keep=keep_checkpoints, keep_best=keep_best, background=async_save),
                signature=self._job.partitioned.signature,
                optimizer=type(self._job.optimizer([nn.Parameter(torch.zeros(1))])).__name__,
                cut={
                    "num_stages": num_stages,
                    "balance": self._job.partitioned.sizes,
                    "granularity": self._job.partitioned.granularity,
                },
                trace=trace,
            )
        self._schedule_learning_rates(worker, plan, store)
        worker.activity.keep_events(MOST_EVENTS if trace else 0)
        worker.meter = MemoryMeter.of(pipeline, world.device) if memory else None
        drain_changes_result = not pipeline.drain_is_exact
        # Where draining changes the result and checkpoints are planned, a stop waits for the next one.
        is_planned = drain_changes_result and checkpoint_every_updates is not None
        stops_early = not is_planned and not pipeline.method.is_asynchronous_greedy
        recorder = Recorder(saving.folder.path if saving else None, tensorboard=tensorboard)
        progress = Progress(num_stages=num_stages, quiet=quiet)
        if self._job.partitioned.told and world.rank == 0:
            progress.note(self._job.partitioned.told)

        coordinator = Coordinator(
            plan,
            saving=saving,
            recorder=recorder,
            progress=progress,
            requests=running.requests,
            drain_changes_result=drain_changes_result,
        )
        signal_handler = signals.signal_handler(lambda name: running.ask(Ask.STOP, name))
        with (
            self._job.precision.apply(threads=self._threads),
            self._bound(world),
            signal_handler if handle_signals else contextlib.nullcontext(),
        ):
            try:
                return running.run(worker, coordinator, coordinator.train, stops_early=stops_early)
            finally:
                forget_actions()
                try:
                    recorder.close()  # writes what is left, which a disk may refuse
                finally:
                    if folder is not None:
                        folder.close()

    def evaluate(self, dataset: Dataset[Any] | None, *, batch_size: int, num_workers: int = 0) -> Summary:
        """Evaluate the present weights on ``dataset``, every sample exactly once.

        Returns:
            ``validation_loss`` and, for classes, ``validation_accuracy``; the same on every rank.

        Raises:
            ConfigError, PartitionError, DataError: before it starts.
            StageFailed, ChannelError: another process failed.
        """
        if batch_size < 1:
            raise ConfigError(f"batch_size must be at least 1, got {batch_size}")
        tune_malloc()
        world = self._join()
        store = world.fresh_store()
        running = job.Job(world, self._limits)
        with self._job.precision.apply(threads=self._threads), self._refusals_told(store):
            num_samples, feed = self._feed(dataset, "validation", world, shuffle=False, num_workers=num_workers)
            plan = Plan(
                epochs=0,
                max_updates=None,
                num_samples=0,
                num_validation=num_samples,
                micro_batch_size=batch_size,
                accumulation_steps=1,
            )
            worker = assemble(self._job, world, store, train_loader=None, val_loader=feed, micro_batch_size=batch_size)
        recorder, progress = Recorder(None), Progress(num_stages=self._job.pipeline.num_stages, quiet=True)
        with self._job.precision.apply(threads=self._threads), self._bound(world):
            coordinator = Coordinator(plan, saving=None, recorder=recorder, progress=progress)
            return running.run(worker, coordinator, coordinator.evaluate, stops_early=False)

    def full_state_dict(self) -> dict[str, Tensor]:
        """Parameters and buffers of the whole model by the uncut model's own names, on the CPU.

        Under torchrun every rank must call it, and every rank gets all of it.

        Raises:
            ConfigError: there is no such device, network interface, address or port.
            ChannelError: the other processes cannot be reached.
            RuntimeError: one of them is gone meanwhile.
        """
        self._join()
        return self._job.partitioned.full_state_dict(distributed=self._distributed)

    def load_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Read weights and running statistics from a checkpoint, whatever cut wrote it.

        Raises:
            CheckpointError: damaged, no checkpoint, or of another model.
        """
        layout.verify(Path(path))
        state.check_signature(Path(path), self._job.partitioned.signature)
        for module in self._job.partitioned.modules.values():
            state.load_weights(Path(path), module)

    def _join(self) -> World:
        if self._distributed:
            return connect(
                self._job.pipeline.num_stages, device_type=self._device_type, timeout_seconds=self._timeout_seconds
            )
        return single_process(choose_device(self._device_type))

    def _bound(self, world: World) -> contextlib.AbstractContextManager[None]:
        # A GPU's process has little to compute, and which cores are near its GPU is not for us to guess.
        return bound_to(world.cores if self._bind_cores and world.device.type == "cpu" else None)

    def _refusals_told(self, store: dist.Store) -> contextlib.AbstractContextManager[None]:
        told = shape_inference.propagate_errors(
            store, stages=range(self._job.pipeline.num_stages + 1), rank=launched_rank()
        )
        return told if self._distributed else contextlib.nullcontext()

    def _feed(
        self,
        dataset: Dataset[Any] | None,
        name: str,
        world: World,
        *,
        shuffle: bool,
        num_workers: int,
        min_samples: int = 1,
    ) -> tuple[int, DeviceLoader | None]:
        if not self.needs_data:
            return 0, None
        feed = make_loader(
            dataset,
            name,
            seed=self._job.seed,
            shuffle=shuffle,
            num_workers=num_workers,
            min_samples=min_samples,
            device=world.device,
            dtype=self._job.precision.dtype,
            channels_last=self._job.channels_last,
        )
        return feed.num_samples, feed

    def _schedule_learning_rates(self, worker: LocalWorker, plan: Plan, store: dist.Store) -> None:
        if self._lr_schedule is None:
            return
        # Only the process with the data knows how long an epoch is.
        if self.needs_data:
            store.set("updates_per_epoch", str(plan.updates_per_epoch))
            store.set("total_updates", str(plan.total_updates))
        wiring.schedule_learning_rates(
            worker.stages,
            self._lr_schedule,
            pipeline=self._job.pipeline,
            updates_per_epoch=int(store.get("updates_per_epoch")),
            total_updates=int(store.get("total_updates")),
        )
