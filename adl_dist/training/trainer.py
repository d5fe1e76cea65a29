"""The Python API: one object that trains a model as K stages, in this process or across torchrun's."""

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

from adl_dist.checkpoint import state
from adl_dist.checkpoint.async_save import Saver
from adl_dist.checkpoint.identity import described, optimizer_name
from adl_dist.checkpoint.policy import CheckpointPolicy
from adl_dist.checkpoint.run_dir import RunFolder, chosen_checkpoint, log_to
from adl_dist.control import job
from adl_dist.control.coordinator import Coordinator, Saving
from adl_dist.control.messages import Summary
from adl_dist.control.requests import Ask, Requests
from adl_dist.control.worker import LocalWorker
from adl_dist.data import Loading
from adl_dist.distributed.affinity import bound_to, default_threads, tune_malloc
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
from adl_dist.optim import takes_length
from adl_dist.optimizers import mark_roles
from adl_dist.report import Progress, Recorder, warn
from adl_dist.schedule import Method, Pipeline
from adl_dist.schedule.run_plan import Plan, check_lengths, micro_batch_size_of
from adl_dist.schedule.work import forget_actions
from adl_dist.stage import GradientPolicy, LossFn, OptimizerFactory, Precision, TrainSpec, in_dtype
from adl_dist.stage.metrics import metrics_of
from adl_dist.training import arguments, build
from adl_dist.training.agreement import propagate_errors
from adl_dist.training.delays import record_delays
from adl_dist.training.input import DeviceLoader
from adl_dist.training.options import Monitoring, PartitionSpec, ProcessOptions
from adl_dist.training.partitioned_model import PartitionedModel
from adl_dist.training.tied_copies import untied

# The arguments that are a value of one type.
VALUES: dict[str, type] = {
    **dict.fromkeys(("num_stages", "seed", "epochs", "batch_size", "max_updates", "num_workers"), int),
    **{"partition": PartitionSpec, "precision": Precision, "gradients": GradientPolicy},
    **{"processes": ProcessOptions, "timeouts": WatchdogTimeouts},
    **{"checkpoints": CheckpointPolicy, "monitoring": Monitoring, "loading": Loading},
}


