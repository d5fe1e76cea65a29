"""Measurements of a model, also next to busy processes, and of a link."""

import contextlib
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cached_property
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from adl_dist.cli.config import instantiate
from adl_dist.cli.config.schema import RunConfig
from adl_dist.cli.subprocesses import apart
from adl_dist.distributed.affinity import num_cores, tune_malloc
from adl_dist.distributed.network import GLOO, loopback
from adl_dist.distributed.parent_process import LAUNCHER, end_with_launcher
from adl_dist.errors import ChannelError, ConfigError, in_one_line
from adl_dist.partition import Chain
from adl_dist.partition.costs import Profile
from adl_dist.partition.measure import pace
from adl_dist.partition.predict import Throughput
from adl_dist.stage import in_dtype
from adl_dist.training.measured import micro_batch, take_profile
from adl_dist.training.trial import samples as samples_of
from adl_dist.training.trial.samples import Samples
from adl_dist.training.trial.trial import Trial, attempts
from adl_dist.transport.coding_speed import CACHES

SMALL, LARGE = 8, 4 << 20  # bytes
ROUNDS = 20
SECONDS = 60.0  # after which the measurement is given up
# PCIe 4, cautiously, of each GPU to all others; a link between GPUs is not measured
GPU_LINK = {"bandwidth": 12e9, "latency": 1e-5, "shares_link": True}


