"""Which processes are killed when, and how the run is started again: a deck of cards, shuffled by a seed."""

import random
from dataclasses import dataclass, replace

NAMES = {
    "stage": "kill -9 of a stage",
    "coordinator": "kill -9 of the coordinator (rank 0)",
    "launcher": "kill -9 of the launcher or of torchrun's agent",
    "while saving": "kill -9 while a checkpoint is written",
    "stopped": "SIGSTOP for longer than runtime.watchdog_abort_seconds",
}
OURS, TORCHRUN, AGAIN = "runtime.max_restarts", "torchrun --max-restarts", "the same command"

NUM_EPOCHS, UPDATES_PER_EPOCH = 12, 5  # of 150 digits in updates of 32
NUM_UPDATES = NUM_EPOCHS * UPDATES_PER_EPOCH
SAVE_SECONDS = 0.25  # a slowed save takes longer

# (kind, how it is started again, what starts it at first): how many of 100.
CARDS = {
    ("stage", OURS, "adl-dist"): 12,
    ("stage", TORCHRUN, "torchrun"): 8,
    ("stage", AGAIN, "adl-dist"): 10,
    ("coordinator", OURS, "adl-dist"): 10,
    ("coordinator", TORCHRUN, "torchrun"): 6,
    ("coordinator", AGAIN, "adl-dist"): 8,
    ("launcher", AGAIN, "adl-dist"): 10,
    ("launcher", AGAIN, "torchrun"): 8,
    ("while saving", OURS, "adl-dist"): 8,
    ("while saving", TORCHRUN, "torchrun"): 4,
    ("while saving", AGAIN, "adl-dist"): 10,
    ("stopped", OURS, "adl-dist"): 3,
    ("stopped", AGAIN, "adl-dist"): 3,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Killing:
    """One run that is killed once."""

    kind: str  # of NAMES
    restart: str
    starter: str  # adl-dist or torchrun
    num_stages: int  # and as many processes
    rank: int | None  # None: the launcher
    update: int | None  # after which; None: while the processes start
    seconds: float  # after that, or after the start; while saving, after the save has begun

    def __str__(self):
        when = "while starting" if self.update is None else f"after update {self.update}"
        who = self.starter if self.rank is None else f"rank {self.rank}"
        moment = f"{who} of {self.num_stages}, {when} and {self.seconds:.2f} s"
        return f"{NAMES[self.kind]}: {moment}; {self.restart} ({self.starter})"

    def earlier(self):
        """The same killing of a run that has ended before it came: an epoch earlier, or sooner after the start."""
        if self.update is None:
            return replace(self, seconds=self.seconds / 2)
        return replace(self, update=max(self.update - UPDATES_PER_EPOCH, self.update % UPDATES_PER_EPOCH))


def draw(number, *, seed, start_seconds):
    """The first ``number`` cards of the deck, which begins again when it is used up.

    A run takes ``start_seconds`` from its start to its first update, and saves after each epoch.
    """
    rng = random.Random(seed)
    cards = []
    while len(cards) < number:
        deck = [card for card, times in CARDS.items() for _ in range(times)]
        rng.shuffle(deck)
        cards += deck
    killings = []
    for kind, restart, starter in cards[:number]:
        num_stages = rng.choices([2, 3, 4], weights=(6, 1, 1))[0]
        update = rng.randrange(NUM_UPDATES - UPDATES_PER_EPOCH)
        saves = kind == "while saving"
        if saves:  # the last update of an epoch, but of the last one
            update = (update // UPDATES_PER_EPOCH + 1) * UPDATES_PER_EPOCH - 1
        elif kind != "stopped" and rng.random() < 0.25:
            update = None
        killings.append(
            Killing(
                kind=kind,
                restart=restart,
                starter=starter,
                num_stages=num_stages,
                rank={"launcher": None, "coordinator": 0}.get(kind, rng.randrange(kind == "stage", num_stages)),
                update=update,
                seconds=rng.uniform(0, start_seconds if update is None else SAVE_SECONDS if saves else 0.05),
            )
        )
    return killings
