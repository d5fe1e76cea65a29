"""The data and the model of a configuration, read as by a run."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from adl_dist.cli.config import instantiate
from adl_dist.cli.config.schema import RunConfig
from adl_dist.partition import Chain, checked_sizes, even_sizes, flops_sizes
from adl_dist.stage import in_dtype
from adl_dist.training.input import DeviceLoader
from adl_dist.training.trial import samples as samples_of


def device_loader(
    config: RunConfig, device: torch.device, *, shuffle: bool, dataset: Dataset[Any] | None = None
) -> DeviceLoader:
    """Return the loader of the first stage, by default for training data."""
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


def read_units(config: RunConfig, model: nn.Module, *, keeps: str | None) -> Chain:
    """Return the units of ``model``, traced on the first training samples.

    Args:
        config: of the run.
        model: the uncut model; it may be on meta.
        keeps: the ``keeps_ties`` of :class:`Chain`.

    Raises:
        PartitionError: If the model cannot be divided.
        DataError: If the data is missing.
    """
    loader = device_loader(config, torch.device("cpu"), shuffle=True)
    samples = samples_of.take(loader, None, None)
    assert samples is not None
    batches = [batch for pair in samples.readings for batch in pair]
    model = in_dtype(model, loader.precision.dtype)
    return Chain(model, batches, granularity=config.partition.granularity, keeps_ties=keeps)


def chosen_sizes(chain: Chain, num_stages: int, balance: str | Sequence[int] | Sequence[str]) -> list[int]:
    """Return the units of each stage for a ``partition.balance``.

    The balance must need no measurement.

    Raises:
        PartitionError: If the model cannot be cut like that.
    """
    if balance == "even":
        return even_sizes(chain, num_stages)
    return flops_sizes(chain, num_stages) if isinstance(balance, str) else checked_sizes(chain, num_stages, balance)
