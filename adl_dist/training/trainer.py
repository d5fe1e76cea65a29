"""The Python API: one object that trains a model as K stages, in this process or across torchrun's."""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

from adl_dist.checkpoint import state
from adl_dist.checkpoint.async_save import Saver
from adl_dist.checkpoint.policy import CheckpointPolicy
from adl_dist.checkpoint.run_dir import RunFolder, log_to
from adl_dist.control import job
from adl_dist.control.coordinator import Coordinator, Saving
from adl_dist.control.messages import Summary
from adl_dist.control.requests import Ask, Requests
from adl_dist.control.worker import LocalWorker
from adl_dist.distributed.affinity import bound_to, tune_malloc
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
from adl_dist.schedule import Method, Pipeline, forget_actions
from adl_dist.schedule.run_plan import Plan, check_lengths, micro_batch_size_of
from adl_dist.stage import GradientPolicy, LossFn, OptimizerFactory, Precision, TrainSpec
from adl_dist.training import build, shape_inference
from adl_dist.training.input import DeviceLoader, make_loader
from adl_dist.training.options import Monitoring, PartitionSpec, ProcessOptions
from adl_dist.training.partitioned_model import PartitionedModel


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

    def __init__(  # 12: what is trained, four values that say how, and the seed
        self,
        model: nn.Module,
        *,
        loss_fn: LossFn,
        optimizer: OptimizerFactory,
        method: Method | None = None,
        num_stages: int = 1,
        partition: PartitionSpec | None = None,
        lr_schedule: Callable[..., LRScheduler] | None = None,
        precision: Precision | None = None,
        gradients: GradientPolicy | None = None,
        processes: ProcessOptions | None = None,
        timeouts: WatchdogTimeouts | None = None,
        seed: int = 0,
    ) -> None:
        """Cut the model. Of K processes each keeps only its own stage. None: the value's defaults.

        Args:
            model: any module that torch.fx can trace, or an ``nn.Sequential`` of whatever blocks; it takes one tensor.
            loss_fn: (output, target) to the mean loss over the samples.
            optimizer: makes a torch optimizer from the parameters of one stage.
            method: from :func:`adl_dist.method`; None: ADL with M = 4.
            num_stages: K.
            partition: where the model is cut.
            lr_schedule: makes a torch LR scheduler from an optimizer; stepped once per update. It is also given
                ``updates_per_epoch`` and ``total_updates`` if it takes them.
            precision: number formats and kernels; all parameters and floating-point inputs get its ``dtype``.
            gradients: clipping, and what happens if a loss or gradient is not finite.
            processes: device, threads and processes.
            timeouts: how long the job may stand still.
            seed: seeds data order, augmentation and dropout. Initial weights are the model's own.

        Raises:
            ConfigError: the number of processes is not K, a value is out of range, or the method does not fit K.
            PartitionError: the model cannot be cut like that.
        """
        pipeline = Pipeline(method or Method(), num_stages)
        if seed < 0:
            raise ConfigError(f"seed must be >= 0, got {seed}")
        self._processes = processes or ProcessOptions()
        self._distributed = _is_distributed(self._processes, num_stages)
        self._timeouts = (timeouts or WatchdogTimeouts()).settled(distributed=self._distributed)
        self._spec = TrainSpec(
            pipeline=pipeline,
            loss_fn=loss_fn,
            optimizer=optimizer,
            precision=precision or Precision(),
            gradients=gradients or GradientPolicy(),
            seed=seed,
        )
        self._lr_schedule = lr_schedule
        self._partitioned = PartitionedModel(
            model.to(self._spec.precision.dtype),
            num_stages,
            partition or PartitionSpec(),
            own=[launched_rank()] if self._distributed else range(num_stages),
        )
        self.requests = Requests()  # of the run that trains now, or did last; to ask it to stop or to save

    @property
    def needs_data(self) -> bool:
        """Whether this process feeds the pipeline; the others need no dataset."""
        return 0 in self._partitioned.modules

    def fit(  # 12: data, length, folder, and two values
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
        checkpoints: CheckpointPolicy | None = None,
        monitoring: Monitoring | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> Summary:
        """Train, evaluating and saving between epochs.

        Args:
            train_dataset: map-style, of (input, target); may be None where ``needs_data`` is False.
            epochs: passes over it.
            batch_size: samples of one update; micro-batches hold floor(batch_size / M).
            val_dataset: evaluated after each epoch, every sample exactly once.
            run_dir: the run's folder; None: nothing is written.
            resume: ``auto`` (the newest checkpoint), ``never``, or a checkpoint's path; not after a launcher's restart.
            max_updates: stop after so many updates, if that comes first.
            shuffle: a new order of samples each epoch, a function of (seed, epoch) alone.
            num_workers: processes that load data; 0: the first stage loads between its actions.
            checkpoints: when to save and what to keep.
            monitoring: what is recorded and shown.
            config: the settings that ``run_dir`` is recognised by; None: this trainer's own.

        Returns:
            The summary, as in ``summary.json``; the same on every rank. After a stop it has ``stopped``: ``why``,
            ``update``, ``epoch``, ``checkpoint`` (a path, or None), and whether ``drain_changed_result``.

        Raises:
            ConfigError, PartitionError, DataError, CheckpointError: before training starts.
            DivergedError: a loss or a gradient is not finite.
            StageFailed, ChannelError: another process failed.
            SaveError: the last checkpoint could not be written.
        """
        checkpoints, monitoring = checkpoints or CheckpointPolicy(), monitoring or Monitoring()
        plan = self._plan(epochs, max_updates, batch_size, checkpoints)
        self._check_outputs(run_dir, resume, monitoring)
        if config is None:
            config = {**build.settings_of(self._spec, self._partitioned), "batch_size": batch_size, "shuffle": shuffle}
            config["checkpoint_every_updates"] = checkpoints.every_updates
        folder = RunFolder(Path(run_dir)) if run_dir is not None else None
        if folder is not None:
            resume = folder.check(config, resume=resume)
        data = train_dataset, val_dataset
        running, worker, plan = self._start(data, plan, folder, batch_size, shuffle, num_workers)
        saving = self._saving(worker.world, folder, config, resume, checkpoints, trace=monitoring.trace)
        try:
            return self._train(running, worker, plan, saving, checkpoints, monitoring)
        finally:
            forget_actions()
            if folder is not None:
                folder.close()

    def _plan(self, epochs: int, max_updates: int | None, batch_size: int, checkpoints: CheckpointPolicy) -> Plan:
        """Return the lengths of the run, before it is known how much data there is."""
        check_lengths(epochs=epochs, max_updates=max_updates)
        steps = self._spec.pipeline.micro_batches_per_update
        return Plan(
            epochs=epochs,
            max_updates=max_updates,
            checkpoint_every_updates=checkpoints.every_updates,
            num_samples=0,
            num_validation=0,
            micro_batch_size=micro_batch_size_of(batch_size, steps),
            accumulation_steps=steps,
        )

    def _start(
        self,
        datasets: tuple[Dataset[Any] | None, Dataset[Any] | None],
        plan: Plan,
        folder: RunFolder | None,
        batch_size: int,
        shuffle: bool,
        num_workers: int,
    ) -> tuple[job.Job, LocalWorker, Plan]:
        """Meet the other ranks, open the data and build this process's worker; return the plan with the data's size."""
        path = folder.path if folder is not None else None
        log_to(path / "logs" / f"rank{launched_rank()}.log" if path is not None else None)
        with self._meeting() as (world, store):
            running = job.Job(world, self._timeouts, path)
            self.requests = running.requests
            train, validation = datasets
            loaders = (
                self._loader(train, "training", world, shuffle, num_workers, min_samples=batch_size),
                None if validation is None else self._loader(validation, "validation", world, False, num_workers),
            )
            plan = replace(plan, num_samples=_num_samples(loaders[0]), num_validation=_num_samples(loaders[1]))
            if self.needs_data:
                build.check_sizes(self._spec.pipeline, plan.first_epoch.sizes)
            with self._bound(world):  # with the threads that the first forward starts
                worker = self._worker(world, store, loaders, plan.micro_batch_size, path)
        self._schedule_learning_rates(worker, plan, store)
        return running, worker, plan

    def _check_outputs(self, run_dir: str | os.PathLike[str] | None, resume: str, monitoring: Monitoring) -> None:
        if run_dir is None and resume != "auto":
            raise ConfigError(
                f"resume={resume} needs a run_dir to continue in; without one nothing is saved or resumed"
            )
        if monitoring.trace and run_dir is None:
            raise ConfigError("trace=True writes run_dir/trace.json, but there is no run_dir; pass one, or no trace")
        num_stages = self._spec.pipeline.num_stages
        if monitoring.memory and num_stages > 1 and not self._distributed:
            raise ConfigError(
                f"memory=True (runtime.memory) measures a process, but all {num_stages} stages share one; start "
                "one for each stage (runtime.processes=true, torchrun), or omit it"
            )

    def _saving(
        self,
        world: World,
        folder: RunFolder | None,
        config: Mapping[str, Any],
        resume: str,
        policy: CheckpointPolicy,
        *,
        trace: bool,
    ) -> Saving | None:
        if folder is None or world.rank != 0:
            return None
        return Saving(
            folder=folder,
            config=config,
            resume=resume,
            every_epochs=policy.every_epochs,
            saver=Saver(folder.checkpoints, keep=policy.keep, keep_best=policy.keep_best, background=policy.background),
            signature=self._partitioned.signature,
            optimizer=type(self._spec.optimizer([nn.Parameter(torch.zeros(1))])).__name__,
            cut={
                "num_stages": self._spec.pipeline.num_stages,
                "balance": self._partitioned.sizes,
                "granularity": self._partitioned.spec.units,
            },
            trace=trace,
        )

    def _train(
        self,
        running: job.Job,
        worker: LocalWorker,
        plan: Plan,
        saving: Saving | None,
        checkpoints: CheckpointPolicy,
        monitoring: Monitoring,
    ) -> Summary:
        """Run the job, with its outputs open and signals handled."""
        world, pipeline = worker.world, self._spec.pipeline
        worker.activity.keep_events(MOST_EVENTS if monitoring.trace else 0)
        worker.meter = MemoryMeter.of(pipeline, world.device) if monitoring.memory else None
        drain_changes_result = not pipeline.drain_is_exact
        # Where draining changes the result and checkpoints are planned, a stop waits for the next one.
        is_planned = drain_changes_result and checkpoints.every_updates is not None
        stops_early = not is_planned and not pipeline.method.is_asynchronous_greedy
        recorder = Recorder(saving.folder.path if saving else None, tensorboard=monitoring.tensorboard)
        progress = Progress(num_stages=pipeline.num_stages, quiet=monitoring.quiet)
        if self._partitioned.summary and world.rank == 0:
            progress.note(self._partitioned.summary)
        coordinator = Coordinator(
            plan,
            saving=saving,
            recorder=recorder,
            progress=progress,
            requests=running.requests,
            drain_changes_result=drain_changes_result,
        )
        handler: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self._processes.handle_signals:
            handler = signals.signal_handler(lambda name: running.ask(Ask.STOP, name))
        try:
            with self._applied(), self._bound(world), handler:
                return running.run(worker, coordinator, coordinator.train, stops_early=stops_early)
        finally:
            recorder.close()  # writes what is left, which a disk may refuse

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
        with self._meeting() as (world, store):
            running = job.Job(world, self._timeouts)
            loader = self._loader(dataset, "validation", world, False, num_workers)
            plan = Plan(
                epochs=0,
                max_updates=None,
                num_samples=0,
                num_validation=_num_samples(loader),
                micro_batch_size=batch_size,
                accumulation_steps=1,
            )
            worker = self._worker(world, store, (None, loader), batch_size)
        recorder, progress = Recorder(None), Progress(num_stages=self._spec.pipeline.num_stages, quiet=True)
        coordinator = Coordinator(plan, saving=None, recorder=recorder, progress=progress)
        with self._applied(), self._bound(world):
            return running.run(worker, coordinator, coordinator.evaluate, stops_early=False)

    def full_state_dict(self) -> dict[str, Tensor]:
        """Return parameters and buffers of the whole model by the uncut model's own names, on the CPU.

        Under torchrun every rank must call it, and every rank gets all of it.

        Raises:
            ConfigError: there is no such device, network interface, address or port.
            ChannelError: the other processes cannot be reached.
            RuntimeError: one of them is gone meanwhile.
        """
        self._join()
        return self._partitioned.full_state_dict(distributed=self._distributed)

    def load_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Read weights and running statistics from a checkpoint, whatever cut wrote it.

        Raises:
            CheckpointError: damaged, no checkpoint, or of another model.
        """
        state.verify(Path(path), self._partitioned.signature)
        for module in self._partitioned.modules.values():
            state.load_weights(Path(path), module)

    def _join(self) -> World:
        if self._distributed:
            return connect(
                self._spec.pipeline.num_stages,
                device_type=self._processes.device,
                timeout_seconds=self._processes.timeout_seconds,
            )
        return single_process(choose_device(self._processes.device))

    @contextlib.contextmanager
    def _meeting(self) -> Iterator[tuple[World, dist.Store]]:
        """Join the other ranks; an error of one rank before all have agreed reaches the others through the store."""
        tune_malloc()
        world = self._join()
        store = world.fresh_store()
        stages = range(self._spec.pipeline.num_stages + 1)
        with self._applied(), contextlib.ExitStack() as stack:
            if self._distributed:
                stack.enter_context(shape_inference.propagate_errors(store, stages=stages, rank=launched_rank()))
            yield world, store

    def _applied(self) -> contextlib.AbstractContextManager[None]:
        return self._spec.precision.apply(threads=self._processes.num_threads(self._spec.pipeline.num_stages))

    def _bound(self, world: World) -> contextlib.AbstractContextManager[None]:
        # A GPU's process has little to compute, and which cores are near its GPU is not for us to guess.
        return bound_to(world.cores if self._processes.bind_cores and world.device.type == "cpu" else None)

    def _loader(
        self,
        dataset: Dataset[Any] | None,
        name: str,
        world: World,
        shuffle: bool,
        num_workers: int,
        *,
        min_samples: int = 1,
    ) -> DeviceLoader | None:
        if not self.needs_data:
            return None
        return make_loader(
            dataset,
            name,
            seed=self._spec.seed,
            shuffle=shuffle,
            num_workers=num_workers,
            min_samples=min_samples,
            device=world.device,
            precision=self._spec.precision,
        )

    def _worker(
        self,
        world: World,
        store: dist.Store,
        loaders: tuple[DeviceLoader | None, DeviceLoader | None],
        micro_batch_size: int,
        folder: Path | None = None,
    ) -> LocalWorker:
        return build.build_worker(
            self._spec,
            self._partitioned,
            world,
            store,
            loaders,
            micro_batch_size=micro_batch_size,
            folder=folder,
            pick_next=self._processes.pick_next,
        )

    def _schedule_learning_rates(self, worker: LocalWorker, plan: Plan, store: dist.Store) -> None:
        if self._lr_schedule is None:
            return
        # Only the process with the data knows how long an epoch is.
        if self.needs_data:
            store.set("updates_per_epoch", str(plan.updates_per_epoch))
            store.set("total_updates", str(plan.total_updates))
        build.schedule_learning_rates(
            worker.stages,
            self._lr_schedule,
            pipeline=self._spec.pipeline,
            updates_per_epoch=int(store.get("updates_per_epoch")),
            total_updates=int(store.get("total_updates")),
        )


def _is_distributed(processes: ProcessOptions, num_stages: int) -> bool:
    """Return whether each stage has a process of its own.

    Raises:
        ConfigError: the number of processes that were started is not K, or 1.
    """
    wanted, started = processes.one_per_stage, launched_world_size()
    distributed = (started is not None if wanted is None else wanted) and num_stages > 1
    if distributed and started is None:
        raise ConfigError(
            f"one_per_stage=True, but this script was started plainly: start it with torchrun "
            f"--nproc-per-node={num_stages}, or omit one_per_stage to train in one process"
        )
    check_world_size(num_stages, processes=distributed)
    return distributed


def _num_samples(loader: DeviceLoader | None) -> int:
    return 0 if loader is None else loader.num_samples
