"""Watches the loss of each update, without holding up a GPU."""

import math
from collections import deque

from adl_dist.errors import DivergedError
from adl_dist.stage.tally import Tally


class Losses:
    """Looks at every loss of one stage once, as early as that costs no waiting.

    On a CPU at once. A GPU has only been given its work by then, and to ask for the loss would be to wait for all of
    it: there each loss is looked at one update later, and the last one at the end of the segment.
    """

    def __init__(self, stage: int) -> None:
        self._stage = stage
        self._unseen: deque[tuple[int, int, Tally]] = deque()  # update, epoch, and what holds its loss

    def forget(self) -> None:
        """Begin anew; what an interrupted segment left does not count."""
        self._unseen.clear()

    def add(self, tally: Tally, *, update: int, epoch: int) -> None:
        """Take the loss of one update, if the stage has one.

        Raises:
            DivergedError: a loss is not finite: this one, or that of the update before.
        """
        if tally.loss_sum is not None:
            is_underway = tally.fetch()
            self._unseen.append((update, epoch, tally))
            self.check(but=1 if is_underway else 0)

    def check(self, *, but: int = 0) -> None:
        """Look at all of them, ``but`` for the last ones.

        Raises:
            DivergedError: one is not finite.
        """
        while len(self._unseen) > but:
            update, epoch, tally = self._unseen.popleft()
            loss = tally.numbers()["loss_sum"]
            if not math.isfinite(loss):
                raise DivergedError(f"the loss is {loss}", stage=self._stage, update=update, epoch=epoch)
