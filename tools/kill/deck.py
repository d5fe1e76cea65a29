"""Which processes are killed when, and how the run is started again: a deck of cards, shuffled by a seed."""

import random
from dataclasses import dataclass
from typing import Literal

Kind = Literal["stage", "coordinator", "launcher", "while saving", "stopped"]
Restart = Literal["runtime.max_restarts", "torchrun --max-restarts", "the same command"]
Starter = Literal["adl-dist", "torchrun"]

TOLD = {
    "stage": "kill -9 of a stage",
    "coordinator": "kill -9 of the coordinator (rank 0)",
    "launcher": "kill -9 of the launcher or of torchrun's agent",
    "while saving": "kill -9 while a checkpoint is written",
    "stopped": "SIGSTOP for longer than runtime.abort_seconds",
}
OURS, TORCHRUN, AGAIN = "runtime.max_restarts", "torchrun --max-restarts", "the same command"

SAVE_SECONDS = 0.25  # a slowed save takes longer

# (kind, how it is started again, what starts it at first): how many of 100.
CARDS: dict[tuple[Kind, Restart, Starter], int] = {
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
    """One run that is killed once.

    Attributes:
        kind: who is killed, or when.
        restart: how it is started again.
        starter: what starts it at first.
        num_stages: K, and so many processes.
        rank: who is killed; None: the launcher.
        update: after which; None: while the processes start.
        seconds: how long after that, or after the start; while saving, after the save has begun.
    """

    kind: Kind
    restart: Restart
    starter: Starter
    num_stages: int
    rank: int | None
    update: int | None
    seconds: float

    def __str__(self) -> str:
        when = "while starting" if self.update is None else f"after update {self.update}"
        who = self.starter if self.rank is None else f"rank {self.rank}"
        return (
            f"{TOLD[self.kind]}: {who} of {self.num_stages}, {when} and {self.seconds:.2f} s; {self.restart} "
            f"({self.starter})"
        )


def draw(number: int, *, seed: int, num_updates: int, updates_per_epoch: int, start_seconds: float) -> list[Killing]:
    """The first ``number`` cards of the deck, which begins again when it is used up.

    Args:
        number: how many.
        seed: of everything.
        num_updates: of the whole run.
        updates_per_epoch: after each epoch the run saves.
        start_seconds: from its start to its first update.
    """
    rng = random.Random(seed)
    cards: list[tuple[Kind, Restart, Starter]] = []
    while len(cards) < number:
        deck = [card for card, times in CARDS.items() for _ in range(times)]
        rng.shuffle(deck)
        cards += deck
    killings = []
    for kind, restart, starter in cards[:number]:
        num_stages = rng.choices([2, 3, 4], weights=(6, 1, 1))[0]
        update: int | None = rng.randrange(num_updates - updates_per_epoch)
        saves = kind == "while saving"
        if saves:
            assert update is not None
            # The last update of an epoch, but of the last one.
            update = (update // updates_per_epoch + 1) * updates_per_epoch - 1
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
