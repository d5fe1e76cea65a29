"""The Python API: a trainer of K stages, in this process or torchrun's."""

import contextlib
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any
from weakref import ref

from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

from adl_dist.checkpoint import state
from adl_dist.checkpoint.async_save import Saver
from adl_dist.checkpoint.identity import check_identity, identity_of, optimizer_name
from adl_dist.checkpoint.policy import CheckpointPolicy
from adl_dist.checkpoint.run_dir import RunFolder, chosen_checkpoint, log_to
from adl_dist.checkpoint.storage import on_rank, place_of
from adl_dist.checkpoint.weight_files import WeightFiles
from adl_dist.control import job
from adl_dist.control.coordinator import CheckpointContext, Coordinator
from adl_dist.control.messages import Summary
from adl_dist.control.requests import RequestKind, RequestQueue
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
from adl_dist.optimizers import prepare
from adl_dist.report import MetricsWriter, Progress, announced
from adl_dist.report.callbacks import Callbacks
from adl_dist.report.page import write_after_run
from adl_dist.report.totals import Totals
from adl_dist.schedule import Method, Pipeline
from adl_dist.schedule.run_plan import Plan, check_lengths, micro_batch_size_of
from adl_dist.stage import GradientPolicy, LossFn, OptimizerFactory, Precision, TrainSpec, in_dtype
from adl_dist.stage.average import WeightAverage
from adl_dist.stage.loss import is_of_classes
from adl_dist.stage.metrics import metrics_of
from adl_dist.training import arguments, build
from adl_dist.training.input import Data, Loaders
from adl_dist.training.lazy_weights import prepare_weights
from adl_dist.training.measured import record_delays
from adl_dist.training.options import Monitoring, PartitionSpec, ProcessOptions
from adl_dist.training.partitioned_model import PartitionedModel, Startup, untied
from adl_dist.training.run_outputs import APART, OF_RANK_0, Outputs
from adl_dist.training.shared_folder import say_node, share_folder
from adl_dist.training.startup_sync import Agreement, start_call

PREPARING = "cutting the model into stages, and comparing them with it"


