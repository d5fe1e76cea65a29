"""How long a run is, and how it is divided into segments."""

from dataclasses import dataclass, replace

from adl_dist.errors import ConfigError
from adl_dist.schedule import Segment


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How long a run is and how it is divided. Sizes in samples, lengths in epochs and updates.

    A segment ends with its epoch, and also after every ``checkpoint_every_updates`` of the epoch.
    """

    epochs: int
    max_updates: int | None
    checkpoint_every_updates: int | None = None
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
        if (every := self.checkpoint_every_updates) is not None:
            done_of_epoch = first_sample // (self.micro_batch_size * self.accumulation_steps)
            ends.append(every - done_of_epoch % every)
        return rest.first_updates(min(ends))

    def ends_at(self, sample: int) -> bool:
        """Whether a segment ends after ``sample`` samples of an epoch, whatever is asked for; at 0 one does."""
        every = self.checkpoint_every_updates
        return sample == 0 if every is None else sample % (every * self.micro_batch_size * self.accumulation_steps) == 0

    @property
    def first_epoch(self) -> Segment:
        """The first epoch in one piece."""
        return replace(self, checkpoint_every_updates=None).segment(0, 0, 0)

    @property
    def updates_per_epoch(self) -> int:
        """Updates of one whole epoch."""
        return replace(self, max_updates=None).first_epoch.num_updates

    @property
    def total_updates(self) -> int:
        """Updates of the whole run."""
        total = self.epochs * self.updates_per_epoch
        return total if self.max_updates is None else min(total, self.max_updates)


def check_lengths(*, epochs: int, max_updates: int | None) -> None:
    """Refuse lengths that make no run.

    Raises:
        ConfigError: less than one epoch or one update.
    """
    if epochs < 1:
        raise ConfigError(f"train.epochs must be at least 1, got {epochs}")
    if max_updates is not None and max_updates < 1:
        raise ConfigError(f"train.max_updates must be at least 1, got {max_updates}")


def micro_batch_size_of(batch_size: int, steps: int) -> int:
    """Return the samples of a micro-batch, of which ``steps`` make a batch.

    Raises:
        ConfigError: there is not one sample for each.
    """
    if batch_size < steps:
        raise ConfigError(
            f"train.batch_size={batch_size} leaves no sample for each of method.accumulation_steps={steps} "
            f"micro-batches; use train.batch_size>={steps}"
        )
    return batch_size // steps