class Profiler:
    """The uncut model on its device with samples, ready for measurements.

    Attributes:
        spec: the training's specification, with the memory format that was chosen.
        samples: the samples, on the device.
        loader: the loader of the training data, or None if a shape is given instead.
    """

    def __init__(self, config: RunConfig, *, threads: int, shape: list[int] | None = None) -> None:
        """Build the model and run it on a sample.

        Args:
            config: The configuration of the run.
            threads: Threads of a stage.
            shape: Shape of a sample, [C, H, W]; if None, that of the training data.

        Raises:
            ConfigError: If the model fails on such a sample, or the loss on its output.
            DataError: If the data is missing.
        """
        self.granularity, self.threads = config.partition.granularity, threads
        self._config, self._shape, self._others = config, shape, ""
        self.device = torch.device(config.runtime.device)
        tune_malloc()  # as training does
        self.spec = instantiate.train_spec(config)
        dtype = self.spec.precision.dtype
        self.model = in_dtype(instantiate.build_model(config), dtype, self.device)
        self.loader = None if shape else instantiate.device_loader(config, self.device, shuffle=True)
        if (samples := samples_of.take(self.loader, None, None)) is None:
            assert shape is not None
            inputs = torch.randn(samples_of.NUM_SAMPLES, *shape, dtype=dtype, device=self.device)
            samples = Samples.of(inputs, torch.zeros(len(inputs), dtype=torch.long))

        for block in attempts(self.model, self.spec, samples):
            with block as self.spec:
                self._trial = Trial(self.model, self.spec, samples, self.device)
                self._trial.run()
        self.samples = samples.to(self.device, channels_last=bool(self.spec.precision.channels_last))
        if self.loader is not None:
            self.loader.precision = self.spec.precision
        self._autocast = self.spec.precision.autocasting(self.device)

    @cached_property
    def chain(self) -> Chain:
        """The units of the model; PartitionError if it cannot be divided."""
        return self._trial.chain(granularity=self.granularity)

    def num_others(self, num_stages: int) -> int:
        """Return the number of other stages on this machine's cores; 0 on GPUs."""
        on_cpu = self.device.type == "cpu"
        return max(0, min(num_stages, num_cores() // self.threads) - 1) if on_cpu else 0

    @contextlib.contextmanager
    def profiles(self, sizes: Iterable[int], num_others: int) -> Iterator[dict[int, Profile]]:
        """Yield a profile of the units for each micro-batch size in ``sizes``.

        The units are measured alone, then while ``num_others`` processes train the same model with micro-batches of the
        first size. These processes end with the block.

        Raises:
            ConfigError: If such a process ends before it is ready, or in the block.
        """
        found = {size: self._profile(size) for size in dict.fromkeys(sizes)}
        with self._others_at_work(num_others, next(iter(found))):
            if num_others:
                found = {size: replace(alone, loaded=self._profile(size)) for size, alone in found.items()}
            yield found

    @contextlib.contextmanager
    def _others_at_work(self, num: int, size: int) -> Iterator[None]:
        spawn, started = multiprocessing.get_context("spawn"), []
        how = {"threads": self.threads, "shape": self._shape}
        with contextlib.ExitStack() as stack:
            for _ in range(num):
                reply, theirs = spawn.Pipe(duplex=False)
                process = spawn.Process(target=_train_forever, args=(os.getpid(), theirs, self._config, how, size))
                process.start()
                stack.callback(process.join)
                stack.callback(process.kill)
                theirs.close()
                started.append((process, reply))
            for _, reply in started:
                try:
                    error = reply.recv()
                except EOFError:
                    error = "it was killed"
                if error is not None:
                    raise ConfigError(f"a second process could not train the model next to the measuring one: {error}")
            self._others = ", the other cores at work" * bool(num)
            yield
            self._others = ""
            if not all(process.is_alive() for process, _ in started):
                raise ConfigError(
                    f"one of {num} processes that trained the model next to the measuring one was killed; is there "
                    "enough memory?"
                )

    def _profile(self, size: int) -> Profile:
        sys.stderr.write(f"measuring {len(self.chain.units)} units with {size} samples{self._others} ...\n")
        sample = self.samples.one
        with self.spec.precision.apply(threads=self.threads):
            return take_profile(
                self.model, self.chain, self.spec, sample, micro_batch_size=size, kept_in=None, feed=self.loader
            )

    def pace(self, samples: int) -> Throughput:
        """Measure the uncut model on one device, with a batch of ``samples``."""
        sys.stderr.write(f"measuring the whole model with {samples} samples{self._others} ...\n")
        batch = micro_batch(self.samples.one, samples)
        with self.spec.precision.apply(threads=self.threads):
            forward, backward = pace(self.model, *batch, self.spec.loss_fn, self._autocast)
            load = 0.0 if self.loader is None else self.loader.seconds_to_load(samples)
        return Throughput(samples=samples, forward=load + forward, backward=backward)


def _train_forever(parent: int, reply: Connection, config: RunConfig, how: dict[str, Any], size: int) -> None:
    """Train until killed; reply with None once it has begun, or an error."""
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


def link_figures(device: str) -> dict[str, Any]:
    """Return a :class:`Machine`'s keyword arguments for links of ``device``.

    On CPUs two processes of this machine measure a link, which takes a few seconds, mostly to start them.

    Raises:
        ChannelError: If these processes fail or take too long.
    """
    if device == "cuda":
        return GPU_LINK
    with tempfile.TemporaryDirectory(prefix="adl-dist-link-") as folder:
        try:
            return apart(measure_link, [(folder, rank) for rank in range(2)], seconds=SECONDS)[0]
        except Exception as error:
            raise ChannelError(
                f"two processes could not send each other messages over loopback ({in_one_line(error)}); describe the "
                "link instead: --links 8gbit,0.1ms"
            ) from error


def measure_link(folder: str, rank: int) -> dict[str, float]:
    """Return a :class:`Machine`'s arguments for the link to the peer.

    They are the bandwidth in bytes/s, the latency in s, and CPU seconds per message and per byte.
    """
    torch.set_num_threads(1)
    if (interface := loopback()) is not None:
        os.environ[GLOO] = interface
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    elsewhere = torch.zeros(CACHES, dtype=torch.uint8)

    def exchange(num_bytes: int, *, works: bool) -> tuple[float, float]:
        """Return wall-clock and CPU seconds of one message, from round trips.

        They are half of the shortest trip, and half of the median CPU time of a trip. With ``works``, other memory is
        touched before each trip, as in a stage, so that the message is not in the caches.
        """
        message, walls, busy = torch.zeros(num_bytes, dtype=torch.uint8), [], []
        for _ in range(ROUNDS):
            if works:
                elsewhere.add_(1)
            wall, cpu = time.perf_counter(), time.process_time()
            if rank == 0:
                dist.send(message, 1)
                dist.recv(message, 1)
            else:
                dist.recv(message, 0)
                dist.send(message, 0)
            walls.append((time.perf_counter() - wall) / 2)
            busy.append((time.process_time() - cpu) / 2)
        return min(walls), statistics.median(busy)

    exchange(LARGE, works=False)
    (latency, _), (wall, _) = exchange(SMALL, works=False), exchange(LARGE, works=False)
    (_, per_message), (_, cpu) = exchange(SMALL, works=True), exchange(LARGE, works=True)
    dist.destroy_process_group()
    link = {"bandwidth": LARGE / wall, "latency": latency, "seconds_per_message": per_message}
    return {**link, "seconds_per_byte": max(cpu - per_message, 0.0) / LARGE}
