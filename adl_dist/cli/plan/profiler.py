"""Measure the model of a configuration, alone and while other processes keep the machine busy.

``python -m adl_dist.cli.plan.profiler JSON`` is one of those processes: it trains the same model over and over.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adl_dist.cli.config import instantiate
from adl_dist.cli.config.compose import compose_run
from adl_dist.cli.config.schema import RunConfig
from adl_dist.distributed.affinity import tune_malloc
from adl_dist.distributed.parent_process import LAUNCHER, end_with_launcher
from adl_dist.errors import ConfigError, DataError
from adl_dist.partition import linearise
from adl_dist.partition.costs import Profile
from adl_dist.partition.measure import pace
from adl_dist.partition.predict import Throughput
from adl_dist.stage import Precision, to_channels_last
from adl_dist.training.input import DeviceLoader, common_sample, make_loader
from adl_dist.training.partitioned_model import micro_batch, take_profile
from adl_dist.training.shape_inference import dry_run
from adl_dist.transport import Specs, TensorSpec

READY = "ready"


class BackgroundLoad:
    """Processes that train, as the other stages of one machine do, or rest: then they hold memory, but no core."""

    def __init__(self, running: Sequence["subprocess.Popen[str]"]) -> None:
        self._running = running
        self.is_at_work = False

    @classmethod
    @contextlib.contextmanager
    def started(
        cls, num: int, overrides: Sequence[str], profiler: Mapping[str, Any], samples: int
    ) -> Iterator["BackgroundLoad"]:
        """Start ``num`` processes, which rest at first, and end them on the way out.

        Args:
            num: number of processes.
            overrides: the configuration whose model they train.
            profiler: arguments of :class:`Profiler`.
            samples: size of a micro-batch.

        Raises:
            ConfigError: one of them ended before it was ready.
        """
        job = json.dumps({"overrides": list(overrides), "profiler": dict(profiler), "samples": samples})
        command = [sys.executable, "-m", "adl_dist.cli.plan.profiler", job]
        environment = {**os.environ, LAUNCHER: str(os.getpid())}  # they end with this process
        with contextlib.ExitStack() as stack:
            running = []
            for _ in range(num):
                process = subprocess.Popen(
                    command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
                )
                stack.callback(process.communicate)
                stack.callback(process.kill)
                running.append(process)
            for process in running:
                assert process.stdout is not None
                assert process.stderr is not None
                if process.stdout.readline().strip() != READY:
                    last = (process.stderr.read().strip() or "it printed nothing").splitlines()[-1]
                    raise ConfigError(f"a second process could not train the model next to the measuring one: {last}")
                process.send_signal(signal.SIGSTOP)
            yield cls(running)

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """Let all processes train inside the ``with`` block."""
        self.is_at_work = bool(self._running)
        self._send(signal.SIGCONT)
        try:
            yield
        finally:
            self._send(signal.SIGSTOP)
            self.is_at_work = False

    @property
    def pids(self) -> list[int]:
        """Their process ids."""
        return [process.pid for process in self._running]

    def _send(self, number: signal.Signals) -> None:
        for process in self._running:
            process.send_signal(number)


class Profiler:
    """The model on its device with one sample, ready to be measured.

    Attributes:
        chain: the units of the model.
        granularity: how finely the model is divided into units.
        threads: number of threads that it is measured with.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        shape: list[int] | None,
        granularity: str,
        threads: int,
        kept_in: Path | None,
        quiet: bool,
        load: BackgroundLoad | None = None,
    ) -> None:
        """Build the model and look at a sample.

        Args:
            config: the configuration of the run.
            shape: shape of a sample, [C, H, W]; None: take it from the training data.
            granularity: how finely the model is divided into units.
            threads: number of threads to measure with.
            kept_in: file for the measurements; the micro-batch size is appended to its name.
            quiet: do not print what is being measured.
            load: processes that can keep the machine busy; None: none.

        Raises:
            ConfigError: the model does not take such a sample, or the loss fails on its output.
            DataError: the data is missing.
            PartitionError: the model cannot be divided into units.
        """
        self.granularity, self._kept_in, self._quiet, self.threads = granularity, kept_in, quiet, threads
        self._load = load or BackgroundLoad([])
        self._device = torch.device(config.runtime.device.value)
        tune_malloc()  # as training does
        self._spec = instantiate.train_spec(config)
        precision = self._spec.precision
        self._autocast = precision.autocasting(self._device)
        self._model = instantiate.build_model(config).to(self._device, precision.dtype)
        if precision.channels_last:
            to_channels_last(self._model)
        self._loader = _loader(config, precision, self._device) if shape is None else None
        sample = common_sample(self._loader, None) if shape is None else _random_sample(shape, config, self._device)
        assert sample is not None
        self._sample = sample
        arriving, target = (TensorSpec.of(tensor) for tensor in sample)
        dry_run(
            self._model, 0, Specs.always([arriving]), target, self._spec.loss_fn, self._device, within=self._autocast
        )
        self.chain = linearise(self._model, granularity=granularity)

    def profile(self, micro_batch_size: int) -> Profile:
        """Measure each unit for one micro-batch, alone and, if there is a background load, also under that."""
        alone = self._profile(micro_batch_size)
        with self._load.at_work():
            return replace(alone, loaded=self._profile(micro_batch_size)) if self._load.is_at_work else alone

    def _profile(self, micro_batch_size: int) -> Profile:
        kept_in = self._kept_in
        if kept_in is not None:
            loaded = "-loaded" if self._load.is_at_work else ""
            kept_in = kept_in.with_name(f"{kept_in.stem}-{micro_batch_size}{loaded}{kept_in.suffix}")
        self._say(f"measuring {len(self.chain.units)} units with {micro_batch_size} samples")
        with self._spec.precision.apply(threads=self.threads):
            return take_profile(
                self._model,
                self.chain,
                self._spec,
                granularity=self.granularity,
                sample=self._sample,
                micro_batch_size=micro_batch_size,
                kept_in=kept_in,
                load=None if self._loader is None else partial(self._loader.seconds_to_load, micro_batch_size),
            )

    def pace_of_each(self, samples: int) -> Throughput:
        """Measure the uncut model with so many samples at once on each of several devices."""
        with self._load.at_work():
            return self.pace(samples)

    def pace(self, samples: int) -> Throughput:
        """Measure the uncut model with so many samples at once on one device."""
        self._say(f"measuring the whole model with {samples} samples")
        with self._spec.precision.apply(threads=self.threads):
            forward, backward = pace(
                self._model, *micro_batch(self._sample, samples, self._device), self._spec.loss_fn, self._autocast
            )
            load = 0.0 if self._loader is None else self._loader.seconds_to_load(samples)
        return Throughput(samples=samples, forward=load + forward, backward=backward)

    def _say(self, text: str) -> None:
        if not self._quiet:
            sys.stderr.write(f"{text}{', the other cores at work' if self._load.is_at_work else ''} ...\n")


