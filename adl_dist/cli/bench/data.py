"""Data for a measurement: an epoch of just the length that is wanted, so that a pipeline is filled only once."""

from typing import Any

import torch
from torch.utils.data import Dataset, Subset

from adl_dist.cli.config import instantiate
from adl_dist.cli.config.schema import RunConfig
from adl_dist.training.input import DeviceLoader, make_loader


def stretched(
    bench_target: str, bench_samples: int, **arguments: Any
) -> tuple[Dataset[tuple[Any, Any]], Dataset[tuple[Any, Any]]]:
    """What ``data._target_`` gives while its run is measured.

    Args:
        bench_target: the user's ``data._target_``.
        bench_samples: of one epoch; they are spread over those of the target, and repeated if there are fewer.
        arguments: the other keys of the data node.

    Returns:
        ``bench_samples`` of the training dataset, and a single sample of the one for validation.
    """
    train, validation = instantiate.datasets({"_target_": bench_target, **arguments})
    size = len(train)  # type: ignore[arg-type]  # check_dataset has seen that it has a length
    return Subset(train, [i * size // bench_samples for i in range(bench_samples)]), Subset(validation, [0])


def stretching(target: str, num_samples: int) -> list[str]:
    """The words of a command line that stretch the data of ``target`` to ``num_samples``."""
    ours = f"{__name__}.{stretched.__name__}"
    # As a node, not as data._target_=, which would start from an empty one and lose the user's keys.
    return [f"data={{_target_:{ours}}}", f"data.bench_target={target}", f"data.bench_samples={num_samples}"]


def feed_of(
    dataset: Dataset[Any], config: RunConfig, device: torch.device, *, shuffle: bool | None = None
) -> DeviceLoader:
    """Micro-batches of ``dataset`` as our own first stage gets them; ``shuffle``: other than configured."""
    return make_loader(
        dataset,
        "training",
        seed=config.seed,
        shuffle=config.data.get("shuffle", True) if shuffle is None else shuffle,
        num_workers=config.data.get("num_workers", 0),
        device=device,
        precision=instantiate.precision(config),
    )
