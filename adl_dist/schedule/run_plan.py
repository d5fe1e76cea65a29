"""The run's segments, sizes of micro-batches and groups, and loss weights."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from adl_dist.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Segment:
    """The micro-batches of one segment of training, the same for every stage."""

    epoch: int  # of the data order and augmentation
    first_sample: int = 0  # where in the epoch's order the segment begins
    first_update: int  # s of the first group, counted from 0 over the whole run
    num_samples: int  # samples visited from there on
    micro_batch_size: int  # samples in one forward; the last micro-batch may hold fewer
    accumulation_steps: int  # M, micro-batches in one update; the last group may hold fewer

    @classmethod
    def without_groups(cls, num_samples: int, micro_batch_size: int) -> "Segment":
        """Return a segment with groups of one micro-batch, as for evaluation."""
        return cls(
            epoch=0, first_update=0, num_samples=num_samples, micro_batch_size=micro_batch_size, accumulation_steps=1
        )

    @property
    def sizes(self) -> list[int]:
        """Samples of each micro-batch."""
        return _in_parts(self.num_samples, self.micro_batch_size)

    @property
    def group_sizes(self) -> list[int]:
        """Micro-batches of each group."""
        return _in_parts(len(self.sizes), self.accumulation_steps)

    @property
    def first_micro_batch(self) -> int:
        """Micro-batches of the epoch that lie before the segment."""
        return self.first_sample // self.micro_batch_size

    @property
    def num_updates(self) -> int:
        """Updates that every stage makes."""
        return len(self.group_sizes)

    def first_updates(self, num_updates: int) -> "Segment":
        """Return the segment that ends after its first ``num_updates``."""
        return replace(self, num_samples=sum(self.sizes[: sum(self.group_sizes[:num_updates])]))

    def loss_weights(self, reduction: str, sizes: list[int]) -> list[float]:
        """Return the factor on the loss of each micro-batch of ``sizes`` samples."""
        M = self.accumulation_steps
        groups = [sizes[start : start + M] for start in range(0, len(sizes), M)]
        return [weight for group in groups for weight in weights_in_group(reduction, group)]


def weights_in_group(reduction: str, terms: Sequence[float]) -> list[float]:
    """Return the factor on the loss of each micro-batch of a group.

    ``terms`` has the number of terms of each, usually samples. The factor is 1 for ``sum``. For ``mean`` it is n_b /
    n_group, so that an update follows the mean over the group's terms: the paper's 1/M if all are equal, 0 if the group
    has none.
    """
    if reduction == "sum":
        return [1.0] * len(terms)
    total = math.fsum(terms)  # not sum(), which rounds in another way since Python 3.12
    return [number / total if total else 0.0 for number in terms]


def _in_parts(total: int, size: int) -> list[int]:
    full, rest = divmod(total, size)
    return [size] * full + [rest] * (rest > 0)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The length of a run, in epochs and updates, and its segments.

    A segment ends with its epoch, and after every ``checkpoint_every_updates`` and ``eval_every_updates`` of the epoch.
    """

    epochs: int
    max_updates: int | None
    checkpoint_every_updates: int | None = None
    eval_every_updates: int | None = None
    num_samples: int
    num_validation: int
    micro_batch_size: int
    accumulation_steps: int

    def segment(self, epoch: int, first_sample: int, update: int) -> Segment:
        """Return the segment from ``first_sample`` of ``epoch`` and ``update`` on."""
        rest = Segment(
            epoch=epoch,
            first_sample=first_sample,
            first_update=update,
            num_samples=self.num_samples - first_sample,
            micro_batch_size=self.micro_batch_size,
            accumulation_steps=self.accumulation_steps,
        )
        ends = [rest.num_updates]
        if self.max_updates is not None:
            ends.append(self.max_updates - update)
        done_of_epoch = first_sample // (self.micro_batch_size * self.accumulation_steps)
        for every in (self.checkpoint_every_updates, self.eval_every_updates):
            if every is not None:
                ends.append(every - done_of_epoch % every)
        return rest.first_updates(min(ends))

    def ends_at(self, sample: int) -> bool:
        """Return whether a planned segment ends (or begins) at ``sample``."""
        return any(self.is_after(every, sample) for every in (self.checkpoint_every_updates, self.eval_every_updates))

    def is_after(self, every: int | None, sample: int) -> bool:
        """Return whether ``sample`` lies between epochs, or ``every`` updates end."""
        size = self.micro_batch_size * self.accumulation_steps
        return sample == 0 or (every is not None and sample % (every * size) == 0)

    @property
    def as_given(self) -> dict[str, int | None]:
        """The settings that ranks know without the size of the dataset."""
        sizes = {"micro_batch_size": self.micro_batch_size, "accumulation_steps": self.accumulation_steps}
        return {"epochs": self.epochs, "max_updates": self.max_updates, **sizes}

    @property
    def first_epoch(self) -> Segment:
        """The first epoch in one piece."""
        return replace(self, checkpoint_every_updates=None, eval_every_updates=None).segment(0, 0, 0)

    @property
    def evaluation(self) -> Segment:
        """The validation set, in micro-batches of the same size."""
        return Segment.without_groups(self.num_validation, self.micro_batch_size)

    @property
    def updates_per_epoch(self) -> int:
        """Updates of one whole epoch."""
        return replace(self, max_updates=None).first_epoch.num_updates

    @property
    def total_updates(self) -> int:
        """Updates of the whole run."""
        total = self.epochs * self.updates_per_epoch
        return total if self.max_updates is None else min(total, self.max_updates)


def check_lengths(**lengths: int | None) -> None:
    """Raise ConfigError for less than one epoch or one update."""
    for name, length in lengths.items():
        if length is not None and length < 1:
            raise ConfigError(f"train.{name} must be at least 1, got {length}")


def micro_batch_size_of(batch_size: int, steps: int) -> int:
    """Return ``batch_size`` // ``steps``, or raise ConfigError if that is 0."""
    if batch_size < steps:
        raise ConfigError(
            f"train.batch_size={batch_size} leaves no sample for each of method.accumulation_steps={steps} "
            f"micro-batches; use train.batch_size>={steps}"
        )
    return batch_size // steps