class Trainer:
    """A trainer of a model cut into K stages.

    Each stage has a process under torchrun; otherwise all are in this process.

    Initial weights are the model's own: call ``torch.manual_seed`` before the model is built, so that they are equal in
    every run and on every rank. :meth:`full_state_dict` returns the trained weights. For a model on
    ``torch.device("meta")`` each process makes only the weights of its own stages, or reads them from ``init_from``;
    new Parameter objects then replace those of the model (docs/huggingface.md).

    Examples:
        >>> torch.manual_seed(0)
        >>> model = make_model()
        >>> trainer = Trainer(model, loss_fn=nn.CrossEntropyLoss(),
        ...                   optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        ...                   method=adl_dist.method("adl", accumulation_steps=4), num_stages=4)
        >>> trainer.fit(train_dataset, epochs=10, batch_size=128, val_dataset=val_dataset, run_dir="runs/mine")
        >>> state = trainer.full_state_dict()

    Under torchrun every rank runs the same script and makes the same calls.

    Args:
        model: any module. It is called with the data's input: a tensor, the elements of a tuple, or the entries of a
            dictionary by their names. It is cut when there is data to try it with.
        loss_fn: a function from (output, target) to the mean loss over the samples, or over terms that it counts
            (docs/own.md), or ``model`` for the loss that the model returns, see :class:`adl_dist.losses.ModelLoss`.
        optimizer: makes a torch optimizer from the parameters of one stage; for groups by rules, see
            :func:`adl_dist.optimizers.with_rules`, which also freezes parameters of ``model``.
        loss_reduction: ``mean`` if ``loss_fn`` returns such a mean; ``batch`` for any other loss of a micro-batch, like
            one with a router's term, which is then weighted by the number of samples.
        method: from :func:`adl_dist.method`, or a method's name; by default ADL with M = 4.
        num_stages: K.
        partition: where the model is cut.
        lr_schedule: makes a torch LR scheduler from an optimizer; stepped once per update. It is also given
            ``updates_per_epoch`` and ``total_updates`` (or ``total_steps``) if it takes them. It may be made, and
            stepped through the run, more than once.
        precision: number formats and kernels; all parameters and floating-point inputs get its ``dtype``.
        gradients: clipping, and the treatment of a loss or gradient that is not finite.
        metrics: figures measured besides the loss, in training and validation: ``accuracy``, ``top5``, ``perplexity``,
            or a callable of (output, target) that returns (sum, count); recorded by its name.
        ema: the decay of a moving average of the weights; if None, there is none.
        processes: device, threads and processes.
        timeouts: how long the job may stand still.
        seed: the seed of data order, augmentation and dropout, and of the weights of a model on meta.
        init_from: weights to begin with: a safetensors file, a folder of several with their index, a checkpoint, or a
            state_dict saved by ``torch.save``.
        init_skip: patterns of names like ``fc.*``: these tensors are not taken from ``init_from``.

    Raises:
        ConfigError: If an argument has a wrong type or is out of range, the number of processes is not K, the method
            does not fit K, or tensors of a model on meta cannot be made.
        CheckpointError: If ``init_from`` is missing, damaged, or of another model.
    """

    def __init__(  # 17: the model and its weights, six values that say how it is trained, the figures, the seed
        self,
        model: nn.Module,
        *,
        loss_fn: LossFn | str,
        optimizer: OptimizerFactory,
        loss_reduction: str = "mean",
        method: Method | str | None = None,
        num_stages: int = 1,
        partition: PartitionSpec | None = None,
        lr_schedule: Callable[..., LRScheduler] | None = None,
        precision: Precision | None = None,
        gradients: GradientPolicy | None = None,
        metrics: Sequence[str | Callable[[Any, Any], Any]] = (),
        ema: float | None = None,
        processes: ProcessOptions | None = None,
        timeouts: WatchdogTimeouts | None = None,
        seed: int = 0,
        init_from: str | os.PathLike[str] | None = None,
        init_skip: Sequence[str] = (),
    ) -> None:
        """Check the arguments and load the initial weights."""
        loss_fn = arguments.check_trainer(
            model,
            loss_fn,
            optimizer,
            lr_schedule,
            num_stages=num_stages,
            seed=seed,
            partition=partition,
            precision=precision,
            gradients=gradients,
            processes=processes,
            timeouts=timeouts,
        )
        self._spec = TrainSpec(
            pipeline=Pipeline(arguments.resolve_method(method), num_stages),
            loss_fn=loss_fn,
            loss_reduction=loss_reduction,
            optimizer=optimizer,
            lr_schedule=lr_schedule,
            precision=precision or Precision(),
            gradients=gradients or GradientPolicy(),
            metrics=(metrics,) if isinstance(metrics, str) or callable(metrics) else tuple(metrics),
            ema=ema,
            seed=seed,
        )
        self._gradients = self._spec.gradients  # as given; a run that continues may clip otherwise
        self._metrics = [metric.name for metric in metrics_of(self._spec.metrics, None)]  # refuses a wrong name
        self._processes, self._timeouts = processes or ProcessOptions(), timeouts or WatchdogTimeouts()
        self._distributed = _is_distributed(self._processes, self._spec.pipeline)
        arguments.check_layers(model, distributed=self._distributed)
        self._partitioned = self._prepare(model, partition or PartitionSpec(), init_from, init_skip)
        self._modules = [ref(module) for module in model.modules()]  # of the user's; a process keeps those of its stage
        # Of the stages of this process, which may have nothing to train; None before the first fit.
        self._averages: list[WeightAverage] | None = None
        self._data = Data(None, None, 0, 0, Loading())  # of the last fit
        self._notes = [APART] if self._distributed else []  # for the first fit
        self.running: str | None = None  # its method that runs
        self.requests = RequestQueue()  # of the job that runs now, or did last; to ask it to stop or to save

    def _prepare(
        self,
        model: nn.Module,
        partition: PartitionSpec,
        init_from: str | os.PathLike[str] | None,
        init_skip: Sequence[str],
    ) -> PartitionedModel:
        """Return ``model``, not cut yet, with its weights loaded or prepared."""
        spec, num_stages = self._spec, self._spec.pipeline.num_stages
        arguments.check_delays(spec.pipeline.method, partition.balance)
        names = untied(model) if partition.tied == "untie" else {}
        path = None if init_from is None else self._reach(init_from)
        skipped = [init_skip] if isinstance(init_skip, str) else init_skip
        weights = prepare_weights(model, path, spec.seed, names, skipped)
        if weights is not None and not self._distributed:  # this process has all of it in any case
            weights.make(model)
            weights = None
        prepare(model, spec.optimizer)
        notes = arguments.conversion_notes(model, spec.loss_fn, spec.precision.dtype)
        notes += filter(None, [spec.gradients.note(spec.pipeline)])
        if names:
            shown = f"{', '.join([*names][:3])}{' ..' * (len(names) > 3)}"
            notes.append(f"partition.tied=untie: {shown} had the weights of another layer, now its own")
        own = spec.pipeline.stages_of(launched_rank()) if self._distributed else range(num_stages)
        model = in_dtype(model, spec.precision.dtype)
        return PartitionedModel(model, num_stages, partition, [*own], weights, notes=notes)

    @property
    def rank(self) -> int:
        """The rank of this process, which is 0 without torchrun."""
        return launched_rank()

    @property
    def needs_data(self) -> bool:
        """``True`` if this process feeds the pipeline with data."""
        return 0 in self._partitioned.modules

    @arguments.one_at_a_time
    def fit(  # 15: data, length, folder, and four that say how it is loaded, saved and watched
        self,
        train_dataset: Dataset[Any] | None,
        *,
        epochs: int,
        batch_size: int,
        val_dataset: Dataset[Any] | None = None,
        run_dir: str | os.PathLike[str] | None = None,
        resume: str = "auto",
        max_updates: int | None = None,
        eval_every_updates: int | None = None,
        shuffle: bool = True,
        num_workers: int = 0,
        loading: Loading | None = None,
        checkpoints: CheckpointPolicy | None = None,
        monitoring: Monitoring | None = None,
        callbacks: Sequence[Any] = (),
        config: Mapping[str, Any] | None = None,
    ) -> Summary:
        """Train, evaluating and saving between epochs.

        Afterwards, also after an error, the module given to the trainer holds the newest weights, under the same
        Parameter objects: all weights in one process, only those of its own stage in each of K processes.

        Args:
            train_dataset: map-style or iterable, of (input, target), each a tensor, a tuple or a dictionary of tensors
                (docs/own.md); may be None where ``needs_data`` is False.
            epochs: passes over ``train_dataset``.
            batch_size: samples of one update; micro-batches hold floor(batch_size / M).
            val_dataset: evaluated after each epoch, every sample exactly once.
            run_dir: the run's folder; if None, nothing is written. That of rank 0 counts for all ranks.
            resume: ``auto`` (the newest checkpoint), ``never``, or a checkpoint's path, which restarts do not repeat.
            max_updates: stop after so many updates, if that comes first.
            eval_every_updates: evaluate also after so many updates of an epoch, with an empty pipeline.
            shuffle: whether each epoch has a new order of samples, a function of (seed, epoch) only.
            num_workers: processes that load data; if 0, the first stage loads between its actions.
            loading: a ``collate_fn``, a sampler, the length of an epoch; by default samples are stacked.
            checkpoints: when to save and what to keep.
            monitoring: what is recorded and shown.
            callbacks: called on rank 0, see :class:`adl_dist.Callback`.
            config: the settings that ``run_dir`` is recognised by; by default this trainer's own.

        Returns:
            The summary, as in ``summary.json``; the same on every rank. After a stop it has ``stopped``, and
            ``ended_by`` if a callback has ended the run (docs/runs.md).

        Raises:
            AdlError: ConfigError, PartitionError, DataError or CheckpointError if the run cannot start; later
                DivergedError, StageFailed, ChannelError or CallbackError; SaveError if the last checkpoint could not be
                written; TakenOverError if another process has taken ``run_dir`` over.
        """
        length = {"epochs": epochs, "max_updates": max_updates, "eval_every_updates": eval_every_updates}
        arguments.check_values({**length, "batch_size": batch_size, "num_workers": num_workers, "loading": loading})
        arguments.check_values({"checkpoints": checkpoints, "monitoring": monitoring})
        check_lengths(**length)
        data = Data(train_dataset, val_dataset, batch_size, num_workers, loading or Loading(), shuffle)
        outputs = self._outputs(checkpoints or CheckpointPolicy(), monitoring or Monitoring(), Callbacks(callbacks))
        place = OF_RANK_0 if run_dir is None and self.rank else run_dir
        outputs.check(place, resume, self._spec, is_distributed=self._distributed)
        return self._fit(data, outputs, length, run_dir, resume, config)

    def _outputs(self, checkpoints: CheckpointPolicy, monitoring: Monitoring, callbacks: Callbacks) -> Outputs:
        outputs = Outputs(checkpoints, monitoring, callbacks)
        has_accuracy = is_of_classes(self._spec.loss_fn) or "accuracy" in self._metrics
        return outputs if has_accuracy else outputs.by_loss()

    def _note(self, data: Data, outputs: Outputs, *, of_script: bool) -> None:
        """Add the notes to print before training."""
        if of_script:
            outputs.notes.extend(self._notes)
            self._notes.clear()
        M = self._spec.pipeline.micro_batches_per_update
        if left := data.batch_size % M:
            asked = f"train.batch_size={data.batch_size} is no multiple of M={M}"
            outputs.notes.append(f"note: {asked}: an update has {data.batch_size - left} samples")

    def _fit(
        self,
        data: Data,
        outputs: Outputs,
        length: dict[str, Any],
        run_dir: str | os.PathLike[str] | None,
        resume: str,
        config: Mapping[str, Any] | None,
    ) -> Summary:
        self._note(data, outputs, of_script=config is None)
        self._data = data  # as :meth:`evaluate` loads, too
        self._spec = replace(self._spec, gradients=self._gradients)
        self._partitioned.peak_tflops = outputs.monitoring.peak_tflops
        every = {"checkpoint_every_updates": outputs.checkpoints.every_updates}
        every["eval_every_updates"] = length["eval_every_updates"]
        steps = self._spec.pipeline.micro_batches_per_update
        sizes = {"micro_batch_size": micro_batch_size_of(data.batch_size, steps), "accumulation_steps": steps}
        folder = RunFolder(run_dir) if run_dir is not None else None
        own = build.settings_of(self._spec, self._partitioned) | {
            "batch_size": data.batch_size,
            "shuffle": data.shuffle,
        }
        known_by = own | every if config is None else dict(config)
        # A script has no settings for its optimizer and schedule: what they are is known when they are made.
        later = () if config is not None else ("optimizer", "lr_schedule")
        world = self._join()
        with self._keep_modes(), self._start_job(world, folder) as (running, agreement):
            folder, resume = self._agreed_folder(world, agreement, folder, known_by, resume, later)
            if self.needs_data:
                outputs.check_validation(
                    data.validation is not None, length["eval_every_updates"], saves=folder is not None
                )
            if self._spec.gradients is not self._gradients:
                scope = self._spec.gradients.clip_scope
                outputs.notes.append(f"note: gradients are clipped as when this run began: train.clip_scope={scope}")
            say_node(world, agreement, quiet=outputs.monitoring.quiet)
            with announced(PREPARING) if world.rank == 0 and not outputs.monitoring.quiet else contextlib.nullcontext():
                plan, worker, made = self._assemble(world, agreement, data, folder, {**length, **every, **sizes})
            known_by.update({name: made[name] for name in later})
            if folder is not None:
                folder.recognise(known_by)
                if world.rank == 0 and self._spec.pipeline.method.awaits_delays:
                    record_delays(folder.path, worker.pipeline.nominal_delays)
        if self._spec.ema is not None:
            self._averages = [average for stage in worker.stages for average in stage.averages]
        with self._keep_modes(), contextlib.closing(worker), contextlib.closing(folder or contextlib.ExitStack()):
            saving = None
            if folder is not None:
                worker.wants_timeline, worker.reach = outputs.monitoring.report, folder.reach
                saving = self._saving(folder, known_by, resume, outputs, made) if world.rank == 0 else None
            summary = self._train(running, worker, plan, saving, outputs)
            if saving is not None and outputs.monitoring.report:
                saving.folder.pull()
                write_after_run(saving.folder.path)
            if world.rank == 0:
                is_measured = self._partitioned.spec.balance == "auto"
                outputs.tell_end(summary, plan.epochs, is_measured=is_measured)
            return summary

    @arguments.one_at_a_time
    def evaluate(
        self,
        dataset: Dataset[Any] | None,
        *,
        batch_size: int | None = None,
        num_workers: int | None = None,
        loading: Loading | None = None,
        ema: bool = False,
    ) -> Summary:
        """Evaluate the present weights on ``dataset``, every sample exactly once.

        Options that are not given are those of the last :meth:`fit`; ``batch_size`` is then the size of its
        micro-batches. With ``ema`` the parameters are the moving averages of that call.

        Returns:
            ``validation_loss`` and, for classes, ``validation_accuracy``, for text ``validation_perplexity``; the same
            on every rank.

        Raises:
            ConfigError, PartitionError, DataError: If the evaluation cannot start.
            StageFailed, ChannelError: If another process failed.
        """
        self._check_averages(ema)
        if batch_size is None:
            batch_size = self._data.batch_size // self._spec.pipeline.micro_batches_per_update
            if not batch_size:
                raise ConfigError("give evaluate a batch_size; it has a default only after fit")
        num_workers = self._data.num_workers if num_workers is None else num_workers
        loading = loading or self._data.loading
        arguments.check_values({"batch_size": batch_size, "num_workers": num_workers, "loading": loading})
        if batch_size < 1:
            raise ConfigError(f"batch_size must be at least 1, got {batch_size}")
        data = Data(None, dataset, batch_size, num_workers, loading, trains=False)
        world = self._join()
        length = {"epochs": 0, "max_updates": None, "micro_batch_size": batch_size, "accumulation_steps": 1}
        with self._keep_modes(), self._start_job(world, None) as (running, agreement):
            plan, worker, _ = self._assemble(world, agreement, data, None, length)
        progress = Progress(num_stages=self._spec.pipeline.num_stages, quiet=True)
        coordinator = Coordinator(plan, MetricsWriter(None), progress, Totals(worker.unit))
        with self._keep_modes(), contextlib.closing(worker), self._applied(), self._bound(world), self._averaged(ema):
            return running.run(worker, coordinator, coordinator.evaluate, stops_early=False)

    @arguments.one_at_a_time
    def full_state_dict(self, *, ema: bool = False) -> dict[str, Tensor]:
        """Return the tensors of the whole model by name, on the CPU.

        Under torchrun every rank must call it, and every rank gets all of it. With ``ema`` the parameters are the
        moving averages of the last call of :meth:`fit`.

        Raises:
            ConfigError: If ``ema`` is set without an average, a rank makes a different call, or the device, network
                interface, address or port does not exist.
            ChannelError: If the other processes cannot be reached, or one of them does not make the call.
            RuntimeError: If a process ends meanwhile.
        """
        self._check_averages(ema)
        world = self._join()
        start_call(world, "full_state_dict")
        with self._averaged(ema):
            return self._partitioned.full_state_dict(distributed=self._distributed)

    def _check_averages(self, ema: bool) -> None:
        if ema and self._averages is None:
            raise ConfigError(
                "ema=True: there is no average of these weights; give Trainer(ema=0.999) and call fit before, or load "
                "it by load_checkpoint(path, ema=True) and omit ema=True here"
            )

    @contextlib.contextmanager
    def _averaged(self, ema: bool) -> Iterator[None]:
        """With ``ema``, replace the weights by the moving averages in the block."""
        with contextlib.ExitStack() as stack:
            for average in (self._averages or ()) if ema else ():
                stack.enter_context(average.in_place_of_weights())
            yield

    @arguments.one_at_a_time
    def load_checkpoint(self, path: str | os.PathLike[str], which: str = "newest", *, ema: bool = False) -> None:
        """Load weights, buffers and the loss's state from a checkpoint of any cut.

        A moving average of the last fit is dropped.

        The state of the loss is read only if this trainer's loss has the same names and shapes; otherwise the loss
        stays as it is.

        Args:
            path: the checkpoint's own folder, or a run folder.
            which: of a run folder, the ``newest``, or the ``best`` by validation.
            ema: whether to load the moving average of the weights instead.

        Raises:
            CheckpointError: If the checkpoint is missing, damaged, of a different model, or without an average.
        """
        chosen = chosen_checkpoint(self._reach(path), which)
        state.verify(chosen, self._partitioned.signature)
        loss_fn, of_loss = self._spec.loss_fn, state.loss_state(chosen)
        if isinstance(loss_fn, nn.Module) and _shapes_of(loss_fn.state_dict()) == _shapes_of(of_loss):
            loss_fn.load_state_dict(of_loss)
        if self._partitioned.weights is not None:  # not made yet
            files = self._partitioned.weights.files = WeightFiles.at(chosen)
            for module in self._partitioned.modules.values() if ema else ():
                files.tensors = state.averaged(chosen, files.tensors, module)
            return
        for module in self._partitioned.modules.values():
            state.load_weights(chosen, module, ema=ema)
        self._partitioned.initial, self._averages = {}, None  # the average was of other weights

    def _agreed_folder(
        self,
        world: World,
        agreement: Agreement,
        folder: RunFolder | None,
        known_by: Mapping[str, Any],
        resume: str,
        later: Collection[str],
    ) -> tuple[RunFolder | None, str]:
        """Return rank 0's run folder and ``resume`` for this rank; begin its log."""
        found: dict[str, Any] = {"place": None, "resume": resume}
        if folder is not None and world.rank == 0:
            resume = folder.check(known_by, resume=resume, later=later)
            cut = None if folder.identity is None else folder.identity.get("cut", {})
            found = {"place": str(folder.place), "resume": resume, "cut": cut, "clip_scope": folder.clip_scope}
        folder, found = share_folder(folder, found, world, agreement)
        log_to(None if folder is None else folder.path / "logs" / f"rank{launched_rank()}.log")
        if (scope := found.get("clip_scope")) is not None:
            self._keep_clip_scope(scope, known_by)
        if (cut := found.get("cut")) is not None:
            self._partitioned.initial = {}
            if self._partitioned.sizes is None and cut.get("num_stages") == self._spec.pipeline.num_stages:
                self._partitioned.begins = list(cut.get("begins", ()))
        return folder, found["resume"]

    def _keep_clip_scope(self, scope: Any, known_by: Mapping[str, Any]) -> None:
        """Keep the clip ``scope`` of the run that continues."""
        given = self._spec.gradients
        kept = replace(given, clip_scope=scope)
        if kept.clips_model(self._spec.pipeline) != given.clips_model(self._spec.pipeline):
            self._spec = replace(self._spec, gradients=kept)
            for settings in (known_by, known_by.get("train")):  # of a script, and of the command line
                if isinstance(settings, dict) and "clip_scope" in settings:
                    settings["clip_scope"] = scope

    @contextlib.contextmanager
    def _start_job(self, world: World, folder: RunFolder | None) -> Iterator[tuple[job.Job, Agreement]]:
        """Yield a new job and the agreement of ranks; raise errors on all ranks."""
        tune_malloc()
        agreement = start_call(world, str(self.running))
        with self._applied(), agreement.propagate_errors():
            running = job.Job(world, self._timeouts, folder.path if folder is not None else None)
            self.requests = running.requests
            yield running, agreement

    @contextlib.contextmanager
    def _keep_modes(self) -> Iterator[None]:
        """Restore the modes of the user's modules, which stages switch."""
        parts = [ref(module) for part in self._partitioned.modules.values() for module in part.modules()]
        kept = [(to, module.training) for to in (*self._modules, *parts) if (module := to()) is not None]
        try:
            yield
        finally:
            for to, training in kept:
                if (module := to()) is not None:
                    module.training = training

    def _assemble(
        self, world: World, agreement: Agreement, data: Data, folder: RunFolder | None, length: Mapping[str, Any]
    ) -> tuple[Plan, LocalWorker, build.Settings]:
        """Load the data, settle the cut; return the plan, worker and settings."""
        loaders = Loaders.open(data, self._spec, world.device) if self.needs_data else Loaders()
        plan = Plan(**length, **loaders.lengths)
        if folder is not None and (known := folder.identity) is not None:  # before the model is cut, which takes long
            check_identity(folder.checkpoints, known, identity_of(plan, known.get("optimizer", "")))
        startup = Startup(world, agreement, loaders, plan, None if folder is None else folder.path)
        with self._bound(world):  # with the threads of the first forward, but without the loaders' workers
            settled = build.settle_partition(self._spec, self._partitioned, startup)
            return plan, *build.build_worker(settled, self._partitioned, startup)

    def _saving(
        self, folder: RunFolder, config: Mapping[str, Any], resume: str, outputs: Outputs, made: build.Settings
    ) -> CheckpointContext:
        policy = outputs.checkpoints
        return CheckpointContext(
            folder=folder,
            config=config,
            resume=resume,
            policy=policy,
            saver=Saver(folder.checkpoints, policy, check_owner=folder.check_owner, before_commit=folder.push),
            signature=self._partitioned.signature,
            optimizer=optimizer_name(made),
            cut={"num_stages": self._spec.pipeline.num_stages, "begins": self._partitioned.begins},
            trace=outputs.monitoring.trace,
        )

    def _train(
        self,
        running: job.Job,
        worker: LocalWorker,
        plan: Plan,
        saving: CheckpointContext | None,
        outputs: Outputs,
    ) -> Summary:
        """Run the job, with its outputs open and signals handled."""
        world, pipeline, monitoring = worker.world, worker.pipeline, outputs.monitoring
        worker.activity.most_events = MOST_EVENTS if monitoring.trace else 0
        worker.meter = MemoryMeter.of(pipeline, world.device) if monitoring.memory else None
        recorder = outputs.recorder(saving)
        if world.rank == 0 and (outputs.callbacks.any or recorder.has_loggers):
            worker.callback_queue = outputs.callback_queue
        flops = self._partitioned.flops
        coordinator = Coordinator(
            plan,
            recorder,
            outputs.progress(worker, self._partitioned, saving, plan.eval_every_updates),
            Totals(worker.unit, None if flops is None else flops / world.size),
            saving,
            outputs.callbacks,
            outputs.callback_queue,
            running.requests,
            drain_changes_result=lambda epoch: not pipeline.in_epoch(epoch).drain_is_exact,
            skips_non_finite=self._spec.gradients.skips,
        )
        # Where draining changes the result and checkpoints are planned, a stop waits for the next one.
        stops_early = pipeline.drain_is_exact or outputs.checkpoints.every_updates is None
        try:
            with self._applied(), self._bound(world), contextlib.ExitStack() as stack:
                if self._processes.handle_signals:
                    stack.enter_context(signals.signal_handler(lambda name: running.ask(RequestKind.STOP, name)))
                    outputs.callbacks.on_interrupt = lambda why: running.requests.ask(RequestKind.STOP, why)
                return running.run(worker, coordinator, coordinator.train, stops_early=stops_early)
        except BaseException:
            self._partitioned.give_state()  # of a segment that has not ended
            raise
        finally:
            recorder.close()  # writes what is left, which a disk may refuse

    def _reach(self, path: str | os.PathLike[str]) -> PurePath:
        """Return the user's path, or rank 0's if it is missing on this machine."""
        place = place_of(path)
        if not isinstance(place, Path) or place.exists():
            return place
        if not self._distributed or self.rank == 0:
            return Path(path)  # a mistaken path is shown as it is
        self._join()
        return on_rank(0, place)

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
    """Return whether stages are in several processes.

    Raise ConfigError for a wrong number of processes.
    """
    wanted, started = processes.one_per_stage, launched_world_size()
    distributed = (started is not None if wanted is None else wanted) and pipeline.num_processes > 1
    if distributed and started is None:
        raise ConfigError(
            f"one_per_stage=True, but this script was started plainly: start it with torchrun "
            f"--nproc-per-node={pipeline.num_processes}, or omit one_per_stage to train in one process"
        )
    check_world_size(pipeline, processes=distributed)
    return distributed


def _shapes_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the shape of each tensor in ``state``, and None for other values."""
    return {name: getattr(value, "shape", None) for name, value in state.items()}
