"""A segment: all that happens between two points where the pipeline is empty."""

from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class Segment:
    """The micro-batches of one segment of training. Every stage derives the same from it.

    Attributes:
        epoch: whose data order and augmentation are used.
        first_sample: where in the epoch's order the segment begins.
        first_update: s of the first group, counted from 0 over the whole run.
        num_samples: samples visited from there on.
        micro_batch_size: samples in one forward; the last micro-batch may hold fewer.
        accumulation_steps: M, micro-batches in one update; the last group may hold fewer.
    """

    epoch: int
    first_sample: int = 0
    first_update: int
    num_samples: int
    micro_batch_size: int
    accumulation_steps: int

    @property
    def sizes(self) -> list[int]:
        """Samples of each micro-batch."""
        full, rest = divmod(self.num_samples, self.micro_batch_size)
        return [self.micro_batch_size] * full + [rest] * (rest > 0)

    @property
    def group_sizes(self) -> list[int]:
        """Micro-batches of each group."""
        full, rest = divmod(len(self.sizes), self.accumulation_steps)
        return [self.accumulation_steps] * full + [rest] * (rest > 0)

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
        """Return the factor on the loss of each micro-batch, these holding ``sizes`` samples.

        ``mean``: n_b / n_group, the paper's 1/M if even: an update follows the mean over the group's samples, not
        over its micro-batches. ``sum``: 1.
        """
        if reduction == "sum":
            return [1.0] * len(sizes)
        weights: list[float] = []
        for start in range(0, len(sizes), self.accumulation_steps):
            group = sizes[start : start + self.accumulation_steps]
            weights += [size / sum(group) for size in group]
        return weights
