"""Datasets, and a loader that repeats samples by (seed, epoch, index)."""

from adl_dist.data.datasets import cifar10, cifar100, digits, imagefolder, imagenet, synthetic
from adl_dist.data.loader import Loader, epoch_order
from adl_dist.data.loading import Loading, check_dataset
from adl_dist.data.tokens import tokens
from adl_dist.data.vocabulary import Vocabulary

__all__ = [
    "Loader", "Loading", "Vocabulary", "check_dataset", "cifar10", "cifar100", "digits", "epoch_order", "imagefolder",
    "imagenet", "synthetic", "tokens",
]  # fmt: skip