def _loader(config: RunConfig, precision: Precision, device: torch.device) -> DeviceLoader:
    try:
        train, _ = instantiate.build_data(config)
    except DataError as error:
        raise DataError(f"{error}; or describe a sample: --input 3,224,224") from error
    return make_loader(
        train,
        "training",
        seed=config.seed,
        shuffle=True,
        num_workers=config.data.get("num_workers", 0),
        device=device,
        precision=precision,
    )


def _random_sample(shape: list[int], config: RunConfig, device: torch.device) -> tuple[Tensor, Tensor]:
    input_ = torch.randn(1, *shape, dtype=getattr(torch, config.dtype.value))
    if config.runtime.channels_last and input_.ndim == 4:
        input_ = input_.contiguous(memory_format=torch.channels_last)
    return input_.to(device), torch.zeros(1, dtype=torch.long)


def _train_forever(job: Mapping[str, Any]) -> None:
    config, _ = compose_run(job["overrides"])
    profiler = Profiler(config, **job["profiler"], kept_in=None, quiet=True)
    profiler.pace(job["samples"])
    sys.stdout.write(f"{READY}\n")
    sys.stdout.flush()
    while True:
        profiler.pace(job["samples"])


if __name__ == "__main__":
    end_with_launcher()
    _train_forever(json.loads(sys.argv[1]))
