"""Data and model of a configuration as a run reads them, for commands that read them outside of a run."""

from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from adl_dist.cli.config import instantiate
from adl_dist.cli.config.schema import RunConfig
from adl_dist.partition import Chain
from adl_dist.stage import in_dtype
from adl_dist.training.input import DeviceLoader
from adl_dist.training.trial import samples as samples_of


def device_loader(
    config: RunConfig, device: torch.device, *, shuffle: bool, dataset: Dataset[Any] | None = None
) -> DeviceLoader:
    """Return micro-batches as our first stage gets them; ``dataset`` None: of the training data."""
    whole = instantiate.build_data(config.data)[0] if dataset is None else dataset
    return DeviceLoader(
        whole,
        "training",
        seed=config.seed,
        shuffle=shuffle,
        num_workers=config.data.get("num_workers", 0),
        loading=instantiate.loading(config, whole if dataset is None else None),
        device=device,
        precision=instantiate.precision(config),
    )


def read_units(config: RunConfig, model: nn.Module, *, keeps: str | None, may_run: bool = True) -> Chain | None:
    """Record ``model`` on samples of the data and return its units.

    Args:
        config: the configuration of the run.
        model: the uncut model.
        keeps: the ``keeps_ties`` of :class:`Chain`.
        may_run: whether data and weights are there to run it; if not, None is returned.

    Raises:
        PartitionError: If its forward cannot be run in stages.
        DataError: If the data is missing.
    """
    if not may_run:
        return None
    loader = device_loader(config, torch.device("cpu"), shuffle=True)
    samples = samples_of.take(loader, None, None)
    assert samples is not None
    batches = [batch for pair in samples.readings for batch in pair]
    model = in_dtype(model, loader.precision.dtype)
    return Chain(model, batches, granularity=config.partition.chosen().granularity, keeps_ties=keeps)
