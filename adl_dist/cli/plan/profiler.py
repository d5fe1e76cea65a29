"""Measures the model of a configuration, as ``adl-dist plan`` needs it."""

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adl_dist.cli.config import instantiate
from adl_dist.cli.config.compose import compose_run
from adl_dist.cli.config.schema import RunConfig
from adl_dist.cli.plan.neighbours import READY, BackgroundLoad
from adl_dist.distributed.affinity import tune_malloc
from adl_dist.distributed.parent_process import end_with_launcher
from adl_dist.errors import DataError
from adl_dist.partition import linearise
from adl_dist.partition.advice import Throughput
from adl_dist.partition.measure import pace
from adl_dist.partition.profile import Profile
from adl_dist.stage import Precision, to_channels_last
from adl_dist.training.dry_run import dry_run
from adl_dist.training.input import DeviceLoader, common_sample, make_loader
from adl_dist.training.partitioned_model import micro_batch, take_profile
from adl_dist.transport import Specs, TensorSpec


class Profiler:
    """The model, on its device, with a sample.

    Attributes:
        chain: its units.
        granularity: of the units.
        threads: that it is measured with.
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
        others: BackgroundLoad | None = None,
    ) -> None:
        """Build the model and look at a sample.

        Args:
            config: of the run.
            shape: of a sample, [C, H, W]; None: the training data tells.
            granularity: of the units.
            threads: to measure with.
            kept_in: a file for the measurements; one for each micro-batch size, which is in the name.
            quiet: do not say what is being measured.
            others: that may be at work on this machine, too; None: nobody.

        Raises:
            ConfigError: the model does not take such a sample, or the loss fails on what it makes of it.
            DataError: the data is not there.
            PartitionError: the model cannot be read.
        """
        self.granularity, self._kept_in, self._quiet, self.threads = granularity, kept_in, quiet, threads
        self._others = others or BackgroundLoad([])
        self._device = torch.device(config.runtime.device.value)
        tune_malloc()  # as training does
        self._spec = instantiate.train_spec(config)
        precision = self._spec.precision
        self._within = precision.autocasting(self._device)
        self._model = instantiate.build_model(config).to(self._device, precision.dtype)
        if precision.channels_last:
            to_channels_last(self._model)
        self._feed = _feed(config, precision, self._device) if shape is None else None
        sample = common_sample(self._feed, None) if shape is None else _described(shape, config, self._device)
        assert sample is not None
        self._sample = sample
        arriving, target = (TensorSpec.of(tensor) for tensor in self._sample)
        dry_run(self._model, 0, Specs.always([arriving]), target, self._spec.loss_fn, self._device, within=self._within)
        self.chain = linearise(self._model, granularity=granularity)

    def profile(self, micro_batch_size: int) -> Profile:
        """Costs of each unit for micro-batches of that size; of a device whose neighbours rest, and are at work."""
        alone = self._profile(micro_batch_size)
        with self._others.at_work():
            return replace(alone, loaded=self._profile(micro_batch_size)) if self._others.are_at_work else alone

    def _profile(self, micro_batch_size: int) -> Profile:
        kept_in = self._kept_in
        if kept_in is not None:
            loaded = "-loaded" if self._others.are_at_work else ""
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
                load=None if self._feed is None else partial(self._feed.seconds_to_load, micro_batch_size),
            )

    def pace_of_each(self, samples: int) -> Throughput:
        """Of the uncut model with so many samples at once, on each device."""
        with self._others.at_work():
            return self.pace(samples)

    def pace(self, samples: int) -> Throughput:
        """Of the uncut model with so many samples at once, on one device."""
        self._say(f"measuring the whole model with {samples} samples")
        with self._spec.precision.apply(threads=self.threads):
            forward, backward = pace(
                self._model, *micro_batch(self._sample, samples, self._device), self._spec.loss_fn, self._within
            )
            load = 0.0 if self._feed is None else self._feed.seconds_to_load(samples)
        return Throughput(samples=samples, forward=load + forward, backward=backward)

    def _say(self, text: str) -> None:
        if not self._quiet:
            sys.stderr.write(f"{text}{', the other cores at work' if self._others.are_at_work else ''} ...\n")


def _feed(config: RunConfig, precision: Precision, device: torch.device) -> DeviceLoader:
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


def _described(shape: list[int], config: RunConfig, device: torch.device) -> tuple[Tensor, Tensor]:
    input_ = torch.randn(1, *shape, dtype=getattr(torch, config.dtype.value))
    if config.runtime.channels_last and input_.ndim == 4:
        input_ = input_.contiguous(memory_format=torch.channels_last)
    return input_.to(device), torch.zeros(1, dtype=torch.long)


def _work(told: dict[str, Any]) -> None:
    config, _ = compose_run(told["overrides"])
    measurer = Profiler(config, **told["measurer"], kept_in=None, quiet=True)
    measurer.pace(told["samples"])
    sys.stdout.write(f"{READY}\n")
    sys.stdout.flush()
    while True:
        measurer.pace(told["samples"])


if __name__ == "__main__":
    end_with_launcher()
    _work(json.loads(sys.argv[1]))