class Trainer:
    """Trains ``model`` cut into K stages: one process each under torchrun, all in this process otherwise.

    Example:
        >>> torch.manual_seed(0)
        >>> model = make_model()
        >>> trainer = Trainer(model, loss_fn=nn.CrossEntropyLoss(),
        ...                   optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        ...                   method=adl_dist.method("adl", accumulation_steps=4), num_stages=4)
        >>> trainer.fit(train_dataset, epochs=10, batch_size=128, val_dataset=val_dataset, run_dir="runs/mine")
        >>> state = trainer.full_state_dict()

    Under torchrun every rank runs the same script and makes the same calls.
    """

    def __init__(  # 13: what is trained, five values that say how, and the seed
        self,
        model: nn.Module,
        *,
        loss_fn: LossFn,
        optimizer: OptimizerFactory,
        method: Method | str | None = None,
        num_stages: int = 1,
        partition: PartitionSpec | None = None,
        lr_schedule: Callable[..., LRScheduler] | None = None,
        precision: Precision | None = None,
        gradients: GradientPolicy | None = None,
        metrics: Sequence[str | Callable[[Any, Any], Any]] = (),
        processes: ProcessOptions | None = None,
        timeouts: WatchdogTimeouts | None = None,
        seed: int = 0,
    ) -> None:
        """Take what is trained and how; the model is cut when there is data to try it with. None: a value's defaults.

        Initial weights are the model's own: for the same ones in every run, and on every rank, call
        ``torch.manual_seed`` before it is built. :meth:`full_state_dict` returns those that training ends with.

        Args:
            model: any module that torch.fx can trace, or an ``nn.Sequential`` of whatever blocks. It is called with the
                data's input: a tensor, the elements of a tuple, or the entries of a dictionary by their names.
            loss_fn: (output, target) to the mean loss over the samples, or over terms that it counts (docs/own.md).
            optimizer: makes a torch optimizer from the parameters of one stage.
            method: from :func:`adl_dist.method`, or a method's name; None: ADL with M = 4.
            num_stages: K.
            partition: where the model is cut.
            lr_schedule: makes a torch LR scheduler from an optimizer; stepped once per update. It is also given
                ``updates_per_epoch`` and ``total_updates`` (or ``total_steps``) if it takes them. It may be made, and
                stepped through the run, more than once.
            precision: number formats and kernels; all parameters and floating-point inputs get its ``dtype``.
            gradients: clipping, and what happens if a loss or gradient is not finite.
            metrics: what is measured besides the loss, in training and validation: ``accuracy``, ``top5``,
                ``perplexity``, or a callable of (output, target) that returns (sum, count); recorded by its name.
            processes: device, threads and processes.
            timeouts: how long the job may stand still.
            seed: seeds data order, augmentation and dropout.

        Raises:
            ConfigError: an argument of a wrong kind, a value out of range, another number of processes than K, or a
                method that does not fit K.
        """
        arguments.check_model(model)
        arguments.check_loss(loss_fn)
        arguments.check_factories(optimizer, lr_schedule)
        given = {"partition": partition, "precision": precision, "gradients": gradients, "processes": processes}
        arguments.check_values({**given, "timeouts": timeouts, "num_stages": num_stages, "seed": seed}, VALUES)
        if seed < 0:
            raise ConfigError(f"seed must be >= 0, got {seed}")
        self._spec = TrainSpec(
            pipeline=Pipeline(arguments.chosen_method(method), num_stages),
            loss_fn=loss_fn,
            optimizer=optimizer,
            lr_schedule=lr_schedule,
            precision=precision or Precision(),
            gradients=gradients or GradientPolicy(),
            metrics=tuple(metrics),
            seed=seed,
        )
        partition = partition or PartitionSpec()
        if self._spec.pipeline.method.awaits_delays and partition.balance != "auto":
            raise ConfigError(
                "method.delay=auto follows from measured stages; use partition.balance=auto, or give the list that "
                "adl-dist plan prints for this cut, like method.delay=[2,1,0]"
            )
        self._processes = processes or ProcessOptions()
        metrics_of(self._spec.metrics, None)  # refuses a wrong name before any work
        self._distributed = _is_distributed(self._processes, self._spec.pipeline)
        self._timeouts = timeouts or WatchdogTimeouts()
        self._loss_settings = described(loss_fn)  # now, because a loss may count its calls
        names = untied(model) if partition.tied == "untie" else []
        mark_roles(model)
        self._partitioned = PartitionedModel(
            in_dtype(model, self._spec.precision.dtype),
            num_stages,
            partition,
            own=self._spec.pipeline.stages_of(launched_rank()) if self._distributed else range(num_stages),
        )
        if names:
            shown = f"{', '.join(names[:3])}{' ..' * (len(names) > 3)}"
            self._partitioned.notes.append(
                f"partition.tied=untie: {shown} had the weights of another layer, now its own"
            )
        self.requests = Requests()  # of the job that runs now, or did last; to ask it to stop or to save

    @property
    def needs_data(self) -> bool:
        """Whether this process feeds the pipeline; the others need no dataset."""
        return 0 in self._partitioned.modules

    def fit(  # 13: data, length, folder, and three values
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
        loading: Loading | None = None,
        checkpoints: CheckpointPolicy | None = None,
        monitoring: Monitoring | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> Summary:
        """Train, evaluating and saving between epochs.

        Afterwards, also after an error, the module given to the trainer holds the newest weights, under the same
        Parameter objects: all of them in one process, those of its own stage in each of K. ``full_state_dict`` gives
        all of them in either case.

        Args:
            train_dataset: map-style or iterable, of (input, target), each a tensor, a tuple or a dictionary of tensors
                (docs/own.md); may be None where ``needs_data`` is False.
            epochs: passes over it.
            batch_size: samples of one update; micro-batches hold floor(batch_size / M).
            val_dataset: evaluated after each epoch, every sample exactly once.
            run_dir: the run's folder; None: nothing is written.
            resume: ``auto`` (the newest checkpoint), ``never``, or a checkpoint's path; not after a launcher's restart.
            max_updates: stop after so many updates, if that comes first.
            shuffle: a new order of samples each epoch, a function of (seed, epoch) alone.
            num_workers: processes that load data; 0: the first stage loads between its actions.
            loading: a ``collate_fn``, a sampler, the length of an epoch; None: samples are stacked, each visited once.
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
        given = {"epochs": epochs, "batch_size": batch_size, "max_updates": max_updates, "num_workers": num_workers}
        arguments.check_values(
            {**given, "checkpoints": checkpoints, "monitoring": monitoring, "loading": loading}, VALUES
        )
        loading = loading or Loading()
        loading.check()
        checkpoints, monitoring = checkpoints or CheckpointPolicy(), monitoring or Monitoring()
        self._partitioned.peak_tflops = monitoring.peak_tflops
        check_lengths(epochs=epochs, max_updates=max_updates)
        steps = self._spec.pipeline.micro_batches_per_update
        every: dict[str, Any] = {"checkpoint_every_updates": checkpoints.every_updates}
        sizes = {"micro_batch_size": micro_batch_size_of(batch_size, steps), "accumulation_steps": steps}
        self._check_outputs(run_dir, resume, monitoring)
        folder = RunFolder(Path(run_dir)) if run_dir is not None else None
        own = {**self._settings, "batch_size": batch_size, "shuffle": shuffle, **every}
        known_by = own if config is None else dict(config)
        # A script has no settings for its optimizer and schedule: what they are is known when they are made.
        later = () if config is not None else ("optimizer", "lr_schedule")
        resume = resume if folder is None else folder.check(known_by, resume=resume, later=later)
        if folder is not None and folder.is_resumed(resume):
            self._partitioned.initial = {}
        log_to(folder.path / "logs" / f"rank{launched_rank()}.log" if folder is not None else None)

        def make_plan(**lengths: Any) -> Plan:
            if checkpoints.keep_best and folder is not None and self.needs_data and not lengths["num_validation"]:
                raise ConfigError(
                    "keep_best=True (runtime.keep_best) keeps the checkpoint with the best validation, but there is no "
                    "validation dataset; give one, or omit keep_best"
                )
            return Plan(epochs=epochs, max_updates=max_updates, **every, **sizes, **lengths)

        def recognise(made: build.Settings) -> None:
            known_by.update({name: made[name] for name in later})
            if folder is not None:
                folder.recognise(known_by)

        data = {"training": train_dataset} | ({"validation": val_dataset} if val_dataset is not None else {})
        loadings = {"training": loading, "validation": loading.of_validation}
        running, worker, plan, made = self._start(
            make_plan, data, loadings, folder, batch_size, shuffle, num_workers, recognise
        )
        if folder is not None and worker.world.rank == 0 and self._spec.pipeline.method.awaits_delays:
            record_delays(folder.path, worker.pipeline.nominal_delays)
        with contextlib.nullcontext() if folder is None else contextlib.closing(folder):
            saving = self._saving(worker.world, folder, known_by, resume, checkpoints, made, trace=monitoring.trace)
            return self._train(running, worker, plan, saving, checkpoints, monitoring)

    def evaluate(
        self, dataset: Dataset[Any] | None, *, batch_size: int, num_workers: int = 0, loading: Loading | None = None
    ) -> Summary:
        """Evaluate the present weights on ``dataset``, every sample exactly once.

        Returns:
            ``validation_loss`` and, for classes, ``validation_accuracy``; the same on every rank.

        Raises:
            ConfigError, PartitionError, DataError: before it starts.
            StageFailed, ChannelError: another process failed.
        """
        if batch_size < 1:
            raise ConfigError(f"batch_size must be at least 1, got {batch_size}")
        make_plan = partial(Plan, epochs=0, max_updates=None, micro_batch_size=batch_size, accumulation_steps=1)
        loadings = {"validation": (loading or Loading()).of_validation}
        running, worker, plan, _ = self._start(make_plan, {"validation": dataset}, loadings, num_workers=num_workers)
        recorder, progress = Recorder(None), Progress(num_stages=self._spec.pipeline.num_stages, quiet=True)
        coordinator = Coordinator(plan, saving=None, recorder=recorder, progress=progress)
        with self._applied(), self._bound(worker.world):
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

    def load_checkpoint(self, path: str | os.PathLike[str], which: str = "newest") -> None:
        """Read weights and running statistics from a checkpoint, whatever cut wrote it.

        Args:
            path: the checkpoint's own folder, or a run folder.
            which: of a run folder, the ``newest``, or the ``best`` by validation.

        Raises:
            CheckpointError: damaged, no checkpoint, or of another model.
        """
        chosen = chosen_checkpoint(Path(path), which)
        state.verify(chosen, self._partitioned.signature)
        for module in self._partitioned.modules.values():
            state.load_weights(chosen, module)
        self._partitioned.initial = {}

    @property
    def _settings(self) -> dict[str, Any]:
        """The settings of this trainer that a run folder is recognised by, as far as they are known already."""
        return {**build.settings_of(self._spec, self._partitioned), "loss": self._loss_settings}

    def _check_outputs(self, run_dir: str | os.PathLike[str] | None, resume: str, monitoring: Monitoring) -> None:
        if run_dir is None and resume != "auto":
            raise ConfigError(
                f"resume={resume} needs a run_dir to continue in; without one nothing is saved or resumed"
            )
        if monitoring.trace and run_dir is None:
            raise ConfigError("trace=True writes run_dir/trace.json, but there is no run_dir; pass one, or no trace")
        pipeline = self._spec.pipeline
        if monitoring.memory and pipeline.num_stages > 1 and not self._distributed:
            raise ConfigError(
                f"memory=True (runtime.memory) measures a process, but all {pipeline.num_stages} stages share one; "
                "start one for each stage (runtime.processes=true, torchrun), or omit it"
            )
        if monitoring.memory and pipeline.num_processes < pipeline.num_stages:
            raise ConfigError(
                f"memory=True (runtime.memory) measures a process, but {pipeline.stages_per_process} stages share one; "
                "use method.stages_per_process=1, or omit it"
            )

    def _start(
        self,
        make_plan: Callable[..., Plan],
        datasets: Mapping[str, Dataset[Any] | None],
        loadings: Mapping[str, Loading],
        folder: RunFolder | None = None,
        min_samples: int = 1,
        shuffle: bool = False,
        num_workers: int = 0,
        recognise: Callable[[build.Settings], None] | None = None,
    ) -> tuple[job.Job, LocalWorker, Plan, build.Settings]:
        """Join the other ranks, open the data, build this process's worker, and make the plan for so much data.

        ``datasets`` are ``training`` and ``validation``, for the first of which ``min_samples`` and ``shuffle`` are;
        ``loadings`` are how they are loaded.
        ``recognise`` looks at the settings in the optimizers and schedules that all stages have made, which are
        returned, too. An error of one rank reaches the others through the store.
        """
        tune_malloc()
        world = self._join()
        store = world.fresh_store()
        with self._applied(), propagate_errors(store, rank=world.rank):
            path = folder.path if folder is not None else None
            running = job.Job(world, self._timeouts, path)
            self.requests = running.requests
            loaders = {
                name: DeviceLoader(
                    dataset,
                    name,
                    seed=self._spec.seed,
                    shuffle=shuffle and name == "training",
                    num_workers=num_workers,
                    min_samples=min_samples if name == "training" else 1,
                    device=world.device,
                    precision=self._spec.precision,
                    loading=loadings[name],
                )
                for name, dataset in datasets.items()
                if self.needs_data
            }
            lengths = {name: loader.num_samples for name, loader in loaders.items()}
            plan = make_plan(
                num_samples=lengths.get("training", 0),
                num_validation=lengths.get("validation", 0),
            )
            build.check_sizes(self._spec.pipeline, plan.first_epoch.sizes)
            # With the threads that the first forward starts, but without the loaders: their workers are not bound.
            with self._bound(world):
                worker, made = build.build_worker(
                    self._spec,
                    self._partitioned,
                    world,
                    store,
                    (loaders.get("training"), loaders.get("validation")),
                    plan=plan,
                    folder=path,
                    pick_next=self._processes.pick_next,
                )
            if recognise is not None:
                recognise(made)
        return running, worker, plan, made

    def _saving(
        self,
        world: World,
        folder: RunFolder | None,
        config: Mapping[str, Any],
        resume: str,
        policy: CheckpointPolicy,
        made: build.Settings,
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
            optimizer=optimizer_name(made),
            schedule_follows=self._spec.lr_schedule is not None and takes_length(self._spec.lr_schedule),
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
        world, pipeline = worker.world, worker.pipeline
        worker.activity.most_events = MOST_EVENTS if monitoring.trace else 0
        worker.meter = MemoryMeter.of(pipeline, world.device) if monitoring.memory else None
        # Where draining changes the result and checkpoints are planned, a stop waits for the next one.
        is_planned = not pipeline.drain_is_exact and checkpoints.every_updates is not None
        stops_early = not is_planned and not pipeline.method.is_asynchronous_greedy
        recorder = Recorder(saving.folder.path if saving else None, tensorboard=monitoring.tensorboard)
        progress = Progress(num_stages=pipeline.num_stages, quiet=monitoring.quiet, unit=worker.unit)
        if world.rank == 0:
            for note in self._partitioned.notes:
                progress.note(note)
            if self._partitioned.warning is not None:
                warn(f"{self._partitioned.warning}; so {pipeline.num_stages} stages are hardly faster than one")
        coordinator = Coordinator(
            plan,
            saving=saving,
            recorder=recorder,
            progress=progress,
            requests=running.requests,
            drain_changes_result=lambda epoch: not pipeline.in_epoch(epoch).drain_is_exact,
            unit=worker.unit,
            flops=None if self._partitioned.flops is None else self._partitioned.flops / world.size,
        )
        try:
            with self._applied(), self._bound(world), contextlib.ExitStack() as stack:
                if self._processes.handle_signals:
                    stack.enter_context(signals.signal_handler(lambda name: running.ask(Ask.STOP, name)))
                return running.run(worker, coordinator, coordinator.train, stops_early=stops_early)
        finally:
            forget_actions()
            recorder.close()  # writes what is left, which a disk may refuse

    def _join(self) -> World:
        device, seconds, pipeline = self._processes.device, self._processes.timeout_seconds, self._spec.pipeline
        if self._distributed:
            size, num_stages = pipeline.num_processes, pipeline.num_stages
            return connect(num_stages, size=size, device_type=device, timeout_seconds=seconds)
        return single_process(choose_device(device), pipeline.num_stages)

    def _applied(self) -> contextlib.AbstractContextManager[None]:
        threads = self._processes.threads or default_threads(self._spec.pipeline.num_processes)
        return self._spec.precision.apply(threads=threads)

    def _bound(self, world: World) -> contextlib.AbstractContextManager[None]:
        # A GPU's process has little to compute, and which cores are near its GPU is not for us to guess.
        return bound_to(world.cores if self._processes.bind_cores and world.device.type == "cpu" else None)


def _is_distributed(processes: ProcessOptions, pipeline: Pipeline) -> bool:
    """Return whether stages are in several processes; raise ConfigError if neither so many nor 1 were started."""
    wanted, started = processes.one_per_stage, launched_world_size()
    distributed = (started is not None if wanted is None else wanted) and pipeline.num_processes > 1
    if distributed and started is None:
        raise ConfigError(
            f"one_per_stage=True, but this script was started plainly: start it with torchrun "
            f"--nproc-per-node={pipeline.num_processes}, or omit one_per_stage to train in one process"
        )
    check_world_size(pipeline, processes=distributed)
    return distributed
