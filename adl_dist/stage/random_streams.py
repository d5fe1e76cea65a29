"""The seeds of dropout and other draws, by epoch, stage and micro-batch."""

from collections.abc import Collection
from functools import lru_cache
from typing import Any

import torch

from adl_dist.seeds import stream_seeds
from adl_dist.streams import seed_each, seed_torch

FORWARD, BACKWARD, BACKWARD_WEIGHT = "", "backward: ", "backward of weights: "  # parts, each with draws of its own
SEEDS_AT_ONCE = 256
# By stream. One seed for all would give numpy and Python the same numbers, because both are MT19937.
PURPOSES = {"torch": "dropout", "python": "python", "numpy": "numpy"}


def seed_update(seed: int, key: str, update: int, device: torch.device) -> None:
    """Seed the random stream of one update of an optimizer."""
    seed_torch(_seed_at(update, seed, f"update of {key}"), device)


def _seed_at(last: int, *stream: Any) -> int:
    """Return ``stream_seed(*stream, last)``."""
    return _block_of_seeds(last // SEEDS_AT_ONCE, *stream)[last % SEEDS_AT_ONCE]


@lru_cache(maxsize=2048)
def _block_of_seeds(block: int, *stream: Any) -> list[int]:
    """Return the ``SEEDS_AT_ONCE`` seeds of ``stream`` in one ``block``."""
    last = range(block * SEEDS_AT_ONCE, (block + 1) * SEEDS_AT_ONCE)
    seeds: list[int] = stream_seeds(*stream, last=last).tolist()
    return seeds


class RandomStreams:
    """The seeds of the global random streams in one stage."""

    def __init__(self, seed: int, stage: int, draws: Collection[str] = ()) -> None:
        """Prepare seeds of torch's stream and of ``draws``: ``python``, ``numpy``."""
        self._seed, self._stage, self._streams = seed, stage, ("torch", *sorted(draws))
        self.begin(0, first_micro_batch=0)

    def begin(self, epoch: int, *, first_micro_batch: int) -> None:
        """Begin a segment of ``epoch``."""
        self._epoch, self._first_micro_batch = epoch, first_micro_batch

    def seed_of(self, purpose: str, micro_batch: int) -> int:
        """Return the seed of (purpose, epoch, stage, micro-batch of the epoch).

        ``micro_batch`` is counted in the segment.
        """
        return _seed_at(self._first_micro_batch + micro_batch, self._seed, purpose, self._epoch, self._stage)

    def seeds_of(self, micro_batch: int) -> tuple[dict[str, int], dict[str, int]]:
        """Return (seeds common to all stages, the stage's own), each by stream."""
        of_epoch = self._first_micro_batch + micro_batch
        common = {s: _seed_at(of_epoch, self._seed, f"common {p}", self._epoch) for s, p in PURPOSES.items()}
        return common, {stream: self.seed_of(purpose, micro_batch) for stream, purpose in PURPOSES.items()}

    def seed(self, micro_batch: int, device: torch.device, part: str = FORWARD) -> None:
        """Seed the streams for a ``part`` of the work on a micro-batch."""
        seed_each({s: self.seed_of(f"{part}{PURPOSES[s]}", micro_batch) for s in self._streams}, device)
