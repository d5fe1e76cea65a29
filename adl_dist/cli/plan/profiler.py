"""Measurements of a configured model, on an idle machine and under load."""

import contextlib
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property, partial
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import torch

from adl_dist.cli.config import instantiate
from adl_dist.cli.config.reading import device_loader
from adl_dist.cli.config.schema import RunConfig
from adl_dist.distributed.affinity import num_cores, tune_malloc
from adl_dist.distributed.parent_process import LAUNCHER, end_with_launcher
from adl_dist.errors import ConfigError, in_one_line
from adl_dist.partition import Chain
from adl_dist.partition.costs import Profile
from adl_dist.partition.measure import pace
from adl_dist.partition.predict import Throughput
from adl_dist.stage import TrainSpec, in_dtype
from adl_dist.training.measured import micro_batch, take_profile
from adl_dist.training.trial import samples as samples_of
from adl_dist.training.trial.samples import Samples
from adl_dist.training.trial.trial import Trial, settle_formats


class Profiler:
    """The uncut model on its device with a sample, ready for measurements."""

    def __init__(
        self,
        config: RunConfig,
        *,
        threads: int,
        shape: list[int] | None = None,
        kept_in: Path | None = None,
    ) -> None:
        """Build the model and run it on a sample.

        Args:
            config: The configuration of the run.
            threads: Threads of a stage.
            shape: Shape of a sample, [C, H, W]; if None, that of the training data.
            kept_in: File for the measurements; the micro-batch size is appended to its name.

        Raises:
            ConfigError: If the model fails on such a sample, or the loss on its output.
            DataError: If the data is missing.
        """
        self.granularity, self.threads = config.partition.granularity, threads
        self._config, self._shape, self._kept_in = config, shape, kept_in
        self._load: list[int] = []  # process ids
        self._is_loaded = False
        self.device = torch.device(config.runtime.device)
        tune_malloc()  # as training does
        self.spec = instantiate.train_spec(config)
        precision = self.spec.precision
        self.model = in_dtype(instantiate.build_model(config), precision.dtype, self.device)
        self._loader = None if shape else device_loader(config, self.device, shuffle=True)
        samples = samples_of.take(self._loader, None, None)
        if samples is None:
            assert shape is not None
            inputs = torch.randn(samples_of.NUM_SAMPLES, *shape, dtype=precision.dtype, device=self.device)
            samples = Samples.of(inputs, torch.zeros(len(inputs), dtype=torch.long))
        self._trial = settle_formats(self.model, self.spec, samples, partial(self._tried, samples))
        self.spec = self._trial.spec
        self.samples = samples.to(self.device, channels_last=bool(self.spec.precision.channels_last))
        if self._loader is not None:
            self._loader.precision = self.spec.precision
        self.reads_stream = self._loader is not None and self._loader.stream is not None
        self._autocast = self.spec.precision.autocasting(self.device)
        self._sample = self.samples.one

    def _tried(self, samples: Samples, spec: TrainSpec) -> Trial:
        """Try the model on ``samples`` with one spec."""
        trial = Trial(self.model, spec, samples, self.device)
        trial.run()
        return trial

    @cached_property
    def chain(self) -> Chain:
        """The units of the model.

        Raises:
            PartitionError: If it cannot be divided.
        """
        return self._trial.chain(granularity=self.granularity)

    def num_others(self, num_stages: int) -> int:
        """Return the number of other stages on this machine's cores; 0 on GPUs."""
        on_cpu = self.device.type == "cpu"
        return max(0, min(num_stages, num_cores() // self.threads) - 1) if on_cpu else 0

    @contextlib.contextmanager
    def with_load(self, num: int, samples: int) -> Iterator[None]:
        """Start ``num`` training processes as load.

        They train the same model with micro-batches of ``samples``. They are stopped (SIGSTOP) except inside
        :meth:`under_load`: they hold memory, but no core.

        Raises:
            ConfigError: If one of them ended before it was ready, or in the block.
        """
        spawn, started = multiprocessing.get_context("spawn"), list[tuple[SpawnProcess, Connection]]()
        how = {"threads": self.threads, "shape": self._shape}
        with contextlib.ExitStack() as stack:
            for _ in range(num):
                reply, theirs = spawn.Pipe(duplex=False)
                process = spawn.Process(target=_train_forever, args=(os.getpid(), theirs, self._config, how, samples))
                process.start()
                stack.callback(process.join)
                stack.callback(process.kill)
                theirs.close()
                started.append((process, reply))
            stack.callback(self._load.clear)
            for process, reply in started:
                try:
                    error = reply.recv()
                except EOFError:
                    error = "it was killed"
                if error is not None or process.pid is None:
                    raise ConfigError(f"a second process could not train the model next to the measuring one: {error}")
                os.kill(process.pid, signal.SIGSTOP)
                self._load.append(process.pid)
            yield
            if not all(process.is_alive() for process, _ in started):
                raise ConfigError(
                    f"one of {num} processes that trained the model next to the measuring one was killed; is there "
                    "enough memory?"
                )

    @contextlib.contextmanager
    def under_load(self) -> Iterator[None]:
        """Let the processes of :meth:`with_load` train inside the block."""
        self._is_loaded = bool(self._load)
        self._send(signal.SIGCONT)
        try:
            yield
        finally:
            self._send(signal.SIGSTOP)
            self._is_loaded = False

    def _send(self, number: signal.Signals) -> None:
        for pid in self._load:
            os.kill(pid, number)

    def profile(self, micro_batch_size: int) -> Profile:
        """Measure each unit for one micro-batch, without and with any load."""
        alone = self._profile(micro_batch_size)
        if not self._load:
            return alone
        with self.under_load():
            return replace(alone, loaded=self._profile(micro_batch_size))

    def _profile(self, size: int) -> Profile:
        kept_in = self._kept_in
        if kept_in is not None:
            kept_in = kept_in.with_stem(f"{kept_in.stem}-{size}{'-loaded' if self._is_loaded else ''}")
        self._say(f"measuring {len(self.chain.units)} units with {size} samples")
        with self.spec.precision.apply(threads=self.threads):
            return take_profile(
                self.model,
                self.chain,
                self.spec,
                self._sample,
                micro_batch_size=size,
                kept_in=kept_in,
                feed=self._loader,
            )

    def pace(self, samples: int) -> Throughput:
        """Measure the uncut model with so many samples at once, on one device."""
        self._say(f"measuring the whole model with {samples} samples")
        batch = micro_batch(self._sample, samples)
        with self.spec.precision.apply(threads=self.threads):
            forward, backward = pace(self.model, *batch, self.spec.loss_fn, self._autocast)
            load = 0.0 if self._loader is None else self._loader.seconds_to_load(samples)
        return Throughput(samples=samples, forward=load + forward, backward=backward)

    def _say(self, text: str) -> None:
        sys.stderr.write(f"{text}{', the other cores at work' if self._is_loaded else ''} ...\n")


def _train_forever(parent: int, reply: Connection, config: RunConfig, how: dict[str, Any], size: int) -> None:
    """Train in a load process, and reply with None when it has begun, or with an error."""
    os.environ[LAUNCHER] = str(parent)
    end_with_launcher()
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):  # the user's code may print
        os.dup2(null, stream)
    try:
        profiler = Profiler(config, **how)
        profiler.pace(size)
    except Exception as error:
        reply.send(in_one_line(error))
        return
    reply.send(None)
    while True:
        profiler.pace(size)
