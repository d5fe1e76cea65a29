"""Data and model of a configuration as a run reads them, for commands that read them outside of a run."""

from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from adl_dist.cli.config import instantiate
from adl_dist.cli.config.schema import RunConfig
from adl_dist.errors import PartitionError
from adl_dist.partition import Chain, linearise
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
    """Return the units of ``model``, read without samples of the data, which take time, where that is possible.

    ``keeps`` is the ``keeps_ties`` of :func:`linearise`. ``may_run``: whether data and weights are there to run it; if
    not, and if it cannot be read without, return None.

    Raises:
        PartitionError: it cannot be divided.
        DataError: the data is missing.
    """
    how: dict[str, Any] = {"granularity": config.partition.chosen().units, "keeps_ties": keeps}
    try:
        return linearise(model, **how)
    except PartitionError:
        if not may_run:
            return None
    loader = device_loader(config, torch.device("cpu"), shuffle=True)
    samples = samples_of.take(loader, None, None)
    assert samples is not None
    return linearise(in_dtype(model, loader.precision.dtype), samples=samples.readings[0], **how)
